//! A rank of the benchmark. Rank 0 measures; rank 1 answers, and checks what arrived.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nobounce::memory::gpu::Gpu;
use nobounce::{ConnectOptions, Connection};
use nobounce_initiated::options::Options;
use nobounce_initiated::world::World;

use super::figures::{Bandwidth, Idle, InitiatedLinkFigures, Latency, Rate};
use super::kernels::{InitiatedKernels, MAX_ROUNDS, Posted, StreamOp};
use crate::bench::busy::cpu_seconds;
use crate::bench::numbers::float;
use crate::bench::ranks::size;
use crate::bench::stats::Percentiles;

const HEAP: usize = 128 << 20;
const HALF: usize = HEAP / 2;
const CHANNELS: u32 = 4;
/// Sizes, and numbers of channels.
const LATENCIES: [u64; 6] = [8, 64, 512, 4 << 10, 64 << 10, 1 << 20];
const BANDWIDTHS: [u64; 4] = [64 << 10, 1 << 20, 8 << 20, 32 << 20];
const RATES: [u32; 3] = [1, 2, CHANNELS];
const SIGNAL_RATES: [u32; 2] = [1, CHANNELS];
/// Operations of each channel, for a rate.
const COUNT: u64 = 300_000;
/// The signals that are counted for a rate, one for each channel. Signal 0 is that of the latency.
const FIRST_SIGNAL: u16 = 1;
/// Operations of a stream that are incomplete at a time.
const AHEAD: usize = 16;
/// How long one measurement is to take.
const AIM: Duration = Duration::from_millis(300);
const PAUSE: Duration = Duration::from_secs(1);
const PAUSES: u32 = 3;
const SOON: Duration = Duration::from_secs(20);

/// What is measured over each link, for people.
pub(super) fn cases() -> String {
    let list = |sizes: &[u64]| sizes.iter().map(|bytes| size(*bytes)).collect::<Vec<_>>().join(", ");
    let list_of = |channels: &[u32]| channels.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    format!(
        "latency of a put with a signal, kernel to kernel: {}\n\
         stream of puts, of gets, and of host-posted WRITEs: {}\n\
         rate of values of 8 B: {} channels\n\
         rate of signals: {} channels\n\
         idle kernels: {PAUSES} pauses of {PAUSE:?}\n",
        list(&LATENCIES),
        list(&BANDWIDTHS),
        list_of(&RATES),
        list_of(&SIGNAL_RATES),
    )
}

/// One of the two ranks.
pub(super) struct Rank {
    world: World,
    kernels: InitiatedKernels,
    channel: u64,
    peer: u32,
    /// Signals, counted operations and pauses so far.
    rounds: u64,
    counted: u64,
}

impl Rank {
    pub(super) fn join(rank: u32, meet: SocketAddr, gpu: i32) -> anyhow::Result<Self> {
        let channels = CHANNELS as usize;
        let options =
            Options { rank, ranks: 2, rendezvous: meet, gpu, heap: HEAP, channels, ..Options::default() };
        let world = World::join(&options)?;
        let found = Gpu::by_ordinal(gpu)?.context("the GPU is gone")?;
        let kernels = InitiatedKernels::load(&found)?;
        let channel = world.channel(0).context("a world has a channel")?;
        Ok(Self { world, kernels, channel, peer: 1 - rank, rounds: 0, counted: 0 })
    }

    fn is_first(&self) -> bool {
        self.world.rank() == 0
    }

    /// All figures; those of rank 1 are not complete.
    pub(super) fn measure(&mut self, link: &str) -> anyhow::Result<InitiatedLinkFigures> {
        let paths = self.world.heap().paths().to_string();
        let mut latency = Vec::new();
        for bytes in LATENCIES {
            latency.push(self.latency(bytes)?);
        }
        let mut rate = Vec::new();
        for channels in RATES {
            rate.extend(self.rate(channels)?);
        }
        let (mut signal_rate, mut expected) = (Vec::new(), [0; CHANNELS as usize]);
        for channels in SIGNAL_RATES {
            expected.iter_mut().take(channels as usize).for_each(|signal| *signal += COUNT);
            signal_rate.extend(self.signal_rate(channels, &expected)?);
        }
        let connection = self.connect()?;
        let mut bandwidth = Vec::new();
        for bytes in BANDWIDTHS {
            bandwidth.extend(self.bandwidth(bytes, &connection)?);
        }
        let idle = self.idle()?;
        self.world.barrier()?;
        let reports = self.world.reports();
        ensure!(reports.is_empty(), "descriptors were refused: {reports:?}");
        let (link, gpu) = (link.to_owned(), self.kernels.gpu());
        Ok(InitiatedLinkFigures { link, gpu, paths, latency, rate, signal_rate, bandwidth, idle })
    }

    fn ping_pong(&mut self, rounds: u64, bytes: u64) -> anyhow::Result<(u64, Vec<u64>)> {
        self.world.barrier()?;
        let found = self.kernels.ping_pong(self.channel, self.peer, rounds, bytes, self.rounds)?;
        self.rounds += rounds;
        Ok(found)
    }

    fn latency(&mut self, bytes: u64) -> anyhow::Result<Latency> {
        let (time, _) = self.ping_pong(100, bytes)?;
        // Both ranks need the same number.
        let rounds = self.agree(rounds_within(AIM, time / 100))?;
        let (time, samples) = self.ping_pong(rounds, bytes)?;
        let half = |ns: f64| ns / 2e3;
        let samples: Vec<f64> = samples.into_iter().map(|ns| half(float(ns))).collect();
        let Percentiles { p50, p99, .. } = Percentiles::of(&samples).context("no rounds")?;
        Ok(Latency { bytes, p50_us: p50, mean_us: half(float(time) / float(rounds)), p99_us: p99 })
    }

    /// The number of rank 0, for both.
    fn agree(&mut self, number: u64) -> anyhow::Result<u64> {
        let all = self.world.exchange(&number.to_le_bytes())?;
        let first = all.first().and_then(|bytes| bytes.as_slice().try_into().ok());
        Ok(u64::from_le_bytes(first.context("rank 0 sent no number")?))
    }

    /// That of rank 0.
    fn post(&mut self, posted: Posted, channels: u32) -> anyhow::Result<Option<Rate>> {
        self.world.barrier()?;
        let stride = self.world.channel(1).map_or(0, |second| second - self.channel);
        let mut rate = None;
        if self.is_first() {
            let time = self.kernels.post(posted, (self.channel, stride), channels, self.peer, COUNT)?;
            let million_per_s = float(COUNT * u64::from(channels)) / float(time) * 1e3;
            rate = Some(Rate { channels, million_per_s });
        }
        self.world.barrier()?;
        Ok(rate)
    }

    fn rate(&mut self, channels: u32) -> anyhow::Result<Option<Rate>> {
        let rate = self.post(Posted::Values, channels)?;
        if !self.is_first() {
            for number in 0..channels as usize {
                let last = self.world.heap().read_u64(number * 512)?;
                ensure!(last == COUNT, "channel {number}: the last value is {last}, not {COUNT}");
            }
        }
        Ok(rate)
    }

    /// `expected` is what the signals of rank 1 are afterwards.
    fn signal_rate(&mut self, channels: u32, expected: &[u64]) -> anyhow::Result<Option<Rate>> {
        let rate = self.post(Posted::Signals(FIRST_SIGNAL), channels)?;
        if !self.is_first() {
            let found = self.kernels.read_signals(self.channel, FIRST_SIGNAL, CHANNELS)?;
            ensure!(found == expected, "the signals are {found:?}, not {expected:?}");
        }
        Ok(rate)
    }

    /// A connection of the hosts, for WRITEs to compare with.
    fn connect(&mut self) -> anyhow::Result<Connection> {
        if self.is_first() {
            let listener = self.world.device().listen("127.0.0.1:0")?;
            self.world.exchange(listener.local_addr().to_string().as_bytes())?;
            return Ok(listener.accept(SOON)?);
        }
        let all = self.world.exchange(&[])?;
        let addr: SocketAddr =
            std::str::from_utf8(all.first().context("rank 0 sent no address")?)?.parse()?;
        Ok(self.world.device().connect(addr, &ConnectOptions::default())?)
    }

    fn bandwidth(&mut self, bytes: u64, connection: &Connection) -> anyhow::Result<Option<Bandwidth>> {
        // The first half of rank 0 goes to the second half of rank 1, and comes back changed.
        self.fill(0, 1)?;
        self.world.barrier()?;
        let put_gbytes_per_s = self.stream(StreamOp::Put, bytes)?;
        self.world.barrier()?;
        if !self.is_first() {
            self.check(HALF, 1, bytes)?;
            self.fill(HALF, 2)?;
        }
        self.world.barrier()?;
        let get_gbytes_per_s = self.stream(StreamOp::Get, bytes)?;
        if self.is_first() {
            self.check(0, 2, bytes)?;
        }
        let host_write_gbytes_per_s = self.host_writes(bytes, connection)?;
        self.world.barrier()?;
        let found = Bandwidth { bytes, put_gbytes_per_s, get_gbytes_per_s, host_write_gbytes_per_s };
        Ok(self.is_first().then_some(found))
    }

    fn stream(&mut self, moved: StreamOp, bytes: u64) -> anyhow::Result<f64> {
        if !self.is_first() {
            return Ok(0.0);
        }
        let mut run = |count: u64| {
            let time = self.kernels.stream(
                self.channel,
                self.peer,
                moved,
                (count, bytes),
                AHEAD as u64,
                self.counted,
            );
            self.counted += count;
            time
        };
        let first = run(slots(bytes))?;
        let count = rounds_within(AIM, first / slots(bytes)).max(slots(bytes));
        Ok(float(count * bytes) / float(run(count)?))
    }

    fn host_writes(&mut self, bytes: u64, connection: &Connection) -> anyhow::Result<f64> {
        if !self.is_first() {
            connection.send_region(self.world.heap())?;
            connection.recv_message(SOON)?;
            return Ok(0.0);
        }
        let remote = connection.recv_region(SOON)?;
        let (heap, len) = (self.world.heap(), usize::try_from(bytes)?);
        let run = |count: u64| -> anyhow::Result<Duration> {
            let (began, mut tickets) = (Instant::now(), VecDeque::new());
            for number in 0..count {
                let at = usize::try_from(number % slots(bytes))? * len;
                tickets.push_back(connection.write(heap, at..at + len, &remote, (HALF + at) as u64)?);
                if tickets.len() > AHEAD
                    && let Some(first) = tickets.pop_front()
                {
                    connection.wait(first, SOON)?;
                }
            }
            tickets.into_iter().try_for_each(|ticket| connection.wait(ticket, SOON).map(|_| ()))?;
            Ok(began.elapsed())
        };
        let first = run(slots(bytes))?;
        let count = rounds_within(AIM, nanos(first) / slots(bytes)).max(slots(bytes));
        let time = run(count)?;
        connection.send_message(b"done")?;
        Ok(float(count * bytes) / float(nanos(time)))
    }

    fn idle(&mut self) -> anyhow::Result<Idle> {
        let (mut longest, mut cpu) = (0, 0.0);
        for pause in 0..PAUSES {
            self.world.barrier()?;
            std::thread::sleep(PAUSE / 10);
            let before = cpu_seconds();
            std::thread::sleep(PAUSE);
            cpu += cpu_seconds() - before;
            if self.is_first() {
                longest = longest.max(self.kernels.one_put(self.channel, self.peer, pause.into())?);
            }
        }
        let cpu_percent = cpu / (PAUSE * PAUSES).as_secs_f64() * 100.0;
        Ok(Idle { cpu_percent, first_put_us: float(longest) / 1e3, pauses: PAUSES })
    }

    /// Fills half of the heap with a pattern.
    fn fill(&self, at: usize, seed: u64) -> anyhow::Result<()> {
        Ok(self.world.heap().write_at(at, &pattern(seed, HALF))?)
    }

    /// What streams of that size have written, in half of the heap.
    fn check(&self, at: usize, seed: u64, bytes: u64) -> anyhow::Result<()> {
        let len = usize::try_from(slots(bytes) * bytes)?;
        let mut found = vec![0; len];
        self.world.heap().read_at(at, &mut found)?;
        let wrong = found.iter().zip(pattern(seed, len)).position(|(found, expected)| *found != expected);
        ensure!(wrong.is_none(), "wrong bytes arrived, the first at offset {}", wrong.unwrap_or(0));
        Ok(())
    }
}

/// Places of that size in half of the heap.
fn slots(bytes: u64) -> u64 {
    HALF as u64 / bytes
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let word = |at: u64| (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) ^ seed;
    (0..len.div_ceil(8) as u64).flat_map(|at| word(at).to_le_bytes()).take(len).collect()
}

fn rounds_within(time: Duration, ns_each: u64) -> u64 {
    (nanos(time) / ns_each.max(1)).clamp(16, MAX_ROUNDS)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1)
}
