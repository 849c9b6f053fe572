//! From a plan to table, JSON, plot, comparison and exit status, without a NIC.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::case::{Case, CaseKind, CaseResult, CpuUse, Interval, Op, Place, Samples, Wait};
use super::*;

/// Measures by formula: 3 us plus 1 us per 4 KiB, at most 3 GB/s; `slowness` makes it worse.
pub(super) struct Mock {
    slowness: f64,
    wrong: Option<u64>,
    broken: bool,
    /// The pass that uses another link than the others, if any.
    falls_back: Option<u32>,
    pass: u32,
}

impl Mock {
    pub(super) fn new() -> Self {
        Self { slowness: 1.0, wrong: None, broken: false, falls_back: None, pass: 0 }
    }
}

impl Measure for Mock {
    fn renew(&mut self) -> anyhow::Result<()> {
        self.pass += 1;
        Ok(())
    }

    fn fallbacks(&self) -> Vec<String> {
        (self.falls_back == Some(self.pass))
            .then(|| "udp, for there is no room".to_owned())
            .into_iter()
            .collect()
    }

    fn run(&mut self, case: &Case, progress: &dyn Fn(f64)) -> anyhow::Result<CaseResult> {
        anyhow::ensure!(!self.broken, "the peer went away");
        progress(0.5);
        let passes = match case.op {
            Op::Write => 1.0,
            Op::Send => 1.2,
            Op::Read | Op::Atomic => 2.0,
        };
        let staging = match case.place {
            Place::Host | Place::Direct => 1.0,
            Place::Staged => 4.0,
            Place::Naive => 9.0,
        };
        let microseconds = (3.0 * passes * staging + numbers::float(case.size) / 4096.0) * self.slowness;
        let samples = if case.kind.is_latency() {
            let sample = |at: u32| microseconds * (1.0 + f64::from(at % 100) / 100.0);
            Samples::Latency((0..10_000).map(sample).collect())
        } else {
            let directions = if case.kind == CaseKind::Bidirectional { 1.2 } else { 1.0 };
            let per_second = directions
                / (0.5e-6 + numbers::float(case.size) / 3e9)
                / passes.sqrt()
                / self.slowness
                / staging.powf(0.1)
                / f64::from(case.qps).powf(0.1);
            let interval = Interval { seconds: 1_000_000.0 / per_second / 4.0, messages: 250_000 };
            Samples::Throughput(vec![interval; 4])
        };
        Ok(CaseResult {
            samples,
            mtu: 4096,
            iters: 10_000,
            link: match self.falls_back {
                Some(pass) if pass != self.pass => "shm",
                _ => case.over.map_or("udp", Link::name),
            }
            .to_owned(),
            memory: if case.place.is_gpu() { "gpu" } else { "host" }.to_owned(),
            path: match case.place {
                Place::Host | Place::Direct => "direct".to_owned(),
                Place::Staged => "staged (staging was asked for)".to_owned(),
                Place::Naive => "naive staging".to_owned(),
            },
            counted: case.place.is_gpu().then(|| gpu_tests::counted(case)),
            compared: 64,
            cpu: CpuUse { seconds: 0.5, messages: 1_000_000 },
            verified: if self.wrong == Some(case.size) {
                Err("byte 3 holds 1, not 2".to_owned())
            } else {
                Ok(())
            },
        })
    }
}

pub(super) fn example_machine() -> Machine {
    Machine {
        cpu: "Example CPU @ 2.40GHz".to_owned(),
        cores: 2,
        allowed_cpus: vec![0, 1],
        kernel: "6.1.0".to_owned(),
        memory_bytes: 8 << 30,
        rmem_max: Some(212_992),
        gpu: None,
    }
}

fn example_raw() -> anyhow::Result<Raw> {
    Ok(Raw {
        gbytes_per_s: 5.0,
        half_round_trip_us: 2.5,
        gbytes_per_s_samples: vec![4.9, 5.0, 5.1],
        half_round_trip_us_samples: vec![2.4, 2.5, 2.6],
        blast_cpu_samples: vec![1.0],
        ping_cpu_samples: vec![1.0],
    })
}

/// Runs a plan against a mock; returns the outcome and what was printed.
pub(super) fn try_run(plan: &Plan, mock: &mut Mock) -> anyhow::Result<(Verdict, String)> {
    let counted = Cell::new(0);
    let counters = || {
        counted.set(counted.get() + 1000);
        Some(UdpCounters {
            out_datagrams: counted.get(),
            in_datagrams: counted.get(),
            receive_buffer_errors: 0,
        })
    };
    let mut world = world(mock, &counters);
    let mut out = Vec::new();
    let verdict = run(plan, &mut world, &mut out)?;
    Ok((verdict, String::from_utf8(out)?))
}

pub(super) fn world<'a>(mock: &'a mut Mock, counters: &'a dyn Fn() -> Option<UdpCounters>) -> World<'a> {
    World {
        measure: mock,
        raw: example_raw,
        counters,
        machine: example_machine(),
        notes: Vec::new(),
        cpu_time: || None,
        command: "nobounce bench".to_owned(),
        started: "2026-01-02T03:04:05Z".to_owned(),
        progress: Progress::hidden(),
        facts: || None,
    }
}

pub(super) fn plan_of(args: &BenchArgs) -> Plan {
    plan::plan(args, None).expect("the arguments are right")
}

fn quick() -> Plan {
    plan_of(&BenchArgs { quick: true, ..BenchArgs::default() })
}

/// A small run over every kind, for the tests of table, plot and comparison.
pub(crate) fn sample_report() -> BenchReport {
    let counters = {
        let calls = Cell::new(0);
        move || {
            calls.set(calls.get() + 5000);
            Some(UdpCounters {
                out_datagrams: calls.get(),
                in_datagrams: calls.get() / 2,
                receive_buffer_errors: 0,
            })
        }
    };
    let mut mock = Mock::new();
    let plan = quick();
    measure(&plan, &mut world(&mut mock, &counters)).expect("the mock measures")
}

/// The default run by the mock, drawn to the file named by `NOBOUNCE_TEST_PLOT` for people to look
/// at.
#[test]
fn the_default_run_draws() {
    let counters = || Some(UdpCounters::default());
    let plan = plan_of(&BenchArgs::default());
    let report = measure(&plan, &mut world(&mut Mock::new(), &counters)).unwrap();
    let drawn = plot::svg(&report).unwrap();
    assert!(drawn.contains("write both ways") && drawn.contains("64 QPs"));
    if let Some(path) = std::env::var_os("NOBOUNCE_TEST_PLOT") {
        std::fs::write(path, drawn).unwrap();
    }
}

/// A folder of our own that vanishes with the test.
pub(super) struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("nobounce-bench-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("a folder for the test");
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(super) fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).expect("the JSON is there")).expect("the JSON is JSON")
}

#[test]
fn a_good_run_prints_writes_and_is_fine() {
    let folder = Folder::new();
    let mut plan = quick();
    (plan.json, plan.plot) = (Some(folder.file("run.json")), Some(folder.file("run.svg")));
    let (verdict, printed) = try_run(&plan, &mut Mock::new()).unwrap();
    assert_eq!(verdict, Verdict::Fine);
    assert!(printed.contains("write 1 MiB over udp: ") && printed.contains(" of raw"), "{printed}");
    assert!(printed.contains("bytes verified"), "{printed}");

    let json = json(&folder.file("run.json"));
    assert_eq!(json["schema"], "nobounce-bench/1");
    assert_eq!(json["kernel_udp"]["after"]["out_datagrams"], 2000);
    assert!(json["machine"].get("hostname").is_none());
    let results = json["results"].as_array().unwrap();
    assert_eq!(results.len(), plan.cases.len());
    for one in results {
        for field in
            ["op", "kind", "size", "qps", "link", "memory", "path", "wait", "mtu", "iters", "verified"]
        {
            assert!(one.get(field).is_some(), "{field} is missing in {one}");
        }
        let kind = one["kind"].as_str().unwrap();
        assert_eq!(one.get("p50_us").is_some(), kind == "latency");
        assert_eq!(one.get("mops").is_some(), kind == "rate");
        assert_eq!(one.get("gbytes_per_s").is_some(), kind.starts_with('b'));
        assert_eq!(one.get("of_raw").is_some(), kind != "rate");
        assert!(one["samples"].as_array().unwrap().len() <= 4096);
    }
    assert!(std::fs::read_to_string(folder.file("run.svg")).unwrap().starts_with("<svg"));
}

#[test]
fn a_slower_run_fails_the_comparison_and_a_faster_one_does_not() {
    let folder = Folder::new();
    let mut first = quick();
    first.json = Some(folder.file("old.json"));
    try_run(&first, &mut Mock::new()).unwrap();
    let mut second = quick();
    second.compare = Some(folder.file("old.json"));

    let (verdict, printed) = try_run(&second, &mut Mock::new()).unwrap();
    assert_eq!(verdict, Verdict::Fine, "{printed}");
    let (verdict, printed) = try_run(&second, &mut Mock { slowness: 1.3, ..Mock::new() }).unwrap();
    assert_eq!(verdict, Verdict::Failed);
    assert!(printed.contains("  slower  write 8 B latency: "), "{printed}");
    let (verdict, printed) = try_run(&second, &mut Mock { slowness: 0.7, ..Mock::new() }).unwrap();
    assert_eq!(verdict, Verdict::Fine);
    assert!(printed.contains("  faster  "), "{printed}");
    second.tolerance = 0.5;
    assert_eq!(try_run(&second, &mut Mock { slowness: 1.3, ..Mock::new() }).unwrap().0, Verdict::Fine);
}

#[test]
fn wrong_bytes_fail_the_run_and_are_kept() {
    let folder = Folder::new();
    let mut plan = quick();
    plan.json = Some(folder.file("run.json"));
    let (verdict, printed) = try_run(&plan, &mut Mock { wrong: Some(8), ..Mock::new() }).unwrap();
    assert_eq!(verdict, Verdict::Failed);
    assert!(printed.contains("WRONG BYTES: write 8 B latency: byte 3 holds 1, not 2"), "{printed}");
    assert_eq!(json(&folder.file("run.json"))["results"][0]["verified"], false);
}

#[test]
fn a_link_called_udp_that_moves_no_datagram_fails() {
    let still = || Some(UdpCounters::default());
    let mut mock = Mock::new();
    let mut out = Vec::new();
    assert_eq!(run(&quick(), &mut world(&mut mock, &still), &mut out).unwrap(), Verdict::Failed);
    assert!(String::from_utf8(out).unwrap().contains("NOT UDP"));
}

#[test]
fn a_measurer_that_cannot_is_an_error_naming_the_case() {
    let told = format!("{:#}", try_run(&quick(), &mut Mock { broken: true, ..Mock::new() }).unwrap_err());
    assert_eq!(told, "cannot measure write 8 B latency: the peer went away");
}

#[test]
fn unusable_files_are_told_before_anything_is_measured() {
    let folder = Folder::new();
    let broken = || Mock { broken: true, ..Mock::new() };
    let mut plan = quick();
    plan.json = Some(folder.file("no/such/folder.json"));
    let told = format!("{:#}", try_run(&plan, &mut broken()).unwrap_err());
    assert!(told.starts_with("cannot write "), "{told}");
    plan.json = None;
    plan.compare = Some(folder.file("old.json"));
    let told = format!("{:#}", try_run(&plan, &mut broken()).unwrap_err());
    assert!(told.contains("cannot read the earlier run"), "{told}");
    // Trying a file leaves nothing behind when the run then fails.
    plan.compare = None;
    plan.json = Some(folder.file("new.json"));
    assert!(try_run(&plan, &mut broken()).is_err());
    assert!(!folder.file("new.json").exists());
}

#[test]
fn against_a_peer_there_is_no_raw_and_no_share() {
    let plan = plan_of(&BenchArgs { quick: true, peer: Some("node7".to_owned()), ..BenchArgs::default() });
    let (verdict, printed) = try_run(&plan, &mut Mock::new()).unwrap();
    assert_eq!(verdict, Verdict::Fine);
    assert!(!printed.contains("of raw:") && printed.contains("no raw figures"), "{printed}");
}

#[test]
fn the_plan_can_be_explained() {
    let args = BenchArgs {
        op: vec![Op::Write],
        kind: vec![CaseKind::Latency],
        wait: Some(Wait::Memory),
        ..BenchArgs::default()
    };
    let mut out = Vec::new();
    explain(&plan_of(&args), &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    assert!(text.contains("write 8 B latency, waiting on memory: 400 ms, MTU 4096"), "{text}");
    assert!(text.contains("5 passes"), "{text}");
}

#[test]
fn a_pass_in_between_that_fell_back_is_in_the_report() {
    let plan = plan_of(&BenchArgs { passes: Some(3), ..BenchArgs::default() });
    let mut mock = Mock { falls_back: Some(1), ..Mock::new() };
    let report = measure(&plan, &mut world(&mut mock, &|| None)).unwrap();
    assert!(report.results.iter().all(|one| one.link == "shm in 2 of 3, udp in 1 of 3 passes"));
    assert_eq!(report.notes, ["in pass 2 of 3: udp, for there is no room"]);
    let shown = table::render(&report);
    assert!(shown.contains("udp in 1 of 3 passes") && shown.contains("in pass 2 of 3: udp, for"), "{shown}");
}

/// Of every second that passes between two looks a tenth.
fn robbed() -> Option<CpuTime> {
    static LOOKS: AtomicU32 = AtomicU32::new(0);
    let looks = LOOKS.fetch_add(1, Ordering::Relaxed) + 1;
    CpuTime::parse(&format!("cpu  {} 0 0 0 0 0 0 {} 0 0\n", looks * 90, looks * 10))
}

#[test]
fn cpu_time_that_the_host_took_is_in_the_report() {
    let plan = plan_of(&BenchArgs { quick: true, ..BenchArgs::default() });
    let report =
        measure(&plan, &mut World { cpu_time: robbed, ..world(&mut Mock::new(), &|| None) }).unwrap();
    let shown = table::render(&report);
    assert!(shown.contains("the hypervisor took 10.0 % of the CPU time"), "{shown}");
}
