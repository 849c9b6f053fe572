//! `nobounce bench` as it is typed. Parsing has no side effects; [`super::plan`] says what it
//! means.

use std::path::PathBuf;

use super::case::{Kind, Memory, Op, Wait};
use crate::size::Sizes;

/// TCP port on which `--listen` and `--peer` meet unless another is named.
pub(crate) const DEFAULT_PORT: u16 = 14791;

const EXAMPLES: &str = "\
Examples:
  nobounce bench                                    two processes on this machine, about a minute
  nobounce bench --quick                            the same in a few seconds
  nobounce bench --op write --kind latency --size 8 --wait memory
  nobounce bench --op write --size 1..8M --json new.json --plot new.svg
  nobounce bench --quick --compare old.json         exit code 1 if something got slower
  nobounce bench --memory gpu --plot gpu.svg        GPU memory: direct against staged and naive staging
  nobounce bench --busy 2 --op write,send --size 8,1M   beside two busy processes, against TCP
  nobounce bench --listen --addr eth0               on one machine, and on the other:
  nobounce bench --peer 10.0.0.7 --addr eth0

Exit codes: 0 fine, 1 a comparison or a verification failed, 2 wrong usage or broken environment.";

/// Measure latency, bandwidth and message rate, and our share of what the wire can do.
///
/// Without arguments it starts a second process on this machine, runs write, read and send from 1 B
/// to 8 MiB between the two, checks every byte, and sets the results against what plain UDP does
/// here ("raw").
#[derive(Debug, Clone, Default, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    /// Measure against another machine, where `nobounce bench --listen` runs
    #[arg(long, value_name = "HOST[:PORT]", conflicts_with = "listen", help_heading = "Where")]
    pub(crate) peer: Option<String>,

    /// Wait for a `--peer` and serve it; without a value on all addresses, port 14791
    #[arg(long, value_name = "ADDR:PORT", num_args = 0..=1, default_missing_value = "", help_heading = "Where")]
    pub(crate) listen: Option<String>,

    /// Address or interface of the device on this machine [default: loopback]
    #[arg(long, value_name = "ADDR", help_heading = "Where")]
    pub(crate) addr: Option<String>,

    /// Device of this machine: nb0 is the software NIC, others (mlx5_0, mlx5_0:2, rxe0) are the
    /// system's, auto is the nearest of them; several (mlx5_0,mlx5_1) are rails [default: nb0, or
    /// NOBOUNCE_DEVICE]
    #[arg(long, value_name = "NAME", help_heading = "Where")]
    pub(crate) device: Option<String>,

    /// Say which devices there are, which one would be used and why, and measure nothing
    #[arg(long, help_heading = "Where")]
    pub(crate) explain_device: bool,

    /// Link between ends on this machine: udp, or auto (or shm), which is shared memory where
    /// available; of two (udp,shm) the second is used for the headline figures only [default: auto,
    /// or NOBOUNCE_LINK; a run without either also shows write of 8 B and of 1 MiB over udp]
    #[arg(long, value_name = "LINK", value_delimiter = ',', value_parser = ["udp", "shm", "auto"], hide_possible_values = true, help_heading = "Where")]
    pub(crate) link: Vec<String>,

    /// Engines that drive the device at most, each with a thread: 1 to 8 [default: by the CPUs, or
    /// NOBOUNCE_ENGINES]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8), help_heading = "How")]
    pub(crate) engines: Option<u8>,

    /// Which thread drives the NIC: its own (thread), the one that posts and polls (caller), or
    /// auto: thread from 4 CPUs on [default: auto, or NOBOUNCE_PROGRESS]
    #[arg(long, value_name = "MODE", value_parser = ["auto", "thread", "caller"], hide_possible_values = true, help_heading = "How")]
    pub(crate) progress: Option<String>,

    /// Run N spinning processes beside the measurement, and compare with TCP between the same two
    /// processes; 0: compare on a quiet machine
    #[arg(long, value_name = "N", conflicts_with_all = ["peer", "listen"], value_parser = clap::value_parser!(u32).range(0..=256), help_heading = "How")]
    pub(crate) busy: Option<u32>,

    /// Memory to measure: host, or gpu (direct, staged and naive, with host memory as the
    /// yardstick) [default: host]
    #[arg(long, value_name = "MEMORY", hide_possible_values = true, help_heading = "What")]
    pub(crate) memory: Option<Memory>,

    /// GPU whose memory is measured, as CUDA counts them, and for which --device auto chooses; on
    /// either machine its own [default: 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(0..), help_heading = "What")]
    pub(crate) gpu: Option<i32>,

    /// Operation to measure; may be repeated [default: write, read, send]
    #[arg(long, value_name = "OP", value_delimiter = ',', help_heading = "What")]
    pub(crate) op: Vec<Op>,

    /// What to measure of it; may be repeated [default: all]
    #[arg(long, value_name = "KIND", value_delimiter = ',', help_heading = "What")]
    pub(crate) kind: Vec<Kind>,

    /// Message size, or a range in powers of two such as 1..8M; may be repeated
    #[arg(long, value_name = "SIZE", value_delimiter = ',', help_heading = "What")]
    pub(crate) size: Vec<Sizes>,

    /// Queue pairs working at once; may be repeated [default: 1]
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = "What")]
    pub(crate) qps: Vec<u32>,

    /// How the target of a write latency test waits [default: cq]
    #[arg(long, help_heading = "What")]
    pub(crate) wait: Option<Wait>,

    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096 [default: 4096]
    #[arg(long, value_name = "BYTES", help_heading = "What")]
    pub(crate) mtu: Option<u32>,

    /// Operations per case, instead of a time [default: as many as fit a fraction of a second]
    #[arg(long, value_name = "N", help_heading = "How")]
    pub(crate) iters: Option<u64>,

    /// Number of passes; each uses fresh processes, total time unchanged. Reports the trimmed mean
    /// [default: 5, or 1 with --quick, --iters, --memory gpu, --device and --peer]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(super::passes::MAX)), help_heading = "How")]
    pub(crate) passes: Option<u32>,

    /// Fewer cases, shorter: under ten seconds
    #[arg(long, help_heading = "How")]
    pub(crate) quick: bool,

    /// Drop this share of the packets we send: 0.01 or 1%
    #[arg(long, value_name = "P", help_heading = "How")]
    pub(crate) loss: Option<String>,

    /// Seed of the patterns and of the losses [default: 1]
    #[arg(long, value_name = "N", help_heading = "How")]
    pub(crate) seed: Option<u64>,

    /// Print what would be measured and how, and measure nothing
    #[arg(long, help_heading = "How")]
    pub(crate) explain: bool,

    /// Write everything measured, with raw samples and machine facts
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub(crate) json: Option<PathBuf>,

    /// Draw latency and bandwidth against size
    #[arg(long, value_name = "FILE.svg", help_heading = "Results")]
    pub(crate) plot: Option<PathBuf>,

    /// Compare with a run kept by --json; exit code 1 if something is slower beyond the tolerance
    #[arg(long, value_name = "OLD.json", help_heading = "Results")]
    pub(crate) compare: Option<PathBuf>,

    /// How much slower is still the same: 0.10 or 10% [default: 0.10]
    #[arg(long, value_name = "SHARE", requires = "compare", help_heading = "Results")]
    pub(crate) tolerance: Option<String>,

    /// Constants that `nobounce predict --calibrate` kept of this machine: what to expect of the
    /// run
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub(crate) calibration: Option<PathBuf>,
}
