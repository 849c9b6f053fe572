//! Every kind of memory as both ends of traffic: the bytes arrive, by the path that the
//! registration names.

use nobounce_memory::gpu::GpuOptions;
use nobounce_memory::path::{Mechanism, Path};
use nobounce_nic::tally::PathTotals;
use nobounce_nic::work::{Mtu, Operation, SendRequest};

use crate::common::{ALL_ACCESS, pair};
use crate::memory;
use crate::rig::{self, Rig};

/// Around a word, a packet, and what the copy engine fetches; what is longer than the memory is
/// cut.
const SIZES: [usize; 4] = [8, 4096, 70_000, 1_000_001];
/// What [`go_the_way_that_was_said`] leaves in memory that is long enough: the seed of its pattern,
/// and its bytes.
pub(crate) const LAST: (u8, usize) = (4, SIZES[3]);

fn names(totals: &PathTotals) -> Vec<&'static str> {
    totals.list().iter().filter(|(_, tally)| tally.bytes > 0).map(|(name, _)| *name).collect()
}

/// The names under which bytes of these paths are counted.
fn expected(path: &Path) -> &'static [&'static str] {
    match path {
        Path::Direct(Mechanism::Cpu) => &["cpu"],
        Path::Direct(Mechanism::Window) => &["window"],
        // Short ones are loaded through the window, where there is one.
        Path::Direct(_) => &["window", "copy-engine"],
        Path::Staged(_) => &["staged"],
        Path::Believed(..) => panic!("the software NIC has no unproved path"),
    }
}

/// Sends into the memory and out of it, in both directions and at all [`SIZES`]. The counters of
/// the device, which has no other traffic, must match the path of the registration. Leaves the
/// bytes of the last round there.
pub(crate) fn go_the_way_that_was_said(name: &str, local: &str, addr: u64, whole: usize) {
    let (a, b) = pair(local, 2 << 20, Mtu::Mtu4096);
    // SAFETY: tests touch the memory by copies only.
    let there = unsafe { b.pd.register_gpu(addr, whole, ALL_ACCESS, &GpuOptions::default()) }.unwrap();
    println!("figure: {name}: {}", there.paths());
    for (round, size) in SIZES.into_iter().enumerate() {
        let len = size.min(whole);
        a.fill(round as u8 + 1);
        // Into it, and out of it again by a READ.
        let write = Operation::Write(rig::remote(&there, 0));
        a.qps[0].post_send(&SendRequest::new(1, write, &a.sge(0, len as u32))).unwrap();
        rig::succeed(&a, 1);
        let sent = a.bytes(0, len);
        a.fill(0xee);
        let read = Operation::Read(rig::remote(&there, 0));
        a.qps[0].post_send(&SendRequest::new(2, read, &a.sge(0, len as u32))).unwrap();
        rig::succeed(&a, 1);
        assert!(a.bytes(0, len) == sent, "{name}: {len} bytes came back changed");
        // Out of it by a WRITE.
        let back = Operation::Write(a.remote(1 << 20));
        b.qps[0].post_send(&SendRequest::new(3, back, &rig::sge(&there, 0, len))).unwrap();
        rig::succeed(&b, 1);
        assert!(a.bytes(1 << 20, len) == sent, "{name}: {len} bytes were sent changed");
    }
    let counters = b.device.path_counters();
    for (totals, path) in
        [(&counters.inbound, &there.paths().inbound), (&counters.outbound, &there.paths().outbound)]
    {
        let used = names(totals);
        assert!(!used.is_empty(), "{name}");
        assert!(used.iter().all(|way| expected(path).contains(way)), "{name}: {path}, but by {used:?}");
    }
}

#[test]
fn bytes_go_the_way_that_was_said() {
    let Some(rig) = Rig::new("kinds::bytes_go_the_way_that_was_said") else { return };
    for (number, (name, make)) in memory::KINDS.into_iter().enumerate() {
        let Ok(made) = make(&rig.gpu, rig.primary()) else { continue };
        if !name.starts_with("not CUDA's") {
            // One device for each: their counters tell the paths apart.
            go_the_way_that_was_said(name, &format!("127.85.90.{}", number + 1), made.addr, made.len);
        }
    }
}
