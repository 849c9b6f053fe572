//! `nobounce bench`: plan, raw, cases, then table, JSON, plot and comparison from one report.
//!
//! | file | what |
//! |---|---|
//! | args, plan, devices, size | what was typed, what it means |
//! | case | one case, its result, and the [`case::Measure`] boundary to the library |
//! | measure, peer, side | both ends of a case: who asks, who serves, how they find each other, and what each does |
//! | rails | a case over several devices |
//! | exchange, ring, drive, watch | what they say, the memory they check, the timed part |
//! | gpu, gpu_* | GPU memory: what there is, what is measured of it, how it is checked, and what to compare |
//! | raw, raw_socket, own_time | what plain UDP does here, and whether it had a CPU for it |
//! | busy, tcp | neighbours that spin meanwhile, and what TCP does beside them |
//! | model, passes, stats, counted, machine, udp_counters | the report and its figures |
//! | table, plot, axis, compare, expected, progress | the report for people |
//! | demo | a short run with a summary |

pub(crate) mod args;
pub(crate) mod axis;
pub(crate) mod busy;
pub(crate) mod case;
mod compare;
mod counted;
pub(crate) mod demo;
mod devices;
mod drive;
pub(crate) mod exchange;
mod expected;
mod explain_device;
mod gpu;
mod gpu_choice;
pub(crate) mod gpu_mps;
mod gpu_naive;
mod gpu_plan;
mod gpu_plot;
mod gpu_ring;
mod gpu_summary;
mod gpu_visible;
pub(crate) mod machine;
mod measure;
pub(crate) mod model;
pub(crate) mod numbers;
mod own_time;
mod passes;
pub(crate) mod peer;
mod plan;
mod plan_error;
pub(crate) mod plot;
pub(crate) mod plot_line;
mod progress;
mod rails;
pub(crate) mod ranks;
pub(crate) mod raw;
mod raw_socket;
mod ring;
mod round;
pub(crate) mod serve;
mod side;
mod sides;
pub(crate) mod stats;
mod stolen;
pub(crate) mod table;
mod tcp;
mod udp_counters;
mod watch;

#[cfg(test)]
mod flow_tests;
#[cfg(test)]
mod gpu_tests;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use nobounce::{Device, hard};
use nobounce_diagnose::diagnose;
use nobounce_topology::facts::Facts;

use self::args::BenchArgs;
use self::busy::Neighbours;
use self::case::{Amount, CaseResult, Link, Measure, Memory};
use self::expected::On;
use self::machine::Machine;
use self::measure::Bench;
use self::model::{BenchReport, CaseOutcome, SCHEMA};
use self::peer::PeerArgs;
use self::plan::{Ends, Plan};
use self::progress::Progress;
use self::raw::Raw;
use self::stolen::CpuTime;
use self::tcp::Tcp;
use self::udp_counters::{KernelUdp, UdpCounters};

/// How a run ended, as the exit code says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// 0
    Fine,
    /// 1: wrong bytes, or slower than the run compared with.
    Failed,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Fine => Self::SUCCESS,
            Verdict::Failed => Self::from(1),
        }
    }
}

/// The command: arguments in, outcome out. An error is exit code 2.
pub(crate) fn main(args: &BenchArgs) -> anyhow::Result<Verdict> {
    let mut plan = plan::plan(args, std::env::var(devices::VARIABLE).ok().as_deref())?;
    let mut out = std::io::stdout().lock();
    let chosen = if args.explain_device { None } else { explain_device::resolve(&mut plan)? };
    if args.explain_device {
        explain_device::print(&plan, &mut out)?;
        return Ok(Verdict::Fine);
    }
    gpu_choice::choose(plan.gpu.unwrap_or(0));
    if chooses_link(&plan) {
        plan.show_over(Link::Udp);
    } else if let Some(link) = plan.also {
        plan.show_over(link);
    }
    if args.explain {
        explain(&plan, &mut out)?;
        return Ok(Verdict::Fine);
    }
    if let Ends::Listen { addr, port } = &plan.ends {
        let devices = peer::open_all(&device_of(&plan))?;
        serve::listen(&devices, addr, *port)?;
    }
    with_world(&mut plan, chosen, |plan, world| run(plan, world, &mut out))
}

/// Opens the devices of the plan and starts the other process; then measures.
fn with_world<T>(
    plan: &mut Plan,
    chosen: Option<String>,
    measure: impl FnOnce(&Plan, &mut World<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    round::Spoil::asked().map_err(anyhow::Error::msg)?;
    // Before the GPU: report a device that cannot be opened at once. No device needs CUDA before
    // memory is registered.
    let devices = peer::open_all(&device_of(plan))?;
    let gpu = (plan.memory == Memory::Gpu).then(|| gpu::Setup::prepare(plan, &devices[0])).transpose()?;
    let mut notes = gpu.as_ref().map(|gpu| gpu.notes.clone()).unwrap_or_default();
    notes.extend(chosen);
    notes.extend(devices.iter().filter_map(|device| device.nic().hard()).map(describe));
    notes.extend(rails::note(&devices));
    if plan.busy.is_some() {
        notes.extend(
            devices
                .iter()
                .filter_map(|device| device.nic().soft())
                .map(|nic| format!("progress: {}", nic.progress()))
                .next(),
        );
    }
    let mut measurer = measurer(plan, devices)?;
    let _neighbours = Neighbours::start(plan.busy.unwrap_or(0))?;
    let mut machine = Machine::here();
    machine.gpu = gpu.as_ref().map(|gpu| gpu.facts.clone());
    let mut world = World {
        measure: measurer.as_mut(),
        raw: raw::measure,
        counters: &UdpCounters::now,
        machine,
        notes,
        cpu_time: CpuTime::now,
        command: std::iter::once("nobounce".to_owned())
            .chain(std::env::args().skip(1))
            .collect::<Vec<_>>()
            .join(" "),
        started: machine::timestamp(),
        progress: Progress::on_terminal(plan.cases.len() * usize::try_from(plan.passes)?),
        facts: || crate::doctor::this_machine().ok(),
    };
    measure(plan, &mut world)
}

/// Whether the link is chosen automatically: neither `--link` nor `NOBOUNCE_LINK` names one, and
/// the run is local, on host memory and the software NIC.
fn chooses_link(plan: &Plan) -> bool {
    let said = plan.link.is_some() || std::env::var_os("NOBOUNCE_LINK").is_some();
    !said && plan.ends == Ends::Here && plan.memory == Memory::Host && !plan.is_hardware()
}

/// The device of this end.
fn device_of(plan: &Plan) -> PeerArgs {
    let (device, link) = (plan.devices.names().to_vec(), plan.link.clone());
    let addr = plan.addr.clone().or_else(|| own_loopback(plan));
    let gpu = plan.gpu.unwrap_or(0);
    let (engines, progress) = (plan.engines, plan.progress.clone());
    PeerArgs { device, gpu, addr, link, engines, progress, loss: plan.loss, seed: plan.seed }
}

/// A loopback address that no other program's device uses. Peers that come and go at a shared
/// address would disturb the measurement.
fn own_loopback(plan: &Plan) -> Option<String> {
    let is_ours = plan.ends == Ends::Here && plan.devices.are_none();
    is_ours.then(free_loopback).flatten()
}

/// The loopback address that belongs to this process, unless the user has chosen an address.
pub(crate) fn free_loopback() -> Option<String> {
    let [.., high, middle, low] = std::process::id().to_be_bytes();
    std::env::var_os("NOBOUNCE_ADDR").is_none().then(|| format!("127.{}.{middle}.{low}", 64 + high % 64))
}

/// The [`Measure`] implementation for this plan.
fn measurer(plan: &Plan, devices: Vec<Device>) -> anyhow::Result<Box<dyn Measure>> {
    let ours = device_of(plan);
    let ends = match &plan.ends {
        Ends::Peer { host, port } => measure::OpenEnds::far(devices, format!("{host}:{port}")),
        _ => measure::OpenEnds::here(devices, &ours)?,
    };
    Ok(Box::new(Bench::new(ends, ours, plan.passes)))
}

/// A hardware device in one line.
fn describe(device: &hard::Device) -> String {
    let port = device.port();
    let carried = match port.link_layer {
        hard::LinkLayer::InfiniBand => format!("InfiniBand, LID {:#x}", port.lid),
        hard::LinkLayer::Ethernet => format!("RoCE, {} (GID {})", device.local(), port.gid.index),
    };
    format!(
        "device {} port {}: {carried}, {} Gb/s, MTU {}, by {}",
        device.name(),
        port.number,
        port.megabits / 1000,
        port.mtu.bytes(),
        device.library().path().display()
    )
}

/// The dependencies of a run besides its plan, replaceable in tests.
struct World<'a> {
    measure: &'a mut dyn Measure,
    raw: fn() -> anyhow::Result<Raw>,
    counters: &'a dyn Fn() -> Option<UdpCounters>,
    machine: Machine,
    notes: Vec<String>,
    cpu_time: fn() -> Option<CpuTime>,
    command: String,
    started: String,
    progress: Progress,
    /// What is known of this machine without experiments.
    facts: fn() -> Option<Facts>,
}

fn run(plan: &Plan, world: &mut World<'_>, out: &mut dyn Write) -> anyhow::Result<Verdict> {
    // Fail on bad input before spending a minute on measuring.
    let old = plan.compare.as_deref().map(compare::load).transpose()?;
    let calibration = plan.calibration.as_deref().map(crate::predict::load_calibration).transpose()?;
    for path in [&plan.json, &plan.plot].into_iter().flatten() {
        writable(path)?;
    }

    let report = measure(plan, world)?;
    world.progress.finish();
    out.write_all(table::render(&report).as_bytes()).context("cannot print the results")?;
    if let (Ends::Peer { .. }, false) = (&plan.ends, plan.is_hardware()) {
        writeln!(out, "no raw figures: plain UDP is measured only between two processes of one machine")?;
    }
    // Packets that are lost on purpose are in no prediction.
    if report.loss.is_none() {
        let on = match plan.devices.names() {
            [first, ..] if plan.is_hardware() => On::Adapter {
                name: first.split(':').next().unwrap_or_default().to_owned(),
                rails: u32::try_from(plan.devices.names().len())?,
                looped: plan.ends == Ends::Here,
                facts: (world.facts)().map(Box::new),
            },
            _ => On::Soft,
        };
        let shares = expected::shares(&report, calibration.as_ref(), &on);
        let findings = || (world.facts)().map(|facts| diagnose(&facts).findings).unwrap_or_default();
        for line in expected::lines(&shares, &on, report.machine.gpu.is_some(), findings) {
            writeln!(out, "{line}")?;
        }
    }
    let mut verdict =
        if report.results.iter().all(|one| one.verified) { Verdict::Fine } else { Verdict::Failed };
    if let Some(path) = &plan.json {
        let mut json = serde_json::to_vec(&report).context("cannot encode the results as JSON")?;
        json.push(b'\n');
        save(path, &json)?;
    }
    if let Some(path) = &plan.plot {
        save(path, plot::svg(&report)?.as_bytes())?;
    }
    if report.results.iter().any(|one| one.link == "udp")
        && report.kernel_udp.is_some_and(|counted| counted.moved().0 == 0)
    {
        writeln!(out, "NOT UDP: the results report link udp, but the kernel counted no datagrams")?;
        verdict = Verdict::Failed;
    }
    for lie in gpu_summary::contradictions(&report) {
        writeln!(out, "{lie}")?;
        verdict = Verdict::Failed;
    }
    if let Some(old) = old {
        let found = compare::compare(&old, &report, plan.tolerance)?;
        write!(out, "\n{found}").context("cannot print the comparison")?;
        if !found.slower.is_empty() {
            verdict = Verdict::Failed;
        }
    }
    out.flush().context("cannot print the results")?;
    Ok(verdict)
}

fn measure(plan: &Plan, world: &mut World<'_>) -> anyhow::Result<BenchReport> {
    let begun = (world.cpu_time)();
    let before_all = raw(plan, world);
    let before = (world.counters)();
    let mut measured: Vec<Vec<CaseResult>> = plan.cases.iter().map(|_| Vec::new()).collect();
    let (mut fallbacks, mut tcps) = (Vec::new(), Vec::new());
    for pass in 0..plan.passes {
        if pass > 0 {
            world.measure.renew().context("cannot start the next pass")?;
        }
        let done = usize::try_from(pass)? * plan.cases.len();
        let mut tcp = tcp(plan, world)?;
        for (index, (case, results)) in plan.cases.iter().zip(&mut measured).enumerate() {
            let progress = world.progress.case(done + index, case);
            tracing::debug!("measuring {case}");
            let result =
                world.measure.run(case, &progress).with_context(|| format!("cannot measure {case}"))?;
            progress(1.0);
            results.push(result);
        }
        // Machine speed drifts within seconds: measure TCP at both ends of a pass.
        if let Some(first) = tcp.take() {
            tcp = self::tcp(plan, world)?.map(|second| first.and(second));
        }
        tcps.push(tcp);
        // The next pass has new devices with new counters.
        fallbacks.push(world.measure.fallbacks());
    }
    let mut notes = world.notes.clone();
    notes.extend(passes::fallbacks(&fallbacks));
    let after = (world.counters)();
    // Machine speed drifts within a minute: measure plain UDP at both ends of the run.
    let raw = before_all.map(|first| match raw(plan, world) {
        Some(second) => first.and(second),
        None => first,
    });
    notes.extend(CpuTime::note(begun, (world.cpu_time)()));
    let mut results = Vec::with_capacity(plan.cases.len());
    for (case, found) in plan.cases.iter().zip(&measured) {
        let outcomes = found
            .iter()
            .zip(&tcps)
            .map(|(result, tcp)| CaseOutcome::new(case, result, raw.as_ref(), tcp.as_ref()));
        results.extend(passes::merged(outcomes.collect::<Result<Vec<_>, _>>()?));
    }
    Ok(BenchReport {
        schema: SCHEMA.to_owned(),
        machine: world.machine.clone(),
        command: world.command.clone(),
        started: world.started.clone(),
        loss: (plan.loss > 0.0).then_some(plan.loss),
        raw,
        busy: plan.busy,
        tcp: tcps.into_iter().flatten().reduce(Tcp::and),
        kernel_udp: before.zip(after).map(|(before, after)| KernelUdp { before, after }),
        notes,
        results,
    })
}

/// Measures plain UDP. Without it the results are valid; only our share of it is unknown.
fn raw(plan: &Plan, world: &World<'_>) -> Option<Raw> {
    // Plain UDP is no yardstick for hardware. With background load, a spinning plain UDP measures
    // the scheduler.
    if plan.ends != Ends::Here || plan.is_hardware() || plan.busy.is_some() {
        return None;
    }
    world.progress.note("plain UDP");
    (world.raw)()
        .inspect_err(|why| eprintln!("nobounce: cannot measure plain UDP, so no shares of raw: {why:#}"))
        .ok()
}

/// Measures TCP between the two processes, where it is the yardstick.
fn tcp(plan: &Plan, world: &mut World<'_>) -> anyhow::Result<Option<Tcp>> {
    if plan.busy.is_none() {
        return Ok(None);
    }
    world.progress.note("TCP");
    world.measure.tcp().context("cannot measure TCP")
}

/// Opens a result file without changing it, so that a wrong path is reported before the run.
pub(crate) fn writable(path: &Path) -> anyhow::Result<()> {
    let existed = path.exists();
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    opened.with_context(|| format!("cannot write {}", path.display()))?;
    if !existed {
        // An empty file would be all that is left if the run fails.
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

pub(crate) fn save(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

fn explain(plan: &Plan, out: &mut dyn Write) -> anyhow::Result<()> {
    let ends = match &plan.ends {
        Ends::Here => "two processes on this machine".to_owned(),
        Ends::Peer { host, port } => format!("this machine and {host}, port {port}"),
        Ends::Listen { addr, port } => format!("serving {addr}, port {port}"),
    };
    writeln!(out, "{ends}; {} cases, every byte verified outside the timed part", plan.cases.len())?;
    if plan.passes > 1 {
        writeln!(out, "{} passes with fresh processes each; reports the trimmed mean", plan.passes)?;
    }
    if plan.memory == Memory::Gpu {
        writeln!(
            out,
            "GPU memory over its best path, staged (pinned, pipelined) and naively staged; host memory for reference"
        )?;
    }
    if plan.ends == Ends::Here && !plan.is_hardware() {
        let link = plan.link.clone().or_else(|| std::env::var("NOBOUNCE_LINK").ok());
        match link.as_deref() {
            Some("udp") => writeln!(out, "link: UDP, as between machines")?,
            _ => writeln!(
                out,
                "link: shared memory where available; --link udp measures the link between machines"
            )?,
        }
        writeln!(
            out,
            "plain UDP between two processes before and after: a GSO stream, then a 32 B ping-pong"
        )?;
    }
    for case in &plan.cases {
        let amount = match case.amount {
            Amount::Iters(iters) => format!("{iters} operations"),
            Amount::Time(time) => format!("{} ms", time.as_millis()),
        };
        writeln!(out, "  {case}: {amount}, MTU {}", case.mtu)?;
    }
    Ok(())
}
