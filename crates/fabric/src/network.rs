//! Hosts, connections and the fabric between them, driven by events.
//!
//! A packet costs one event at each link: its arrival at the other end. A host's link takes the
//! next packet from the queue pairs of the host, in turn, when it has finished the one before.

use std::collections::VecDeque;

use nobounce_protocol::qp::Status;
use nobounce_protocol::rng::Rng;

use crate::config::Config;
use crate::control::Path;
use crate::end::End;
use crate::links::Links;
use crate::messages::{Message, Messages};
use crate::packet::{Kind, Packet, Packets};
use crate::queue::EventQueue;
use crate::topology::{LinkEnd, LinkId, Topology, ecmp};
use crate::units::{Picos, float, index, picos_per_byte};

/// Bytes of headers and framing of a full packet: for the round trip of an empty fabric.
const OVERHEAD: u64 = 82;

/// What happens at a time.
#[derive(Clone, Copy, Debug)]
enum Event {
    Arrive {
        packet: u32,
        link: LinkId,
    },
    /// The link of a host is free.
    Free {
        host: u32,
    },
    Timer {
        end: u32,
        generation: u32,
    },
    /// The traffic asked to be called.
    Wake {
        token: u64,
    },
    Sample,
}

/// What the traffic learns.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Notice {
    /// A message arrived in full.
    Delivered {
        token: u64,
    },
    /// Its sender knows, and the message is over.
    Acknowledged {
        token: u64,
    },
    Wake {
        token: u64,
    },
}

/// Queues and throughput at one time.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Sample {
    /// Microseconds since the start.
    pub us: f64,
    /// Payload received since the sample before, in Gb/s.
    pub goodput_gbits: f64,
    /// Bytes in the deepest queue of a switch.
    pub deepest_queue: u64,
}

#[derive(Debug, Default)]
struct HostState {
    /// Ends with something to send, in turn.
    ready: VecDeque<u32>,
    /// An event is on its way for the time when the link is free.
    armed: bool,
}

/// A simulated network.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) config: Config,
    pub(crate) links: Links,
    pub(crate) messages: Messages,
    pub(crate) rng: Rng,
    pub(crate) samples: Vec<Sample>,
    /// Payload bytes that reached each host.
    pub(crate) received: Vec<u64>,
    pub(crate) totals: Totals,
    topology: Topology,
    now: Picos,
    events: EventQueue<Event>,
    hosts: Vec<HostState>,
    /// Two for each connection.
    ends: Vec<End>,
    free: Vec<u32>,
    packets: Packets,
    notices: VecDeque<Notice>,
    received_at_sample: u64,
}

/// Counters of queue pairs, open and closed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) notifications: u64,
    pub(crate) gaps: u64,
    pub(crate) timeouts: u64,
    pub(crate) probes: u64,
    pub(crate) retransmitted: u64,
    pub(crate) failed: u64,
    pub(crate) received: u64,
    pub(crate) handled: u64,
}

impl Network {
    pub(crate) fn new(config: Config) -> Self {
        let topology = Topology::new(&config.fabric);
        let fabric = &config.fabric;
        let mut events = EventQueue::new();
        events.push(config.sample_every, Event::Sample);
        Self {
            links: Links::new(&config, topology),
            messages: Messages::default(),
            rng: Rng::new(config.seed),
            samples: Vec::new(),
            received: vec![0; fabric.hosts],
            totals: Totals::default(),
            topology,
            now: 0,
            events,
            hosts: (0..fabric.hosts).map(|_| HostState::default()).collect(),
            ends: Vec::new(),
            free: Vec::new(),
            packets: Packets::default(),
            notices: VecDeque::new(),
            received_at_sample: 0,
            config,
        }
    }

    pub(crate) const fn now(&self) -> Picos {
        self.now
    }

    /// Opens a connection; returns the end at the first host. The other end is the next number.
    pub(crate) fn connect(&mut self, from: u32, to: u32) -> u32 {
        let recycled = self.free.pop();
        let number = recycled.unwrap_or_else(|| index(self.ends.len() / 2));
        let generation = recycled.map_or(0, |number| self.ends[2 * number as usize].generation + 1);
        // As a NIC does: a port of the dynamic range for each queue pair.
        let port = 0xc000 | u16::try_from(self.rng.below(0x4000)).unwrap_or(0);
        let path = self.path(from, to);
        let pair = End::pair(number, generation, [from, to], port, &self.config.transport, path);
        if recycled.is_some() {
            for (slot, end) in (2 * number as usize..).zip(pair) {
                self.ends[slot] = end;
            }
        } else {
            self.ends.extend(pair);
        }
        2 * number
    }

    /// The way between two hosts while all queues are empty.
    fn path(&self, from: u32, to: u32) -> Path {
        let (fabric, mtu) = (&self.config.fabric, self.config.transport.mtu);
        let switches = if self.topology.leaf_of(from) == self.topology.leaf_of(to) { 1 } else { 3 };
        let between = u64::from(switches - 1) * picos_per_byte(fabric.fabric_gbits);
        let per_byte = 2 * picos_per_byte(fabric.host_gbits) + between;
        Path {
            line_gbits: fabric.host_gbits,
            round_trip: fabric.round_trip(switches) + (u64::from(mtu) + OVERHEAD) * per_byte,
            mtu: f64::from(mtu),
            switches,
        }
    }

    /// Closes the connection of an end whose messages are over.
    pub(crate) fn close(&mut self, end: u32) {
        for end in [end & !1, end | 1] {
            self.note_counters(end);
            let state = &mut self.ends[end as usize];
            // What is still under way is for an earlier connection from now on.
            state.generation += 1;
            if state.queued {
                state.queued = false;
                let host = state.host as usize;
                self.hosts[host].ready.retain(|other| *other != end);
            }
        }
        self.free.push(end / 2);
    }

    fn note_counters(&mut self, end: u32) {
        let counters = *self.ends[end as usize].qp.counters();
        self.totals.gaps += counters.rcvd_seq_err + counters.implied_nak_seq_err;
        self.totals.timeouts += counters.local_ack_timeout_err;
        self.totals.probes += counters.probes;
        self.totals.retransmitted += counters.retransmitted;
    }

    /// Counters of the connections that are open at the end.
    pub(crate) fn finish(&mut self) {
        let free: std::collections::BTreeSet<u32> = self.free.iter().copied().collect();
        for end in 0..index(self.ends.len()) {
            if !free.contains(&(end / 2)) {
                self.note_counters(end);
            }
        }
    }

    /// Bytes that an end has received.
    pub(crate) fn received_by(&self, end: u32) -> u64 {
        self.ends[end as usize].received
    }

    /// Sends a message from one end to the other. `token` comes back in notices.
    pub(crate) fn post(&mut self, end: u32, bytes: u32, class: usize, token: u64) {
        self.post_since(self.now, end, bytes, class, token);
    }

    /// The same; its latency counts from an earlier time.
    pub(crate) fn post_since(&mut self, posted: Picos, end: u32, bytes: u32, class: usize, token: u64) {
        let message = self.messages.insert(Message { posted, bytes, class, token });
        if !self.ends[end as usize].post(message, bytes) {
            self.messages.remove(message);
            self.totals.failed += 1;
            return;
        }
        self.make_ready(end);
    }

    /// Calls the traffic at that time.
    pub(crate) fn wake_at(&mut self, at: Picos, token: u64) {
        self.events.push(at.max(self.now), Event::Wake { token });
    }

    pub(crate) fn poll_notice(&mut self) -> Option<Notice> {
        self.notices.pop_front()
    }

    /// The next event; false when there is none before the end of the run.
    pub(crate) fn step(&mut self) -> bool {
        let Some((at, event)) = self.events.pop() else { return false };
        if at > self.config.until {
            self.now = self.config.until;
            return false;
        }
        self.now = at;
        self.totals.handled += 1;
        match event {
            Event::Arrive { packet, link } => self.arrive(packet, link),
            Event::Free { host } => {
                self.hosts[host as usize].armed = false;
                self.transmit(host);
            }
            Event::Timer { end, generation } => self.timer(end, generation),
            Event::Wake { token } => self.notices.push_back(Notice::Wake { token }),
            Event::Sample => self.sample(),
        }
        true
    }

    fn sample(&mut self) {
        let every = self.config.sample_every;
        let bytes = self.totals.received - self.received_at_sample;
        self.received_at_sample = self.totals.received;
        self.samples.push(Sample {
            us: crate::units::micros(self.now),
            goodput_gbits: float(bytes) * 8_000.0 / float(every),
            deepest_queue: self.links.deepest_now(self.now),
        });
        self.events.push(self.now + every, Event::Sample);
    }

    fn make_ready(&mut self, end: u32) {
        let state = &mut self.ends[end as usize];
        let host = state.host;
        if !state.queued {
            state.queued = true;
            self.hosts[host as usize].ready.push_back(end);
        }
        self.transmit(host);
    }

    /// Gives the link of a host to the next of its ends.
    fn transmit(&mut self, host: u32) {
        let link = self.topology.host_up(host);
        loop {
            let state = &mut self.hosts[host as usize];
            if state.ready.is_empty() {
                return;
            }
            let free_at = self.links.free_at(link);
            if free_at > self.now {
                if !state.armed {
                    state.armed = true;
                    self.events.push(free_at, Event::Free { host });
                }
                return;
            }
            if let Some(end) = state.ready.pop_front() {
                self.give_turn(host, link, end);
            }
        }
    }

    fn give_turn(&mut self, host: u32, link: LinkId, end: u32) {
        let state = &mut self.ends[end as usize];
        let Some((kind, payload)) = state.poll(self.now) else {
            state.queued = false;
            return self.arm_timer(end);
        };
        let packet = Packet {
            kind,
            source: state.host,
            destination: state.peer_host,
            end: end ^ 1,
            generation: state.generation,
            port: state.port,
            marked: false,
            payload,
        };
        self.totals.notifications += u64::from(matches!(kind, Kind::CongestionNotification));
        self.hosts[host as usize].ready.push_back(end);
        let slot = self.packets.insert(packet);
        self.launch(link, slot);
        self.arm_timer(end);
    }

    fn launch(&mut self, link: LinkId, packet: u32) {
        let wire_len = self.packets.get_mut(packet).wire_len();
        let at = self.links.send(self.now, link, wire_len);
        self.events.push(at, Event::Arrive { packet, link });
    }

    fn arrive(&mut self, slot: u32, link: LinkId) {
        if self.has_failed(link) || self.links.loses(&mut self.rng) {
            self.packets.take(slot);
            return;
        }
        let Packet { source, destination, port, .. } = *self.packets.get_mut(slot);
        let next = match self.topology.end(link) {
            LinkEnd::Host(_) => return self.deliver(slot),
            LinkEnd::Spine(spine) => self.topology.spine_down(spine, self.topology.leaf_of(destination)),
            LinkEnd::Leaf(leaf) if self.topology.leaf_of(destination) == leaf => {
                self.topology.host_down(destination)
            }
            LinkEnd::Leaf(leaf) => {
                let spine = self.choose_spine(leaf, (source, destination, port));
                self.topology.leaf_up(leaf, spine)
            }
        };
        let packet = self.packets.get_mut(slot);
        match self.links.queue(self.now, next, packet, &mut self.rng) {
            Some(at) => self.events.push(at, Event::Arrive { packet: slot, link: next }),
            None => {
                self.packets.take(slot);
            }
        }
    }

    /// ECMP by the addresses and the source port; a failed link is avoided once it is known.
    fn choose_spine(&self, leaf: u32, flow: (u32, u32, u16)) -> u32 {
        let seed = self.config.seed ^ (u64::from(leaf) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let spines = self.topology.spines();
        let avoids = self.config.fabric.failure.is_some_and(|failure| {
            let known = self.now >= failure.at + failure.detected_after;
            known && (leaf == 0 || self.topology.leaf_of(flow.1) == 0)
        });
        if avoids { 1 + ecmp(seed, flow, spines - 1) } else { ecmp(seed, flow, spines) }
    }

    fn has_failed(&mut self, link: LinkId) -> bool {
        let down = self.config.fabric.failure.is_some_and(|failure| {
            let is_it = link == self.topology.leaf_up(0, 0) || link == self.topology.spine_down(0, 0);
            self.now >= failure.at && is_it
        });
        self.links.counters.lost += u64::from(down);
        down
    }

    fn deliver(&mut self, slot: u32) {
        let packet = self.packets.take(slot);
        let end = packet.end;
        if self.ends[end as usize].generation != packet.generation {
            return;
        }
        let state = &mut self.ends[end as usize];
        let before = state.received;
        state.receive(self.now, &packet);
        let bytes = state.received - before;
        self.received[state.host as usize] += bytes;
        self.totals.received += bytes;
        self.collect(end);
        self.make_ready(end);
        self.arm_timer(end);
    }

    fn collect(&mut self, end: u32) {
        while let Some(completion) = self.ends[end as usize].poll_completion() {
            if completion.is_receive() {
                if let Some(message) = completion.immediate {
                    self.messages.note_delivered(self.now, message);
                    let token = self.messages.get(message).token;
                    self.notices.push_back(Notice::Delivered { token });
                }
                continue;
            }
            let message = self.messages.remove(u32::try_from(completion.wr_id).unwrap_or(0));
            if completion.status == Status::Success {
                self.notices.push_back(Notice::Acknowledged { token: message.token });
            } else {
                self.totals.failed += 1;
            }
        }
    }

    /// One event for the timer of an end is under way at a time. A deadline that moved on is looked
    /// up again when the event comes.
    fn arm_timer(&mut self, end: u32) {
        let state = &mut self.ends[end as usize];
        let Some(at) = state.timeout() else { return };
        if at < state.timer_at {
            state.timer_at = at;
            let generation = state.generation;
            self.events.push(at.max(self.now), Event::Timer { end, generation });
        }
    }

    fn timer(&mut self, end: u32, generation: u32) {
        let state = &mut self.ends[end as usize];
        if state.generation != generation || state.timer_at > self.now {
            return;
        }
        state.timer_at = Picos::MAX;
        if state.timeout().is_some_and(|at| at <= self.now) {
            state.handle_timeout(self.now);
            self.collect(end);
            self.make_ready(end);
        }
        self.arm_timer(end);
    }
}
