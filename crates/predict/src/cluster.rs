//! What GPUDirect is worth in a cluster: time of a step, GPU-hours and money, with it and without.

use serde::Serialize;

use super::basis;
pub use super::cluster_error::ClusterError;
use super::constants as c;
use super::factor::{Band, Factor, Stage, in_series, slowest};
use super::interval::Interval;
use super::model::{Estimate, direct};
use super::parts::{Memory, Parts, Software};
use super::route::{self, float};
use super::staging;

/// A cluster and its work.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cluster {
    /// Machines.
    pub nodes: u32,
    /// GPUs of each.
    pub gpus_per_node: u32,
    /// Adapters of each.
    pub nics_per_node: u32,
    /// Bytes of each GPU that a step exchanges: gradients, parameters, tokens or a KV cache.
    pub bytes: u64,
    /// Milliseconds that a step computes.
    pub compute_ms: f64,
    /// Share of the computing during which bytes can travel, 0 to 1.
    pub overlap: f64,
    /// What a GPU costs in an hour.
    pub price: f64,
    /// GB/s between GPUs of one machine in one direction; none: over PCIe.
    pub nvlink: Option<f64>,
}

/// How bytes are exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// Everybody gets the sum, round a ring.
    RingAllReduce,
    /// The same, up and down a tree.
    TreeAllReduce,
    /// Everybody gets everything.
    AllGather,
    /// Everybody gets a share of the sum.
    ReduceScatter,
    /// Everybody sends a share to everybody.
    AllToAll,
    /// One GPU hands its KV cache to another.
    KvHandOver,
}

impl Pattern {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::RingAllReduce,
        Self::TreeAllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::KvHandOver,
    ];

    /// Bus bandwidth against algorithm bandwidth, as nccl-tests define them.
    #[must_use]
    pub fn bus_share(self, cluster: &Cluster) -> f64 {
        let all = f64::from(cluster.nodes) * f64::from(cluster.gpus_per_node);
        match self {
            Self::RingAllReduce | Self::TreeAllReduce => 2.0 * (all - 1.0) / all,
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => (all - 1.0) / all,
            Self::KvHandOver => 1.0,
        }
    }

    /// Its name for people.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::RingAllReduce => "all-reduce, ring",
            Self::TreeAllReduce => "all-reduce, tree",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllToAll => "all-to-all",
            Self::KvHandOver => "KV hand-over",
        }
    }
}

/// A step with one kind of exchange.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Step {
    /// Milliseconds of the exchange.
    pub exchange_ms: f64,
    /// The lower end of its interval.
    pub exchange_low_ms: f64,
    /// The upper end.
    pub exchange_high_ms: f64,
    /// Of them, those that no computing hides.
    pub exposed_ms: f64,
    /// The whole step.
    pub step_ms: f64,
    /// The lower end of its interval.
    pub step_low_ms: f64,
    /// The upper end.
    pub step_high_ms: f64,
    /// GB/s of each GPU's bytes: bytes by time.
    pub algorithm_gbytes_per_s: f64,
    /// GB/s that the slowest link carries, as nccl-tests define it.
    pub bus_gbytes_per_s: f64,
    /// The lower end of its interval.
    pub bus_low_gbytes_per_s: f64,
    /// The upper end.
    pub bus_high_gbytes_per_s: f64,
    /// What the slowest stage carries, which the interval does not exceed.
    #[serde(skip)]
    pub bus_most_gbytes_per_s: f64,
    /// What limits the exchange.
    pub binds: Factor,
}

/// One kind of exchange, both ways.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Impact {
    /// The kind.
    pub pattern: Pattern,
    /// With GPUDirect.
    pub direct: Step,
    /// Through host memory.
    pub staged: Step,
    /// GPU-hours of a month that staging costs beyond the direct way, at the same number of steps.
    pub gpu_hours: f64,
    /// What they cost.
    pub money: f64,
}

/// Hours of a month.
const MONTH: f64 = 730.0;

/// What the figures rest on, for people.
pub const ASSUMPTIONS: [&str; 8] = [
    "every step exchanges the bytes once, on all nodes at the same time; the network is not oversubscribed",
    "ring: 2(p-1)/p of the bytes at the combined rate of a node's adapters, or of NVLink if slower; tree: the same at 92 %, with half of the traffic on two nodes' adapters and three quarters on three nodes'",
    "all-gather and reduce-scatter: (p-1)/p; all-to-all: the share for other nodes, (N-1)/N, through the adapters of the node",
    "each network hop takes 14 us, each NVLink hop 3.4 us (NCCL's tuning values), direct and staged alike; a ring hides it behind the second slice of each chunk",
    "staged: a node's traffic crosses its DRAM twice in each direction, and a copy kernel uses the GPU's slot in both directions",
    "KV hand-over: one GPU to another over its share of the adapters; staged by copy engine in chunks",
    "the exchange overlaps with `overlap` of the compute time; the rest lengthens the step",
    "a month has 730 hours; GPU-hours are those beyond what the same number of steps takes with GPUDirect",
];

/// What GPUDirect is worth here, for each kind of exchange.
///
/// # Errors
/// The cluster does not exist, or there is nothing to compare.
pub fn impact(parts: &Parts, cluster: &Cluster) -> Result<Vec<Impact>, ClusterError> {
    check(cluster)?;
    if parts.memory == Memory::Host {
        return Err(ClusterError::Host);
    }
    route::possible(parts, cluster.bytes)?;
    basis::known(parts, cluster.bytes)?;
    basis::collective(cluster.bytes)?;
    basis::host_memory(parts, cluster.nics_per_node)?;
    Pattern::ALL.into_iter().map(|pattern| one(parts, cluster, pattern)).collect()
}

/// One exchange the direct way, of which host memory is no part.
///
/// # Errors
/// The cluster does not exist, or the exchange is not predicted.
pub(super) fn direct_step(parts: &Parts, cluster: &Cluster, pattern: Pattern) -> Result<Step, ClusterError> {
    check(cluster)?;
    route::possible(parts, cluster.bytes)?;
    basis::known(parts, cluster.bytes)?;
    basis::collective(cluster.bytes)?;
    Ok(one(parts, cluster, pattern)?.direct)
}

fn check(cluster: &Cluster) -> Result<(), ClusterError> {
    for (what, count, most) in [
        ("nodes", cluster.nodes, 1 << 20),
        ("GPUs of one node", cluster.gpus_per_node, 64),
        ("adapters of one node", cluster.nics_per_node, 64),
    ] {
        if count > most {
            return Err(ClusterError::TooMany { what, count, most });
        }
    }
    match cluster {
        Cluster { nodes: 0 | 1, .. } => Err(ClusterError::Nodes(cluster.nodes)),
        Cluster { gpus_per_node: 0, .. } => Err(ClusterError::NoGpus),
        Cluster { nics_per_node: 0, .. } => Err(ClusterError::NoNics),
        Cluster { compute_ms, .. } if !(compute_ms.is_finite() && *compute_ms >= 0.0) => {
            Err(ClusterError::Compute(*compute_ms))
        }
        Cluster { overlap, .. } if !(0.0..=1.0).contains(overlap) => Err(ClusterError::Overlap(*overlap)),
        Cluster { price, .. } if !(price.is_finite() && *price >= 0.0) => Err(ClusterError::Price(*price)),
        _ => Ok(()),
    }
}

fn one(parts: &Parts, cluster: &Cluster, pattern: Pattern) -> Result<Impact, ClusterError> {
    let (direct_us, staged_us) = match pattern {
        Pattern::KvHandOver => hand_over(parts, cluster)?,
        _ => (exchange(parts, cluster, pattern, true), exchange(parts, cluster, pattern, false)),
    };
    let exposed = |exchange_ms: f64| (exchange_ms - cluster.overlap * cluster.compute_ms).max(0.0);
    let algorithm = |microseconds: f64| float(cluster.bytes) / microseconds / 1000.0;
    let bus = |microseconds: f64| algorithm(microseconds) * pattern.bus_share(cluster);
    let step = |Timed { time, least, binds }: Timed| Step {
        exchange_ms: time.expected / 1000.0,
        exchange_low_ms: time.low / 1000.0,
        exchange_high_ms: time.high / 1000.0,
        exposed_ms: exposed(time.expected / 1000.0),
        step_ms: cluster.compute_ms + exposed(time.expected / 1000.0),
        step_low_ms: cluster.compute_ms + exposed(time.low / 1000.0),
        step_high_ms: cluster.compute_ms + exposed(time.high / 1000.0),
        algorithm_gbytes_per_s: algorithm(time.expected),
        bus_gbytes_per_s: bus(time.expected),
        bus_low_gbytes_per_s: bus(time.high),
        bus_high_gbytes_per_s: bus(time.low),
        bus_most_gbytes_per_s: bus(least),
        binds,
    };
    let (direct, staged) = (step(direct_us), step(staged_us));
    let gpus = f64::from(cluster.nodes) * f64::from(cluster.gpus_per_node);
    let longer = if direct.step_ms > 0.0 { staged.step_ms / direct.step_ms - 1.0 } else { 0.0 };
    // What a month of direct steps takes longer when staged.
    let gpu_hours = gpus * MONTH * longer.max(0.0);
    Ok(Impact { pattern, direct, staged, gpu_hours, money: gpu_hours * cluster.price })
}

/// A collective with its interval, which is no less than `least`.
fn timed(parts: &Parts, bytes: u64, is_direct: bool, (expected, least): (f64, f64), binds: Factor) -> Timed {
    let class = if is_direct { parts.collective_class(bytes) } else { parts.staged_class(bytes) };
    let band = Interval::of(class, bytes).of_time(expected);
    // Host memory that is assumed may be faster.
    let least = if is_direct || parts.dram_is_known { least } else { 0.0 };
    Timed { time: Band { low: band.low.max(least).min(expected), ..band }, least, binds }
}

/// Microseconds of a collective, and what limits it.
fn exchange(parts: &Parts, cluster: &Cluster, pattern: Pattern, is_direct: bool) -> Timed {
    let (nodes, gpus) = (f64::from(cluster.nodes), f64::from(cluster.gpus_per_node));
    let all = nodes * gpus;
    let passes = if pattern == Pattern::TreeAllReduce { tree_passes(cluster.nodes) } else { 2.0 };
    let (rate, most, binds) = node_rate(parts, cluster, is_direct, passes / 2.0);
    let bytes = float(cluster.bytes);
    let flow = |share: f64, rate: f64| bytes * share / rate / 1000.0;
    let near = if cluster.gpus_per_node > 1 { c::NCCL_NVLINK } else { 0.0 };
    let share = (all - 1.0) / all;
    // A step sends a chunk in slices, and the next GPU goes on with the first of them: what a step
    // waits for is hidden while the rest flows.
    let ring = |rounds: f64| {
        let flowing = flow(rounds * share, rate);
        let waiting = rounds * (nodes * c::NCCL_NET + (all - nodes) * near);
        flowing.max(flowing / c::NCCL_SLICES + waiting)
    };
    let (time, rounds) = match pattern {
        Pattern::RingAllReduce => (ring(2.0), 2.0),
        Pattern::TreeAllReduce => {
            let levels = nodes.log2().ceil();
            let passes = 2.0 * (levels * c::NCCL_NET + (gpus - 1.0) * near);
            (flow(2.0 * share, rate * c::NCCL_TREE) + passes, 2.0)
        }
        Pattern::AllGather | Pattern::ReduceScatter => (ring(1.0), 1.0),
        Pattern::AllToAll | Pattern::KvHandOver => {
            return all_to_all(parts, cluster, is_direct);
        }
    };
    let times = (time + c::NCCL_BASE, flow(rounds * share, most));
    timed(parts, cluster.bytes, is_direct, times, binds)
}

/// Every GPU sends to every other: through its own adapter what is for other nodes, over the links
/// between GPUs what is for its neighbours, at the same time.
fn all_to_all(parts: &Parts, cluster: &Cluster, is_direct: bool) -> Timed {
    let (nodes, gpus) = (f64::from(cluster.nodes), f64::from(cluster.gpus_per_node));
    // A connection between two GPUs uses one adapter, however many the node has.
    let nics = cluster.nics_per_node.min(cluster.gpus_per_node);
    let outside = Cluster { nics_per_node: nics, nvlink: Some(f64::INFINITY), ..cluster.clone() };
    let (rate, most, binds) = node_rate(parts, &outside, is_direct, 1.0);
    let bytes = float(cluster.bytes);
    let far = |rate: f64| bytes * gpus * (nodes - 1.0) / nodes / rate / 1000.0;
    let (far, least) = (far(rate), far(most));
    let near = bytes * (gpus - 1.0) / (nodes * gpus) / between_gpus(parts, cluster) / 1000.0;
    let (flowing, binds) = if near > far { (near, Factor::GpuLinks) } else { (far, binds) };
    let time = flowing + c::NCCL_NET * (nodes - 1.0).min(64.0) + c::NCCL_BASE;
    timed(parts, cluster.bytes, is_direct, (time, least.max(near)), binds)
}

/// GB/s between GPUs of one machine: their links, or copy kernels over PCIe.
fn between_gpus(parts: &Parts, cluster: &Cluster) -> f64 {
    let over_pcie = || parts.gpu.map(super::slot::Slot::kernel_copy);
    cluster.nvlink.or_else(over_pcie).unwrap_or(f64::INFINITY)
}

/// How often the bytes pass the adapters of the busiest node of two trees that carry half of them
/// each, up and down. Two nodes: each is the other's root once. Three: the one in the middle has a
/// child and a parent in one tree, and one neighbour in the other. More: two children and a parent.
const fn tree_passes(nodes: u32) -> f64 {
    match nodes {
        0..=2 => 1.0,
        3 => 1.5,
        _ => 2.0,
    }
}

/// GB/s of a node in each direction while both are busy, those of its slowest stage, and which that
/// is; `load` is how often the bytes pass its adapters, against a ring.
fn node_rate(parts: &Parts, cluster: &Cluster, is_direct: bool, load: f64) -> (f64, f64, Factor) {
    let node = Parts {
        rails: cluster.nics_per_node,
        gpus: cluster.gpus_per_node,
        software: Software::Nccl,
        sharers: 1,
        ..parts.clone()
    };
    let mut stages = if is_direct {
        route::stages(&node, node.rails)
    } else {
        let mut stages = route::stages(&node.on_host(), node.rails);
        stages.retain(|stage| stage.factor != Factor::Dram);
        // Into the buffer and out of it, in each direction.
        let stage = |factor, gbytes_per_s| Stage { factor, gbytes_per_s, count: 1 };
        stages.push(stage(Factor::Dram, node.dram / (2.0 * c::DRAM_PASSES)));
        stages.push(stage(Factor::GpuCopy, staging::copy_rate(&node)));
        stages
    };
    for stage in &mut stages {
        stage.gbytes_per_s /= load;
    }
    let gbytes_per_s = between_gpus(parts, cluster);
    if cluster.gpus_per_node > 1 && gbytes_per_s.is_finite() {
        stages.push(Stage { factor: Factor::GpuLinks, gbytes_per_s, count: 1 });
    }
    let (most, binds) =
        slowest(&stages).map_or((f64::INFINITY, Factor::Wire), |stage| (stage.gbytes_per_s, stage.factor));
    (in_series(&stages, parts.fitted.series_exponent), most, binds)
}

/// What is known of an exchange.
#[derive(Clone, Copy, Debug)]
struct Timed {
    /// Microseconds.
    time: Band,
    /// Microseconds that its bytes take at the rate of the slowest stage.
    least: f64,
    /// What limits it.
    binds: Factor,
}

/// One hand-over, direct and staged.
fn hand_over(parts: &Parts, cluster: &Cluster) -> Result<(Timed, Timed), ClusterError> {
    let rails = (cluster.nics_per_node / cluster.gpus_per_node).max(1);
    let sharers = (cluster.gpus_per_node / cluster.nics_per_node).max(1);
    let pair = Parts { rails, sharers, gpus: 1, software: Software::Nixl, ..parts.clone() };
    let way = direct(&pair, cluster.bytes)?;
    // All GPUs of a node hand over at once, and share its memory.
    let crowded = Parts { dram: pair.dram / f64::from(cluster.gpus_per_node), ..pair };
    let other = staging::staged(&crowded, cluster.bytes, true)?;
    let timed = |one: Estimate| Timed { time: one.microseconds, least: 0.0, binds: one.binds };
    Ok((timed(way), timed(other)))
}

#[cfg(test)]
mod tests {
    use super::super::machine::{Choice, parts_of};
    use super::super::parts::Spec;
    use super::*;
    use nobounce_topology::machines;

    fn h100() -> Parts {
        let facts = machines::machine("dgx-h100").unwrap();
        parts_of(&facts, &Choice::default()).unwrap().spec.resolve().unwrap()
    }

    fn cluster() -> Cluster {
        Cluster {
            nodes: 8,
            gpus_per_node: 8,
            nics_per_node: 8,
            bytes: 14_000_000_000,
            compute_ms: 400.0,
            overlap: 0.0,
            price: 2.5,
            nvlink: Some(370.8),
        }
    }

    #[test]
    fn the_direct_way_is_never_slower_and_staging_is_bound_by_memory_or_copies() {
        for one in impact(&h100(), &cluster()).unwrap() {
            assert!(one.staged.exchange_ms >= one.direct.exchange_ms, "{one:?}");
            assert!(one.gpu_hours >= 0.0 && one.money >= 0.0);
        }
        let ring = impact(&h100(), &cluster()).unwrap()[0];
        assert_eq!(ring.staged.binds, Factor::Dram);
        // 2 x 63/64 x 14 GB at about 360 GB/s.
        assert!((70.0..85.0).contains(&ring.direct.exchange_ms), "{ring:?}");
        assert!(ring.staged.exchange_ms > 1.8 * ring.direct.exchange_ms, "{ring:?}");
    }

    #[test]
    fn every_exchange_has_an_interval_and_no_link_is_exceeded() {
        let found = impact(&h100(), &cluster()).unwrap();
        for step in found.iter().flat_map(|one| [one.direct, one.staged]) {
            assert!(step.exchange_low_ms <= step.exchange_ms && step.exchange_ms < step.exchange_high_ms);
            assert!(step.step_low_ms <= step.step_ms && step.step_ms < step.step_high_ms, "{step:?}");
            assert!(step.bus_low_gbytes_per_s < step.bus_gbytes_per_s, "{step:?}");
            assert!(step.bus_high_gbytes_per_s >= step.bus_gbytes_per_s, "{step:?}");
        }
        // NVLink carries 370.8 GB/s, which the interval of a ring does not exceed.
        assert!(found[0].direct.bus_high_gbytes_per_s <= 370.9, "{:?}", found[0].direct);
        let wide = |parts: &Parts| {
            let step = impact(parts, &cluster()).unwrap()[0].direct;
            step.exchange_high_ms / step.exchange_ms
        };
        let efa = Parts { link: "efa:400".parse().unwrap(), ..h100() };
        // Five sources have collectives: too few for an interval of their own.
        assert!(wide(&efa) > 1.9 && wide(&h100()) > 1.9, "{} {}", wide(&efa), wide(&h100()));
    }

    #[test]
    fn what_is_hidden_costs_nothing() {
        let hidden = Cluster { overlap: 1.0, compute_ms: 10_000.0, ..cluster() };
        assert!(impact(&h100(), &hidden).unwrap().iter().all(|one| one.money.abs() < 1e-9));
    }

    #[test]
    fn impossible_clusters_are_explained() {
        let wrong = |change: fn(&mut Cluster)| {
            let mut cluster = cluster();
            change(&mut cluster);
            impact(&h100(), &cluster).unwrap_err().to_string()
        };
        for (found, wanted) in [
            (wrong(|cluster| cluster.nodes = 1), "at least two"),
            (wrong(|cluster| cluster.gpus_per_node = 0), "--gpus-per-node 0"),
            (wrong(|cluster| cluster.nics_per_node = 0), "--nics-per-node 0"),
            (wrong(|cluster| cluster.price = -1.0), "invalid --price -1"),
            (wrong(|cluster| cluster.overlap = 1.5), "0 to 1"),
            (wrong(|cluster| cluster.overlap = f64::NAN), "0 to 1"),
            (wrong(|cluster| cluster.compute_ms = -3.0), "-3"),
            (wrong(|cluster| cluster.nics_per_node = 1000), "1000"),
            (wrong(|cluster| cluster.bytes = 100_000), "not predicted: below 1 MiB"),
        ] {
            assert!(found.contains(wanted), "{found}");
        }
    }

    /// Staging crosses host memory, of which nothing may be assumed that a server may lack.
    #[test]
    fn many_adapters_need_known_host_memory() {
        let spec = Spec {
            link: "ib:ndr".parse().ok(),
            distance: Some(nobounce_topology::tree::Distance::Pix),
            ..Spec::default()
        };
        let found = impact(&spec.resolve().unwrap(), &cluster()).unwrap_err().to_string();
        assert!(found.contains("8 adapters") && found.contains("--dram"), "{found}");
        let stated = Spec { dram: Some(400.0), ..spec.clone() }.resolve().unwrap();
        assert!(impact(&stated, &cluster()).is_ok());
        let few = Cluster { nics_per_node: 1, ..cluster() };
        assert!(impact(&spec.resolve().unwrap(), &few).is_ok());
    }
}
