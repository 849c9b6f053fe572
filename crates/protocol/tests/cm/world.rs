//! Two agents and what lies between them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use nobounce_protocol::cm::{
    Accept, Agent, CmConfig, CmMessage, CommId, Connect, Event, Mad, MessageKind, ip, reason,
};
use nobounce_protocol::sim::Rng;
use nobounce_protocol::timing::{MICROSECOND, MILLISECOND, Nanos};
use nobounce_protocol::wire::{Psn, Qpn};

pub(crate) const A: usize = 0;
pub(crate) const B: usize = 1;
pub(crate) const SERVICE: u64 = 0x0106_1c06;
/// How long a message travels.
const TRIP: Nanos = 50 * MICROSECOND;

/// What becomes of a message: how many copies arrive, and how much later than usual.
pub(crate) type Fate = Box<dyn FnMut(usize, MessageKind, u32) -> Vec<Nanos>>;

pub(crate) struct World {
    pub(crate) agents: [Agent; 2],
    pub(crate) now: Nanos,
    /// Messages under way, by the time they arrive.
    under_way: BTreeMap<(Nanos, u64), (usize, Mad)>,
    pub(crate) events: [Vec<Event>; 2],
    /// Every message sent: the sender and the kind.
    pub(crate) sent: Vec<(usize, MessageKind)>,
    pub(crate) fate: Fate,
    serial: u64,
    accepted: u32,
}

pub(crate) fn address(of: usize) -> IpAddr {
    [[10, 0, 0, 1], [10, 0, 0, 2]][of].into()
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with_seed(7)
    }

    pub(crate) fn with_seed(seed: u64) -> Self {
        let agent = |slot: u8| {
            Agent::new(CmConfig {
                slot,
                ca_guid: u64::from(slot) + 1,
                seed: seed.wrapping_mul(2) + u64::from(slot),
            })
        };
        Self {
            agents: [agent(3), agent(4)],
            now: 1,
            under_way: BTreeMap::new(),
            events: [Vec::new(), Vec::new()],
            sent: Vec::new(),
            fate: Box::new(|_, _, _| vec![0]),
            serial: 0,
            accepted: 0,
        }
    }

    /// Loses the `n`-th message of a kind that `from` sends (the first is 0).
    pub(crate) fn lose(&mut self, from: usize, kind: MessageKind, n: u32) {
        self.fate = Box::new(
            move |by, what, count| if (by, what, count) == (from, kind, n) { vec![] } else { vec![0] },
        );
    }

    pub(crate) fn connect(&mut self) -> CommId {
        self.connect_with(Qpn::new(0x12), b"hello")
    }

    pub(crate) fn connect_with(&mut self, qpn: Qpn, private: &[u8]) -> CommId {
        let id = self.agents[A].connect(self.now, request(qpn, private)).unwrap();
        self.settle();
        id
    }

    /// Accepts with a queue pair of its own.
    pub(crate) fn accept(&mut self, id: CommId) {
        self.accept_with(id, Qpn::new(0x34 + self.accepted));
        self.accepted += 1;
    }

    pub(crate) fn accept_with(&mut self, id: CommId, qpn: Qpn) {
        self.agents[B].accept(self.now, id, Accept { qpn, ..answer(b"welcome") }).unwrap();
        self.settle();
    }

    pub(crate) fn establish(&mut self, id: CommId) {
        self.agents[A].establish(id).unwrap();
        self.settle();
    }

    /// A connection that stands: its numbers at both sides.
    pub(crate) fn established(&mut self) -> (CommId, CommId) {
        self.agents[B].listen(SERVICE, 8).unwrap();
        let a = self.connect();
        self.run(MILLISECOND);
        let Some(Event::Request { id: b, .. }) = self.events[B].pop() else { panic!("no request") };
        self.accept(b);
        self.run(MILLISECOND);
        assert!(matches!(self.events[A].pop(), Some(Event::Reply { .. })));
        self.establish(a);
        self.run(MILLISECOND);
        assert_eq!(self.events[B].pop(), Some(Event::Established { id: b }));
        (a, b)
    }

    /// Collects what the agents have to say.
    pub(crate) fn settle(&mut self) {
        for side in [A, B] {
            while let Some((to, mad)) = self.agents[side].poll_transmit() {
                assert_eq!(to, address(1 - side));
                let (kind, _) = Mad::parse(mad.bytes()).expect("our own message");
                let before = self.sent.iter().filter(|sent| **sent == (side, kind)).count();
                self.sent.push((side, kind));
                for later in (self.fate)(side, kind, u32::try_from(before).unwrap()) {
                    self.serial += 1;
                    self.under_way.insert((self.now + TRIP + later, self.serial), (1 - side, mad.clone()));
                }
            }
            while let Some(event) = self.agents[side].poll_event() {
                self.events[side].push(event);
            }
        }
    }

    /// Gives a message to an agent, as if the other had sent it.
    pub(crate) fn deliver(&mut self, to: usize, mad: &Mad) {
        let (kind, mad) = Mad::parse(mad.bytes()).unwrap();
        let message = CmMessage::read(kind, &mad);
        self.agents[to].handle_message(self.now, address(1 - to), &message, &mad);
        self.settle();
    }

    /// Lets time pass until nothing happens any more, at most so much of it.
    pub(crate) fn run(&mut self, most: Nanos) {
        let end = self.now + most;
        loop {
            self.settle();
            let arrival = self.under_way.first_key_value().map(|((at, _), _)| *at);
            let timers = [A, B].map(|side| self.agents[side].poll_timeout());
            let next = [arrival, timers[A], timers[B]].into_iter().flatten().min();
            let Some(at) = next.filter(|at| *at <= end) else { break };
            self.now = self.now.max(at);
            if arrival == Some(at) {
                let (_, (to, mad)) = self.under_way.pop_first().unwrap();
                self.deliver(to, &mad);
            } else {
                self.agents.iter_mut().for_each(|agent| agent.handle_timeout(at));
            }
        }
        self.now = end;
    }

    /// How often `from` sent a kind of message.
    pub(crate) fn count(&self, from: usize, kind: MessageKind) -> usize {
        self.sent.iter().filter(|sent| **sent == (from, kind)).count()
    }

    pub(crate) fn assert_forgotten(&self) {
        for side in [A, B] {
            assert_eq!(self.agents[side].len(), 0, "side {side} remembers something");
            assert_eq!(self.agents[side].poll_timeout(), None);
        }
    }
}

/// A bad network: loses, doubles and delays by chance.
pub(crate) fn bad(seed: u64, loss_ppm: u32) -> Fate {
    let mut rng = Rng::new(seed);
    Box::new(move |_, _, _| {
        let copies = 1 + u32::from(rng.chance(200_000));
        let mut arrivals = Vec::new();
        for _ in 0..copies {
            if !rng.chance(loss_ppm) {
                arrivals.push(rng.below(400 * MILLISECOND));
            }
        }
        arrivals
    })
}

pub(crate) fn request(qpn: Qpn, private: &[u8]) -> Connect {
    let header = ip::IpHeader { port: 40_000, src: address(A), dst: address(B) };
    Connect {
        to: address(B),
        service: SERVICE,
        qpn,
        transport: 0,
        starting_psn: Psn::new(0x00ab_cdef),
        responder_resources: 4,
        initiator_depth: 5,
        flow_control: true,
        retry_count: 6,
        rnr_retry_count: 7,
        srq: true,
        mtu: 5,
        local_gid: ip::gid(address(A)),
        remote_gid: ip::gid(address(B)),
        traffic_class: 9,
        local_ack_timeout: 17,
        private: header.prepend(private),
    }
}

pub(crate) fn answer(private: &[u8]) -> Accept {
    Accept {
        qpn: Qpn::new(0x34),
        starting_psn: Psn::new(0x00fe_dcba),
        responder_resources: 2,
        initiator_depth: 3,
        flow_control: true,
        rnr_retry_count: 5,
        srq: false,
        private: private.to_vec(),
    }
}

pub(crate) fn rejected(event: &Event) -> Option<u16> {
    match event {
        Event::Rejected { reason, .. } => Some(*reason),
        _ => None,
    }
}

pub(crate) const CONSUMER: u16 = reason::CONSUMER;
