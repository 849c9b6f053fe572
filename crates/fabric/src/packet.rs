//! Packets on their way: headers and lengths, no payload.

use nobounce_protocol::wire::{CongestionNotification, Header, ICRC_LEN, SelectiveAck};

use crate::units::index;

/// Bytes around the base transport header: UDP 8, IPv4 20, Ethernet 14, its checksum 4, preamble
/// and gap 20.
const FRAMING: u32 = 66;

/// What a packet is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Of a queue pair.
    Transport(Header),
    SelectiveAck(SelectiveAck),
    CongestionNotification,
}

/// A packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    pub(crate) kind: Kind,
    pub(crate) source: u32,
    pub(crate) destination: u32,
    /// The receiving end of the connection, and which connection of that number it was.
    pub(crate) end: u32,
    pub(crate) generation: u32,
    /// UDP source port.
    pub(crate) port: u16,
    /// The IP header says congestion experienced.
    pub(crate) marked: bool,
    /// Payload bytes.
    pub(crate) payload: u32,
}

impl Packet {
    /// Bytes that it occupies a link for.
    pub(crate) fn wire_len(&self) -> u32 {
        let transport = match &self.kind {
            Kind::Transport(header) => index(header.len() + ICRC_LEN) + u32::from(header.pad),
            Kind::SelectiveAck(ack) => index(ack.len()),
            Kind::CongestionNotification => index(CongestionNotification::LEN),
        };
        transport + self.payload + FRAMING
    }
}

/// The packets that are under way.
#[derive(Debug, Default)]
pub(crate) struct Packets {
    slots: Vec<Packet>,
    free: Vec<u32>,
}

impl Packets {
    pub(crate) fn insert(&mut self, packet: Packet) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = packet;
            return slot;
        }
        self.slots.push(packet);
        index(self.slots.len() - 1)
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> &mut Packet {
        &mut self.slots[slot as usize]
    }

    /// Takes a packet out; its number may be used again.
    pub(crate) fn take(&mut self, slot: u32) -> Packet {
        self.free.push(slot);
        self.slots[slot as usize]
    }
}
