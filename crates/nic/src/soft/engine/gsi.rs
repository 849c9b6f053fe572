//! Queue pair 1: management datagrams, on their way in and out.
//!
//! Several devices of one address share it. Whichever gets a datagram reads whose it is: a request goes to the device that has
//! bound the service's name, everything else to the slot in the communication's number. Where there is no such device, whoever
//! got the datagram answers in its place.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use nobounce_protocol::cm::{
    Agent, CommId, Config, Event, GSI_QKEY, GSI_QPN, MAD_LEN, Mad, Message, Route, refusal,
};
use nobounce_protocol::timing::Nanos;
use nobounce_protocol::wire::{BTH_LEN, Deth, Header, ICRC_LEN, Opcode, Parsed, Psn, Qpn};

use crate::links::{Link, MadOwner, RxDatagram, TxBatch, now_ns};
use crate::soft::engine::{Core, Engine};
use crate::soft::events::cm_channel::{CmNotice, Told};
use crate::soft::local::probe::Probe;
use crate::sync::notices::Notices;

/// Datagrams kept between receiving and handling them; further ones are lost, and said again.
const MAX_INBOX: usize = 1024;
/// Bytes of a datagram's packet.
const PACKET: usize = BTH_LEN + 8 + MAD_LEN + ICRC_LEN;
/// How soon to try again when the send buffer is full.
const RETRY_NS: Nanos = 1_000_000;
/// How long a request waits for somebody to offer the service, before it is refused: programs that end one listener and begin the next (as
/// perftest does) may be between the two.
const GRACE_NS: Nanos = 100_000_000;
/// How often it is looked whether somebody does.
const LOOK_NS: Nanos = 5_000_000;
/// Requests that wait so at most; further ones are refused at once.
const MAX_WAITING: usize = 256;
/// So many messages are sent at once when the device goes; a socket has room for more of them.
const LAST_WORDS_AT_ONCE: usize = 64;
/// How often it is looked for packets then, at most.
const MAX_LAST_LOOKS: usize = 8;
/// Notices kept for a user who does not fetch them: more than there can be communications.
const MAX_NOTICES: usize = 1 << 17;

/// A datagram as it came.
#[derive(Debug)]
struct Inbound {
    src: IpAddr,
    src_port: u16,
    ip_id: u16,
    packet: Vec<u8>,
    mad: Mad,
    message: Message,
}

/// Who is told of a communication.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pub(crate) notices: Arc<Notices<CmNotice>>,
    pub(crate) tag: u64,
}

/// Queue pair 1 of a device.
#[derive(Debug, Default)]
pub(crate) struct Gsi {
    /// There is something to do: datagrams came, or a timer fired.
    pub(crate) wanted: bool,
    inbox: Vec<Inbound>,
    /// Requests that nobody has offered a service for, and until when they wait.
    waiting: Vec<(Nanos, Inbound)>,
    out: Vec<(IpAddr, Mad)>,
    psn: u32,
    /// The timer that was set last.
    armed: Option<Nanos>,
    pub(crate) agent: Option<Box<LocalAgent>>,
    /// Not understood, or with another key.
    pub(crate) malformed: u64,
}

/// The connection manager of this process on this device.
#[derive(Debug)]
pub(crate) struct LocalAgent {
    pub(crate) cm: Agent,
    pub(crate) owners: HashMap<CommId, Owner>,
    pub(crate) listeners: HashMap<u64, Owner>,
    /// Sockets that tell whether anybody is there, by peer.
    probes: HashMap<IpAddr, Probe>,
}

impl LocalAgent {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            cm: Agent::new(config),
            owners: HashMap::new(),
            listeners: HashMap::new(),
            probes: HashMap::new(),
        }
    }

    /// Brings events to those who are told of them.
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

    /// Asks the hosts of those who do not answer whether anybody is there. A host that is up and has no such socket says so,
    /// and there is no need to wait for the last repetition.
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

    /// Begins to look after a peer that has not answered yet.
    pub(crate) fn watch(&mut self, local: IpAddr, peer: IpAddr) {
        if peer == local || self.probes.contains_key(&peer) {
            return; // our own socket is there
        }
        self.probes.extend(Probe::new(local, peer).ok().map(|probe| (peer, probe)));
    }
}

impl Gsi {
    /// Takes a packet to queue pair 1; false if it is no message of the connection manager's.
    pub(crate) fn take(&mut self, datagram: &RxDatagram<'_>, header: &Header, payload: &[u8]) -> bool {
        // Those who hand it on need its ICRC.
        let valid = header.deth.qkey == GSI_QKEY && datagram.sealed;
        let parsed = valid.then(|| Mad::parse(payload)).flatten();
        let Some((kind, mad)) = parsed.filter(|_| header.opcode == Opcode::UdSendOnly) else {
            self.malformed += 1;
            return false;
        };
        if self.inbox.len() < MAX_INBOX {
            let message = Message::read(kind, &mad);
            let RxDatagram { src, src_port, ip_id, bytes, .. } = *datagram;
            self.inbox.push(Inbound { src, src_port, ip_id, packet: bytes.to_vec(), mad, message });
            self.wanted = true;
        }
        true
    }

    /// Puts what is to be said into the batch; whether it is full.
    fn fill(&mut self, tx: &mut TxBatch) -> bool {
        while let Some((to, mad)) = self.out.pop() {
            let Some(room) = tx.begin(to, 0, PACKET) else {
                self.out.push((to, mad));
                return true;
            };
            self.psn = self.psn.wrapping_add(1);
            let header = Header {
                deth: Deth { qkey: GSI_QKEY, source: Qpn::new(GSI_QPN) },
                ..Header::new(Opcode::UdSendOnly, Qpn::new(GSI_QPN), Psn::new(self.psn))
            };
            let len = header.emit(room);
            room[len..len + MAD_LEN].copy_from_slice(mad.bytes());
            tx.commit();
        }
        false
    }
}

impl Core {
    /// A packet to no queue pair that an application has: to queue pair 1, or to none.
    #[cold]
    pub(crate) fn handle_stray(&mut self, datagram: &RxDatagram<'_>, parsed: &Parsed) {
        let payload = &datagram.bytes[parsed.payload.clone()];
        let to_gsi = parsed.header.dest_qpn.get() == GSI_QPN;
        if !to_gsi || !self.gsi.take(datagram, &parsed.header, payload) {
            self.counters.no_such_qp += 1;
        }
    }
}

impl Engine {
    /// Handles the management datagrams that came and the timers of the connection manager, and sends what comes of it.
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
            let owner = match Route::of(&inbound.message) {
                Route::Service(service) => {
                    let ours = core.gsi.agent.as_ref().is_some_and(|agent| agent.cm.listens(service));
                    (!ours).then_some(MadOwner::Service(service))
                }
                Route::Communication(id) => {
                    let [of, ..] = id.to_be_bytes();
                    (of != slot).then_some(MadOwner::Slot(of))
                }
            };
            let Inbound { src, src_port, ip_id, packet, mad, message } = &inbound;
            let datagram = RxDatagram {
                src: *src,
                src_port: *src_port,
                ip_id: *ip_id,
                bytes: packet,
                sealed: true,
                whole: None,
                packets: 1,
            };
            match (owner, &mut core.gsi.agent) {
                // A name of our own that nobody listens to is as good as none.
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

    fn send_gsi(&mut self) {
        // The batch gives them away from the end.
        self.core.gsi.out.reverse();
        loop {
            if self.link.send_blocked() {
                break;
            }
            let Core { gsi, tx, counters, .. } = &mut self.core;
            let full = gsi.fill(tx);
            counters.sent_pkts += u64::try_from(tx.packets().len()).unwrap_or(0);
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
            self.core.timers.push(Reverse((at, GSI_QPN)));
        }
    }

    /// The device goes, or its process does: whoever has a connection with it learns of that. What others of our address are told comes to
    /// our own socket where we have the first slot, and so may what is for them: it is handed over before the socket goes.
    pub(crate) fn hang_up(&mut self) {
        if self.core.gsi.agent.is_none() {
            return;
        }
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

/// Whether what is handed over would come back to us.
fn is_own(link: &dyn Link, owner: MadOwner) -> bool {
    match owner {
        MadOwner::Slot(slot) => slot == link.slot(),
        MadOwner::Service(service) => link.has_service(service),
    }
}
