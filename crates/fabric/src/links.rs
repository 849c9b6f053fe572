//! Links with their queues, and the buffers that queues of one switch share.
//!
//! A queue is first in, first out, so the time at which a packet leaves is known when it arrives:
//! the link is busy until then. Its backlog follows from that time, and no event is needed for a
//! departure.

use nobounce_protocol::rng::Rng;

use crate::config::{Config, Switch};
use crate::packet::Packet;
use crate::stats::Histogram;
use crate::topology::{LinkId, Topology};
use crate::units::{Picos, float, picos_per_byte, whole};

/// Counters of all links.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LinkCounters {
    pub(crate) packets: u64,
    pub(crate) marked: u64,
    /// Dropped because the buffer was full.
    pub(crate) dropped: u64,
    /// Lost on a link: at random, or because it failed.
    pub(crate) lost: u64,
}

#[derive(Clone, Debug)]
struct Link {
    picos_per_byte: Picos,
    delay: Picos,
    /// When the last queued packet has left.
    free_at: Picos,
    bytes: u64,
    deepest: u64,
}

impl Link {
    const fn backlog(&self, now: Picos) -> u64 {
        self.free_at.saturating_sub(now) / self.picos_per_byte
    }
}

/// What the ports of one switch use of its buffer.
#[derive(Clone, Debug, Default)]
struct Buffer {
    ports: Vec<LinkId>,
    /// At least what is in use: exact when last counted, plus what was queued since.
    used_at_most: u64,
}

/// All links and switches.
#[derive(Debug)]
pub(crate) struct Links {
    links: Vec<Link>,
    buffers: Vec<Buffer>,
    topology: Topology,
    switch: Switch,
    loss_ppm: u32,
    pub(crate) counters: LinkCounters,
    /// Queue that packets with payload found at switches, in bytes.
    pub(crate) depths: Histogram,
}

impl Links {
    pub(crate) fn new(config: &Config, topology: Topology) -> Self {
        let fabric = &config.fabric;
        let mut buffers = vec![Buffer::default(); topology.switches() as usize];
        let links = (0..topology.links())
            .map(|link| {
                if let Some(switch) = topology.switch_of(link) {
                    buffers[switch as usize].ports.push(link);
                }
                let is_host = topology.is_host_link(link);
                let gbits = if is_host { fabric.host_gbits } else { fabric.fabric_gbits };
                let to_host = is_host && topology.switch_of(link).is_some();
                let delay = fabric.link_delay + if to_host { fabric.host_delay } else { 0 };
                Link { picos_per_byte: picos_per_byte(gbits), delay, free_at: 0, bytes: 0, deepest: 0 }
            })
            .collect();
        Self {
            links,
            buffers,
            topology,
            switch: fabric.switch,
            loss_ppm: fabric.loss_ppm,
            counters: LinkCounters::default(),
            depths: Histogram::new(),
        }
    }

    /// When a host's link is free for another packet.
    pub(crate) fn free_at(&self, link: LinkId) -> Picos {
        self.links[link as usize].free_at
    }

    /// A host sends a packet; returns when it arrives at the other end.
    pub(crate) fn send(&mut self, now: Picos, link: LinkId, wire_len: u32) -> Picos {
        self.counters.packets += 1;
        let link = &mut self.links[link as usize];
        link.bytes += u64::from(wire_len);
        link.free_at = link.free_at.max(now) + u64::from(wire_len) * link.picos_per_byte;
        link.free_at + link.delay
    }

    /// A switch queues a packet and marks it if need be; returns when it arrives at the other end,
    /// or nothing if the buffer is full.
    pub(crate) fn queue(
        &mut self,
        now: Picos,
        link: LinkId,
        packet: &mut Packet,
        rng: &mut Rng,
    ) -> Option<Picos> {
        let wire_len = packet.wire_len();
        let depth = self.links[link as usize].backlog(now);
        let after = depth + u64::from(wire_len);
        if packet.payload > 0 {
            self.depths.record(depth);
        }
        if !self.admits(now, link, u64::from(wire_len), after) {
            self.counters.dropped += 1;
            return None;
        }
        // ACKs and CNPs are not ECN-capable.
        if packet.payload > 0 && !packet.marked && self.marks(depth, rng) {
            packet.marked = true;
            self.counters.marked += 1;
        }
        let link = &mut self.links[link as usize];
        link.bytes += u64::from(wire_len);
        link.deepest = link.deepest.max(after);
        link.free_at = link.free_at.max(now) + u64::from(wire_len) * link.picos_per_byte;
        Some(link.free_at + link.delay)
    }

    fn admits(&mut self, now: Picos, link: LinkId, wire_len: u64, after: u64) -> bool {
        let Some(switch) = self.topology.switch_of(link) else { return true };
        let buffer = &mut self.buffers[switch as usize];
        let limits = self.switch;
        let fits = |used: u64| {
            let free = limits.buffer.saturating_sub(used);
            wire_len <= free && float(after) <= limits.alpha * float(free)
        };
        // Counting all ports is exact and slow; the upper bound decides most cases.
        if !fits(buffer.used_at_most) {
            buffer.used_at_most =
                buffer.ports.iter().map(|port| self.links[*port as usize].backlog(now)).sum();
            if !fits(buffer.used_at_most) {
                return false;
            }
        }
        buffer.used_at_most += wire_len;
        true
    }

    fn marks(&self, depth: u64, rng: &mut Rng) -> bool {
        let limits = &self.switch;
        if !limits.ecn || depth < limits.ecn_min {
            return false;
        }
        if depth >= limits.ecn_max {
            return true;
        }
        let share = float(depth - limits.ecn_min) / float(limits.ecn_max - limits.ecn_min);
        rng.below(1 << 32) < whole(share * limits.ecn_probability * 4_294_967_296.0)
    }

    /// Whether a packet is lost on its link for no reason.
    pub(crate) fn loses(&mut self, rng: &mut Rng) -> bool {
        let lost = rng.chance(self.loss_ppm);
        self.counters.lost += u64::from(lost);
        lost
    }

    /// Bytes in the deepest queue of all switches now.
    pub(crate) fn deepest_now(&self, now: Picos) -> u64 {
        let ports = self.buffers.iter().flat_map(|buffer| &buffer.ports);
        ports.map(|port| self.links[*port as usize].backlog(now)).max().unwrap_or(0)
    }

    /// The deepest queue of the run, and where it was.
    pub(crate) fn deepest(&self) -> (u64, String) {
        let ports = self.buffers.iter().flat_map(|buffer| &buffer.ports).copied();
        let deepest = ports.max_by_key(|port| (self.links[*port as usize].deepest, std::cmp::Reverse(*port)));
        deepest
            .map_or((0, String::new()), |port| (self.links[port as usize].deepest, self.topology.name(port)))
    }

    /// Share of the time that the links between switches were busy: mean and highest.
    pub(crate) fn fabric_load(&self, time: Picos) -> Option<(f64, f64)> {
        let all: Vec<f64> = (0..self.topology.links())
            .filter(|link| !self.topology.is_host_link(*link))
            .map(|link| &self.links[link as usize])
            .map(|link| float(link.bytes * link.picos_per_byte) / float(time.max(1)))
            .collect();
        let highest = all.iter().copied().reduce(f64::max)?;
        Some((all.iter().sum::<f64>() / crate::units::float_of(all.len()), highest))
    }
}
