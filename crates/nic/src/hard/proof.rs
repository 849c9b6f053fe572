//! Proof that a direct method reaches GPU memory. The device writes bytes to a test allocation on
//! that GPU and reads them back, over a loopback connection. Runs once per GPU and method of an
//! open device, whatever the result.

use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nobounce_memory::HostBuffer;
use nobounce_memory::gpu::{Gpu, GpuBuffer, GpuMemory, GpuOptions};
use nobounce_memory::path::Mechanism;
use nobounce_protocol::qp::{Access, Operation, QpAttr, Remote, Status};
use nobounce_protocol::wire::Psn;
use nobounce_verbs as verbs;

use super::cq::Cq;
use super::gpu::try_method;
use super::memory::Pd;
use super::qp::Qp;
use super::stage::Shadow;
use crate::work::{QpLimits, SendRequest, Sge};

/// Bytes transferred: more than one page.
const LEN: usize = 3 * 4096 + 512;
/// Offset of the bytes in the allocation, not page-aligned: a driver that ignores the dma-buf
/// offset writes elsewhere, still inside our allocation.
const BEGIN: usize = (64 << 10) + 256;
/// Timeout of one transfer.
const LIMIT: Duration = Duration::from_secs(5);
/// Timeout for the bytes to become visible on the GPU after their completion.
const SEEN: Duration = Duration::from_millis(200);

/// Result of a proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProofResult {
    /// The bytes were right.
    Proved,
    /// The proof could not run: the registration is trusted.
    Untried(String),
    /// The registration succeeded, but the bytes did not arrive.
    Lied(String),
}

/// Results so far.
#[derive(Default)]
pub(crate) struct RegistrationProofs(Mutex<HashMap<(String, &'static str), ProofResult>>);

impl fmt::Debug for RegistrationProofs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RegistrationProofs")
    }
}

pub(crate) fn of(pd: &Pd, gpu: &Arc<Gpu>, method: Mechanism) -> ProofResult {
    let mut known = pd.device().inner.proofs.0.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (gpu.pci_address().to_owned(), method.name());
    if let Some(verdict) = known.get(&key) {
        return verdict.clone();
    }
    let verdict = prove(pd, gpu, method).unwrap_or_else(|verdict| verdict);
    tracing::debug!("{}: {} of {gpu}: {verdict:?}", pd.device().name(), method.name());
    // Cache failures to run, too: a device without loopback would otherwise cost a timeout per
    // registration.
    known.insert(key, verdict.clone());
    verdict
}

fn untried(error: impl fmt::Display) -> ProofResult {
    ProofResult::Untried(error.to_string())
}

fn lied(method: Mechanism, what: &str) -> ProofResult {
    ProofResult::Lied(format!(
        "the device registered GPU memory by {}, but {what}: its driver promises what it does not do",
        method.name()
    ))
}

fn prove(pd: &Pd, gpu: &Arc<Gpu>, method: Mechanism) -> Result<ProofResult, ProofResult> {
    let buffer = GpuBuffer::new(gpu, BEGIN + LEN).map_err(untried)?;
    let options = GpuOptions { window: false, ..GpuOptions::default() };
    let memory = Arc::new(GpuMemory::reach(buffer.addr() + BEGIN as u64, LEN, &options).map_err(untried)?);
    let shadow = Shadow::new(Arc::clone(&memory)).map_err(untried)?;
    let host = HostBuffer::new(2 * LEN).map_err(untried)?;
    let pattern: Vec<u8> = (0..LEN).map(|at| u8::try_from((at * 31 + at / 251) % 256).unwrap_or(0)).collect();
    host.write_at(0, &pattern).map_err(untried)?;
    // Drop order: deregister before the memory is freed.
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let there = ProofRegion::new(pd, try_method(pd, &memory, access, method).map_err(untried)?);
    let here = pd.register_range(host.as_mut_ptr().cast(), host.len(), access).map_err(untried)?;
    let here = ProofRegion::new(pd, here);
    let loopback = Loopback::make(pd).map_err(ProofResult::Untried)?;

    let remote = Remote { addr: memory.addr(), rkey: there.rkey() };
    let len = u32::try_from(LEN).unwrap_or(0);
    let sge = |offset: usize| Sge { addr: host.addr() + offset as u64, len, lkey: here.lkey() };
    // Control run between two host buffers first: if that fails, the proof says nothing about the
    // GPU.
    let beside = Remote { addr: host.addr() + LEN as u64, rkey: here.rkey() };
    loopback
        .run(Operation::Write(beside), sge(0))
        .map_err(|trouble| untried(format!("the device does not talk to itself ({trouble})")))?;
    loopback
        .run(Operation::Write(remote), sge(0))
        .map_err(|trouble| trouble.judge(method, "a write to it ended in"))?;
    let start = Instant::now();
    let mut found = vec![0; LEN];
    loop {
        shadow.fetch(0, LEN).map_err(ProofResult::Untried)?;
        shadow.buffer.read_at(0, &mut found).map_err(untried)?;
        if found == pattern {
            break;
        }
        if start.elapsed() > SEEN {
            return Err(lied(method, "bytes that it wrote there did not arrive"));
        }
    }
    loopback
        .run(Operation::Read(remote), sge(LEN))
        .map_err(|trouble| trouble.judge(method, "a read from it ended in"))?;
    host.read_at(LEN, &mut found).map_err(untried)?;
    if found == pattern {
        Ok(ProofResult::Proved)
    } else {
        Err(lied(method, "bytes that it read there are others"))
    }
}

/// A region for the length of a proof.
struct ProofRegion<'a> {
    pd: &'a Pd,
    raw: NonNull<verbs::Mr>,
}

impl<'a> ProofRegion<'a> {
    fn new(pd: &'a Pd, raw: NonNull<verbs::Mr>) -> Self {
        Self { pd, raw }
    }

    fn lkey(&self) -> u32 {
        // SAFETY: a live region.
        unsafe { self.raw.as_ref().lkey }
    }

    fn rkey(&self) -> u32 {
        // SAFETY: a live region.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for ProofRegion<'_> {
    fn drop(&mut self) {
        // SAFETY: registered by us, and not used again.
        unsafe { (self.pd.device().inner.context.library.api.dereg_mr)(self.raw.as_ptr()) };
    }
}

/// Why a request of a proof failed.
enum ProofError {
    /// It could not be posted or polled, or did not complete in time.
    Nothing(String),
    /// It completed with this status.
    Ended(Status),
}

impl ProofError {
    fn judge(self, method: Mechanism, what: &str) -> ProofResult {
        match self {
            Self::Nothing(why) => lied(method, &format!("{what} nothing: {why}")),
            Self::Ended(status) => lied(method, &format!("{what} {status:?}")),
        }
    }
}

impl fmt::Display for ProofError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing(why) => f.write_str(why),
            Self::Ended(status) => write!(f, "{status:?}"),
        }
    }
}

/// Two queue pairs of one device, connected to each other.
struct Loopback {
    qps: [Qp; 2],
    cq: Cq,
}

impl Loopback {
    fn make(pd: &Pd) -> Result<Self, String> {
        let device = pd.device();
        let words = |error: &dyn fmt::Display| error.to_string();
        let cq = device.create_cq(8, None).map_err(|error| words(&error))?;
        let limits = QpLimits {
            send_depth: 4,
            recv_depth: 1,
            send_sges: 1,
            recv_sges: 1,
            inline: 0,
            signal_all: false,
        };
        let make = || pd.create_qp(&cq, &cq, limits).map_err(|error| words(&error));
        let qps = [make()?, make()?];
        let (port, psn) = (device.port(), Psn::new(77));
        for (ours, theirs) in [(&qps[0], &qps[1]), (&qps[1], &qps[0])] {
            let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
            let to_rtr = QpAttr {
                max_dest_rd_atomic: 1,
                ..QpAttr::to_rtr(device.local(), theirs.qpn(), psn, port.mtu)
            };
            let to_rts = QpAttr { max_rd_atomic: 1, timeout: 14, retry_cnt: 6, ..QpAttr::to_rts(psn) };
            for attr in [QpAttr::to_init(rights), to_rtr, to_rts] {
                ours.modify(&attr, port.lid).map_err(|error| words(&error))?;
            }
        }
        Ok(Self { qps, cq })
    }

    fn run(&self, op: Operation, sge: Sge) -> Result<(), ProofError> {
        let posted = self.qps[0].post_send(&SendRequest::new(1, op, &[sge]));
        posted.map_err(|error| ProofError::Nothing(error.to_string()))?;
        let (start, mut got) = (Instant::now(), Vec::new());
        while start.elapsed() < LIMIT {
            let polled = self.cq.poll(&mut got, 1).map_err(|error| ProofError::Nothing(error.to_string()))?;
            if polled > 0 {
                let status = got[0].status;
                return if status == Status::Success { Ok(()) } else { Err(ProofError::Ended(status)) };
            }
            std::thread::yield_now();
        }
        Err(ProofError::Nothing("the device did not answer itself".to_owned()))
    }
}
