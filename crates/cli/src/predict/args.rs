//! `nobounce predict` as it is typed.

use std::path::PathBuf;

use nobounce_predict::fabric::Fabric;
use nobounce_predict::parts::{End, Memory, Op, Software, Spec};
use nobounce_predict::slot::Slot;
use nobounce_topology::platform::Platform;
use nobounce_topology::tree::Distance;
use serde::de::DeserializeOwned;

use super::sizes::{ByteAmount, PredictSizes};

const EXAMPLES: &str = "\
Examples:
  nobounce predict                                  this machine
  nobounce predict --machine dgx-h100               a known machine
  nobounce predict --facts facts.json --gpu 3       facts from `nobounce doctor --save`
  nobounce predict --link ib:hdr --nic-slot gen4x16 --gpu-slot gen4x16 --distance PHB
  nobounce predict --machine dgx-h100 --plot h100.svg --size 8..1G
  nobounce predict --machine dgx-h100 --nodes 8 --bytes 14G --compute 400 --price 2.5
  nobounce bench --json a.json && nobounce predict --calibrate a.json --save-calibration here.json

Exit codes: 0 success, 1 a run differs from its calibration by more than --tolerance, 2 usage error or broken environment.";

/// Predict latency and bandwidth of a machine, direct and staged, and name the bottleneck.
///
/// The parts come from a machine: this one, a known one, or saved facts. Options override single
/// parts, or name them all. Unknown parts are assumed; the last line lists the assumptions.
/// docs/reference/predict-model.md explains the model and its accuracy.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(after_help = EXAMPLES, group = clap::ArgGroup::new("second").args(["against", "split"]))]
pub(crate) struct PredictArgs {
    /// Use a known machine: dgx-a100, dgx-h100, dgx-b200, hgx-h100-roce, dual-socket, workstation,
    /// gh200, mi300x, p5-efa, vm-flat, container
    #[arg(long, value_name = "NAME", conflicts_with = "facts", help_heading = "Machine")]
    pub(crate) machine: Option<String>,

    /// Read facts saved by `nobounce doctor --save` ('-': standard input)
    #[arg(long, value_name = "FILE", help_heading = "Machine")]
    pub(crate) facts: Option<PathBuf>,

    /// Index of the GPU [default: the first]
    #[arg(long, value_name = "N", help_heading = "Machine")]
    pub(crate) gpu: Option<u32>,

    /// Name of the adapter [default: the best for the GPU]
    #[arg(long, value_name = "NAME", help_heading = "Machine")]
    pub(crate) nic: Option<String>,

    #[command(flatten)]
    pub(crate) parts: PartArgs,

    /// Message size, or a range in powers of two such as 8..1G; up to 1T; may be repeated
    #[arg(long, value_name = "SIZE", value_delimiter = ',', help_heading = "Results")]
    pub(crate) size: Vec<PredictSizes>,

    /// Print the prediction as JSON
    #[arg(long, help_heading = "Results")]
    pub(crate) json: bool,

    /// Plot latency and bandwidth against message size
    #[arg(long, value_name = "FILE.svg", help_heading = "Results")]
    pub(crate) plot: Option<PathBuf>,

    /// Print the score of the model on published figures, each predicted without its source
    #[arg(long, help_heading = "Results")]
    pub(crate) validation: bool,

    /// List the constants of the model, with their sources
    #[arg(long, help_heading = "Results")]
    pub(crate) constants: bool,

    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,

    /// Fit the constants of this machine to a run of `nobounce bench --json`, and show the residual
    /// of each size; of several runs, the median of each case counts
    #[arg(long, value_name = "BENCH.json", num_args = 1.., conflicts_with = "calibration", help_heading = "Calibration")]
    pub(crate) calibrate: Vec<PathBuf>,

    /// Compare another run with the fitted constants
    #[arg(long, value_name = "BENCH.json", help_heading = "Calibration")]
    pub(crate) against: Option<PathBuf>,

    /// Split the passes of one run: fit the constants to every second pass (turns) or to the first
    /// half (halves), and compare the other passes with them
    #[arg(
        long,
        value_name = "HOW",
        requires = "calibrate",
        conflicts_with = "against",
        help_heading = "Calibration"
    )]
    pub(crate) split: Option<Parted>,

    /// Accepted deviation from the fitted constants: 0.15 or 15% [default: 0.15]
    #[arg(long, value_name = "SHARE", requires = "second", value_parser = share, help_heading = "Calibration")]
    pub(crate) tolerance: Option<f64>,

    /// Save the fitted constants
    #[arg(long, value_name = "FILE", requires = "calibrate", help_heading = "Calibration")]
    pub(crate) save_calibration: Option<PathBuf>,

    /// Use saved constants
    #[arg(long, value_name = "FILE", help_heading = "Calibration")]
    pub(crate) calibration: Option<PathBuf>,

    /// Link of the software NIC [default: udp, or shm where only that was measured]
    #[arg(long, requires = "calibration", help_heading = "Calibration")]
    pub(crate) via: Option<SoftLink>,

    /// Predict beside N busy processes, as `bench --busy N` measured it
    #[arg(long, value_name = "N", requires = "calibration", help_heading = "Calibration")]
    pub(crate) busy: Option<u32>,

    /// Predict between two machines, as `bench --peer` measured it; --mtu 1024 for Ethernet's 1500
    #[arg(long, requires = "calibration", help_heading = "Calibration")]
    pub(crate) between_machines: bool,
}

/// The link of the software NIC.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(crate) enum SoftLink {
    Udp,
    Shm,
}

impl SoftLink {
    /// As a run of the bench names it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Shm => "shm",
        }
    }
}

/// How one run becomes two.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(crate) enum Parted {
    Turns,
    Halves,
}

/// Single parts, in the place of the machine's.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Parts")]
pub(crate) struct PartArgs {
    /// Network: ib:sdr to ib:xdr, or rocev1:, rocev2:, rocev2-ipv6:, iwarp:, efa: or tcp: with Gb/s
    #[arg(long, value_name = "LINK")]
    pub(crate) link: Option<Fabric>,

    /// Path MTU: 256, 512, 1024, 2048 or 4096
    #[arg(long, value_name = "BYTES")]
    pub(crate) mtu: Option<u32>,

    /// Number of network switches between the two ends
    #[arg(long, value_name = "N")]
    pub(crate) hops: Option<u32>,

    /// Number of adapters used together
    #[arg(long, value_name = "N")]
    pub(crate) rails: Option<u32>,

    /// Number of these adapters on the other socket
    #[arg(long, value_name = "N")]
    pub(crate) far_rails: Option<u32>,

    /// PCIe link of each adapter, such as gen5x16
    #[arg(long, value_name = "SLOT")]
    pub(crate) nic_slot: Option<Slot>,

    /// PCIe link of each GPU
    #[arg(long, value_name = "SLOT", conflicts_with = "coherent")]
    pub(crate) gpu_slot: Option<Slot>,

    /// GPU coherent with the processor (GH200, GB200, DGX Spark)
    #[arg(long)]
    pub(crate) coherent: bool,

    /// Number of GPUs in use at each end
    #[arg(long, value_name = "N")]
    pub(crate) gpus: Option<u32>,

    /// Number of GPUs that share one adapter
    #[arg(long, value_name = "N")]
    pub(crate) sharers: Option<u32>,

    /// Memory of the transfer: gpu or host
    #[arg(long, value_name = "MEMORY", value_parser = word::<Memory>)]
    pub(crate) memory: Option<Memory>,

    /// End of a GPU transfer that lies in host memory: source or target
    #[arg(long, value_name = "END", value_parser = word::<End>)]
    pub(crate) host_end: Option<End>,

    /// Distance between GPU and adapter: PIX, PXB, PHB, NODE or SYS
    #[arg(long, value_name = "DISTANCE", value_parser = upper::<Distance>)]
    pub(crate) distance: Option<Distance>,

    /// Processor: intel-client, xeon-old, xeon-skylake, sapphire-rapids, emerald-rapids, zen, grace
    /// or other
    #[arg(long, value_name = "PROCESSOR", value_parser = word::<Platform>)]
    pub(crate) platform: Option<Platform>,

    /// Strict PCIe ordering: relaxed ordering is off
    #[arg(long)]
    pub(crate) strict_order: bool,

    /// PCIe MaxPayload
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_payload: Option<u32>,

    /// MaxReadReq of the adapter
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_read_request: Option<u32>,

    /// Size of the GPU's BAR1
    #[arg(long, value_name = "SIZE")]
    pub(crate) bar1: Option<ByteAmount>,

    /// Host memory bandwidth at each end [default: all channels of the processor]
    #[arg(long, value_name = "GB/s")]
    pub(crate) dram: Option<f64>,

    /// Software that posts the transfers: verbs, mpi, nixl, nccl, gpu-initiated or nobounce (the
    /// software NIC)
    #[arg(long, value_name = "LIBRARY", value_parser = word::<Software>)]
    pub(crate) software: Option<Software>,

    /// Queue pairs on each rail [default: enough to fill it]
    #[arg(long, value_name = "N")]
    pub(crate) qps: Option<u32>,

    /// Operation: write or read
    #[arg(long, value_name = "OP", value_parser = word::<Op>)]
    pub(crate) op: Option<Op>,

    /// Chunk size of staged transfers [default: 512K]
    #[arg(long, value_name = "SIZE")]
    pub(crate) chunk: Option<ByteAmount>,
}

impl PartArgs {
    /// The machine's parts, with those that were named in their place.
    pub(crate) fn over(&self, machine: Spec) -> Spec {
        let coherent = match (self.coherent, self.gpu_slot) {
            (true, _) => Some(true),
            (false, Some(_)) => None,
            (false, None) => machine.coherent,
        };
        let host = self.memory == Some(Memory::Host);
        Spec {
            link: self.link.or(machine.link),
            mtu: self.mtu.or(if self.link.is_some() { None } else { machine.mtu }),
            hops: self.hops.or(machine.hops),
            rails: self.rails.or(machine.rails),
            far_rails: self.far_rails.or(machine.far_rails),
            nic: self.nic_slot.or(machine.nic),
            gpu: self.gpu_slot.or(if host || coherent == Some(true) { None } else { machine.gpu }),
            coherent: if host && !self.coherent { None } else { coherent },
            gpus: self.gpus.or(machine.gpus),
            memory: self.memory.or(machine.memory),
            host_end: self.host_end.or(machine.host_end),
            gpu_vendor: machine.gpu_vendor,
            distance: self.distance.or(machine.distance),
            platform: self.platform.or(machine.platform),
            relaxed_ordering: if self.strict_order { Some(false) } else { machine.relaxed_ordering },
            max_payload: self.max_payload.or(machine.max_payload),
            max_read_request: self.max_read_request.or(machine.max_read_request),
            bar1: self.bar1.map(|amount| amount.0).or(machine.bar1),
            dram: self.dram.or(machine.dram),
            memory_per_socket: machine.memory_per_socket.filter(|_| self.platform.is_none()),
            sockets: machine.sockets,
            acs_redirect: machine.acs_redirect.filter(|_| self.distance.is_none()),
            iommu: machine.iommu,
            unavailable: machine.unavailable,
            port_down: machine.port_down.filter(|_| self.link.is_none()),
            software: self.software.or(machine.software),
            queue_pairs: self.qps.or(machine.queue_pairs),
            operation: self.op.or(machine.operation),
            chunk: self.chunk.map(|amount| amount.0).or(machine.chunk),
            sharers: self.sharers.or(machine.sharers),
        }
    }
}

impl PartArgs {
    /// What differs from the machine, as `distance NODE`.
    pub(crate) fn changes(&self, machine: &Spec) -> Vec<String> {
        let fields = |spec: &Spec| serde_json::to_value(spec).ok()?.as_object().cloned();
        let (Some(before), Some(after)) = (fields(machine), fields(&self.over(machine.clone()))) else {
            return Vec::new();
        };
        let differs = |(name, value): (String, serde_json::Value)| {
            let changed = before.get(&name) != Some(&value) && !value.is_null();
            let value = value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
            changed.then(|| format!("{} {value}", name.replace('_', " ")))
        };
        after.into_iter().filter_map(differs).collect()
    }
}

/// A cluster, for what GPUDirect is worth.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Impact: value of GPUDirect in a cluster")]
pub(crate) struct ClusterArgs {
    /// Number of machines
    #[arg(long, value_name = "N", requires = "bytes")]
    pub(crate) nodes: Option<u32>,

    /// GPUs of each machine [default: those of the machine, or 8]
    #[arg(long, value_name = "N", requires = "nodes")]
    pub(crate) gpus_per_node: Option<u32>,

    /// Adapters of each machine [default: those of the machine, or 8]
    #[arg(long, value_name = "N", requires = "nodes")]
    pub(crate) nics_per_node: Option<u32>,

    /// Bytes that each GPU exchanges per step: gradients, or a KV cache
    #[arg(long, value_name = "SIZE", requires = "nodes")]
    pub(crate) bytes: Option<ByteAmount>,

    /// Compute time of a step in milliseconds [default: 0]
    #[arg(long, value_name = "MS", requires = "nodes", allow_negative_numbers = true)]
    pub(crate) compute: Option<f64>,

    /// Share of the compute time that overlaps with the exchange: 0.5 or 50% [default: 0]
    #[arg(long, value_name = "SHARE", requires = "nodes", value_parser = share, allow_negative_numbers = true)]
    pub(crate) overlap: Option<f64>,

    /// Price of a GPU-hour [default: 0]
    #[arg(long, value_name = "MONEY", requires = "nodes", allow_negative_numbers = true)]
    pub(crate) price: Option<f64>,
}

/// One of the names of an enumeration.
fn word<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(serde_json::Value::String(text.to_ascii_lowercase()))
        .map_err(|error| error.to_string())
}

/// The same, where the names are in capitals.
fn upper<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(serde_json::Value::String(text.to_ascii_uppercase()))
        .map_err(|error| error.to_string())
}

/// `0.15` or `15%`.
fn share(text: &str) -> Result<f64, String> {
    let wrong = || format!("invalid share {text:?}: expected 0.15 or 15%");
    let (number, unit) = text.strip_suffix('%').map_or((text, 1.0), |number| (number, 100.0));
    let value: f64 = number.trim().parse().map_err(|_| wrong())?;
    if value.is_finite() { Ok(value / unit) } else { Err(wrong()) }
}
