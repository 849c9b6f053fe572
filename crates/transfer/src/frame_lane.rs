//! Frames as SENDs on the first lane: a stream of bytes in registered slots. A frame that is sent
//! after a WRITE of the same lane arrives after its bytes.

use std::collections::VecDeque;

use nobounce::{Connection, Device, Region, Status};
use nobounce_nic::work::{RecvRequest, Sge, WorkCompletion, WorkKind};

use crate::frame::{Frame, Malformed};
use crate::wire::Wire;

/// Bytes of a slot.
pub(crate) const SLOT: usize = 4096;
/// Receives that are posted. A peer that sends more waits (RNR).
const RECEIVES: usize = 32;
/// SENDs in flight: fewer than receives, so that a peer that is late by some does not refuse any.
pub(crate) const SENDS: usize = 8;
/// Marks the numbers of receives.
const RECEIVE: u64 = 1 << 63;

/// Frames to and from one peer.
#[derive(Debug)]
pub(crate) struct FrameLane {
    /// Slots of receives, then those of SENDs.
    region: Region,
    receives: usize,
    /// Slots of SENDs, and the bytes in them, the oldest first.
    in_flight: VecDeque<(usize, usize)>,
    free: Vec<usize>,
    stream: Wire,
}

impl FrameLane {
    /// Posts the receives: before the peer knows of this end.
    pub(crate) fn new(device: &Device, connection: &Connection) -> Result<Self, String> {
        let qp = connection.qp(0);
        let receives = RECEIVES.min(qp.limits().recv_depth);
        let region = device.register((receives + SENDS) * SLOT).map_err(|error| error.to_string())?;
        let free = (receives..receives + SENDS).collect();
        let lane = Self { region, receives, in_flight: VecDeque::new(), free, stream: Wire::default() };
        (0..receives).try_for_each(|slot| lane.post_receive(connection, slot))?;
        Ok(lane)
    }

    fn sge(&self, slot: usize, len: usize) -> Sge {
        // At most SLOT.
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        Sge { addr: self.region.addr() + (slot * SLOT) as u64, len, lkey: self.region.mr().lkey() }
    }

    fn post_receive(&self, connection: &Connection, slot: usize) -> Result<(), String> {
        let sges = [self.sge(slot, SLOT)];
        let request = RecvRequest { wr_id: RECEIVE | slot as u64, sges: &sges };
        connection.qp(0).post_recv(&request).map_err(|error| error.to_string())
    }

    pub(crate) fn push(&mut self, frame: &Frame) {
        self.stream.push(frame);
    }

    /// Bytes that were ever pushed, and those of them that the peer has acknowledged.
    pub(crate) fn progress(&self) -> (u64, u64) {
        let (pushed, sent) = self.stream.progress();
        let in_flight: usize = self.in_flight.iter().map(|(_, bytes)| bytes).sum();
        (pushed, sent - in_flight as u64)
    }

    /// Bytes that wait for a slot.
    pub(crate) fn unsent(&self) -> usize {
        self.stream.unsent().len()
    }

    /// Fills a slot with the next bytes, if there are any and a slot is free: what to send.
    pub(crate) fn next_send(&mut self) -> Result<Option<Sge>, String> {
        let len = self.unsent().min(SLOT);
        if len == 0 {
            return Ok(None);
        }
        let Some(slot) = self.free.pop() else { return Ok(None) };
        let bytes = &self.stream.unsent()[..len];
        self.region.write_at(slot * SLOT, bytes).map_err(|error| error.to_string())?;
        self.stream.note_sent(len);
        self.in_flight.push_back((slot, len));
        Ok(Some(self.sge(slot, len)))
    }

    /// The oldest SEND has been acknowledged.
    pub(crate) fn end_send(&mut self) {
        self.free.extend(self.in_flight.pop_front().map(|(slot, _)| slot));
    }

    /// Whether it is the completion of a receive.
    pub(crate) fn is_receive(work: &WorkCompletion) -> bool {
        work.wr_id & RECEIVE != 0
    }

    /// Takes the bytes of a receive, and posts it again. One that was flushed has none.
    ///
    /// # Errors
    /// The peer sent something else than frames.
    pub(crate) fn receive(&mut self, connection: &Connection, work: &WorkCompletion) -> Result<(), String> {
        if work.status == Status::Flushed {
            return Ok(());
        }
        if work.status != Status::Success || work.kind != WorkKind::Receive {
            return Err(format!("no frame: {:?}, {:?}", work.kind, work.status));
        }
        let slot = usize::try_from(work.wr_id & !RECEIVE).unwrap_or(usize::MAX);
        let len = usize::try_from(work.byte_len).unwrap_or(usize::MAX);
        if slot >= self.receives || len > SLOT {
            return Err("a receive that was not posted".to_owned());
        }
        let mut bytes = [0; SLOT];
        let bytes = &mut bytes[..len];
        self.region.read_at(slot * SLOT, bytes).map_err(|error| error.to_string())?;
        self.stream.receive(bytes);
        // A queue pair that has failed takes none; the peer says why on the side channel.
        let _ = self.post_receive(connection, slot);
        Ok(())
    }

    /// The next frame that is complete.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, Malformed> {
        self.stream.next_frame()
    }
}
