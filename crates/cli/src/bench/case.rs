//! One benchmark case, its result, and the [`Measure`] trait that runs it.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::counted::Counted;
use super::tcp::Tcp;
use crate::size::Bytes;

/// How long a case is measured, in all passes together.
pub(crate) const TIME: Duration = Duration::from_millis(400);

/// The RDMA operation under test.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    /// RDMA WRITE
    Write,
    /// RDMA READ
    Read,
    /// SEND into a posted receive
    Send,
    /// Fetch-and-add on 8 bytes
    Atomic,
}

impl Op {
    /// Whether one operation is a round trip, so that its latency compares with two one-way
    /// latencies.
    pub(crate) fn is_round_trip(self) -> bool {
        matches!(self, Self::Read | Self::Atomic)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Send => "send",
            Self::Atomic => "atomic",
        })
    }
}

/// What is measured of it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CaseKind {
    /// One operation at a time: half a ping-pong for write and send, the whole operation for read
    /// and atomic
    Latency,
    /// One direction, many operations in flight
    Bandwidth,
    /// Both directions at once; the sum counts
    Bidirectional,
    /// Messages per second
    Rate,
    /// Time until a kernel that polls the target's GPU memory sees an 8-byte flag: half a ping-pong
    #[serde(rename = "gpu-visible")]
    GpuVisible,
}

impl CaseKind {
    /// Whether it is measured one operation at a time, in microseconds.
    pub(crate) fn is_latency(self) -> bool {
        matches!(self, Self::Latency | Self::GpuVisible)
    }
}

impl fmt::Display for CaseKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Latency => "latency",
            Self::Bandwidth => "bandwidth",
            Self::Bidirectional => "bidirectional",
            Self::Rate => "rate",
            Self::GpuVisible => "gpu-visible",
        })
    }
}

/// How the target of a latency test detects the message.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Wait {
    /// Poll a completion queue
    Cq,
    /// Spin on the last byte of the buffer; an engine thread drives the device
    Memory,
    /// Poll for the send completion, then spin on the last byte of the buffer, as ib_write_lat does
    Perftest,
}

impl Wait {
    /// Text behind the name of a case.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Cq => "",
            Self::Memory => ", waiting on memory",
            Self::Perftest => ", waiting as perftest",
        }
    }

    /// Whether messages are seen in memory.
    pub(crate) fn is_on_memory(self) -> bool {
        matches!(self, Self::Memory | Self::Perftest)
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cq => "cq",
            Self::Memory => "memory",
            Self::Perftest => "perftest",
        })
    }
}

/// Which memory a run is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum Memory {
    /// Host memory
    #[default]
    Host,
    /// GPU memory: direct, staged and naive, with host memory as the yardstick
    Gpu,
}

/// Where messages are stored, and how they get between there and the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub(crate) enum Place {
    /// Host memory.
    #[default]
    Host,
    /// GPU memory, by the best path there is.
    Direct,
    /// GPU memory, staged by the NIC through pinned memory.
    Staged,
    /// GPU memory, staged by the application: `cudaMemcpy` from and to pageable memory at both
    /// ends.
    Naive,
}

impl Place {
    /// Whether it is GPU memory.
    pub(crate) fn is_gpu(self) -> bool {
        self != Self::Host
    }
}

/// A way that packets take between ends on one machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    /// As between machines.
    Udp,
    /// Shared memory.
    Shm,
}

impl Link {
    /// As it is typed.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Shm => "shm",
        }
    }
}

/// When a case has been measured enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Amount {
    /// After this many operations, over all queue pairs together.
    Iters(u64),
    /// After this long (set-up and verification come on top).
    Time(Duration),
}

/// One thing to measure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Case {
    /// The operation.
    pub(crate) op: Op,
    /// What is measured of it.
    pub(crate) kind: CaseKind,
    /// Where the messages lie.
    pub(crate) place: Place,
    /// Bytes in one message.
    pub(crate) size: u64,
    /// Queue pairs that work at once.
    pub(crate) qps: u32,
    /// How the target waits; anything but `Cq` only in latency tests of writes.
    pub(crate) wait: Wait,
    /// Path MTU in bytes.
    pub(crate) mtu: u32,
    /// When to stop.
    pub(crate) amount: Amount,
    /// Over this link, whichever the other cases take.
    pub(crate) over: Option<Link>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.op, Bytes(self.size), self.kind)?;
        if self.qps > 1 {
            write!(f, ", {} queue pairs", self.qps)?;
        }
        write!(f, "{}", self.wait.words())?;
        match self.over {
            None => {}
            Some(Link::Udp) => write!(f, ", over UDP")?,
            Some(Link::Shm) => write!(f, ", over shared memory")?,
        }
        match self.place {
            Place::Host => Ok(()),
            Place::Direct => write!(f, ", GPU memory"),
            Place::Staged => write!(f, ", GPU memory staged"),
            Place::Naive => write!(f, ", GPU memory staged naively"),
        }
    }
}

/// What a measurer hands back for one case.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CaseResult {
    /// What was sampled.
    pub(crate) samples: Samples,
    /// Operations in the timed part.
    pub(crate) iters: u64,
    /// The link the bytes went over: `udp` or `shm`.
    pub(crate) link: String,
    /// Where the bytes are: `host`, `gpu`, or `stand-in` where host memory emulates the GPU's.
    pub(crate) memory: String,
    /// Their path: `direct` (with `, believed, not proved: reason` where that applies), `staged
    /// (reason)`, or `naive staging`.
    pub(crate) path: String,
    /// What the NICs of both ends counted meanwhile.
    pub(crate) counted: Option<Counted>,
    /// The path MTU both ends agreed on, in bytes.
    pub(crate) mtu: u32,
    /// Messages in distinct slots with distinct bytes that were compared one by one, outside the
    /// timed part.
    pub(crate) compared: u64,
    /// CPU seconds of both ends in the timed part, and its messages in both directions.
    pub(crate) cpu: CpuUse,
    /// Whether every byte and every guard zone is correct; otherwise the first error.
    pub(crate) verified: Result<(), String>,
}

/// What the timed part cost.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct CpuUse {
    /// CPU seconds of both ends.
    pub(crate) seconds: f64,
    /// Messages, in both directions.
    pub(crate) messages: u64,
}

/// Samples as they were taken, in order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Samples {
    /// One value per operation, in microseconds: half a ping-pong for write and send, the whole
    /// operation for read and atomic. For [`CaseKind::Latency`] and [`CaseKind::GpuVisible`].
    Latency(Vec<f64>),
    /// One entry per interval of the timed part. For every other kind.
    Throughput(Vec<Interval>),
}

/// Work done in one interval of the timed part, over all queue pairs (and both directions).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Interval {
    /// How long it took.
    pub(crate) seconds: f64,
    /// Messages completed in it.
    pub(crate) messages: u64,
}

/// Runs benchmark cases: the library between two processes, or a mock in tests.
pub(crate) trait Measure {
    /// Measures one case. `progress` gets the finished share, 0 to 1, as often as is convenient.
    ///
    /// An error means that nothing could be measured (exit code 2). Wrong bytes are a result whose
    /// `verified` holds the error (exit code 1).
    fn run(&mut self, case: &Case, progress: &dyn Fn(f64)) -> anyhow::Result<CaseResult>;

    /// Why packets used UDP where a faster link was requested.
    fn fallbacks(&self) -> Vec<String> {
        Vec::new()
    }

    /// What TCP does between the same two processes.
    fn tcp(&mut self) -> anyhow::Result<Option<Tcp>> {
        Ok(None)
    }

    /// Starts another pass with everything re-created, as at the start of a run.
    fn renew(&mut self) -> anyhow::Result<()> {
        Ok(())
    }
}
