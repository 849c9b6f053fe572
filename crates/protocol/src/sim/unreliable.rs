//! Messages of the unreliable services over a bad network, and the oracle that says what may have
//! become of them.
//!
//! The operations are those of [`plan`](super::plan). Each side's region is divided into areas of
//! slots, one for each message. So every byte reveals which message wrote it:
//!
//! | area | read | written |
//! |---|---|---|
//! | `OUT` | by this side's messages | never |
//! | `IN` | - | by the peer's WRITEs, a slot each |
//! | `RECEIVED` | - | by the peer's SENDs, a slot for each receive |

use super::plan::{Op, OpKind, Plan};
use super::{A, B, Endpoint, Memory, Setup, Sim};
use crate::qp::{Completion, GRH_LEN, Operation, PostError, QpState, Service, Status, WorkKind, WorkRequest};
use crate::timing::MICROSECOND;
use crate::wire::Feth;

const SLOT: u64 = 1536;
const SLOTS: usize = 16;
const AREA: u64 = SLOT * SLOTS as u64;
const OUT: u64 = 0;
const IN: u64 = AREA;
const RECEIVED: u64 = 2 * AREA;
/// The longest message, with room for the header of a datagram in its slot.
const MAX_LEN: u32 = 1400;
const MANY_STEPS: u64 = 400_000;

/// A message that was posted.
#[derive(Clone, Copy, Debug)]
struct SentMessage {
    wr_id: u64,
    signaled: bool,
    op: Operation,
    local: u64,
    len: u32,
}

impl SentMessage {
    /// The completion of its receive, without the receive's own number and the source; `None` if it
    /// takes none.
    fn told(&self) -> Option<(WorkKind, u32, Option<u32>)> {
        match self.op {
            Operation::Send => Some((WorkKind::Receive, self.len, None)),
            Operation::SendImmediate(value) => Some((WorkKind::Receive, self.len, Some(value))),
            Operation::WriteImmediate(_, value) => {
                Some((WorkKind::ReceiveWriteImmediate, self.len, Some(value)))
            }
            _ => None,
        }
    }
}

#[derive(Debug, Default)]
struct Side {
    messages: Vec<SentMessage>,
    /// Numbers of the receives, in order.
    receives: Vec<u64>,
    before: Vec<u8>,
}

struct UnreliableRun {
    service: Service,
    mtu: u32,
    sim: Sim,
    sides: [Side; 2],
}

/// Carries a plan out with queue pairs of an unreliable service, and says what cannot be.
///
/// # Errors
/// What is wrong, for people.
pub fn run(plan: &Plan, service: Service) -> Result<(), String> {
    let memory = usize::try_from(3 * AREA).unwrap_or(0) + 2 * Setup::GUARD;
    let setup =
        Setup { service, mtu: plan.mtu, psn: plan.psn, signal_all: false, memory, ..Setup::default() };
    let mut sim = Sim::with(&setup, plan.conditions, plan.seed);
    let mut sides = [Side::default(), Side::default()];
    for (end, side) in sim.ends.iter_mut().zip(&mut sides) {
        end.memory.fill(u8::try_from(end.qpn.get() & 0xff).unwrap_or(0));
        side.before = end.memory.bytes().to_vec();
    }
    let mut run = UnreliableRun { service, mtu: plan.mtu.bytes(), sim, sides };
    for op in &plan.ops {
        run.apply(op)?;
    }
    if !run.sim.drive_bounded(MANY_STEPS) {
        return Err(format!("still busy after {MANY_STEPS} steps, at {} us", run.sim.now / MICROSECOND));
    }
    run.judge(A, B).map_err(|why| format!("{service:?} from A to B: {why}"))?;
    run.judge(B, A).map_err(|why| format!("{service:?} from B to A: {why}"))
}

impl UnreliableRun {
    fn apply(&mut self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Post { side, kind, len, at, signaled, fence } => {
                return self.post(
                    usize::from(side % 2),
                    kind,
                    u32::from(len),
                    u64::from(at),
                    signaled,
                    fence,
                );
            }
            Op::Receive { side } => {
                let side = usize::from(side % 2);
                let slot = self.sides[side].receives.len();
                if slot < SLOTS {
                    let wr_id = self.sim.ends[side].post_receive(RECEIVED + slot as u64 * SLOT, SLOT);
                    self.sides[side].receives.push(wr_id);
                }
            }
            Op::Wait { micros } => self.sim.drive_for(u64::from(micros % 1000) * MICROSECOND),
            Op::Loss { pipe, ppm } => {
                self.sim.pipes[usize::from(pipe % 2)].conditions.loss = ppm.min(200_000);
            }
        }
        Ok(())
    }

    fn post(
        &mut self,
        side: usize,
        kind: OpKind,
        len: u32,
        at: u64,
        signaled: bool,
        fence: bool,
    ) -> Result<(), String> {
        let slot = self.sides[side].messages.len();
        if slot >= SLOTS {
            return Ok(());
        }
        let most = if self.service == Service::Ud { MAX_LEN.min(self.mtu) } else { MAX_LEN };
        let len = len % (most + 1);
        let remote = self.sim.ends[1 - side].remote(IN + slot as u64 * SLOT);
        let number = u32::try_from(slot).unwrap_or(0);
        let op = match kind {
            OpKind::Send | OpKind::Bad => Operation::Send,
            OpKind::SendImmediate => Operation::SendImmediate(number),
            OpKind::SendInvalidate => Operation::SendInvalidate(number),
            OpKind::Write => Operation::Write(remote),
            OpKind::WriteImmediate => Operation::WriteImmediate(remote, number),
            OpKind::Read => Operation::Read(remote),
            OpKind::CompareSwap => Operation::CompareSwap { remote, compare: 0, swap: 1 },
            OpKind::FetchAdd => Operation::FetchAdd { remote, add: 1 },
            OpKind::AtomicWrite => Operation::AtomicWrite(remote),
            OpKind::Flush => Operation::Flush { remote, len: 8, feth: Feth::new(Feth::GLOBAL, Feth::RANGE) },
        };
        let len = if op.moves_word() { 8 } else { len };
        let local = OUT + at % (AREA - u64::from(MAX_LEN));
        let request = WorkRequest { wr_id: 0, op, len, signaled, solicited: false, fence, xrc_srq: 0 };
        match self.sim.ends[side].post_request(request, local) {
            Ok(wr_id) if op.is_offered(self.service) => {
                self.sides[side].messages.push(SentMessage { wr_id, signaled, op, local, len });
                Ok(())
            }
            Err(PostError::NotOffered { .. }) if !op.is_offered(self.service) => Ok(()),
            other => Err(format!("posting {op:?} ended as {other:?}")),
        }
    }

    /// What one side sent, and what the other has of it.
    fn judge(&self, from: usize, to: usize) -> Result<(), String> {
        let (sender, receiver) = (&self.sim.ends[from], &self.sim.ends[to]);
        if sender.qp.state() != QpState::Rts {
            return Err(format!("nothing was wrong, and yet it is in {:?}", sender.qp.state()));
        }
        let messages = &self.sides[from].messages;
        let want: Vec<_> =
            messages.iter().filter(|m| m.signaled).map(|m| (m.wr_id, Status::Success)).collect();
        if sender.sends() != want {
            return Err(format!("send completions {:?}, not {want:?}", sender.sends()));
        }
        let whole = self.judge_received(from, to)?;
        self.judge_writes(from, to, &whole)?;
        let counted = self.sim.pipes[from].counters();
        let pristine = counted.lost + counted.corrupted + counted.reordered + counted.duplicated == 0;
        let told = messages.iter().filter(|m| m.told().is_some()).count();
        let received = receiver.received().len();
        if pristine && receiver.qp.counters().out_of_buffer == 0 && received != told {
            return Err(format!("{received} of {told} messages arrived, although nothing happened to them"));
        }
        if received as u64 > told as u64 + counted.duplicated {
            return Err(format!("{received} messages arrived of {told}"));
        }
        Ok(())
    }

    /// Every receive holds a whole message: the next ones of a connection, any of datagrams. Which
    /// ones, in order.
    fn judge_received(&self, from: usize, to: usize) -> Result<Vec<usize>, String> {
        let (receiver, messages) = (&self.sim.ends[to], &self.sides[from].messages);
        let mut whole = Vec::new();
        for (slot, got) in receiver.received().iter().enumerate() {
            if self.sides[to].receives.get(slot) != Some(&got.wr_id) || got.status != Status::Success {
                return Err(format!("receive {slot} ended as {got:?}"));
            }
            let first = match self.service {
                Service::Ud => 0,
                _ => whole.last().map_or(0, |last| last + 1),
            };
            let found = (first..messages.len()).find(|i| self.is_told(&messages[*i], from, to, slot, got));
            whole.push(found.ok_or_else(|| format!("receive {slot} is no message sent (next): {got:?}"))?);
        }
        Ok(whole)
    }

    fn is_told(&self, message: &SentMessage, from: usize, to: usize, slot: usize, got: &Completion) -> bool {
        let head = if self.service == Service::Ud { GRH_LEN } else { 0 };
        let Some((kind, len, immediate)) = message.told() else { return false };
        let told =
            (got.kind, u64::from(got.byte_len), got.immediate) == (kind, u64::from(len) + head, immediate);
        let at = RECEIVED + slot as u64 * SLOT;
        let receiver = &self.sim.ends[to];
        let has_header = bytes(receiver, at, head).iter().all(|byte| *byte == Memory::GRH_BYTE);
        let placed = kind == WorkKind::ReceiveWriteImmediate
            || bytes(receiver, at + head, len.into())
                == bytes(&self.sim.ends[from], message.local, len.into());
        told && has_header && placed && got.source.is_some() == (self.service == Service::Ud)
    }

    /// Every packet of a WRITE arrived whole or not at all; a WRITE with a completion arrived
    /// whole. Nothing else changed.
    fn judge_writes(&self, from: usize, to: usize, whole: &[usize]) -> Result<(), String> {
        let (receiver, before) = (&self.sim.ends[to], &self.sides[to].before);
        let mut expected = before.clone();
        for (slot, message) in self.sides[from].messages.iter().enumerate() {
            let is_write = matches!(message.op, Operation::Write(_) | Operation::WriteImmediate(..));
            let mut done = 0;
            while is_write && done < message.len {
                let len = u64::from((message.len - done).min(self.mtu));
                let at = IN + slot as u64 * SLOT + u64::from(done);
                let sent = bytes(&self.sim.ends[from], message.local + u64::from(done), len);
                if bytes(receiver, at, len) == sent {
                    let start = usize::try_from(at).unwrap_or(0) + Setup::GUARD;
                    expected[start..start + sent.len()].copy_from_slice(sent);
                } else if whole.contains(&slot) {
                    return Err(format!("message {slot} was told, but is not whole at {done}"));
                }
                done += self.mtu;
            }
        }
        let received = usize::try_from(RECEIVED).unwrap_or(0) + Setup::GUARD;
        let end = received + usize::try_from(AREA).unwrap_or(0);
        let after = receiver.memory.bytes();
        if after[..received] != expected[..received] || after[end..] != expected[end..] {
            return Err("memory changed without a write, or by less than a packet".to_owned());
        }
        Ok(())
    }
}

fn bytes(end: &Endpoint, offset: u64, len: u64) -> &[u8] {
    end.memory.read(end.addr(offset), len).unwrap_or_default()
}
