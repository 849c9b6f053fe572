//! Measures one case after the other between two processes, through the library.

use std::net::IpAddr;

use anyhow::Context;
use nobounce::hard::LinkLayer;
use nobounce::{ConnectOptions, Connection, Device, Mtu};

use super::busy::cpu_seconds;
use super::case::{Amount, Case, CaseKind, CaseResult, CpuUse, Interval, Link, Measure, Samples};
use super::counted::{Counted, EndCounted};
use super::drive::WINDOW;
use super::exchange::{Step, Work, check_round, hear, hear_checked, hear_counted, hear_ready, say};
use super::gpu_visible;
use super::peer::{self, Child, PeerArgs};
use super::rails;
use super::round::Round;
use super::side::{Side, Timed};
use super::tcp::{self, Tcp};

/// Rounds of the timed part if there is a single pass; memory is filled and checked between them.
const ROUNDS: u64 = 5;
/// Operations of the round that finds out how long an operation takes, unless they are large.
const FIRST_ROUND: u64 = 256;
/// Most bytes of that round; fewer with many passes, or it would take longer than the timed part.
const FIRST_ROUND_BYTES: u64 = 64 << 20;
const FIRST_ROUND_LEAST_BYTES: u64 = 16 << 20;
/// Fewest messages of a round, however short: the first and the last of a stream run alone for a
/// while...
const FEWEST: f64 = 8.0;
/// ... unless they take longer than so many seconds.
const FEWEST_SECONDS: f64 = 0.1;
const MAX_ROUND: u64 = 4_000_000;
/// Checked rounds of a case, once per run. On a GPU more than one, so that new bytes also overwrite
/// old ones.
const CHECKED_ROUNDS: u32 = 2;
const CHECKED_ROUNDS_HOST: u32 = 1;

/// Our devices, and where the others are.
pub(super) struct OpenEnds {
    /// One, or the rails of every transfer.
    devices: Vec<Device>,
    target: String,
    /// The other process, if we started it; it ends with us.
    child: Option<Child>,
}

impl OpenEnds {
    /// A peer that runs already.
    pub(super) fn far(devices: Vec<Device>, target: String) -> Self {
        Self { devices, target, child: None }
    }

    /// Starts the other process on this machine, with devices like ours.
    pub(super) fn here(devices: Vec<Device>, ours: &PeerArgs) -> anyhow::Result<Self> {
        // Another seed, or both ends would lose the same packets.
        let child = Child::start(&PeerArgs { seed: ours.seed.wrapping_add(1), ..ours.clone() })?;
        Ok(Self { devices, target: child.target(), child: Some(child) })
    }

    fn first(&self) -> &Device {
        &self.devices[0]
    }

    fn connect(&self, case: &Case) -> anyhow::Result<Connection> {
        let options = ConnectOptions {
            qps: usize::try_from(case.qps)?,
            mtu: Mtu::from_bytes(case.mtu),
            depth: usize::try_from(2 * WINDOW)?,
            ..ConnectOptions::default()
        };
        Ok(self.first().connect(self.target.as_str(), &options)?)
    }
}

/// The asking end.
pub(super) struct Bench {
    /// None only while it is made anew.
    ends: Option<OpenEnds>,
    ours: PeerArgs,
    /// The same over another link, once it was asked for.
    other: Option<(Link, OpenEnds)>,
    /// Rounds of a case in one pass.
    rounds: u64,
    /// Whether it is the first pass, in which messages are compared one by one.
    first_pass: bool,
    /// Bytes of the round that finds out how long an operation takes, at most.
    first_bytes: u64,
}

impl Bench {
    pub(super) fn new(ends: OpenEnds, ours: PeerArgs, passes: u32) -> Self {
        let (rounds, first_bytes) = (ROUNDS / u64::from(passes), FIRST_ROUND_BYTES / u64::from(passes));
        Self {
            ends: Some(ends),
            ours,
            other: None,
            rounds: rounds.max(1),
            first_bytes: first_bytes.max(FIRST_ROUND_LEAST_BYTES),
            first_pass: true,
        }
    }

    fn ends_for(&mut self, case: &Case) -> anyhow::Result<&OpenEnds> {
        let Some(link) = case.over else {
            return self.ends.as_ref().context("cannot restart the two ends of the bench");
        };
        if self.other.as_ref().is_none_or(|(open, _)| *open != link) {
            self.other = None;
            let ours = PeerArgs { link: Some(link.name().to_owned()), ..self.ours.clone() };
            self.other = Some((link, OpenEnds::here(peer::open_all(&ours)?, &ours)?));
        }
        self.other.as_ref().map(|(_, ends)| ends).context("they were opened just now")
    }
}

impl Measure for Bench {
    fn renew(&mut self) -> anyhow::Result<()> {
        // Drop the old device first. One that closes after a younger one of the same address leaves
        // packets to the wrong process for a while.
        let far = self.ends.take().and_then(|ends| ends.child.is_none().then_some(ends.target));
        (self.other, self.first_pass) = (None, false);
        let devices = peer::open_all(&self.ours)?;
        self.ends = Some(match far {
            Some(target) => OpenEnds::far(devices, target),
            None => OpenEnds::here(devices, &self.ours)?,
        });
        Ok(())
    }

    fn run(&mut self, case: &Case, progress: &dyn Fn(f64)) -> anyhow::Result<CaseResult> {
        let (seed, rounds, first_bytes, first_pass) =
            (self.ours.seed, self.rounds, self.first_bytes, self.first_pass);
        let ends = self.ends_for(case)?;
        let (before, links) = (counted(&ends.devices), sent_by_link(ends.first()));
        let connections = rails::ask(ends.connect(case)?, &ends.devices, case)?;
        let connection = connections.first();
        let Case { op, kind, place, size, wait, .. } = *case;
        let work = Work { op, kind, place, size, wait, seed };
        say(connection, &Step::Work(work))?;
        let side = connections.open(work, true, |_| ())?;

        let mut session =
            Session { connection, side: side.as_ref(), round: 0, compared: 0, cpu: 0.0, verified: Ok(()) };
        let first = FIRST_ROUND.min(first_bytes / size.max(1)).max(2 * u64::from(case.qps));
        let warm = session.round(if let Amount::Iters(n) = case.amount { first.min(n) } else { first })?;
        let per_operation = warm.seconds / warm.messages.max(1) as f64;
        let limit = if kind == CaseKind::GpuVisible { gpu_visible::MAX_ROUND } else { MAX_ROUND };
        let plan: Vec<u64> = match case.amount {
            Amount::Iters(n) => (0..rounds).map(|i| n / rounds + u64::from(i < n % rounds)).collect(),
            Amount::Time(time) => {
                let slice = time.as_secs_f64() / rounds as f64;
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                // positive, and clamped next
                let messages =
                    (slice.max(FEWEST_SECONDS.min(FEWEST * per_operation)) / per_operation.max(1e-9)) as u64;
                vec![messages.max(u64::from(case.qps)); usize::try_from(rounds)?]
            }
        };
        let (mut latencies, mut intervals, mut iters) = (Vec::new(), Vec::new(), 0);
        // A half round trip is one message there or back.
        let ways = if kind.is_latency() && !op.is_round_trip() { 2 } else { 1 };
        let mut cpu = CpuUse::default();
        for (done, messages) in (1_u32..).zip(plan.into_iter().filter(|n| *n > 0)) {
            let messages = messages.min(limit);
            let round = session.round(messages)?;
            iters += messages;
            cpu.seconds += session.cpu;
            cpu.messages += round.messages * ways;
            latencies.extend(round.latencies);
            intervals.push(Interval { seconds: round.seconds, messages: round.messages });
            progress(f64::from(done) / rounds as f64);
        }
        if first_pass {
            let checked = if place.is_gpu() { CHECKED_ROUNDS } else { CHECKED_ROUNDS_HOST };
            (0..checked).try_for_each(|_| session.checked_round())?;
        }
        say(connection, &Step::End)?;
        let there = hear_counted(connection)?;
        let samples =
            if kind.is_latency() { Samples::Latency(latencies) } else { Samples::Throughput(intervals) };
        Ok(CaseResult {
            samples,
            iters,
            link: match ends.first().nic().hard().map(|hard| hard.port().link_layer) {
                Some(LinkLayer::InfiniBand) => "infiniband".to_owned(),
                Some(LinkLayer::Ethernet) => "roce".to_owned(),
                None => link_between(&links, &sent_by_link(ends.first())),
            },
            memory: side.memory().to_owned(),
            path: side.path(),
            counted: Some(Counted { here: counted(&ends.devices).since(&before), there }),
            mtu: connection.mtu().bytes(),
            compared: session.compared,
            cpu,
            verified: session.verified,
        })
    }

    fn tcp(&mut self) -> anyhow::Result<Option<Tcp>> {
        let ends = self.ends.as_ref().context("cannot restart the two ends of the bench")?;
        let connection = ends.first().connect(ends.target.as_str(), &ConnectOptions::default())?;
        say(&connection, &Step::Tcp)?;
        match hear(&connection)? {
            Step::TcpPort(port) => tcp::measure(port).map(Some),
            other => anyhow::bail!("bench peer: expected TcpPort, got {other:?}"),
        }
    }

    fn fallbacks(&self) -> Vec<String> {
        let devices = self.ends.iter().flat_map(|ends| &ends.devices);
        devices.flat_map(|device| device.nic().fallbacks()).collect()
    }
}

/// Packets sent so far, by link.
fn sent_by_link(device: &Device) -> Vec<(&'static str, u64)> {
    let counters = device.nic().link_counters().into_iter();
    counters.filter_map(|(name, count)| Some((name.strip_suffix("_tx_packets")?, count))).collect()
}

/// The links that packets took between two readings of the counters.
fn link_between(before: &[(&'static str, u64)], after: &[(&'static str, u64)]) -> String {
    let moved = before.iter().zip(after).filter(|(before, after)| after.1 > before.1);
    let names: Vec<_> = moved.map(|(_, (name, _))| *name).collect();
    if names.is_empty() { "udp".to_owned() } else { names.join(" and ") }
}

/// What all devices of this end counted.
fn counted(devices: &[Device]) -> EndCounted {
    let one = |device: &Device| EndCounted::from(device.nic().path_counters());
    devices.iter().map(one).reduce(|a, b| a.plus(&b)).unwrap_or_default()
}

struct Session<'a> {
    connection: &'a Connection,
    side: &'a dyn Side,
    round: u32,
    /// Messages that were compared one by one.
    compared: u64,
    /// CPU seconds of both ends in the timed part of the last round.
    cpu: f64,
    /// The first thing that was wrong, at either end.
    verified: Result<(), String>,
}

impl Session<'_> {
    fn round(&mut self, messages: u64) -> anyhow::Result<Timed> {
        self.play(messages, false)
    }

    /// A round in which no message covers another one's bytes.
    fn checked_round(&mut self) -> anyhow::Result<()> {
        let messages = self.side.checkable();
        if messages > 0 {
            self.compared += self.play(messages, true)?.messages;
        }
        Ok(())
    }

    fn play(&mut self, messages: u64, checked: bool) -> anyhow::Result<Timed> {
        let (side, round) = (self.side, Round { index: self.round, messages, checked });
        self.round += 1;
        // Fill first, then send: the other end starts as soon as it has the message and has filled
        // its own.
        side.prepare(round)?;
        say(self.connection, &Step::Round(round))?;
        hear_ready(self.connection)?;
        let before = cpu_seconds();
        let timed = side.timed(round)?;
        let cpu = cpu_seconds() - before;
        let (theirs, their_cpu) = hear_checked(self.connection)?;
        self.cpu = cpu + their_cpu;
        let ours = side.check(round);
        if self.verified.is_ok() {
            self.verified = theirs.map_err(|what| format!("at the peer: {what}")).and(ours);
        }
        Ok(timed)
    }
}

/// The serving end: follows the requesting end until it sends «end» or disconnects. With several
/// devices, the others listen at `here`.
pub(super) fn serve(connection: Connection, devices: &[Device], here: IpAddr) -> anyhow::Result<()> {
    let before = counted(devices);
    let (connections, work) = match hear(&connection)? {
        Step::Rails(count) => {
            let connections = rails::answer(connection, count, devices, here)?;
            let next = hear(connections.first())?;
            (connections, next)
        }
        Step::Tcp => {
            let (listener, port) = tcp::listen()?;
            say(&connection, &Step::TcpPort(port))?;
            return tcp::serve(&listener);
        }
        step => (rails::Connections::One(Box::new(connection)), step),
    };
    let Step::Work(work) = work else {
        anyhow::bail!("bench client: expected Work first");
    };
    let connection = connections.first();
    let refuse = |why: &anyhow::Error| {
        // Report the refusal to the requesting end if it still listens; it is logged here too.
        let _ = say(connection, &Step::Sorry(format!("{why:#}")));
    };
    work.check(connection.lanes()).inspect_err(refuse)?;
    let side = connections.open(work, false, refuse)?;
    loop {
        match hear(connection)? {
            Step::Round(round) => {
                check_round(round)?;
                side.prepare(round)?;
                say(connection, &Step::Ready)?;
                let before = cpu_seconds();
                side.timed(round).context("the measurement failed at this end")?;
                let cpu = cpu_seconds() - before;
                say(connection, &Step::Checked(side.check(round), cpu))?;
            }
            Step::End => {
                return say(connection, &Step::Counted(counted(devices).since(&before)));
            }
            other => anyhow::bail!("bench client: unexpected {other:?}"),
        }
    }
}
