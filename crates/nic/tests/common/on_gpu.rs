//! GPU memory of a test, on a stand-in for the driver whose device memory is a memfd.

use fake_cuda::client::StandIn;
use nobounce_memory::gpu::GpuOptions;
use nobounce_nic::soft::Mr;
use nobounce_nic::tally::PathTotals;
use nobounce_nic::work::{Remote, Sge};

use super::{ALL_ACCESS, End, MIB, patterns};

pub(crate) const LEN: usize = 2 * MIB;
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum GpuMethod {
    Window,
    NoWindow,
    Staged,
}

impl GpuMethod {
    pub(crate) const ALL: [Self; 3] = [Self::Window, Self::NoWindow, Self::Staged];

    pub(crate) fn options(self) -> GpuOptions {
        GpuOptions { staged: self == Self::Staged, ..GpuOptions::default() }
    }
}

/// GPU memory of one end.
pub(crate) struct OnGpu {
    pub(crate) gpu: &'static StandIn,
    pub(crate) addr: u64,
    pub(crate) mr: Mr,
}

impl OnGpu {
    pub(crate) fn new(end: &End, gpu: &'static StandIn, way: GpuMethod) -> Self {
        gpu.refuse_dmabuf_mmap(i32::from(way == GpuMethod::NoWindow));
        let addr = if way == GpuMethod::NoWindow { pool(gpu) } else { gpu.malloc(LEN) };
        // SAFETY: the test touches the memory through the stand-in only.
        let mr = unsafe { end.pd.register_gpu(addr, LEN, ALL_ACCESS, &way.options()) }.unwrap();
        Self { gpu, addr, mr }
    }

    pub(crate) fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: self.addr + offset as u64, len: len as u32, lkey: self.mr.lkey() }
    }

    pub(crate) fn remote(&self, offset: usize) -> Remote {
        Remote { addr: self.addr + offset as u64, rkey: self.mr.rkey() }
    }

    pub(crate) fn fill(&self, seed: u8) {
        self.gpu.poke(self.addr, &patterns(seed, 0, LEN));
    }

    #[track_caller]
    pub(crate) fn holds(&self, offset: usize, expected: &[u8]) {
        assert!(
            self.gpu.peek(self.addr + offset as u64, expected.len()) == expected,
            "other bytes at {offset}"
        );
    }
}

/// Memory of a stream-ordered pool, which the driver does not let other code map.
pub(crate) fn pool(gpu: &StandIn) -> u64 {
    let mut addr = 0;
    let stream = gpu.stream(1);
    assert_eq!(gpu.alloc_async(&mut addr, LEN, stream), 0);
    assert_eq!(gpu.synchronize_stream(stream), 0);
    addr
}

pub(crate) fn used(totals: &PathTotals) -> Vec<&'static str> {
    totals.list().iter().filter(|(_, tally)| tally.bytes > 0).map(|(name, _)| *name).collect()
}
