//! What the arguments mean: a validated list of cases. Pure; nothing is opened or measured here.

use std::path::PathBuf;
use std::time::Duration;

use super::args::{BenchArgs, DEFAULT_PORT};
use super::case::{Amount, Case, CaseKind, Link, Memory, Op, Place, TIME, Wait};
use super::devices::Named;
use super::gpu_plan;
use super::passes;
use super::plan_error::{MAX_QPS, MAX_REGISTERED, PlanError};

const OPS: &[Op] = &[Op::Write, Op::Read, Op::Send];
const KINDS: &[CaseKind] = &[CaseKind::Latency, CaseKind::Bandwidth, CaseKind::Bidirectional, CaseKind::Rate];
/// What several devices together do.
const RAIL_OPS: &[Op] = &[Op::Write, Op::Read];
const RAIL_KINDS: &[CaseKind] = &[CaseKind::Bandwidth];
const RAIL_SIZES: [u64; 4] = [64 << 10, 1 << 20, 8 << 20, 64 << 20];
const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];
const SIZES: [u64; 9] = [1, 8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 8 << 20];
const QUICK_LATENCY_SIZES: [u64; 2] = [8, 4 << 10];
const QUICK_BANDWIDTH_SIZES: [u64; 2] = [64 << 10, 1 << 20];
const RATE_SIZE: u64 = 8;
const QUICK_TIME: Duration = Duration::from_millis(250);
/// Shortest time of one case in one pass: with less, setup would dominate.
///
/// Most variation comes with each pass or lasts longer than this. So many short passes tell more
/// than fewer long ones. Passes of 10 ms varied no more than those of 40 ms (two busy cores, UDP,
/// 40 passes each).
const SHORTEST: Duration = Duration::from_millis(15);
/// For the few headline figures: as long as plain UDP is measured.
const HEADLINE_TIME: Duration = Duration::from_secs(2);

/// Where the two ends are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ends {
    /// Two processes on this machine.
    Here,
    /// We ask, `host:port` serves.
    Peer {
        /// Name or address of the other machine.
        host: String,
        /// Its TCP port.
        port: u16,
    },
    /// Serve clients at this address.
    Listen {
        /// Address to listen on.
        addr: String,
        /// TCP port to listen on.
        port: u16,
    },
}

/// Everything a run does, validated.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    /// Where the two ends are.
    pub(crate) ends: Ends,
    /// The devices of this end, as an argument or the environment names them.
    pub(crate) devices: Named,
    /// Address or interface of the device; loopback without.
    pub(crate) addr: Option<String>,
    /// The link; the default comes from the environment, or is chosen automatically.
    pub(crate) link: Option<String>,
    /// A second link, over which the headline figures are shown too.
    pub(crate) also: Option<Link>,
    /// Most engines that drive the device; the default depends on the CPUs.
    pub(crate) engines: Option<u8>,
    /// The thread that drives the device; the default comes from the environment.
    pub(crate) progress: Option<String>,
    /// Background load processes; TCP is then the yardstick.
    pub(crate) busy: Option<u32>,
    /// Which memory the run is about.
    pub(crate) memory: Memory,
    /// The GPU whose memory is measured, as a CUDA ordinal; `None` for host memory.
    pub(crate) gpu: Option<i32>,
    /// What to measure, in order; empty for [`Ends::Listen`], where the requesting side decides.
    pub(crate) cases: Vec<Case>,
    /// How often all of it is measured.
    pub(crate) passes: u32,
    /// Share of sent packets that the fault link drops, 0 to 1.
    pub(crate) loss: f64,
    /// Seed of patterns and losses.
    pub(crate) seed: u64,
    /// Where the JSON goes.
    pub(crate) json: Option<PathBuf>,
    /// Where the plot goes.
    pub(crate) plot: Option<PathBuf>,
    /// The run to compare with.
    pub(crate) compare: Option<PathBuf>,
    /// How much slower is still the same, as a share.
    pub(crate) tolerance: f64,
    /// Constants of this machine, for what is to be expected.
    pub(crate) calibration: Option<PathBuf>,
}

impl Plan {
    /// Whether a device of this end is hardware.
    pub(crate) fn is_hardware(&self) -> bool {
        self.devices.have_hardware()
    }

    /// Measures the headline figures over a second link, too. Between machines nothing is shorter
    /// than UDP, and raw is plain UDP. Processes of one machine have shared memory.
    pub(crate) fn show_over(&mut self, link: Link) {
        if self.memory == Memory::Gpu {
            let more = gpu_plan::over(link, &self.cases);
            return self.cases.extend(more);
        }
        let judged = |case: &Case| headline(case.op, case.kind, case.size).is_some() && case.qps == 1;
        let with = |case: Case| {
            let other = judged(&case).then(|| Case { over: Some(link), ..case.clone() });
            std::iter::once(case).chain(other)
        };
        self.cases = std::mem::take(&mut self.cases).into_iter().flat_map(with).collect();
    }
}

/// What the arguments mean; `environment` names devices where they do not.
pub(crate) fn plan(args: &BenchArgs, environment: Option<&str>) -> Result<Plan, PlanError> {
    let ends = ends(args)?;
    let devices = Named::of(args.device.as_deref(), environment);
    let serves = matches!(ends, Ends::Listen { .. });
    let memory = args.memory.unwrap_or_default();
    let gpu = match (memory, args.gpu) {
        (Memory::Gpu, gpu) => Some(gpu.unwrap_or(0)),
        (Memory::Host, Some(gpu)) if !serves => return Err(PlanError::GpuMemory(gpu)),
        (Memory::Host, gpu) => gpu,
    };
    let mut cases = if serves { Vec::new() } else { cases(args, &devices)? };
    let passes = args.passes.unwrap_or_else(|| usual_passes(args, &devices));
    for case in &mut cases {
        // Of operations that were counted by hand each pass does all.
        if let Amount::Time(time) = &mut case.amount {
            *time = (*time / passes).max(SHORTEST);
        }
    }
    Ok(Plan {
        also: also(args, &ends)?,
        ends,
        devices,
        addr: args.addr.clone(),
        link: args.link.first().cloned(),
        engines: args.engines,
        progress: args.progress.clone(),
        busy: args.busy,
        memory,
        gpu,
        cases,
        passes,
        loss: args.loss.as_deref().map_or(Ok(0.0), |text| share("loss", text, 1.0, "1"))?,
        seed: args.seed.unwrap_or(1),
        json: args.json.clone(),
        plot: args.plot.clone(),
        compare: args.compare.clone(),
        calibration: args.calibration.clone(),
        tolerance: args.tolerance.as_deref().map_or(Ok(0.10), |text| share("tolerance", text, 10.0, "10"))?,
    })
}

fn ends(args: &BenchArgs) -> Result<Ends, PlanError> {
    if let Some(text) = &args.peer {
        let (host, port) = host_port("peer", text)?;
        return Ok(Ends::Peer { host, port });
    }
    let Some(text) = &args.listen else { return Ok(Ends::Here) };
    let typed: [(&'static str, bool); 14] = [
        ("--memory", args.memory.is_some()),
        ("--op", !args.op.is_empty()),
        ("--kind", !args.kind.is_empty()),
        ("--size", !args.size.is_empty()),
        ("--qps", !args.qps.is_empty()),
        ("--wait", args.wait.is_some()),
        ("--mtu", args.mtu.is_some()),
        ("--iters", args.iters.is_some()),
        ("--quick", args.quick),
        ("--passes", args.passes.is_some()),
        ("--explain", args.explain),
        ("--json", args.json.is_some()),
        ("--plot", args.plot.is_some()),
        ("--compare", args.compare.is_some()),
    ];
    if let Some((flag, _)) = typed.iter().find(|(_, given)| *given) {
        return Err(PlanError::ListenTakesNoCases(flag));
    }
    if text.is_empty() {
        return Ok(Ends::Listen { addr: String::new(), port: DEFAULT_PORT });
    }
    let (addr, port) = host_port("listen", text)?;
    Ok(Ends::Listen { addr, port })
}

/// The second link that was named.
fn also(args: &BenchArgs, ends: &Ends) -> Result<Option<Link>, PlanError> {
    let here = *ends == Ends::Here && args.device.is_none();
    match &args.link[..] {
        [] | [_] => Ok(None),
        [first, second] if here && first == "udp" && second != "udp" => Ok(Some(Link::Shm)),
        [first, second] if here && first != "udp" && second == "udp" => Ok(Some(Link::Udp)),
        _ => Err(PlanError::Links),
    }
}

fn cases(args: &BenchArgs, devices: &Named) -> Result<Vec<Case>, PlanError> {
    let mtu = args.mtu.unwrap_or(4096);
    if !MTUS.contains(&mtu) {
        return Err(PlanError::Mtu(mtu));
    }
    let amount = match (args.iters, args.quick) {
        (Some(0), _) => return Err(PlanError::Iters),
        (Some(iters), _) => Amount::Iters(iters),
        (None, true) => Amount::Time(QUICK_TIME),
        (None, false) => Amount::Time(TIME),
    };
    let qps = unique(if args.qps.is_empty() { &[1] } else { &args.qps });
    if let Some(wrong) = qps.iter().find(|n| !(1..=MAX_QPS).contains(*n)) {
        return Err(PlanError::Qps(*wrong));
    }
    let gpu = args.memory == Some(Memory::Gpu);
    let rails = devices.are_rails();
    let (all_ops, all_kinds) = match (rails, gpu) {
        (true, _) => (RAIL_OPS, RAIL_KINDS),
        (false, true) => gpu_plan::defaults(args.quick),
        (false, false) => (OPS, KINDS),
    };
    let ops = unique(if args.op.is_empty() { all_ops } else { &args.op });
    let kinds = unique(if args.kind.is_empty() { all_kinds } else { &args.kind });
    let typed_sizes: Vec<u64> =
        unique(&args.size.iter().flat_map(|sizes| sizes.0.clone()).collect::<Vec<_>>());
    refuse_contradictions(args, &ops, &kinds, &qps, &typed_sizes)?;
    let typed_sizes = if rails && typed_sizes.is_empty() { RAIL_SIZES.to_vec() } else { typed_sizes };
    let unfit = ops.iter().any(|op| !RAIL_OPS.contains(op)) || kinds != RAIL_KINDS || qps != [1];
    if rails && (unfit || args.addr.is_some()) {
        return Err(PlanError::Rails);
    }
    if gpu {
        let quick = args.quick;
        let mut cases =
            gpu_plan::cases(&gpu_plan::Wanted { ops, kinds, sizes: typed_sizes, qps, mtu, amount, quick })?;
        cases.retain(|case| !rails || case.place != Place::Naive);
        return Ok(cases);
    }

    let mut cases = Vec::new();
    for kind in &kinds {
        for op in &ops {
            for size in sizes_of(*op, *kind, &typed_sizes, args.quick) {
                // Latency is one operation at a time: further queue pairs would only idle.
                let counts: &[u32] = if *kind == CaseKind::Latency { &[1] } else { &qps };
                for count in counts {
                    if u64::from(*count) * size > MAX_REGISTERED {
                        return Err(PlanError::Registered { qps: *count, size });
                    }
                    let spins = *op == Op::Write && *kind == CaseKind::Latency;
                    let wait = if spins { args.wait.unwrap_or(Wait::Cq) } else { Wait::Cq };
                    let amount =
                        headline(*op, *kind, size).filter(|_| amount == Amount::Time(TIME)).unwrap_or(amount);
                    let place = Place::Host;
                    cases.push(Case {
                        op: *op,
                        kind: *kind,
                        place,
                        size,
                        qps: *count,
                        wait,
                        mtu,
                        amount,
                        over: None,
                    });
                }
            }
        }
    }
    // The plain run also shows that many queue pairs together keep up with one.
    let plain = args.op.is_empty() && args.kind.is_empty() && typed_sizes.is_empty() && args.qps.is_empty();
    if plain {
        let (op, kind, size) = (Op::Write, CaseKind::Bandwidth, 1 << 20);
        let after = cases.iter().rposition(|case| (case.op, case.kind) == (op, kind)).map_or(0, |at| at + 1);
        let amount = if args.quick { amount } else { headline(op, kind, size).unwrap_or(amount) };
        let place = Place::Host;
        cases.insert(after, Case { op, kind, place, size, qps: 64, wait: Wait::Cq, mtu, amount, over: None });
    }
    Ok(cases)
}

/// Several passes where they are cheap: between two local processes, on the software NIC, and
/// limited by time. GPU processes take seconds to start, and processes of another machine are not
/// ours.
fn usual_passes(args: &BenchArgs, devices: &Named) -> u32 {
    let elsewhere = args.peer.is_some() || !devices.are_none() || args.memory == Some(Memory::Gpu);
    let once = args.quick || args.iters.is_some() || elsewhere;
    if once { 1 } else { passes::USUAL }
}

/// How long the headline figures are measured.
fn headline(op: Op, kind: CaseKind, size: u64) -> Option<Amount> {
    let judged = matches!(
        (op, kind, size),
        (Op::Write, CaseKind::Latency, 8) | (Op::Write, CaseKind::Bandwidth, 0x10_0000)
    );
    judged.then_some(Amount::Time(HEADLINE_TIME))
}

/// Rejects contradictory arguments; defaults that do not apply are dropped silently instead.
fn refuse_contradictions(
    args: &BenchArgs,
    ops: &[Op],
    kinds: &[CaseKind],
    qps: &[u32],
    sizes: &[u64],
) -> Result<(), PlanError> {
    let only_atomic = ops == [Op::Atomic];
    if only_atomic && !sizes.is_empty() && sizes != [8] {
        return Err(PlanError::AtomicSize);
    }
    let bulk = |kind: &&CaseKind| matches!(kind, CaseKind::Bandwidth | CaseKind::Bidirectional);
    if only_atomic && let Some(kind) = args.kind.iter().find(bulk) {
        return Err(PlanError::AtomicKind(*kind));
    }
    let write_latency = ops.contains(&Op::Write) && kinds.contains(&CaseKind::Latency);
    if args.wait.is_some_and(Wait::is_on_memory) && !write_latency {
        return Err(PlanError::WaitMemory);
    }
    if args.wait.is_some_and(Wait::is_on_memory) && args.memory == Some(Memory::Gpu) {
        return Err(PlanError::WaitGpu);
    }
    if args.memory != Some(Memory::Gpu) && kinds.contains(&CaseKind::GpuVisible) {
        return Err(PlanError::VisibleNeedsGpu);
    }
    if args.wait.is_some_and(Wait::is_on_memory) && sizes.contains(&0) {
        return Err(PlanError::EmptyMemory);
    }
    if kinds.iter().all(|kind| kind.is_latency()) && qps != [1] {
        return Err(PlanError::LatencyQps);
    }
    if sizes == [0] && kinds.iter().all(|kind| bulk(&kind)) {
        return Err(PlanError::EmptyBandwidth);
    }
    Ok(())
}

fn sizes_of(op: Op, kind: CaseKind, typed: &[u64], quick: bool) -> Vec<u64> {
    let bulk = matches!(kind, CaseKind::Bandwidth | CaseKind::Bidirectional);
    match (op, kind) {
        (Op::Atomic, _) if bulk => Vec::new(),
        (Op::Atomic, _) => vec![8],
        _ if !typed.is_empty() => typed.iter().copied().filter(|size| *size > 0 || !bulk).collect(),
        (_, CaseKind::Rate) => vec![RATE_SIZE],
        (_, CaseKind::Latency) if quick => QUICK_LATENCY_SIZES.to_vec(),
        (_, CaseKind::Bandwidth) if quick => QUICK_BANDWIDTH_SIZES.to_vec(),
        (_, CaseKind::Bidirectional) if quick => vec![1 << 20],
        _ => SIZES.to_vec(),
    }
}

fn unique<T: Copy + PartialEq>(items: &[T]) -> Vec<T> {
    let mut kept = Vec::with_capacity(items.len());
    for item in items {
        if !kept.contains(item) {
            kept.push(*item);
        }
    }
    kept
}

fn share(flag: &'static str, text: &str, bound: f64, below: &'static str) -> Result<f64, PlanError> {
    let (number, scale) = text.trim().strip_suffix('%').map_or((text.trim(), 1.0), |number| (number, 100.0));
    let value = number.trim().parse::<f64>().ok().map(|value| value / scale);
    value.filter(|value| (0.0..bound).contains(value)).ok_or(PlanError::Share {
        flag,
        text: text.to_owned(),
        below,
    })
}

fn host_port(flag: &'static str, text: &str) -> Result<(String, u16), PlanError> {
    let wrong = || PlanError::Address { flag, text: text.to_owned() };
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, rest)) => (host, Some(rest.strip_prefix(':').ok_or_else(wrong)?)),
        // More than one colon and no bracket: a bare IPv6 address, which carries no port.
        None if text.matches(':').count() > 1 => (text, None),
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    if host.is_empty() || host.contains(char::is_whitespace) || host.contains(['[', ']']) {
        return Err(wrong());
    }
    let port = port.map_or(Ok(DEFAULT_PORT), str::parse).map_err(|_| wrong())?;
    if port == 0 { Err(wrong()) } else { Ok((host.to_owned(), port)) }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
