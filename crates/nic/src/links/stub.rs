//! A link that is only a list in memory: for the tests of the links that wrap others.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

use nobounce_protocol::wire::ROCE_PORT;
use nobounce_protocol::wire::icrc::IcrcCheck;

use super::{Arrival, Capabilities, Link, RxDatagram, SOURCE_PORTS, TxBatch, TxPacket};

pub(super) const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
pub(super) const THERE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// What was sent through a [`StubLink`]: each packet with its bytes.
pub(super) type Log = Arc<Mutex<Vec<(TxPacket, Vec<u8>)>>>;

/// Stub: keeps what is sent, receives nothing but what the test puts in `inbox`.
#[derive(Debug)]
pub(super) struct StubLink {
    pub(super) caps: Capabilities,
    pub(super) log: Log,
    pub(super) inbox: Vec<Vec<u8>>,
    /// Where that comes from.
    pub(super) from: IpAddr,
}

impl StubLink {
    pub(super) fn new() -> (Self, Log) {
        let caps = Capabilities {
            local: HERE,
            source_ports: [ROCE_PORT; SOURCE_PORTS],
            max_segments: 64,
            receive_offload: true,
            max_path_mtu: 4096,
            usual_hops: 64,
            sealed: false,
            host_addresses: &[],
        };
        let log = Log::default();
        (Self { caps, log: Arc::clone(&log), inbox: Vec::new(), from: THERE }, log)
    }
}

impl Link for StubLink {
    fn local(&self) -> IpAddr {
        self.caps.local
    }

    fn slot(&self) -> u8 {
        0
    }

    fn capabilities(&self) -> Capabilities {
        self.caps
    }

    fn send(&mut self, batch: &mut TxBatch) {
        let mut log = self.log.lock().unwrap();
        log.extend(batch.packets().iter().map(|p| (*p, batch.bytes(p).to_vec())));
        batch.clear();
    }

    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        let arrived = std::mem::take(&mut self.inbox);
        for bytes in &arrived {
            sink(&RxDatagram {
                arrival: Arrival::Wire,
                group: None,
                src: self.from,
                src_port: ROCE_PORT,
                bytes,
                ip_id: 0,
                has_icrc: true,
                whole: None,
                packets: 1,
                marked: false,
            });
        }
        arrived.len()
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        Vec::new()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// Puts a packet into the batch whose payload holds `number`.
pub(super) fn numbered(batch: &mut TxBatch, number: u32, len: usize) -> bool {
    batch.put(THERE, 0, len, |room| {
        room.fill(0);
        room[12..16].copy_from_slice(&number.to_be_bytes());
    })
}

/// Reads back what [`numbered`] wrote.
pub(super) fn number_of(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[12..16].try_into().unwrap())
}

/// Whether the packet's ICRC is right for the place it was sent at.
pub(super) fn is_closed(packet: &TxPacket, bytes: &[u8]) -> bool {
    packet.flow(HERE).verify(packet.ip_id, bytes) == IcrcCheck::Valid { ip_id: Some(packet.ip_id) }
}
