//! How much arrives, on the virtual clock: one connection against loss, and several that share a
//! bottleneck.
//!
//! The table is a snapshot: a change of window, timers or repetition shows up as a diff of numbers.

use std::fmt::Write as _;

use nobounce_protocol::qp::{Mtu, Operation, Status};
use nobounce_protocol::sim::{Conditions, Setup, Sim};
use nobounce_protocol::timing::{MICROSECOND, MILLISECOND, Nanos};

const MESSAGE: u32 = 1 << 20;
const OUTSTANDING: usize = 8;
const RATE: u64 = 25_000_000_000;
/// Losses per million.
const LOSSES: [u32; 5] = [0, 100, 1_000, 10_000, 50_000];

fn setup(mtu: Mtu) -> Setup {
    Setup { mtu, memory: (1 << 20) + 2 * Setup::GUARD, send_depth: OUTSTANDING, ..Setup::default() }
}

fn wire() -> Conditions {
    Conditions { rate: RATE, delay: 10 * MICROSECOND, ..Conditions::default() }
}

/// Keeps the queues of all even endpoints full until the time is over; bytes done by each.
fn load(sim: &mut Sim, time: Nanos, is_read: bool) -> Vec<u64> {
    let flows = sim.ends.len() / 2;
    let end = sim.now + time;
    while sim.now < end {
        for flow in 0..flows {
            let remote = sim.ends[2 * flow + 1].remote(0);
            let op = if is_read { Operation::Read(remote) } else { Operation::Write(remote) };
            while sim.ends[2 * flow].post(op, 0, MESSAGE).is_ok() {}
        }
        assert!(sim.step(), "it must not stop");
    }
    (0..flows)
        .map(|flow| {
            let done = &sim.ends[2 * flow].completions;
            assert!(done.iter().all(|c| c.status == Status::Success), "{:?}", done.last());
            done.len() as u64 * u64::from(MESSAGE)
        })
        .collect()
}

/// Gigabits per second, in hundredths.
fn goodput(bytes: u64, time: Nanos) -> u64 {
    bytes * 8 * 100 / time
}

fn against_loss(mtu: Mtu, loss: u32, is_read: bool, selective: bool) -> u64 {
    let mut sim = Sim::with(&Setup { selective, ..setup(mtu) }, wire(), 7);
    for pipe in &mut sim.pipes {
        pipe.conditions.loss = loss;
    }
    // Before the first round trip is measured, a lost ACK costs milliseconds.
    let (start, time) = (10 * MILLISECOND, 40 * MILLISECOND);
    let before = load(&mut sim, start, is_read)[0];
    goodput(load(&mut sim, time, is_read)[0] - before, time)
}

const COLUMNS: [(&str, Mtu, bool); 4] = [
    ("WRITE 1024", Mtu::Mtu1024, false),
    ("WRITE 4096", Mtu::Mtu4096, false),
    ("READ 1024", Mtu::Mtu1024, true),
    ("READ 4096", Mtu::Mtu4096, true),
];

/// A table of goodput; `check` gets the loss, the goodput and that without loss.
fn table_against_loss(selective: bool, check: impl Fn(u32, u64, u64)) -> String {
    let mut table = "1 MiB messages, 25 Gb/s, 10 us one way, Gb/s of payload\nloss %   ".to_owned();
    for (name, ..) in COLUMNS {
        write!(table, " {name:>10}").unwrap();
    }
    table.push('\n');
    let mut lossless = [0; COLUMNS.len()];
    for loss in LOSSES {
        write!(table, "{:<9}", f64::from(loss) / 10_000.0).unwrap();
        for (column, (_, mtu, is_read)) in COLUMNS.into_iter().enumerate() {
            let got = against_loss(mtu, loss, is_read, selective);
            write!(table, " {:>7}.{:02}", got / 100, got % 100).unwrap();
            if loss == 0 {
                lossless[column] = got;
            }
            check(loss, got, lossless[column]);
        }
        table.push('\n');
    }
    table
}

#[test]
fn goodput_against_loss() {
    let table = table_against_loss(false, |loss, got, lossless| {
        assert!(loss > 0 || got > 2000, "a perfect wire is filled: {got}");
        assert!(loss > 1000 || 2 * got > lossless, "above half of loss-free at {loss} per million: {got}");
        assert!(got > 0, "never zero");
    });
    insta::assert_snapshot!("goodput_against_loss", table);
}

#[test]
fn goodput_against_loss_with_selective_retransmission() {
    let table = table_against_loss(true, |loss, got, lossless| {
        assert!(loss > 0 || got > 2000, "a perfect wire is filled: {got}");
        assert!(loss > 10_000 || 10 * got >= 9 * lossless, "{got} of {lossless} at {loss} per million");
        assert!(10 * got >= 7 * lossless, "{got} of {lossless} at {loss} per million");
    });
    insta::assert_snapshot!("goodput_against_loss_selective", table);
}

/// (sum of x)^2 / (n * sum of x^2): 1 when all have the same.
fn jain(shares: &[u64]) -> f64 {
    #[allow(clippy::cast_precision_loss)] // a ratio
    let x: Vec<f64> = shares.iter().map(|s| *s as f64).collect();
    let sum: f64 = x.iter().sum();
    #[allow(clippy::cast_precision_loss)]
    let n = x.len() as f64;
    sum * sum / (n * x.iter().map(|v| v * v).sum::<f64>())
}

#[test]
fn flows_share_a_bottleneck_fairly_and_keep_it_busy() {
    let mut table = String::new();
    for (flows, buffer) in [(1, 256 << 10), (2, 256 << 10), (4, 256 << 10), (4, 128 << 10), (2, 512 << 10)] {
        let conditions = Conditions { buffer, ..wire() };
        let mut sim = Sim::many(flows, &setup(Mtu::Mtu1024), conditions, 11);
        let time = 100 * MILLISECOND;
        let bytes = load(&mut sim, time, false);
        let total = goodput(bytes.iter().sum(), time);
        let (fair, used) = (jain(&bytes), total * 100 / (RATE / 10_000_000));
        let lost = sim.pipes[0].counters().overflowed * 1_000_000 / sim.pipes[0].counters().sent;
        writeln!(
            table,
            "{flows} flows, {:>4} KiB buffer: {used} % used, fairness {fair:.3}, {lost} per million dropped",
            buffer >> 10
        )
        .unwrap();
        assert!(fair > 0.9, "{bytes:?}");
        assert!(used >= 70, "{used} %");
    }
    insta::assert_snapshot!("shared_bottleneck", table);
}

/// What many senders of one receiver get, start included.
struct Incast {
    goodput: u64,
    fairness: f64,
    dropped: u64,
    /// 99th percentile of the time of an 8 KiB message beside them, one each 100 us, in
    /// nanoseconds.
    short: Nanos,
}

/// Senders of one receiver share a link of 100 Gb/s, a round trip of 10 us and a buffer of 16 MB.
fn incast(senders: usize, mark_above: u64, time: Nanos) -> Incast {
    const LEN: u32 = 256 << 10;
    const SHORT: u32 = 8 << 10;
    const LINE: u64 = 100_000_000_000;
    let setup = Setup {
        mtu: Mtu::Mtu4096,
        selective: true,
        memory: LEN as usize + 2 * Setup::GUARD,
        send_depth: 4,
        ..Setup::default()
    };
    let wire = Conditions {
        rate: LINE,
        delay: 5 * MICROSECOND,
        buffer: 16_000_000,
        mark_above,
        ..Conditions::default()
    };
    let mut sim = Sim::many(senders + 1, &setup, wire, 3);
    let (short, mut began, mut times) = (2 * senders, 0, Vec::new());
    while sim.now < time {
        for flow in 0..senders {
            let op = Operation::Write(sim.ends[2 * flow + 1].remote(0));
            while sim.ends[2 * flow].post(op, 0, LEN).is_ok() {}
        }
        if !std::mem::take(&mut sim.ends[short].completions).is_empty() {
            times.push(sim.now - began);
            began = 0;
        }
        if began == 0 && (senders == 0 || sim.now >= times.len() as u64 * 100 * MICROSECOND) {
            began = sim.now.max(1);
            let op = Operation::Write(sim.ends[short + 1].remote(0));
            sim.ends[short].post(op, 0, SHORT).unwrap();
        }
        assert!(sim.step(), "it must not stop");
    }
    let done: Vec<u64> =
        (0..senders).map(|flow| sim.ends[2 * flow].completions.len() as u64 * u64::from(LEN)).collect();
    let bytes = done.iter().sum::<u64>() + times.len() as u64 * u64::from(SHORT);
    times.sort_unstable();
    Incast {
        goodput: goodput(bytes, time),
        fairness: if senders > 0 { jain(&done) } else { 1.0 },
        dropped: sim.pipes[0].counters().overflowed,
        short: times[times.len() * 99 / 100],
    }
}

#[test]
fn many_senders_of_one_receiver_obey_congestion_notifications() {
    let unloaded = incast(0, 0, 5 * MILLISECOND).short;
    let mut table = format!(
        "100 Gb/s, 10 us round trip, 16 MB buffer, MTU 4096; 8 KiB alone: p99 {}.{} us\n",
        unloaded / 1000,
        unloaded % 1000 / 100
    );
    for (senders, mark_above) in [(2, 100_000), (8, 100_000), (64, 100_000), (64, 0)] {
        let Incast { goodput, fairness, dropped, short } = incast(senders, mark_above, 40 * MILLISECOND);
        writeln!(
            table,
            "{senders:>2} senders, marks above {:>3} KB: {}.{:02} Gb/s, fairness {fairness:.3}, {dropped} dropped, \
             8 KiB p99 {}.{} us",
            mark_above / 1000,
            goodput / 100,
            goodput % 100,
            short / 1000,
            short % 1000 / 100
        )
        .unwrap();
        if mark_above > 0 {
            assert_eq!(dropped, 0);
            assert!(goodput >= 9000 && short <= 3 * unloaded, "{goodput} {short}");
            // Few senders that are all marked together grow and shrink together.
            assert!(fairness >= if senders == 64 { 0.95 } else { 0.75 }, "{fairness}");
        }
    }
    insta::assert_snapshot!("incast", table);
}
