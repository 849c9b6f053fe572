//! What the scenarios share.

use nobounce_protocol::qp::{Operation, Status};
use nobounce_protocol::sim::{A, B, Conditions, Fate, Memory, Setup, Sim};
use nobounce_protocol::wire::{Header, Opcode};

/// One connection over a perfect network, with bytes that tell their place on both sides.
pub(crate) fn pair(setup: &Setup) -> Sim {
    over(setup, Conditions::default(), 1)
}

pub(crate) fn over(setup: &Setup, conditions: Conditions, seed: u64) -> Sim {
    let mut sim = Sim::with(setup, conditions, seed);
    sim.ends[A].memory.fill(0x00);
    sim.ends[B].memory.fill(0xff);
    sim
}

pub(crate) const SUCCESS: Status = Status::Success;

/// Where A's bytes are, where B's.
pub(crate) const HERE: u64 = 0;
pub(crate) const THERE: u64 = 160 << 10;

/// A posts a WRITE of `len` bytes.
pub(crate) fn write(sim: &mut Sim, len: u32) -> u64 {
    let remote = sim.ends[B].remote(THERE);
    sim.ends[A].post(Operation::Write(remote), HERE, len).unwrap()
}

/// A posts a READ of `len` bytes.
pub(crate) fn read(sim: &mut Sim, len: u32) -> u64 {
    let remote = sim.ends[B].remote(THERE);
    sim.ends[A].post(Operation::Read(remote), HERE, len).unwrap()
}

/// A adds 1 to the first word of B's `THERE`.
pub(crate) fn add(sim: &mut Sim) -> u64 {
    let remote = sim.ends[B].remote(THERE);
    sim.ends[A].post(Operation::FetchAdd { remote, add: 1 }, HERE, 8).unwrap()
}

/// A sends `len` bytes.
pub(crate) fn send(sim: &mut Sim, len: u32) -> u64 {
    sim.ends[A].post(Operation::Send, HERE, len).unwrap()
}

pub(crate) fn bytes(memory: &Memory, addr: u64, len: u32) -> Vec<u8> {
    memory.read(addr, u64::from(len)).unwrap().to_vec()
}

/// A's bytes at `HERE` and B's at `THERE` are the same.
pub(crate) fn same(sim: &Sim, len: u32) -> bool {
    let (a, b) = (&sim.ends[A], &sim.ends[B]);
    bytes(&a.memory, a.addr(HERE), len) == bytes(&b.memory, b.addr(THERE), len)
}

pub(crate) fn word(memory: &Memory, addr: u64) -> u64 {
    u64::from_le_bytes(memory.read(addr, 8).unwrap().try_into().unwrap())
}

pub(crate) fn set_word(memory: &mut Memory, addr: u64, value: u64) {
    memory.at(addr, 8).unwrap().copy_from_slice(&value.to_le_bytes());
}

/// How A's send requests ended.
pub(crate) fn ended(sim: &Sim) -> Vec<Status> {
    sim.ends[A].sends().into_iter().map(|(_, status)| status).collect()
}

/// Everything but `[addr, addr + len)` is as it was.
pub(crate) fn nothing_else_changed(before: &Memory, after: &Memory, addr: u64, len: u32) {
    let start = usize::try_from(addr - Memory::BASE).unwrap();
    let end = start + usize::try_from(len).unwrap();
    assert_eq!(before.bytes()[..start], after.bytes()[..start], "before the target");
    assert_eq!(before.bytes()[end..], after.bytes()[end..], "behind the target");
}

/// Loses those packets of a pipe whose number among the packets of this kind is in `which`.
pub(crate) fn lose(kind: fn(&Header) -> bool, which: &'static [u64]) -> impl FnMut(u64, &Header) -> Fate {
    let mut seen = 0;
    move |_, header| {
        if !kind(header) {
            return Fate::Pass;
        }
        seen += 1;
        if which.contains(&(seen - 1)) { Fate::Drop } else { Fate::Pass }
    }
}

pub(crate) fn any(_: &Header) -> bool {
    true
}

pub(crate) fn is_nak(header: &Header) -> bool {
    use nobounce_protocol::wire::Syndrome;
    header.opcode == Opcode::Ack && !matches!(header.aeth.syndrome, Syndrome::Ack(_))
}

pub(crate) fn is_ack(header: &Header) -> bool {
    header.opcode == Opcode::Ack && !is_nak(header)
}
