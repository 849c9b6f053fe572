//! `nobounce sim` as it is typed.

use std::path::PathBuf;

use crate::size::Sizes;

const EXAMPLES: &str = "\
Examples:
  nobounce sim incast --senders 64                   64 to 1 at 100 Gb/s, with short messages beside
  nobounce sim incast --senders 64 --control swift --no-ecn
  nobounce sim permutation --nodes 1024 --rate 400 --time 1000
  nobounce sim permutation --nodes 128 --ports 8     8 queue pairs and source ports for each pair
  nobounce sim all-to-all --nodes 1024 --size 64K --json > run.json
  nobounce sim ring --nodes 64 --size 256M
  nobounce sim kv --nodes 64 --load 0.6 --loss 0.01 --plot kv.svg
  nobounce sim all-to-all --nodes 64 --size 1M --fail-link 100 --fail-detect 500

Exit codes: 0 success, 1 a message failed or the traffic did not end in time, 2 usage error.";

/// Simulate a leaf-spine fabric of up to thousands of nodes that run nobounce's queue pairs.
///
/// The protocol is the real one; hosts, links and switches are simulated. The same options and seed
/// give the same report. docs/guide/scale.md explains the model and its accuracy.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SimArgs {
    /// Traffic to simulate
    #[arg(value_name = "TRAFFIC")]
    pub(crate) traffic: Traffic,

    #[command(flatten)]
    pub(crate) fabric: FabricArgs,

    #[command(flatten)]
    pub(crate) switch: SwitchArgs,

    #[command(flatten)]
    pub(crate) transport: TransportArgs,

    #[command(flatten)]
    pub(crate) load: LoadArgs,

    /// Longest simulated time in microseconds [default: 1000, or until all-to-all and ring end]
    #[arg(long, value_name = "US", help_heading = "Run")]
    pub(crate) time: Option<f64>,

    /// Seed of ECMP, marks, losses and arrivals
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Run")]
    pub(crate) seed: u64,

    /// Print the report as JSON
    #[arg(long, help_heading = "Results")]
    pub(crate) json: bool,

    /// Plot goodput, the deepest queue and latencies
    #[arg(long, value_name = "FILE.svg", help_heading = "Results")]
    pub(crate) plot: Option<PathBuf>,
}

/// The traffic patterns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Traffic {
    /// Many senders to one receiver, and short messages beside them
    Incast,
    /// Every node sends to one other, all the time
    Permutation,
    /// Every node sends --size bytes to every other
    AllToAll,
    /// Ring all-reduce of --size bytes
    Ring,
    /// Half of the nodes fetches blocks of 16 KiB to 1 MiB from the other half, at random times
    Kv,
}

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct FabricArgs {
    /// Number of nodes [default: 64; with incast, senders and receiver]
    #[arg(long, value_name = "N", help_heading = "Fabric")]
    pub(crate) nodes: Option<usize>,

    /// Nodes below one leaf switch [default: 32; with incast, all]
    #[arg(long, value_name = "N", help_heading = "Fabric")]
    pub(crate) per_leaf: Option<usize>,

    /// Spine switches, each with one link to every leaf [default: as many as nodes below a leaf]
    #[arg(long, value_name = "N", help_heading = "Fabric")]
    pub(crate) spines: Option<usize>,

    /// Rate of a node's link in Gb/s
    #[arg(long, value_name = "GBITS", default_value_t = 100.0, help_heading = "Fabric")]
    pub(crate) rate: f64,

    /// Rate of a link between leaf and spine in Gb/s [default: --rate]
    #[arg(long, value_name = "GBITS", help_heading = "Fabric")]
    pub(crate) fabric_rate: Option<f64>,

    /// Propagation delay of a link in microseconds [default: 1, or 2.25 with one switch]
    #[arg(long, value_name = "US", help_heading = "Fabric")]
    pub(crate) delay: Option<f64>,

    /// Share of packets that each link loses at random, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0, help_heading = "Fabric")]
    pub(crate) loss: f64,

    /// Time in microseconds at which the link between leaf 0 and spine 0 fails
    #[arg(long, value_name = "US", help_heading = "Fabric")]
    pub(crate) fail_link: Option<f64>,

    /// Time in microseconds until the switches avoid it
    #[arg(
        long,
        value_name = "US",
        default_value_t = 1000.0,
        requires = "fail_link",
        help_heading = "Fabric"
    )]
    pub(crate) fail_detect: f64,
}

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SwitchArgs {
    /// Buffer that the ports of a switch share, in MB
    #[arg(long, value_name = "MB", default_value_t = 16.0, help_heading = "Switches")]
    pub(crate) buffer: f64,

    /// Dynamic threshold: a port may use this multiple of the free buffer
    #[arg(long, value_name = "X", default_value_t = 8.0, help_heading = "Switches")]
    pub(crate) alpha: f64,

    /// Mark no packets
    #[arg(long, conflicts_with_all = ["ecn_min", "ecn_max"], help_heading = "Switches")]
    pub(crate) no_ecn: bool,

    /// Queue in KB from which packets are marked [default: 50 at 100 Gb/s, in proportion]
    #[arg(long, value_name = "KB", help_heading = "Switches")]
    pub(crate) ecn_min: Option<f64>,

    /// Queue in KB from which all are marked [default: 200 at 100 Gb/s, in proportion]
    #[arg(long, value_name = "KB", help_heading = "Switches")]
    pub(crate) ecn_max: Option<f64>,

    /// Share of packets marked just below --ecn-max, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0, help_heading = "Switches")]
    pub(crate) ecn_share: f64,
}

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TransportArgs {
    /// Path MTU: payload bytes of a packet
    #[arg(long, value_name = "BYTES", default_value_t = 4096, help_heading = "Queue pairs")]
    pub(crate) mtu: u32,

    /// Congestion control of senders
    #[arg(long, value_enum, default_value_t = Control::Aimd, help_heading = "Queue pairs")]
    pub(crate) control: Control,

    /// Queue pairs, each with its own source port, of a pair of nodes; with permutation
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Queue pairs")]
    pub(crate) ports: usize,
}

/// Congestion control to simulate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Control {
    /// Window by losses and congestion notification packets: that of queue pairs
    Aimd,
    /// Window by round-trip time on a known path, after Swift
    Swift,
    /// Rate by congestion notification packets, after DCQCN
    Dcqcn,
}

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct LoadArgs {
    /// Senders of incast
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Traffic")]
    pub(crate) senders: usize,

    /// Bytes of a message; of all-to-all, for each pair; of ring, on each node [default: 1M, 64K,
    /// 64M]
    #[arg(long, value_name = "SIZE", value_parser = one_size, help_heading = "Traffic")]
    pub(crate) size: Option<u32>,

    /// Bytes of the short messages of incast
    #[arg(long, value_name = "SIZE", value_parser = one_size, default_value = "8K", help_heading = "Traffic")]
    pub(crate) short: u32,

    /// Load of the short messages of incast, as a share of the link; of kv, of the blocks [default:
    /// 0.02, 0.5]
    #[arg(long, value_name = "SHARE", help_heading = "Traffic")]
    pub(crate) load: Option<f64>,

    /// Peers that a node of all-to-all sends to at a time
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Traffic")]
    pub(crate) concurrent: usize,

    /// Choose the neighbours of ring at random instead of by number
    #[arg(long, help_heading = "Traffic")]
    pub(crate) shuffle: bool,
}

/// One size, of 1 GiB at most.
fn one_size(text: &str) -> Result<u32, String> {
    let sizes: Sizes = text.parse().map_err(|error| format!("{error}"))?;
    match sizes.0[..] {
        [size] if (1..=1 << 30).contains(&size) => Ok(u32::try_from(size).unwrap_or(1 << 30)),
        _ => Err("expected one size from 1 to 1G".to_owned()),
    }
}
