//! Why the arguments of a bench make no plan.

use super::case::CaseKind;
use crate::size::Bytes;

/// Queue pairs one case may use.
pub(crate) const MAX_QPS: u32 = 4096;
/// Most bytes that one case may register on each side: beyond this, a typo would make the machine
/// swap.
pub(crate) const MAX_REGISTERED: u64 = 8 << 30;

/// Why the arguments make no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum PlanError {
    /// Not one of the five.
    #[error("invalid --mtu {0}: expected 256, 512, 1024, 2048 or 4096")]
    Mtu(u32),
    /// None, or more than we handle.
    #[error("invalid --qps {0}: expected 1 to {MAX_QPS}")]
    Qps(u32),
    /// Nothing to measure.
    #[error("invalid --iters 0: expected 1 or more; omit it to measure by time")]
    Iters,
    /// Not a share.
    #[error(
        "invalid --{flag} {text:?}: expected a share such as 0.01 or 1%, at least 0 and less than {below}"
    )]
    Share {
        /// The argument.
        flag: &'static str,
        /// What was typed.
        text: String,
        /// The bound.
        below: &'static str,
    },
    /// Atomics have one size.
    #[error("atomics are always 8 bytes; omit --size or use --size 8 with --op atomic")]
    AtomicSize,
    /// Atomics move no bulk data.
    #[error("--op atomic has no {0}; use --kind latency or --kind rate")]
    AtomicKind(CaseKind),
    /// A READ's arrival is not visible in memory, and neither is a SEND before its completion.
    #[error(
        "--wait memory and --wait perftest need write latency; add --op write --kind latency, or use --wait cq"
    )]
    WaitMemory,
    /// GPU memory is polled by kernels.
    #[error(
        "--wait memory and --wait perftest need host memory; with --memory gpu use --kind gpu-visible, where a GPU kernel polls"
    )]
    WaitGpu,
    /// There is no kernel to see anything.
    #[error("--kind gpu-visible needs GPU memory; add --memory gpu")]
    VisibleNeedsGpu,
    /// A GPU is named, and its memory is not measured.
    #[error("--gpu {0} needs GPU memory; add --memory gpu")]
    GpuMemory(i32),
    /// One QP suffices for one operation at a time.
    #[error("latency uses one operation at a time on one queue pair; omit --qps or choose another --kind")]
    LatencyQps,
    /// Zero bytes have no bandwidth.
    #[error("messages of 0 bytes have no bandwidth; use --kind latency or --kind rate with --size 0")]
    EmptyBandwidth,
    /// A spinning target needs a byte to spin on.
    #[error("--wait memory and --wait perftest spin on the last byte of the message; use --size 1 or more")]
    EmptyMemory,
    /// Would not fit.
    #[error("{qps} queue pairs x {} exceed the {} that one case may register; use fewer --qps or a smaller --size", Bytes(*size), Bytes(MAX_REGISTERED))]
    Registered {
        /// Queue pairs.
        qps: u32,
        /// Message size.
        size: u64,
    },
    /// Not HOST, HOST:PORT, `[V6]` or `[V6]:PORT`.
    #[error("invalid --{flag} {text:?}: expected HOST, HOST:PORT or [IPV6]:PORT (port 1 to 65535)")]
    Address {
        /// The argument.
        flag: &'static str,
        /// What was typed.
        text: String,
    },
    /// Several links are between processes of one machine.
    #[error(
        "--link takes one link; two different ones (udp,shm) need the software NIC and two processes of this machine"
    )]
    Links,
    /// Rails split transfers, and do nothing else.
    #[error(
        "several devices together carry only large writes and reads: use --op write,read --kind bandwidth, one queue pair each, and no --addr"
    )]
    Rails,
    /// The listener does what the asking side says.
    #[error("{0} has no effect with --listen; give it to --peer at the other end")]
    ListenTakesNoCases(&'static str),
}
