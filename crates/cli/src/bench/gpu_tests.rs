//! Runs on GPU memory: what is planned, and what the report says, without a GPU.

use super::args::BenchArgs;
use super::case::{Amount, Case, CaseKind, Link, Memory, Op, Place};
use super::counted::{Counted, Moved};
use super::flow_tests::{Mock, example_machine, plan_of, try_run, world};
use super::machine::GpuFacts;
use super::model::{BenchReport, MemoryPath};
use super::plan;
use super::plan_error::PlanError;
use super::udp_counters::UdpCounters;
use super::{Verdict, gpu_summary, measure, plot, table};

/// What an honest NIC counts for a case of the mock's.
pub(super) fn counted(case: &Case) -> Counted {
    let moved = Moved { bytes: case.size * 10_000, operations: 10_000 };
    let mut counted = Counted::default();
    let (inbound, outbound) = (&mut counted.there.inbound, &mut counted.here.outbound);
    match case.place {
        Place::Host | Place::Naive => (inbound.cpu, outbound.cpu) = (moved, moved),
        Place::Direct => (inbound.window, outbound.copy_engine) = (moved, moved),
        Place::Staged => (inbound.staged, outbound.staged) = (moved, moved),
    }
    counted
}

fn gpu_args() -> BenchArgs {
    BenchArgs { memory: Some(Memory::Gpu), ..BenchArgs::default() }
}

fn facts(stand_in: bool) -> GpuFacts {
    GpuFacts {
        name: "Example GPU".to_owned(),
        stand_in,
        pci_address: "0000:1b:00.0".to_owned(),
        cuda: "13.0".to_owned(),
        bar1_bytes: Some(256 << 30),
        window: Some("resource manager".to_owned()),
        paths: "in direct (window), out direct (copy-engine)".to_owned(),
        refusals: Vec::new(),
        calibration: "Example GPU: loads up to 4096 bytes, copy engine above".to_owned(),
        shared_by: "MPS was started for this run".to_owned(),
        checked_on: "gpu".to_owned(),
    }
}

fn gpu_report(args: &BenchArgs) -> BenchReport {
    let counters = || Some(UdpCounters::default());
    let mut mock = Mock::new();
    let mut world = world(&mut mock, &counters);
    world.machine.gpu = Some(facts(false));
    world.notes = vec!["two processes, one GPU: MPS was started for this run".to_owned()];
    measure(&plan_of(args), &mut world).expect("the mock measures")
}

fn quick() -> BenchReport {
    gpu_report(&BenchArgs { quick: true, ..gpu_args() })
}

#[test]
fn the_plan_compares_writes_and_sweeps_the_rest() {
    let plan = plan_of(&gpu_args());
    let find = |op, kind, place, size| {
        plan.cases.iter().filter(|c| (c.op, c.kind, c.place, c.size) == (op, kind, place, size)).count()
    };
    for place in [Place::Direct, Place::Staged, Place::Naive, Place::Host] {
        for size in [8, 512, 4096] {
            assert_eq!(find(Op::Write, CaseKind::Latency, place, size), 1, "{place:?} {size}");
        }
        for kind in [CaseKind::Bandwidth, CaseKind::Bidirectional] {
            for size in [1 << 20, 8 << 20] {
                assert_eq!(find(Op::Write, kind, place, size), 1, "{place:?} {size}");
            }
        }
        for op in [Op::Read, Op::Send] {
            let compared = usize::from(place != Place::Naive);
            for (kind, sizes) in [(CaseKind::Latency, [8, 4096]), (CaseKind::Bandwidth, [1 << 20, 8 << 20])] {
                assert_eq!(sizes.map(|size| find(op, kind, place, size)), [compared; 2], "{op} {place:?}");
            }
            assert_eq!(find(op, CaseKind::Latency, place, 512), usize::from(place == Place::Direct));
        }
    }
    assert_eq!(find(Op::Write, CaseKind::GpuVisible, Place::Direct, 8), 1);
    assert_eq!(find(Op::Write, CaseKind::GpuVisible, Place::Naive, 8), 0);
    let seconds: f64 = plan
        .cases
        .iter()
        .map(|case| if let Amount::Time(time) = case.amount { time.as_secs_f64() } else { f64::MAX })
        .sum();
    assert!(seconds < 70.0, "{seconds} s");
    // What is compared follows one another, so that all of it meets the same machine.
    let at = plan.cases.iter().position(|c| c.place == Place::Staged && c.kind == CaseKind::Latency).unwrap();
    let places: Vec<_> = plan.cases[at - 1..at + 3].iter().map(|c| (c.place, c.size)).collect();
    assert_eq!(places, [(Place::Direct, 8), (Place::Staged, 8), (Place::Naive, 8), (Place::Host, 8)]);
}

/// The second link is shown for what the shares are made of, after all others, ways side by side.
#[test]
fn another_link_is_shown_for_the_shares() {
    let both = BenchArgs { link: vec!["udp".to_owned(), "shm".to_owned()], ..gpu_args() };
    let mut plan = plan_of(&both);
    assert_eq!((plan.link.as_deref(), plan.also), (Some("udp"), Some(Link::Shm)));
    let before = plan.cases.len();
    plan.show_over(Link::Shm);
    let more: Vec<_> = plan.cases[before..].iter().map(|c| (c.kind, c.size, c.place)).collect();
    let ways = [Place::Direct, Place::Staged, Place::Host];
    let of = |kind, size| ways.map(|place| (kind, size, place));
    let wanted = [
        (CaseKind::Latency, 8),
        (CaseKind::Latency, 4096),
        (CaseKind::Bandwidth, 1 << 20),
        (CaseKind::Bandwidth, 8 << 20),
    ];
    assert_eq!(more, wanted.map(|(kind, size)| of(kind, size)).concat());
    assert!(plan.cases[before..].iter().all(|c| c.over == Some(Link::Shm) && c.op == Op::Write));

    let counters = || Some(UdpCounters::default());
    let mut mock = Mock::new();
    let mut world = world(&mut mock, &counters);
    world.machine.gpu = Some(facts(false));
    let report = measure(&plan, &mut world).unwrap();
    let told = gpu_summary::lines(&report).join("\n");
    for wanted in [
        "share over shm: WRITE latency direct / staged, 8 B to 4 KiB: 0.31 at 4 KiB",
        "share over shm: WRITE bandwidth direct / host to host, 1 MiB and above: 1.00 at 1 MiB",
        "goal reached: READ bandwidth direct / host to host, 1 MiB and above: 1.00 at 1 MiB, at least 0.8 required",
        "goal reached: SEND latency direct / staged, 8 B to 4 KiB: ",
    ] {
        assert!(told.contains(wanted), "{wanted} is missing in {told}");
    }
    let drawn = plot::svg(&report).unwrap();
    assert!(!drawn.contains("shm"), "the plot is of the main link");
    let printed = table::render(&report);
    assert!(
        printed.contains("write, direct, shm") && printed.contains("rows marked shm over shm"),
        "{printed}"
    );
}

#[test]
fn two_links_must_differ_and_be_here() {
    let of = |links: &[&str]| links.iter().map(|link| (*link).to_owned()).collect::<Vec<_>>();
    for links in [&["udp", "udp"][..], &["shm", "auto"], &["udp", "shm", "udp"]] {
        let args = BenchArgs { link: of(links), ..gpu_args() };
        assert_eq!(plan::plan(&args, None).unwrap_err(), PlanError::Links, "{links:?}");
    }
    let far = BenchArgs { link: of(&["udp", "shm"]), peer: Some("node7".to_owned()), ..gpu_args() };
    assert_eq!(plan::plan(&far, None).unwrap_err(), PlanError::Links);
}

#[test]
fn what_was_typed_is_measured_in_every_way() {
    let typed = BenchArgs {
        op: vec![Op::Write],
        kind: vec![CaseKind::Bandwidth],
        size: vec!["3K".parse().unwrap()],
        qps: vec![1, 4],
        ..gpu_args()
    };
    let seen: Vec<_> = plan_of(&typed).cases.iter().map(|c| (c.place, c.qps)).collect();
    let [direct, staged, naive, host] = [Place::Direct, Place::Staged, Place::Naive, Place::Host];
    assert_eq!(seen, [(direct, 1), (direct, 4), (staged, 1), (staged, 4), (naive, 1), (host, 1), (host, 4)]);
    let atomic = BenchArgs { op: vec![Op::Atomic], ..gpu_args() };
    assert!(
        plan_of(&atomic).cases.iter().all(|c| c.kind == CaseKind::GpuVisible || c.place == Place::Direct)
    );
}

#[test]
fn contradictions_about_gpu_memory_are_refused() {
    let refused = |args: &BenchArgs| plan::plan(args, None).unwrap_err();
    let waits = BenchArgs { wait: Some(super::case::Wait::Memory), ..gpu_args() };
    assert_eq!(refused(&waits), PlanError::WaitGpu);
    let visible = BenchArgs { kind: vec![CaseKind::GpuVisible], ..BenchArgs::default() };
    assert_eq!(refused(&visible), PlanError::VisibleNeedsGpu);
    let listens = BenchArgs { listen: Some(String::new()), ..gpu_args() };
    assert_eq!(refused(&listens), PlanError::ListenTakesNoCases("--memory"));
}

#[test]
fn a_run_on_gpu_memory_as_it_is_printed() {
    insta::assert_snapshot!(table::render(&quick()));
}

#[test]
fn a_stand_in_is_called_so_everywhere() {
    let mut report = quick();
    report.machine.gpu = Some(facts(true));
    for one in report.results.iter_mut().filter(|one| one.memory == "gpu") {
        one.memory = "stand-in".to_owned();
    }
    let printed = table::render(&report);
    assert!(
        printed.contains("STAND-IN for a GPU") && printed.contains("write, stand-in direct"),
        "{printed}"
    );
    assert!(plot::svg(&report).unwrap().contains("STAND-IN for a GPU (host memory)"));
    assert_eq!(serde_json::to_value(&report).unwrap()["machine"]["gpu"]["stand_in"], true);
}

#[test]
fn the_plot_has_a_line_for_each_way() {
    let drawn = plot::svg(&gpu_report(&gpu_args())).unwrap();
    for wanted in [
        "nobounce bench: GPU memory",
        "write, direct",
        "write, staged",
        "write, naive",
        "write, host",
        "write, direct, both ways",
        "GPU-visible, direct",
    ] {
        assert!(drawn.contains(wanted), "{wanted} is missing");
    }
    assert!(!drawn.contains("read"), "other operations would crowd it");
    if let Some(path) = std::env::var_os("NOBOUNCE_TEST_GPU_PLOT") {
        std::fs::write(path, drawn).unwrap();
    }
}

/// A result and the NIC's counters that contradict each other fail the run.
#[test]
fn a_path_that_the_counters_deny_is_a_failure() {
    let honest = quick();
    assert_eq!(gpu_summary::contradictions(&honest), Vec::<String>::new());
    let mut lying = honest.clone();
    let direct = lying.results.iter_mut().find(|one| one.memory_path() == MemoryPath::Direct).unwrap();
    direct.counted.as_mut().unwrap().there.inbound.staged.bytes = 3;
    let told = gpu_summary::contradictions(&lying);
    assert_eq!(told, ["NOT DIRECT: write 8 B latency reports direct, but the NIC counted 3 staged bytes"]);
    let mut lying = honest;
    let staged = lying.results.iter_mut().find(|one| one.memory_path() == MemoryPath::Staged).unwrap();
    staged.counted = Some(Counted::default());
    assert!(gpu_summary::contradictions(&lying)[0].starts_with("NOT STAGED: write 8 B latency"));
    let (verdict, printed) =
        try_run(&plan_of(&BenchArgs { quick: true, ..gpu_args() }), &mut Mock::new()).unwrap();
    assert_eq!(verdict, Verdict::Fine, "{printed}");
}

#[test]
fn without_a_direct_path_the_summary_says_so() {
    let mut report = quick();
    for one in report.results.iter_mut().filter(|one| one.memory_path() == MemoryPath::Direct) {
        one.path = "staged (the window is switched off)".to_owned();
    }
    let lines = gpu_summary::lines(&report);
    assert!(lines[0].starts_with("no direct figures"), "{lines:?}");
    assert!(!lines.iter().any(|line| line.starts_with("goal")), "{lines:?}");
    assert!(!example_machine().to_string().contains("GPU"), "a run on host memory has none");
}

#[test]
fn ways_that_were_not_taken_stand_under_the_path_and_in_the_json() {
    let mut report = quick();
    assert!(!table::render(&report).contains("not used"));
    let gpu = report.machine.gpu.as_mut().unwrap();
    gpu.paths = "direct (peermem)".to_owned();
    gpu.refusals = vec!["dma-buf: ibv_reg_dmabuf_mr: Operation not supported".to_owned()];
    let wanted = "\npath of GPU memory: direct (peermem)\nnot used: dma-buf: ibv_reg_dmabuf_mr: Operation not supported\n";
    let text = table::render(&report);
    assert!(text.contains(wanted), "{text}");
    let json = serde_json::to_value(&report.machine).unwrap();
    assert_eq!(json["gpu"]["refusals"][0], "dma-buf: ibv_reg_dmabuf_mr: Operation not supported");
}
