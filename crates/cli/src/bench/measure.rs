//! Measures one case after the other between two processes, by the library.

use std::time::Duration;

use anyhow::Context;
use nobounce::{ConnectOptions, Connection, Device, Mtu, Path};

use super::case::{Amount, Case, CaseResult, Interval, Kind, Measure, Op, Samples, Wait};
use super::drive::{End, WINDOW};
use super::exchange::{Step, Work, hear, hear_checked, hear_ready, say};
use super::peer::Child;
use super::ring::Ring;

/// The timed part is cut into so many rounds; memory is filled and checked between them.
const ROUNDS: u64 = 5;
/// Operations of the round that finds out how long an operation takes, unless they are large.
const FIRST_ROUND: u64 = 256;
/// Bytes of that round at most.
const FIRST_ROUND_BYTES: u64 = 64 << 20;
const MAX_ROUND: u64 = 4_000_000;

/// The asking end.
pub(super) struct Bench {
    device: Device,
    target: String,
    seed: u64,
    /// The other process, where we started it ourselves; it ends with us.
    _child: Option<Child>,
}

impl Bench {
    pub(super) fn new(device: Device, target: String, seed: u64, child: Option<Child>) -> Self {
        Self { device, target, seed, _child: child }
    }

    fn connect(&self, case: &Case) -> anyhow::Result<Connection> {
        let options = ConnectOptions {
            qps: usize::try_from(case.qps)?,
            mtu: Mtu::from_bytes(case.mtu),
            depth: usize::try_from(2 * WINDOW)?,
            ..ConnectOptions::default()
        };
        Ok(self.device.connect(self.target.as_str(), &options)?)
    }
}

impl Measure for Bench {
    fn run(&mut self, case: &Case, progress: &dyn Fn(f64)) -> anyhow::Result<CaseResult> {
        let connection = self.connect(case)?;
        let work = Work { op: case.op, kind: case.kind, size: case.size, wait: case.wait, seed: self.seed };
        say(&connection, &Step::Work(work))?;
        let ring = Ring::new(&self.device, case.size, self.seed, case.qps == 1)?;
        let peer = connection.exchange_region(&ring.region, Duration::from_secs(60))?;
        let end = End { connection: &connection, ring: &ring, peer, work, asks: true };

        let mut session = Session { end, round: 0, verified: Ok(()) };
        let first = FIRST_ROUND.min(FIRST_ROUND_BYTES / case.size.max(1)).max(2 * u64::from(case.qps));
        let warm = session.round(if let Amount::Iters(n) = case.amount { first.min(n) } else { first })?;
        let per_operation = warm.seconds / warm.messages.max(1) as f64;
        let plan: Vec<u64> = match case.amount {
            Amount::Iters(n) => (0..ROUNDS).map(|i| n / ROUNDS + u64::from(i < n % ROUNDS)).collect(),
            Amount::Time(time) => {
                let slice = time.as_secs_f64() / ROUNDS as f64;
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                // positive, and clamped next
                let messages = (slice / per_operation.max(1e-9)) as u64;
                vec![messages.clamp(u64::from(case.qps).max(1), MAX_ROUND); usize::try_from(ROUNDS)?]
            }
        };
        let (mut latencies, mut intervals, mut iters) = (Vec::new(), Vec::new(), 0);
        for (done, messages) in (1_u32..).zip(plan.into_iter().filter(|n| *n > 0)) {
            let round = session.round(messages)?;
            iters += messages;
            latencies.extend(round.latencies);
            intervals.push(Interval { seconds: round.seconds, messages: round.messages });
            progress(f64::from(done) / ROUNDS as f64);
        }
        say(&connection, &Step::End)?;
        let samples = if case.kind == Kind::Latency {
            Samples::Latency(latencies)
        } else {
            Samples::Throughput(intervals)
        };
        Ok(CaseResult {
            samples,
            iters,
            link: "udp".to_owned(),
            memory: "host".to_owned(),
            path: match ring.region.path() {
                Path::Staged { reason } => format!("staged ({reason})"),
                _ => "direct".to_owned(),
            },
            mtu: connection.mtu().bytes(),
            verified: session.verified,
        })
    }
}

/// What came of one round.
struct Round {
    seconds: f64,
    messages: u64,
    latencies: Vec<f64>,
}

struct Session<'a> {
    end: End<'a>,
    round: u32,
    /// The first thing that was wrong, at either end.
    verified: Result<(), String>,
}

impl Session<'_> {
    fn round(&mut self, messages: u64) -> anyhow::Result<Round> {
        let (end, index) = (&self.end, self.round);
        self.round += 1;
        // First fill, then speak: the other end starts as soon as it has heard and filled its own.
        end.ring.prepare(index)?;
        say(end.connection, &Step::Round { index, messages })?;
        hear_ready(end.connection)?;
        let round = if end.work.kind == Kind::Latency {
            let latencies = end.latency(messages)?;
            let ways = if end.work.op == Op::Write || end.work.op == Op::Send { 2.0 } else { 1.0 };
            Round { seconds: latencies.iter().sum::<f64>() * ways / 1e6, messages, latencies }
        } else {
            let both = end.work.kind == Kind::Bidirectional;
            let seconds = end.stream(messages, if both { messages } else { 0 })?;
            Round { seconds, messages: messages * if both { 2 } else { 1 }, latencies: Vec::new() }
        };
        let theirs = hear_checked(end.connection)?;
        let ours = check(end, index, messages);
        if self.verified.is_ok() {
            self.verified = theirs.map_err(|what| format!("at the other end: {what}")).and(ours);
        }
        Ok(round)
    }
}

/// Checks what must have arrived at this end in that round.
fn check(end: &End<'_>, round: u32, messages: u64) -> Result<(), String> {
    let Work { op, kind, wait, .. } = end.work;
    let both = kind == Kind::Bidirectional;
    let arrived = match op {
        Op::Atomic => return check_counter(end, messages),
        Op::Read if end.asks || both => messages,
        Op::Read => 0,
        Op::Write | Op::Send if !end.asks || both || kind == Kind::Latency => messages,
        Op::Write | Op::Send => 0,
    };
    // Waiting on memory uses one slot, and its last byte to count.
    let on_memory = wait == Wait::Memory && kind == Kind::Latency;
    let numbered = op != Op::Read && !on_memory;
    end.ring.check(round, if on_memory { arrived.min(1) } else { arrived }, on_memory, numbered)
}

/// The counter stood at a word of guard bytes and was incremented once for each message.
fn check_counter(end: &End<'_>, messages: u64) -> Result<(), String> {
    if end.asks {
        return Ok(());
    }
    let found = end.ring.region.read_u64(end.ring.target(0)).map_err(|error| error.to_string())?;
    let expected = u64::from_ne_bytes([0xa5; 8]).wrapping_add(messages);
    if found == expected {
        Ok(())
    } else {
        Err(format!("the counter is {found:#x} and should be {expected:#x} after {messages} increments"))
    }
}

/// The other end: does what the asking end says, until it says «end» or goes away.
pub(super) fn serve(connection: &Connection) -> anyhow::Result<()> {
    let Step::Work(work) = hear(connection)? else {
        anyhow::bail!("the asking end should say first what is to be measured");
    };
    let ring = Ring::new(connection.device(), work.size, work.seed, connection.lanes() == 1)?;
    let peer = connection.exchange_region(&ring.region, Duration::from_secs(60))?;
    let end = End { connection, ring: &ring, peer, work, asks: false };
    loop {
        match hear(connection)? {
            Step::Round { index, messages } => {
                end.ring.prepare(index)?;
                say(connection, &Step::Ready)?;
                timed(&end, messages).context("the timed part failed at this end")?;
                say(connection, &Step::Checked(check(&end, index, messages)))?;
            }
            Step::End => return Ok(()),
            other => anyhow::bail!("the asking end says {other:?}, which makes no sense here"),
        }
    }
}

fn timed(end: &End<'_>, messages: u64) -> anyhow::Result<()> {
    match end.work.kind {
        Kind::Latency => end.latency(messages).map(drop),
        Kind::Bidirectional => end.stream(messages, messages).map(drop),
        Kind::Bandwidth | Kind::Rate => end.stream(0, messages).map(drop),
    }
}
