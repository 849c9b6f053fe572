//! Queue pair 1: inbound and outbound management datagrams (MADs).
//!
//! Several devices of one address share queue pair 1. The device that receives a MAD determines its
//! target: a request belongs to the device that bound the service ID. Every other MAD belongs to
//! the slot in the communication ID. Without such a device, the receiving device replies on its
//! behalf.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use nobounce_protocol::cm::{
    Agent, CmConfig, CmMessage, CmRoute, CommId, Event, GSI_QKEY, GSI_QPN, MAD_LEN, Mad, refusal,
};
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{BTH_LEN, Deth, Header, ICRC_LEN, Opcode, Parsed, Psn, Qpn};

use crate::links::{Arrival, Link, MadOwner, RxDatagram, TxBatch, now_ns};
use crate::soft::engine::timer::Timer;
use crate::soft::engine::{Core, Engine};
use crate::soft::events::cm_channel::{CmNotice, Told};
use crate::soft::local::probe::Probe;
use crate::sync::notices::Notices;

/// Inbound MADs kept between receive and handling; further ones are dropped, and the peer
/// retransmits.
const MAX_INBOX: usize = 1024;
/// Bytes of a datagram's packet.
const PACKET: usize = BTH_LEN + 8 + MAD_LEN + ICRC_LEN;
/// Retry interval while the send buffer is full.
const RETRY_NS: Nanos = 1_000_000;
/// How long a request waits for a listener before it is rejected. Programs that close one listener
/// and open the next (as perftest does) may be between the two.
const GRACE_NS: Nanos = 100_000_000;
/// Poll interval for a listener meanwhile.
const LOOK_NS: Nanos = 5_000_000;
/// Requests that wait for a listener; further ones are rejected at once.
const MAX_WAITING: usize = 256;
/// Messages sent at once when the device closes; a socket buffer has room for more of them.
const LAST_WORDS_AT_ONCE: usize = 64;
/// Receive polls at that time, at most.
const MAX_LAST_LOOKS: usize = 8;
/// Notices kept for a user that does not fetch them: more than there can be communications.
const MAX_NOTICES: usize = 1 << 17;

/// A MAD as received.
#[derive(Debug)]
struct Inbound {
    src: IpAddr,
    src_port: u16,
    ip_id: u16,
    packet: Vec<u8>,
    mad: Mad,
    message: CmMessage,
}

/// Where events of a communication are reported.
#[derive(Clone, Debug)]
pub(crate) struct ServiceOwner {
    pub(crate) notices: Arc<Notices<CmNotice>>,
    pub(crate) tag: u64,
}

/// Queue pair 1 of a device.
#[derive(Debug, Default)]
pub(crate) struct Gsi {
    /// Work is pending: MADs arrived, or a timer fired.
    pub(crate) wanted: bool,
    inbox: Vec<Inbound>,
    /// Requests for a service without a listener, and their deadlines.
    waiting: Vec<(Nanos, Inbound)>,
    out: Vec<(IpAddr, Mad)>,
    psn: u32,
    /// The timer set last.
    armed: Option<Nanos>,
    pub(crate) agent: Option<Box<LocalAgent>>,
    /// Malformed, or with another Q_Key.
    pub(crate) malformed: u64,
}

/// The connection manager of this process on this device.
#[derive(Debug)]
pub(crate) struct LocalAgent {
    pub(crate) cm: Agent,
    pub(crate) owners: HashMap<CommId, ServiceOwner>,
    pub(crate) listeners: HashMap<u64, ServiceOwner>,
    /// Sockets that probe whether a peer listens, by peer.
    probes: HashMap<IpAddr, Probe>,
}

impl LocalAgent {
    pub(crate) fn new(config: CmConfig) -> Self {
        Self {
            cm: Agent::new(config),
            owners: HashMap::new(),
            listeners: HashMap::new(),
            probes: HashMap::new(),
        }
    }

    /// Delivers events to their channels.
    fn deliver(&mut self, local: IpAddr) {
        while let Some(event) = self.cm.poll_event() {
            let id = event.id();
            let owner = match &event {
                Event::Request { req, .. } => self.listeners.get(&req.service).cloned(),
                Event::SidrRequest { req, .. } => self.listeners.get(&req.service).cloned(),
                _ => self.owners.get(&id).cloned(),
            };
            let Some(owner) = owner else { continue };
            self.owners.entry(id).or_insert_with(|| owner.clone());
            let notice = CmNotice { tag: owner.tag, told: Told::Event { local, event } };
            owner.notices.push(notice, MAX_NOTICES);
        }
    }

    /// Probes the hosts of silent peers. A host that is up but has no such socket reports port
    /// unreachable (unless it has a device on another address), so the last retransmission need not
    /// time out.
    fn probe(&mut self) {
        let waiting = std::mem::take(&mut self.probes);
        for (peer, probe) in waiting {
            let silent = self.cm.waiting_for(peer);
            if silent.is_empty() {
                continue;
            }
            if probe.is_refused() {
                silent.into_iter().for_each(|id| self.cm.handle_refused(id));
                continue;
            }
            self.probes.insert(peer, probe);
        }
    }

    /// Starts to probe a peer that has not replied yet.
    pub(crate) fn watch(&mut self, local: IpAddr, peer: IpAddr) {
        if peer == local || self.probes.contains_key(&peer) {
            return; // the local socket exists
        }
        self.probes.extend(Probe::new(local, peer).ok().map(|probe| (peer, probe)));
    }
}

impl Gsi {
    /// Takes a packet to queue pair 1; false if it is not a connection-manager MAD.
    pub(crate) fn take(&mut self, datagram: &RxDatagram<'_>, header: &Header, payload: &[u8]) -> bool {
        // Handing it over to another device needs its ICRC.
        let valid = header.deth.qkey == GSI_QKEY && datagram.has_icrc;
        let parsed = valid.then(|| Mad::parse(payload)).flatten();
        let Some((kind, mad)) = parsed.filter(|_| header.opcode == Opcode::UdSendOnly) else {
            self.malformed += 1;
            return false;
        };
        if self.inbox.len() < MAX_INBOX {
            let message = CmMessage::read(kind, &mad);
            let RxDatagram { src, src_port, ip_id, bytes, .. } = *datagram;
            self.inbox.push(Inbound { src, src_port, ip_id, packet: bytes.to_vec(), mad, message });
            self.wanted = true;
        }
        true
    }

    /// Puts outbound MADs into the batch; returns whether the batch is full.
    fn fill(&mut self, tx: &mut TxBatch) -> bool {
        while let Some((to, mad)) = self.out.pop() {
            let psn = self.psn.wrapping_add(1);
            let header = Header {
                deth: Deth { qkey: GSI_QKEY, source: Qpn::new(GSI_QPN) },
                ..Header::new(Opcode::UdSendOnly, Qpn::new(GSI_QPN), Psn::new(psn))
            };
            let added = tx.put(to, 0, PACKET, |room| {
                let len = header.emit(room);
                room[len..len + MAD_LEN].copy_from_slice(mad.bytes());
            });
            if !added {
                self.out.push((to, mad));
                return true;
            }
            self.psn = psn;
        }
        false
    }
}

impl Core {
    /// A packet whose destination is no application queue pair: queue pair 1, or an unknown one.
    #[cold]
    pub(crate) fn handle_stray(&mut self, datagram: &RxDatagram<'_>, parsed: &Parsed) {
        let payload = &datagram.bytes[parsed.payload.clone()];
        let to_gsi = parsed.header.dest_qpn.get() == GSI_QPN;
        if !to_gsi || !self.gsi.take(datagram, &parsed.header, payload) {
            self.account.counters.no_such_qp += 1;
        }
    }
}

impl Engine {
    /// Handles inbound MADs and the connection manager's timers, then sends the resulting MADs.
    #[cold]
    pub(crate) fn serve_gsi(&mut self, now: Nanos) {
        let Self { link, core, .. } = self;
        let (slot, local) = (link.slot(), link.local());
        core.gsi.wanted = false;
        let due = core.gsi.armed.is_some_and(|at| at <= now);
        if due {
            core.gsi.armed = None;
        }
        let waited = core.gsi.waiting.drain(..).collect::<Vec<_>>();
        let came = std::mem::take(&mut core.gsi.inbox).into_iter().map(|inbound| (now + GRACE_NS, inbound));
        for (until, inbound) in waited.into_iter().chain(came) {
            let owner = match CmRoute::of(&inbound.message) {
                CmRoute::Service(service) => {
                    let ours = core.gsi.agent.as_ref().is_some_and(|agent| agent.cm.listens(service));
                    (!ours).then_some(MadOwner::Service(service))
                }
                CmRoute::Communication(id) => {
                    let [of, ..] = id.to_be_bytes();
                    (of != slot).then_some(MadOwner::Slot(of))
                }
            };
            let Inbound { src, src_port, ip_id, packet, mad, message } = &inbound;
            let datagram = RxDatagram {
                arrival: Arrival::Wire,
                group: None,
                src: *src,
                src_port: *src_port,
                ip_id: *ip_id,
                bytes: packet,
                has_icrc: true,
                whole: None,
                packets: 1,
                marked: false,
            };
            match (owner, &mut core.gsi.agent) {
                // A service ID bound by this device without a listener counts as unbound.
                (Some(owner), _) if !is_own(&**link, owner) && link.hand_over_mad(owner, &datagram) => {}
                (None, Some(agent)) => agent.cm.handle_message(now, *src, message, mad),
                (Some(MadOwner::Service(_)), _) if now < until && core.gsi.waiting.len() < MAX_WAITING => {
                    core.gsi.waiting.push((until, inbound));
                }
                _ => core.gsi.out.extend(refusal(message, mad).map(|answer| (*src, answer))),
            }
        }
        if let Some(agent) = &mut core.gsi.agent {
            if due {
                agent.probe();
            }
            agent.cm.handle_timeout(now);
            agent.deliver(local);
            while let Some(said) = agent.cm.poll_transmit() {
                core.gsi.out.push(said);
            }
        }
        self.send_gsi();
        self.arm_gsi(now);
    }

    /// Hands over MADs that we sent to this address. If our own socket received them, they must not
    /// wait for the next poll: the process may exit before.
    pub(crate) fn route_own_mads(&mut self) {
        self.link.poll_control();
        self.progress();
    }

    fn send_gsi(&mut self) {
        // The batch takes them from the end.
        self.core.gsi.out.reverse();
        loop {
            if self.link.send_blocked() {
                break;
            }
            let Core { gsi, tx, account, .. } = &mut self.core;
            let full = gsi.fill(tx);
            account.counters.sent_pkts += u64::try_from(tx.packets().len()).unwrap_or(0);
            self.link.send(&mut self.core.tx);
            self.link.wake_peers();
            if !full {
                break;
            }
        }
        self.core.gsi.out.reverse();
    }

    /// Sets the timer of the connection manager.
    fn arm_gsi(&mut self, now: Nanos) {
        let gsi = &mut self.core.gsi;
        let blocked = (!gsi.out.is_empty()).then_some(now + RETRY_NS);
        let waiting = (!gsi.waiting.is_empty()).then_some(now + LOOK_NS);
        let agent = gsi.agent.as_ref().and_then(|agent| agent.cm.poll_timeout());
        let Some(at) = [agent, blocked, waiting].into_iter().flatten().min() else { return };
        if gsi.armed.is_none_or(|armed| at < armed) {
            gsi.armed = Some(at);
            self.core.scheduler.set_timer(at, Timer::ConnectionManager);
        }
    }

    /// The device or its process ends: disconnects its peers. MADs to other devices of this address
    /// may arrive at this socket. They are handed over before it closes.
    pub(crate) fn hang_up(&mut self) {
        self.empty_socket();
        let Some(agent) = &mut self.core.gsi.agent else { return };
        agent.cm.end_all(now_ns());
        let words: Vec<_> = std::iter::from_fn(|| agent.cm.poll_transmit()).collect();
        for some in words.chunks(LAST_WORDS_AT_ONCE) {
            self.core.gsi.out.extend_from_slice(some);
            self.send_gsi();
            self.empty_socket();
        }
    }

    fn empty_socket(&mut self) {
        for _ in 0..MAX_LAST_LOOKS {
            if self.progress() == 0 {
                return;
            }
        }
    }
}

/// Whether a MAD handed over to `owner` would come back to this device.
fn is_own(link: &dyn Link, owner: MadOwner) -> bool {
    match owner {
        MadOwner::Slot(slot) => slot == link.slot(),
        MadOwner::Service(service) => link.has_service(service),
    }
}
