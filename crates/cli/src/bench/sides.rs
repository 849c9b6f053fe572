//! The ends of cases whose messages the NIC moves, and which kind of end a case has.

use anyhow::ensure;
use nobounce::Connection;

use super::case::{CaseKind, Op, Place};
use super::drive::CaseEnd;
use super::exchange::{Work, exchange_regions};
use super::gpu;
use super::gpu_naive::Naive;
use super::gpu_visible::Visible;
use super::ring::{GUARD_BYTE, Ring};
use super::round::Round;
use super::side::{Side, Timed, path_of};

/// Registers this end's memory, receives the other end's descriptor, and is then ready for rounds.
/// `refuse` gets the reason if there is no memory.
pub(super) fn open<'a>(
    connection: &'a Connection,
    work: Work,
    asks: bool,
    refuse: impl FnOnce(&anyhow::Error),
) -> anyhow::Result<Box<dyn Side + 'a>> {
    if work.kind == CaseKind::GpuVisible {
        let visible = Visible::new(connection, work, asks).inspect_err(refuse)?;
        return Ok(Box::new(visible.connect()?));
    }
    let stamped = connection.lanes() == 1;
    let ring = Ring::new(connection.device(), work.place, work.size, work.seed, stamped);
    if work.place == Place::Naive {
        let naive = ring.and_then(|ring| Naive::new(connection, ring, work, asks)).inspect_err(refuse)?;
        return Ok(Box::new(naive.connect()?));
    }
    let ring = ring.inspect_err(refuse)?;
    let peer = exchange_regions(connection, &ring.region)?;
    // Whose memory the other end accesses: the serving end's, and the requesting end's if the
    // serving end writes back (bidirectional, or a WRITE ping-pong).
    let (served, asking) =
        if asks { (peer.closed, ring.region.is_closed()) } else { (ring.region.is_closed(), peer.closed) };
    let answers =
        work.kind == CaseKind::Bidirectional || (work.kind == CaseKind::Latency && work.op == Op::Write);
    ensure!(work.op == Op::Send || !(served || answers && asking), nobounce::PostError::RemoteClosed);
    Ok(Box::new(CaseEnd { connection, ring, peer, work, asks }))
}

impl CaseEnd<'_> {
    /// Waiting on memory uses one slot, and its last byte to count.
    fn is_on_memory(&self) -> bool {
        self.work.wait.is_on_memory() && self.work.kind == CaseKind::Latency
    }
}

impl Side for CaseEnd<'_> {
    fn prepare(&self, round: Round) -> anyhow::Result<()> {
        self.ring.prepare(round)
    }

    fn timed(&self, Round { messages, .. }: Round) -> anyhow::Result<Timed> {
        match self.work.kind {
            CaseKind::Latency | CaseKind::GpuVisible => {
                let is_half = matches!(self.work.op, Op::Write | Op::Send);
                Ok(Timed::of_latencies(self.latency(messages)?, is_half))
            }
            CaseKind::Bidirectional => {
                let seconds = self.stream(messages, messages)?;
                Ok(Timed { seconds, messages: 2 * messages, latencies: Vec::new() })
            }
            CaseKind::Bandwidth | CaseKind::Rate => {
                let (sends, receives) = if self.asks { (messages, 0) } else { (0, messages) };
                Ok(Timed { seconds: self.stream(sends, receives)?, messages, latencies: Vec::new() })
            }
        }
    }

    fn check(&self, round: Round) -> Result<(), String> {
        let (Work { op, kind, .. }, messages) = (self.work, round.messages);
        let both = kind == CaseKind::Bidirectional;
        let arrived = match op {
            Op::Atomic if self.asks && round.checked => return check_answers(self, messages),
            Op::Atomic => return check_counter(self, messages),
            Op::Read if self.asks || both => messages,
            Op::Read => 0,
            Op::Write | Op::Send if !self.asks || both || kind == CaseKind::Latency => messages,
            Op::Write | Op::Send => 0,
        };
        let on_memory = self.is_on_memory();
        let numbered = op != Op::Read && !on_memory;
        self.ring.check(round, if on_memory { arrived.min(1) } else { arrived }, on_memory, numbered)
    }

    fn checkable(&self) -> u64 {
        if self.is_on_memory() { 1 } else { self.ring.checkable() }
    }

    fn path(&self) -> String {
        path_of(&self.ring.region)
    }

    fn memory(&self) -> &'static str {
        gpu::memory_name(self.work.place)
    }
}

/// Each response is a distinct number: the counter's value before one of the increments.
fn check_answers(end: &CaseEnd<'_>, messages: u64) -> Result<(), String> {
    let answer =
        |message| end.ring.region.read_u64(end.ring.target(message)).map_err(|error| error.to_string());
    let mut found = (0..messages).map(answer).collect::<Result<Vec<_>, _>>()?;
    // Over several queue pairs they come in any order.
    found.sort_unstable();
    let first = u64::from_ne_bytes([GUARD_BYTE; 8]);
    match (0..messages).zip(found).find(|(at, found)| *found != first.wrapping_add(*at)) {
        None => Ok(()),
        Some((at, found)) => Err(format!(
            "the results of {messages} increments are not distinct: found {found:#x}, expected {:#x}",
            first.wrapping_add(at)
        )),
    }
}

/// The counter started as a word of guard bytes and was incremented once per message.
fn check_counter(end: &CaseEnd<'_>, messages: u64) -> Result<(), String> {
    if end.asks {
        return Ok(());
    }
    let found = end.ring.region.read_u64(end.ring.target(0)).map_err(|error| error.to_string())?;
    let expected = u64::from_ne_bytes([GUARD_BYTE; 8]).wrapping_add(messages);
    if found == expected {
        Ok(())
    } else {
        Err(format!("the counter is {found:#x}, expected {expected:#x} after {messages} increments"))
    }
}
