//! `nobounce bench --path`: nb0 beside TCP on emulated paths.

use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use nobounce_emulator::{DirectionReport, Emulator, End, PathConfig};

use super::figures::{Alone, Beside, Clean, CleanFlow, Condition, PathReport, SCHEMA};
use super::flow::{self, FlowFigures, NB0};
use super::run::{at, late_us};
use super::{flow_tcp, table};
use crate::bench::Verdict;
use crate::bench::args::{BenchArgs, STANDARD_PATHS};
use crate::bench::machine::{self, Machine};
use crate::bench::numbers::{float, rounded};
use crate::bench::ranks;
use crate::bench::stats::{Percentiles, median};

/// The paths of `--path` without a value.
const STANDARD: [&str; 5] = [
    "delay=100us",
    "delay=100us,loss=0.01%",
    "delay=100us,loss=0.1%",
    "delay=100us,loss=1%",
    "delay=100us,loss=5%",
];
/// Congestion controls of TCP that are compared.
const TCP: [&str; 2] = ["bbr", "cubic"];
/// Flows of each kind that share a path.
const FLOWS_BESIDE: usize = 2;
const PASSES: u32 = 3;
const DEFAULT_SEED: u64 = 1;

/// How long to measure.
#[derive(Clone, Copy)]
struct Times {
    warm_up: Duration,
    stream: Duration,
    ping: Duration,
}

impl Times {
    fn of(args: &BenchArgs) -> Self {
        let [warm_up, stream, ping] = if args.quick { [200, 600, 200] } else { [500, 3000, 500] };
        let [warm_up, stream, ping] = [warm_up, stream, ping].map(Duration::from_millis);
        Self { warm_up, stream, ping }
    }
}

/// The command: arguments in, outcome out. An error is exit code 2.
pub(crate) fn main(args: &BenchArgs) -> anyhow::Result<Verdict> {
    let paths = paths(args)?;
    if args.explain {
        for path in &paths {
            println!(
                "{path}{}",
                if path.rate.is_none() { ", rate: half of what TCP reaches without" } else { "" }
            );
        }
        return Ok(Verdict::Fine);
    }
    ranks::check_files(args)?;
    let mut bench = PathBench {
        times: Times::of(args),
        passes: args.passes.unwrap_or(if args.quick { 1 } else { PASSES }),
        kinds: Vec::new(),
        notes: Vec::new(),
    };
    let started = machine::timestamp();
    let mut clean: Vec<Clean> = Vec::new();
    for path in &paths {
        if clean.iter().all(|one| one.mtu != path.mtu) {
            clean.push(bench.clean(path.mtu)?);
        }
    }
    let mut conditions = Vec::new();
    for path in &paths {
        let most = clean.iter().find(|one| one.mtu == path.mtu).map_or(0.0, fastest_tcp);
        conditions.push(bench.condition(path, most)?);
    }
    let report = PathReport {
        schema: SCHEMA.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started,
        machine: Machine::here().to_string(),
        passes: bench.passes,
        clean,
        conditions,
        notes: bench.notes,
    };
    ranks::publish(args, &report, &table::render(&report), || Ok(String::new()))?;
    Ok(if table::is_verified(&report.conditions) { Verdict::Fine } else { Verdict::Failed })
}

/// The paths that were asked for.
fn paths(args: &BenchArgs) -> anyhow::Result<Vec<PathConfig>> {
    let asked = args.path.iter().map(String::as_str);
    let texts = asked.flat_map(|text| match text {
        STANDARD_PATHS => STANDARD.to_vec(),
        text => vec![text],
    });
    texts
        .map(|text| {
            let mut path: PathConfig = text.parse().with_context(|| format!("--path {text:?}"))?;
            if path.faults.seed == 0 {
                path.faults.seed = args.seed.unwrap_or(DEFAULT_SEED);
            }
            Ok(path)
        })
        .collect()
}

/// The most that TCP reaches without faults, 10^9 bytes per second.
fn fastest_tcp(clean: &Clean) -> f64 {
    clean.flows.iter().filter(|one| one.kind != NB0).map(|one| one.gbytes_per_s).fold(0.0, f64::max)
}

struct PathBench {
    times: Times,
    passes: u32,
    /// What there is to compare; empty before the first path.
    kinds: Vec<String>,
    notes: Vec<String>,
}

impl PathBench {
    /// The emulator without faults, as fast as it is.
    fn clean(&mut self, mtu: u32) -> anyhow::Result<Clean> {
        let path = PathConfig { mtu, ..PathConfig::default() };
        let mut flows = Vec::new();
        self.find_kinds(&path)?;
        for kind in self.kinds.clone() {
            let ends = ends(&path)?;
            say(&format!("MTU {mtu} without faults, {kind}"));
            let mut pings = ends.send(&kind, 1, self.times, true)?;
            let [pings] = pings.finish()?;
            let trips = Percentiles::of(&pings.round_trips_us).context("no round trip ended")?;
            let mut speeds = Vec::new();
            for _ in 0..self.passes {
                let [one] = ends.send(&kind, 1, self.times, false)?.finish()?;
                speeds.push(one.gbytes_per_s.iter().sum::<f64>());
            }
            let [out, back] = ends.stop();
            let bytes = out.counts.bytes + back.counts.bytes;
            flows.push(CleanFlow {
                kind,
                gbytes_per_s: rounded(median(&speeds).unwrap_or(0.0)),
                round_trip_p50_us: rounded(trips.p50),
                round_trip_p99_us: rounded(trips.p99),
                emulator_cpu_s_per_gb: rounded(
                    (out.cpu + back.cpu).as_secs_f64() * 1e9 / float(bytes.max(1)),
                ),
                late_us: rounded(late_us(&out)),
            });
        }
        Ok(Clean { mtu, flows })
    }

    /// One flow of each kind alone, and nb0 beside TCP.
    fn condition(&mut self, path: &PathConfig, most: f64) -> anyhow::Result<Condition> {
        // positive, far below 2^63
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let half = (most * 1e9 * 8.0 / 2.0) as u64;
        let path = PathConfig { rate: path.rate.or(Some(half.max(1000))), ..*path };
        let rate = float(path.rate.unwrap_or(0)) / 8e9;
        let ends = ends(&path)?;
        let mut alone: Vec<(Vec<f64>, FlowFigures)> = vec![Default::default(); self.kinds.len()];
        for pass in 1..=self.passes {
            for (kind, (speeds, sum)) in self.kinds.iter().zip(&mut alone) {
                say(&format!("{path}, {kind}, pass {pass}"));
                let [one] = ends.send(kind, 1, self.times, false)?.finish()?;
                speeds.push(rounded(one.gbytes_per_s.iter().sum()));
                sum.retransmitted += one.retransmitted;
                sum.wrong_bytes += one.wrong_bytes;
            }
        }
        let mut beside = Vec::new();
        for tcp in self.kinds.iter().filter(|kind| *kind != NB0) {
            say(&format!("{path}, nb0 beside {tcp}"));
            let mut both = ends.send(NB0, FLOWS_BESIDE, self.times, false)?;
            both.add(ends.start(tcp, FLOWS_BESIDE, self.times, false)?);
            let [nb0, of_tcp] = both.finish()?;
            beside.push(Beside::new(tcp.clone(), nb0.gbytes_per_s, of_tcp.gbytes_per_s));
        }
        let [out, back] = ends.stop();
        let overrun = out.overrun + back.overrun;
        if overrun > 0 {
            self.notes.push(format!("{path}: {overrun} packets were lost because the emulator had no CPU"));
        }
        let alone = self.kinds.iter().zip(alone).map(|(kind, (samples, sum))| Alone {
            kind: kind.clone(),
            gbytes_per_s: median(&samples).unwrap_or(0.0),
            samples,
            retransmitted: sum.retransmitted,
            wrong_bytes: sum.wrong_bytes,
        });
        Ok(Condition {
            path: path.to_string(),
            rate_gbytes_per_s: rounded(rate),
            loss: path.faults.loss,
            delay_us: float(path.faults.delay_ns) / 1e3,
            mtu: path.mtu,
            alone: alone.collect(),
            beside,
        })
    }

    /// Finds out what this kernel has to compare.
    fn find_kinds(&mut self, path: &PathConfig) -> anyhow::Result<()> {
        if !self.kinds.is_empty() {
            return Ok(());
        }
        let emulator = Emulator::start(path)?;
        self.kinds.push(NB0.to_owned());
        for algorithm in TCP {
            let has = || {
                let socket = TcpListener::bind((End::Near.v4(), 0))?;
                flow_tcp::set_algorithm(&socket, algorithm)
            };
            match emulator.run(End::Near, has) {
                Ok(()) => self.kinds.push(algorithm.to_owned()),
                Err(error) => {
                    self.notes.push(format!("no TCP {algorithm}: this kernel does not have it ({error})"));
                }
            }
        }
        Ok(())
    }
}

/// A path with the receiving process at its far end.
fn ends(path: &PathConfig) -> anyhow::Result<PathEnds> {
    let emulator = Emulator::start(path)?;
    let receiver = Process::start(&emulator, End::Far, &["--serve"])?;
    Ok(PathEnds { _receiver: receiver, emulator })
}

/// A line of progress.
fn say(what: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("measuring: {what}");
    }
}

struct PathEnds {
    /// Killed before the path ends.
    _receiver: Process,
    emulator: Emulator,
}

impl PathEnds {
    fn start(&self, kind: &str, flows: usize, times: Times, ping: bool) -> anyhow::Result<Process> {
        let time = if ping { times.ping } else { times.stream };
        let [flows, warm_up, time] =
            [flows.to_string(), times.warm_up.as_millis().to_string(), time.as_millis().to_string()];
        let mut arguments = vec!["--kind", kind, "--flows", &flows, "--warm-up", &warm_up, "--time", &time];
        if ping {
            arguments.push("--ping");
        }
        Process::start(&self.emulator, End::Near, &arguments)
    }

    fn send(&self, kind: &str, flows: usize, times: Times, ping: bool) -> anyhow::Result<Senders> {
        Ok(Senders(vec![self.start(kind, flows, times, ping)?]))
    }

    fn stop(self) -> [DirectionReport; 2] {
        let Self { _receiver: receiver, emulator } = self;
        drop(receiver);
        emulator.stop()
    }
}

/// Processes that send at the same time.
struct Senders(Vec<Process>);

impl Senders {
    fn add(&mut self, process: Process) {
        self.0.push(process);
    }

    /// Lets them begin, and waits for their figures.
    fn finish<const N: usize>(&mut self) -> anyhow::Result<[FlowFigures; N]> {
        for process in &mut self.0 {
            process.input.write_all(b"go\n").context("a sending process has ended")?;
        }
        let figures: Vec<FlowFigures> =
            self.0.iter_mut().map(Process::figures).collect::<anyhow::Result<_>>()?;
        figures.try_into().map_err(|_| anyhow::anyhow!("another number of processes was started"))
    }
}

/// A process of ours at one end; killed in the end.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts it, and waits until it is ready.
    fn start(emulator: &Emulator, end: End, arguments: &[&str]) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find the path of the nobounce program")?;
        let program = program.to_str().context("the path of the nobounce program is no text")?;
        let mut command = at(emulator, end, program)?;
        command.arg(flow::SUBCOMMAND).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start a process at an end of the path")?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (input, output) = pipes.context("the process has no standard input and output")?;
        let mut process = Self { child, input, output: BufReader::new(output) };
        let ready = process.line()?;
        ensure!(ready == "ready", "a process at an end of the path said {ready:?}");
        Ok(process)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            bail!("a process at an end of the path exited early; its error is above");
        }
        Ok(line.trim().to_owned())
    }

    fn figures(&mut self) -> anyhow::Result<FlowFigures> {
        let line = self.line()?;
        serde_json::from_str(&line).context("a process at an end of the path sent no figures")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_the_standard_ones_or_those_named_and_have_a_seed() {
        let asked = |path: &[&str], seed| {
            let path = path.iter().map(|text| (*text).to_owned()).collect();
            paths(&BenchArgs { path, seed, ..BenchArgs::default() })
        };
        let standard = asked(&[STANDARD_PATHS], None).unwrap();
        assert_eq!(standard.len(), 5);
        assert!(standard.iter().all(|path| path.faults.seed == 1 && path.rate.is_none()));
        let named = asked(&["rate=1G,seed=9", "mtu=9000"], Some(3)).unwrap();
        assert_eq!([named[0].faults.seed, named[1].faults.seed], [9, 3]);
        let error = asked(&["lost=1"], None).unwrap_err();
        assert!(format!("{error:#}").contains("--path \"lost=1\": unknown setting"), "{error:#}");
    }
}
