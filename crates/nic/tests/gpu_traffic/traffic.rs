//! A plan of messages of several sizes between four memories, filled before and checked after. The
//! traffic itself then needs no GPU work except the NIC's own.

use std::time::{Duration, Instant};

use nobounce_nic::soft::Mr;
use nobounce_nic::work::{Operation, RecvRequest, SendRequest};

use crate::common::End;
use crate::rig::{self, GpuMethod, Kind, Memory, Rig};

/// What lies between the messages.
const GUARD: u64 = 0x7000 << 32;
/// Where the messages of each memory begin: no two of them are aligned alike.
const SHIFTS: [usize; 4] = [3, 0, 37, 70];

/// Memory with places for messages.
pub(crate) struct Field {
    pub(crate) memory: Memory,
    /// Where the messages lie.
    slots: Vec<(usize, usize)>,
}

impl Field {
    fn new(rig: &Rig, kind: Kind, sizes: &[usize], shift: usize) -> Self {
        let mut at = shift;
        let slots: Vec<_> = sizes
            .iter()
            .enumerate()
            .map(|(i, &size)| {
                let slot = (at, size);
                at += size + 1 + i * 29 % 190;
                slot
            })
            .collect();
        Self { memory: Memory::new(rig, kind, at + 100), slots }
    }

    /// Offset, length and seed of all that is not a message.
    fn gaps(&self) -> impl Iterator<Item = (usize, usize, u64)> {
        let ends = self.slots.iter().map(|&(at, len)| at + len);
        let starts = self.slots.iter().map(|&(at, _)| at).chain([self.memory.len]);
        [0].into_iter()
            .chain(ends)
            .zip(starts)
            .enumerate()
            .map(|(i, (from, to))| (from, to - from, GUARD + ((i as u64) << 40)))
    }

    fn fill(&self, rig: &Rig, seed: u64) {
        for (at, len, seed) in self.gaps().chain(self.messages(seed)) {
            rig.fill(self.memory.addr + at as u64, len, seed);
        }
    }

    #[track_caller]
    fn check(&self, rig: &Rig, seed: u64, what: &str) {
        for (at, len, seed) in self.messages(seed) {
            rig.check(self.memory.addr + at as u64, len, seed, &format!("{what}, the message at {at}"));
        }
        for (at, len, seed) in self.gaps() {
            rig.check(self.memory.addr + at as u64, len, seed, &format!("{what}, beside messages at {at}"));
        }
    }

    fn messages(&self, seed: u64) -> impl Iterator<Item = (usize, usize, u64)> {
        self.slots.iter().enumerate().map(move |(i, &(at, len))| (at, len, (seed << 48) + ((i as u64) << 40)))
    }
}

/// Messages from `source` to `written` by WRITE, from there to `read` by READ, and from `source` to
/// `sent` by SEND.
pub(crate) struct Plan {
    pub(crate) source: Field,
    pub(crate) written: Field,
    pub(crate) read: Field,
    pub(crate) sent: Field,
    sizes: Vec<usize>,
}

/// The plan's memories as they are registered: the first two of one end, the others of the other.
pub(crate) struct Regions {
    pub(crate) source: Mr,
    pub(crate) read: Mr,
    pub(crate) written: Mr,
    pub(crate) sent: Mr,
}

/// How long it all took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Times {
    pub(crate) total: Duration,
    pub(crate) longest: Duration,
    pub(crate) operations: usize,
    /// Answers that did not come in time, and probes and packets sent again because of it.
    pub(crate) delays: [u64; 3],
}

impl std::fmt::Display for Times {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [timeouts, probes, gaps] = self.delays;
        write!(f, "{} operations in {:.1?}, the longest {:.1?}", self.operations, self.total, self.longest)?;
        if timeouts + probes + gaps == 0 {
            return Ok(());
        }
        write!(f, " ({timeouts} timeouts, {probes} probes, {gaps} gaps)")
    }
}

impl Plan {
    pub(crate) fn new(rig: &Rig, kind: Kind, sizes: &[usize]) -> Self {
        let [source, written, read, sent] = SHIFTS.map(|shift| Field::new(rig, kind, sizes, shift));
        Self { source, written, read, sent, sizes: sizes.to_vec() }
    }

    /// Bytes of all messages.
    pub(crate) fn bytes(&self) -> u64 {
        self.sizes.iter().sum::<usize>() as u64
    }

    /// How many messages there are.
    pub(crate) fn messages(&self) -> u64 {
        self.sizes.len() as u64
    }

    pub(crate) fn register(&self, a: &End, b: &End, way: GpuMethod) -> Regions {
        Regions {
            source: rig::register(a, &self.source.memory, way),
            read: rig::register(a, &self.read.memory, way),
            written: rig::register(b, &self.written.memory, way),
            sent: rig::register(b, &self.sent.memory, way),
        }
    }

    /// Fills all memories, differently.
    pub(crate) fn fill(&self, rig: &Rig) {
        for (seed, field) in (1..).zip([&self.source, &self.written, &self.read, &self.sent]) {
            field.fill(rig, seed);
        }
    }

    /// Everything holds what `source` held, and nothing beside it was touched.
    #[track_caller]
    pub(crate) fn check(&self, rig: &Rig, what: &str) {
        self.source.check(rig, 1, &format!("{what}, the source"));
        self.written.check(rig, 1, &format!("{what}, written"));
        self.read.check(rig, 1, &format!("{what}, read"));
        self.sent.check(rig, 1, &format!("{what}, sent"));
    }

    /// All WRITEs at once, then READs and SENDs one by one.
    #[track_caller]
    pub(crate) fn run(&self, a: &End, b: &End, regions: &Regions) -> Times {
        let begin = Instant::now();
        let before = delays(a, b);
        let mut longest = Duration::ZERO;
        for (i, (&(from, len), &(to, _))) in self.source.slots.iter().zip(&self.written.slots).enumerate() {
            let write = Operation::Write(rig::remote(&regions.written, to));
            let from = rig::sge(&regions.source, from, len);
            a.qps[0].post_send(&SendRequest::new(i as u64, write, &from)).unwrap();
        }
        rig::succeed(a, self.sizes.len());
        for (&(from, len), &(to, _)) in self.written.slots.iter().zip(&self.read.slots) {
            let begin = Instant::now();
            let read = Operation::Read(rig::remote(&regions.written, from));
            a.qps[0].post_send(&SendRequest::new(1, read, &rig::sge(&regions.read, to, len))).unwrap();
            rig::succeed(a, 1);
            longest = longest.max(begin.elapsed());
        }
        for (&(from, len), &(to, _)) in self.source.slots.iter().zip(&self.sent.slots) {
            let begin = Instant::now();
            let to = rig::sge(&regions.sent, to, len);
            b.qps[0].post_recv(&RecvRequest { wr_id: 2, sges: &to }).unwrap();
            let from = rig::sge(&regions.source, from, len);
            a.qps[0].post_send(&SendRequest::new(3, Operation::Send, &from)).unwrap();
            rig::succeed(a, 1);
            rig::succeed(b, 1);
            longest = longest.max(begin.elapsed());
        }
        let total = begin.elapsed();
        let after = delays(a, b);
        let delays = std::array::from_fn(|i| after[i] - before[i]);
        Times { total, longest, operations: 3 * self.sizes.len(), delays }
    }
}

fn delays(a: &End, b: &End) -> [u64; 3] {
    ["local_ack_timeout_err", "probes", "out_of_seq_request"].map(|name| a.counter(name) + b.counter(name))
}
