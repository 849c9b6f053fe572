//! Operation sequences by both sides over a bad network, and the oracle that says how they must
//! end.
//!
//! The two sides never write the same bytes, and no bytes are both read and written. So timing does
//! not matter: a plan has exactly one right outcome. Each side's region is divided into areas:
//!
//! | area | read | written |
//! |---|---|---|
//! | `OUT` | by this side's SENDs and WRITEs, by the peer's READs | never |
//! | `IN` | - | by the peer's WRITEs |
//! | `RECEIVED` | - | by the peer's SENDs, a slot each |
//! | `RESULT` | - | by this side's READs and atomics, a slot each |
//! | `WORDS` | - | by the peer's atomics |

use super::{A, B, Conditions, Endpoint, Region, Setup, Sim};
use crate::qp::{Access, Completion, Mtu, Operation, QpState, Remote, Status, WorkKind, WorkRequest};
use crate::timing::MICROSECOND;
use crate::wire::Feth;

const AREA: u64 = 24 << 10;
const OUT: u64 = 0;
const IN: u64 = AREA;
const RECEIVED: u64 = 2 * AREA;
const RESULT: u64 = 3 * AREA;
const WORDS: u64 = 4 * AREA;
const WORD_COUNT: u64 = 8;
/// Requests of one side; more are left out.
const MAX_POSTS: usize = 16;
/// The longest message.
const MAX_LEN: u16 = 1400;
/// Keys a SEND may invalidate: this one and the next ones.
const SPARE_KEY: u32 = 0x5000;
/// What any plan needs, generously: a plan that takes more hangs.
const MANY_STEPS: u64 = 400_000;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum OpKind {
    Send,
    SendImmediate,
    SendInvalidate,
    Write,
    WriteImmediate,
    Read,
    CompareSwap,
    FetchAdd,
    AtomicWrite,
    Flush,
    /// A WRITE with an unknown rkey: it ends the connection.
    Bad,
}

impl OpKind {
    /// Every kind that can succeed, and then the other.
    pub const ALL: [Self; 11] = [
        Self::Send,
        Self::SendImmediate,
        Self::SendInvalidate,
        Self::Write,
        Self::WriteImmediate,
        Self::Read,
        Self::CompareSwap,
        Self::FetchAdd,
        Self::AtomicWrite,
        Self::Flush,
        Self::Bad,
    ];

    const fn consumes_receive(self) -> bool {
        matches!(self, Self::Send | Self::SendImmediate | Self::SendInvalidate | Self::WriteImmediate)
    }

    const fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd | Self::AtomicWrite)
    }
}

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Op {
    /// Side 0 or 1 posts a request of `len` bytes to or from place `at`.
    Post { side: u8, kind: OpKind, len: u16, at: u16, signaled: bool, fence: bool },
    /// A side posts a receive. What is missing at the end is posted then.
    Receive { side: u8 },
    /// Time passes.
    Wait { micros: u16 },
    /// Losses per million of one direction change.
    Loss { pipe: u8, ppm: u32 },
}

/// A connection, a network and what happens.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Plan {
    pub mtu: Mtu,
    pub psn: [u32; 2],
    pub max_rd_atomic: u8,
    pub conditions: Conditions,
    /// Both ends retransmit selectively.
    pub selective: bool,
    pub seed: u64,
    pub ops: Vec<Op>,
}

/// What must have happened to one side at the end.
#[derive(Debug, Default)]
struct Expected {
    memory: Vec<u8>,
    /// Numbers of the requests, in order, and whether they are reported.
    sends: Vec<(u64, bool)>,
    /// Place in `sends` of the first request that cannot succeed.
    bad: Option<usize>,
    /// Numbers of the receives, in order.
    receives: Vec<u64>,
    /// What consumes them, in order.
    messages: Vec<PlannedMessage>,
}

#[derive(Clone, Copy, Debug)]
struct PlannedMessage {
    kind: WorkKind,
    len: u32,
    immediate: Option<u32>,
    invalidated: Option<u32>,
}

struct PlanRun {
    sim: Sim,
    expected: [Expected; 2],
}

/// Carries a plan out and compares the end with the oracle's.
///
/// # Errors
/// What is wrong, for people.
pub fn run(plan: &Plan) -> Result<(), String> {
    let mut run = PlanRun::new(plan);
    run.sim.start_trace();
    for op in &plan.ops {
        run.apply(op);
    }
    for side in [A, B] {
        while run.expected[side].receives.len() < run.expected[side].messages.len() {
            run.post_receive(side);
        }
    }
    if !run.sim.drive_bounded(20000) {
        let t = run.sim.trace();
        let l: Vec<_> = t.lines().collect();
        for x in &l[..120.min(l.len())] {
            eprintln!("{x}");
        }
        eprintln!("....");
        for x in &l[l.len() - 60..] {
            eprintln!("{x}");
        }
        return Err(format!("still busy after {MANY_STEPS} steps, at {} us", run.sim.now / MICROSECOND));
    }
    run.judge()
}

impl PlanRun {
    fn new(plan: &Plan) -> Self {
        let setup = Setup {
            mtu: plan.mtu,
            psn: plan.psn,
            max_rd_atomic: plan.max_rd_atomic.max(1),
            max_dest_rd_atomic: plan.max_rd_atomic.max(1),
            min_rnr_timer: 1,
            signal_all: false,
            memory: usize::try_from(5 * AREA).unwrap_or(0) + 2 * Setup::GUARD,
            runs: plan.seed % 2 == 1,
            selective: plan.selective,
            ..Setup::default()
        };
        let mut sim = Sim::with(&setup, plan.conditions, plan.seed);
        let mut expected = [Expected::default(), Expected::default()];
        for (end, expected) in sim.ends.iter_mut().zip(&mut expected) {
            end.qp.split_short_writes(plan.seed / 2 % 2 == 1);
            end.memory.fill(u8::try_from(end.qpn.get() & 0xff).unwrap_or(0));
            for i in 0..32 {
                let addr = end.addr(0);
                end.memory.register(Region { rkey: SPARE_KEY + i, addr, len: 0, access: Access::empty() });
            }
            expected.memory = end.memory.bytes().to_vec();
        }
        Self { sim, expected }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Post { side, kind, len, at, signaled, fence } => {
                self.post(usize::from(side % 2), kind, len, u64::from(at), signaled, fence);
            }
            Op::Receive { side } => self.post_receive(usize::from(side % 2)),
            Op::Wait { micros } => self.sim.drive_for(u64::from(micros % 1000) * MICROSECOND),
            Op::Loss { pipe, ppm } => {
                self.sim.pipes[usize::from(pipe % 2)].conditions.loss = ppm.min(200_000)
            }
        }
    }

    fn post_receive(&mut self, side: usize) {
        let slot = self.expected[side].receives.len();
        if slot < MAX_POSTS {
            let offset = RECEIVED + slot as u64 * u64::from(MAX_LEN);
            let wr_id = self.sim.ends[side].post_receive(offset, u64::from(MAX_LEN));
            self.expected[side].receives.push(wr_id);
        }
    }

    fn post(&mut self, side: usize, kind: OpKind, len: u16, at: u64, signaled: bool, fence: bool) {
        let slot = self.expected[side].sends.len();
        if slot >= MAX_POSTS {
            return;
        }
        let peer = 1 - side;
        let len = if kind.is_atomic() { 8 } else { len % (MAX_LEN + 1) };
        let place = at % (AREA - u64::from(MAX_LEN));
        let (word, result) = (WORDS + at % WORD_COUNT * 8, RESULT + slot as u64 * u64::from(MAX_LEN));
        let value = at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let number = u32::try_from(slot).unwrap_or(0);
        let there = |offset| self.sim.ends[peer].remote(offset);
        let now = read_word(&self.expected[peer].memory, word);
        // Every other compare-and-swap expects what it will find.
        let compare = if at & 8 == 0 { now } else { !now };
        let (op, local) = match kind {
            OpKind::Send => (Operation::Send, OUT + place),
            OpKind::SendImmediate => (Operation::SendImmediate(number), OUT + place),
            OpKind::SendInvalidate => (Operation::SendInvalidate(SPARE_KEY + number), OUT + place),
            OpKind::Write => (Operation::Write(there(IN + place)), OUT + place / 2),
            OpKind::WriteImmediate => (Operation::WriteImmediate(there(IN + place), number), OUT + place / 2),
            OpKind::Read => (Operation::Read(there(OUT + place)), result),
            OpKind::CompareSwap => {
                (Operation::CompareSwap { remote: there(word), compare, swap: value }, result)
            }
            OpKind::FetchAdd => (Operation::FetchAdd { remote: there(word), add: value }, result),
            OpKind::AtomicWrite => (Operation::AtomicWrite(there(word)), OUT + place),
            OpKind::Flush => {
                let feth = Feth::new(Feth::GLOBAL, u8::try_from(at % 2).unwrap_or(0));
                (Operation::Flush { remote: there(IN + place), len: u32::from(len), feth }, OUT)
            }
            OpKind::Bad => (Operation::Write(Remote { addr: 8, rkey: 0xbad }), OUT),
        };
        let len = match kind {
            OpKind::Bad => len.max(1),
            OpKind::Flush => 0,
            _ => len,
        };
        let request =
            WorkRequest { wr_id: 0, op, len: u32::from(len), signaled, solicited: false, fence, xrc_srq: 0 };
        // A connection that has failed takes requests and flushes them; a full queue cannot be: it
        // is deep enough.
        if let Ok(wr_id) = self.sim.ends[side].post_request(request, local) {
            self.expected[side].sends.push((wr_id, signaled));
            self.expect(side, kind, &request, local, slot);
        }
    }

    /// Carries the request out in the oracle's memory.
    fn expect(&mut self, side: usize, kind: OpKind, request: &WorkRequest, local: u64, slot: usize) {
        let peer = 1 - side;
        let len = u64::from(request.len);
        let [first, second] = &mut self.expected;
        let (own, other) = if side == A { (first, second) } else { (second, first) };
        if kind.consumes_receive() {
            let is_write = kind == OpKind::WriteImmediate;
            let received = RECEIVED + other.messages.len() as u64 * u64::from(MAX_LEN);
            other.messages.push(PlannedMessage {
                kind: if is_write { WorkKind::ReceiveWriteImmediate } else { WorkKind::Receive },
                len: request.len,
                immediate: match request.op {
                    Operation::SendImmediate(v) | Operation::WriteImmediate(_, v) => Some(v),
                    _ => None,
                },
                invalidated: match request.op {
                    Operation::SendInvalidate(key) => Some(key),
                    _ => None,
                },
            });
            if !is_write && other.messages.len() <= MAX_POSTS {
                copy(&own.memory, local, &mut other.memory, received, len);
            }
        }
        let base = self.sim.ends[peer].addr(0);
        match request.op {
            Operation::Write(_) if kind == OpKind::Bad => own.bad = own.bad.or(Some(slot)),
            Operation::Write(remote)
            | Operation::WriteImmediate(remote, _)
            | Operation::AtomicWrite(remote) => {
                copy(&own.memory, local, &mut other.memory, remote.addr - base, len);
            }
            Operation::Read(remote) => copy(&other.memory, remote.addr - base, &mut own.memory, local, len),
            Operation::CompareSwap { remote, compare, swap } => {
                let was = read_word(&other.memory, remote.addr - base);
                if was == compare {
                    write_word(&mut other.memory, remote.addr - base, swap);
                }
                write_word(&mut own.memory, local, was);
            }
            Operation::FetchAdd { remote, add } => {
                let was = read_word(&other.memory, remote.addr - base);
                write_word(&mut other.memory, remote.addr - base, was.wrapping_add(add));
                write_word(&mut own.memory, local, was);
            }
            _ => {}
        }
    }

    fn judge(&self) -> Result<(), String> {
        let failed = self.sim.ends.iter().any(|end| end.qp.state() == QpState::Error);
        let bad = self.expected.iter().any(|e| e.bad.is_some());
        let lossy = self.sim.pipes.iter().any(|p| p.counters().lost + p.counters().corrupted > 0);
        if failed && !bad && !lossy {
            let how = self.sim.ends.iter().map(|end| (end.sends(), end.events.clone())).collect::<Vec<_>>();
            return Err(format!(
                "the connection failed although nothing was lost and nothing was wrong: {how:?}"
            ));
        }
        if bad && !failed {
            return Err("a request that must be refused was not".to_owned());
        }
        for (name, end, expected) in
            [("A", &self.sim.ends[A], &self.expected[A]), ("B", &self.sim.ends[B], &self.expected[B])]
        {
            let judged = if failed { judge_failed(end, expected) } else { judge_done(end, expected) };
            judged.map_err(|why| format!("{name}: {why}"))?;
            check_untouched(end, expected).map_err(|why| format!("{name}: {why}"))?;
        }
        Ok(())
    }
}

/// All went well: everything signalled completed once, in order; memory is the oracle's.
fn judge_done(end: &Endpoint, expected: &Expected) -> Result<(), String> {
    let want: Vec<_> = expected.sends.iter().filter(|s| s.1).map(|s| (s.0, Status::Success)).collect();
    let got = end.sends();
    if got != want {
        return Err(format!("send completions {got:?}, not {want:?}"));
    }
    let received = end.received();
    if received.len() != expected.messages.len().min(MAX_POSTS) {
        return Err(format!("{} receives completed, not {}", received.len(), expected.messages.len()));
    }
    for ((got, id), message) in received.iter().zip(&expected.receives).zip(&expected.messages) {
        let PlannedMessage { kind, len: byte_len, immediate, invalidated } = *message;
        let status = Status::Success;
        let want = Completion { status, byte_len, immediate, invalidated, ..Completion::flushed(*id, kind) };
        if *got != want {
            return Err(format!("{got:?}, not {want:?}"));
        }
    }
    let bytes = end.memory.bytes();
    match bytes.iter().zip(&expected.memory).position(|(a, b)| a != b) {
        Some(at) => Err(format!("byte {at:#x} is {:#x}, not {:#x}", bytes[at], expected.memory[at])),
        None => Ok(()),
    }
}

/// The connection broke: some requests succeeded, at most one says why it did not, the rest was
/// flushed, all once.
fn judge_failed(end: &Endpoint, expected: &Expected) -> Result<(), String> {
    let got = end.sends();
    let mut left = expected.sends.iter().enumerate();
    let mut broken = false;
    for (id, status) in &got {
        // Those that were skipped succeeded in silence, which only unsignalled ones may, and only
        // before the failure.
        let found = loop {
            match left.next() {
                Some((place, (next, _))) if next == id => break Some(place),
                Some((_, (_, false))) if !broken => {}
                _ => break None,
            }
        };
        let Some(place) = found else { return Err(format!("completion of {id} is out of order: {got:?}")) };
        let expected_status = match status {
            Status::Success => !broken && expected.bad.is_none_or(|bad| place < bad),
            Status::Flushed => true,
            Status::RemoteAccess => !broken && expected.bad == Some(place),
            Status::RetryExceeded => !broken,
            _ => false,
        };
        if !expected_status {
            return Err(format!("{id} ended as {status:?}: {got:?}"));
        }
        broken |= *status != Status::Success;
    }
    // What is left must be unsignalled; and if this end failed, nothing may be left behind the
    // failure.
    if end.qp.state() == QpState::Error && (left.any(|(_, (_, signaled))| *signaled || broken)) {
        return Err(format!("not every request was reported: {got:?} of {:?}", expected.sends));
    }
    let ids: Vec<u64> = end.received().iter().map(|c| c.wr_id).collect();
    if !expected.receives.starts_with(&ids) || (end.qp.state() == QpState::Error && ids != expected.receives)
    {
        return Err(format!("receives {ids:?} of {:?}", expected.receives));
    }
    Ok(())
}

/// Memory that no operation of a plan writes (`OUT` and the guard zones) is unchanged, whatever
/// else failed.
fn check_untouched(end: &Endpoint, expected: &Expected) -> Result<(), String> {
    let bytes = end.memory.bytes();
    let guard = Setup::GUARD;
    let out = guard + usize::try_from(OUT + AREA).unwrap_or(0);
    let last = bytes.len() - guard;
    if bytes[..out] != expected.memory[..out] || bytes[last..] != expected.memory[last..] {
        return Err("memory outside the written areas changed".to_owned());
    }
    Ok(())
}

/// A place in the region as a place in the memory.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX / 2) + Setup::GUARD
}

fn copy(from: &[u8], from_at: u64, to: &mut [u8], to_at: u64, len: u64) {
    let len = usize::try_from(len).unwrap_or(0);
    to[index(to_at)..][..len].copy_from_slice(&from[index(from_at)..][..len]);
}

fn read_word(memory: &[u8], at: u64) -> u64 {
    memory[index(at)..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn write_word(memory: &mut [u8], at: u64, value: u64) {
    memory[index(at)..][..8].copy_from_slice(&value.to_le_bytes());
}
