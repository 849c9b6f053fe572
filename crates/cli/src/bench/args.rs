//! `nobounce bench` as it is typed. Parsing has no side effects; [`super::plan`] says what it
//! means.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use nobounce::nic::soft::LinkChoice;

use super::case::{CaseKind, Memory, Op, Wait};
use crate::size::Sizes;

/// TCP port on which `--listen` and `--peer` meet unless another is named.
pub(crate) const DEFAULT_PORT: u16 = 14791;

/// What `--path` without a value stands for.
pub(crate) const STANDARD_PATHS: &str = "standard";

const EXAMPLES: &str = "\
Examples:
  nobounce bench                                    two processes on this machine, about a minute
  nobounce bench --quick                            the same in a few seconds
  nobounce bench --op write --kind latency --size 8 --wait memory
  nobounce bench --op write --size 1..8M --json new.json --plot new.svg
  nobounce bench --quick --compare old.json         exit code 1 if something got slower
  nobounce bench --memory gpu --plot gpu.svg        GPU memory: direct, staged and naive staging
  nobounce bench --gpu-initiated                    kernels put, get and signal themselves
  nobounce bench --kv --plot kv.svg                 lists of KV-cache pages between two processes
  nobounce bench --files /var/tmp --memory gpu      files into GPU memory
  nobounce bench --path delay=100us,loss=1%         beside TCP on an emulated network path
  nobounce bench --busy 2 --op write,send --size 8,1M   beside two busy processes, compared with TCP
  nobounce bench --listen --addr eth0               on one machine, and on the other:
  nobounce bench --peer 10.0.0.7 --addr eth0

Exit codes: 0 success, 1 a comparison or verification failed, 2 usage error or broken environment.";

/// Measure latency, bandwidth and message rate, and compare with plain UDP.
///
/// Without arguments, starts a second process on this machine and runs write, read and send from 1
/// B to 8 MiB between the two. Verifies every byte, and compares the results with plain UDP
/// ("raw").
#[derive(Debug, Clone, Default, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    /// Connect to `nobounce bench --listen` on another machine
    #[arg(long, value_name = "HOST[:PORT]", conflicts_with = "listen", help_heading = "Where")]
    pub(crate) peer: Option<String>,

    /// Serve `--peer` clients at this address [default: that of the device, port 14791]
    #[arg(long, value_name = "ADDR:PORT", num_args = 0..=1, default_missing_value = "", help_heading = "Where")]
    pub(crate) listen: Option<String>,

    /// Address or interface of the local device [default: loopback]
    #[arg(long, value_name = "ADDR", help_heading = "Where")]
    pub(crate) addr: Option<String>,

    /// Local device: nb0 (software NIC), a system device (mlx5_0, mlx5_0:2, rxe0), or auto (the
    /// nearest system device); a list (mlx5_0,mlx5_1) uses each device as a rail [default:
    /// NOBOUNCE_DEVICE, or nb0]
    #[arg(long, value_name = "NAME", help_heading = "Where")]
    pub(crate) device: Option<String>,

    /// List the devices, show which one would be used and why, and measure nothing
    #[arg(long, help_heading = "Where")]
    pub(crate) explain_device: bool,

    /// Link between two processes of this machine: udp, or auto or shm (shared memory where
    /// available); with two (udp,shm), the second runs the headline cases only [default:
    /// NOBOUNCE_LINK, or auto plus write of 8 B and 1 MiB over udp]
    #[arg(long, value_name = "LINK", value_delimiter = ',', value_parser = PossibleValuesParser::new(LinkChoice::names()), hide_possible_values = true, help_heading = "Where")]
    pub(crate) link: Vec<String>,

    /// Maximum number of engine threads per device, 1 to 8 [default: NOBOUNCE_ENGINES, or by the
    /// number of CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8), help_heading = "How")]
    pub(crate) engines: Option<u8>,

    /// Thread that drives the NIC: an engine thread (thread), the thread that posts and polls
    /// (caller), or auto (thread with 4 or more CPUs) [default: NOBOUNCE_PROGRESS, or auto]
    #[arg(long, value_name = "MODE", value_parser = ["auto", "thread", "caller"], hide_possible_values = true, help_heading = "How")]
    pub(crate) progress: Option<String>,

    /// Run N busy-looping processes during the measurement, and compare with TCP; 0 compares with
    /// TCP on an idle machine
    #[arg(long, value_name = "N", conflicts_with_all = ["peer", "listen"], value_parser = clap::value_parser!(u32).range(0..=256), help_heading = "How")]
    pub(crate) busy: Option<u32>,

    /// Memory to measure: host, or gpu (direct, staged and naive staging, with host memory as the
    /// reference) [default: host]
    #[arg(long, value_name = "MEMORY", hide_possible_values = true, help_heading = "What")]
    pub(crate) memory: Option<Memory>,

    /// CUDA ordinal of the local GPU to measure; --device auto picks the adapter nearest to it
    /// [default: 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(0..), help_heading = "What")]
    pub(crate) gpu: Option<i32>,

    /// Kernels post the operations themselves: latency, rate and bandwidth of puts and gets between
    /// two processes
    #[arg(long, conflicts_with_all = ["peer", "listen", "device", "busy", "memory", "op", "kind", "size", "qps", "wait", "mtu", "iters", "passes", "quick", "loss", "compare", "calibration"], help_heading = "What")]
    pub(crate) gpu_initiated: bool,

    /// Lists of KV-cache pages between two processes, by page size and by number of requests
    #[arg(long, conflicts_with_all = ["gpu_initiated", "peer", "listen", "device", "busy", "op", "kind", "size", "qps", "wait", "mtu", "iters", "passes", "quick", "loss", "compare", "calibration"], help_heading = "What")]
    pub(crate) kv: bool,

    /// Files into memory, from DIR and from a file server that serves it; writes 512 MiB there, and
    /// removes them at the end
    #[arg(long, value_name = "DIR", conflicts_with_all = ["kv", "gpu_initiated", "plot", "peer", "listen", "device", "busy", "op", "kind", "size", "qps", "wait", "mtu", "iters", "passes", "quick", "loss", "compare", "calibration"], help_heading = "What")]
    pub(crate) files: Option<PathBuf>,

    /// nb0 beside TCP (cubic and bbr) on an emulated network path, such as
    /// delay=100us,loss=1%,mtu=9000; settings as for `nobounce path`. Without rate, half of what
    /// TCP reaches without faults. May be repeated [without PATH: delay of 100 us, loss of
    /// 0 to 5 %]
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = STANDARD_PATHS, conflicts_with_all = ["files", "kv", "gpu_initiated", "plot", "peer", "listen", "addr", "device", "link", "busy", "memory", "op", "kind", "size", "qps", "wait", "mtu", "iters", "loss", "compare", "calibration"], help_heading = "What")]
    pub(crate) path: Vec<String>,

    /// One of the processes of --gpu-initiated, --kv or --files
    #[arg(long, hide = true, requires = "meet")]
    pub(crate) rank: Option<u32>,

    /// Where they meet
    #[arg(long, hide = true, requires = "rank")]
    pub(crate) meet: Option<std::net::SocketAddr>,

    /// Operation to measure; may be repeated [default: write, read, send]
    #[arg(long, value_name = "OP", value_delimiter = ',', help_heading = "What")]
    pub(crate) op: Vec<Op>,

    /// Quantity to measure; may be repeated [default: all]
    #[arg(long, value_name = "KIND", value_delimiter = ',', help_heading = "What")]
    pub(crate) kind: Vec<CaseKind>,

    /// Message size, or a range in powers of two such as 1..8M; may be repeated
    #[arg(long, value_name = "SIZE", value_delimiter = ',', help_heading = "What")]
    pub(crate) size: Vec<Sizes>,

    /// Number of concurrent queue pairs; may be repeated [default: 1]
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = "What")]
    pub(crate) qps: Vec<u32>,

    /// How the target of a write latency test waits [default: cq]
    #[arg(long, help_heading = "What")]
    pub(crate) wait: Option<Wait>,

    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096 [default: 4096]
    #[arg(long, value_name = "BYTES", help_heading = "What")]
    pub(crate) mtu: Option<u32>,

    /// Operations per case [default: as many as fit a fraction of a second]
    #[arg(long, value_name = "N", help_heading = "How")]
    pub(crate) iters: Option<u64>,

    /// Number of passes; each uses fresh processes, total time unchanged. Reports the trimmed mean
    /// [default: 5, or 1 with --quick, --iters, --memory gpu, --device and --peer]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(super::passes::MAX)), help_heading = "How")]
    pub(crate) passes: Option<u32>,

    /// Run fewer and shorter cases, in under ten seconds
    #[arg(long, help_heading = "How")]
    pub(crate) quick: bool,

    /// Drop this share of the sent packets: 0.01 or 1%
    #[arg(long, value_name = "P", help_heading = "How")]
    pub(crate) loss: Option<String>,

    /// Seed of the data patterns and of the packet loss [default: 1]
    #[arg(long, value_name = "N", help_heading = "How")]
    pub(crate) seed: Option<u64>,

    /// Print the cases that would run, and measure nothing
    #[arg(long, help_heading = "How")]
    pub(crate) explain: bool,

    /// Write all results as JSON, with raw samples and machine facts
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub(crate) json: Option<PathBuf>,

    /// Plot latency and bandwidth against message size
    #[arg(long, value_name = "FILE.svg", help_heading = "Results")]
    pub(crate) plot: Option<PathBuf>,

    /// Compare with a run saved by --json; exit with 1 if a case is slower beyond the tolerance
    #[arg(long, value_name = "OLD.json", help_heading = "Results")]
    pub(crate) compare: Option<PathBuf>,

    /// Slowdown that --compare accepts: 0.10 or 10% [default: 0.10]
    #[arg(long, value_name = "SHARE", requires = "compare", help_heading = "Results")]
    pub(crate) tolerance: Option<String>,

    /// Predict the results from constants saved by `nobounce predict --save-calibration`
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub(crate) calibration: Option<PathBuf>,
}
