//! Every host sends to every other, beginning with its successor.

use super::Traffic;
use crate::config::Config;
use crate::network::{Network, Notice};
use crate::units::{Picos, float, float_of, index};

#[derive(Debug)]
pub(crate) struct AllToAll {
    hosts: usize,
    bytes: u32,
    concurrent: usize,
    class: usize,
    /// Peers that each host has begun with.
    begun: Vec<usize>,
    /// The pairs under way: sender and sending end.
    pairs: Vec<(u32, u32)>,
    free: Vec<usize>,
    /// Messages that each host still waits for, and when the last one came.
    missing: Vec<usize>,
    done_at: Vec<Picos>,
    waiting: usize,
    finished: Option<Picos>,
}

impl AllToAll {
    pub(crate) fn new(hosts: usize, bytes: u32, concurrent: usize) -> Self {
        Self {
            hosts,
            bytes,
            concurrent: concurrent.clamp(1, hosts - 1),
            class: 0,
            begun: vec![0; hosts],
            pairs: Vec::new(),
            free: Vec::new(),
            missing: vec![hosts - 1; hosts],
            done_at: vec![0; hosts],
            waiting: hosts,
            finished: None,
        }
    }

    fn begin(&mut self, network: &mut Network, from: usize) {
        if self.begun[from] + 1 >= self.hosts {
            return;
        }
        self.begun[from] += 1;
        let to = (from + self.begun[from]) % self.hosts;
        let end = network.connect(index(from), index(to));
        let pair = (index(from), end);
        let slot = match self.free.pop() {
            Some(slot) => {
                self.pairs[slot] = pair;
                slot
            }
            None => {
                self.pairs.push(pair);
                self.pairs.len() - 1
            }
        };
        network.post(end, self.bytes, self.class, (to as u64) << 32 | slot as u64);
    }
}

impl Traffic for AllToAll {
    fn start(&mut self, network: &mut Network) {
        self.class = network.messages.class("message");
        for _ in 0..self.concurrent {
            for from in 0..self.hosts {
                self.begin(network, from);
            }
        }
    }

    fn handle(&mut self, network: &mut Network, notice: Notice) {
        match notice {
            Notice::Delivered { token } => {
                let to = usize::try_from(token >> 32).unwrap_or(0);
                self.missing[to] -= 1;
                if self.missing[to] == 0 {
                    self.done_at[to] = network.now();
                    self.waiting -= 1;
                    self.finished = (self.waiting == 0).then(|| network.now());
                }
            }
            Notice::Acknowledged { token } => {
                let slot = usize::try_from(token & 0xffff_ffff).unwrap_or(0);
                let (from, end) = self.pairs[slot];
                network.close(end);
                self.free.push(slot);
                self.begin(network, from as usize);
            }
            Notice::Wake { .. } => {}
        }
    }

    fn ends(&self) -> bool {
        true
    }

    fn finished(&self) -> Option<Picos> {
        self.finished
    }

    fn shares(&self, network: &Network) -> Vec<f64> {
        let rate =
            |(bytes, at): (&u64, &Picos)| float(*bytes) / float(if *at == 0 { network.now() } else { *at });
        network.received.iter().zip(&self.done_at).map(rate).collect()
    }

    fn capacity(&self, config: &Config) -> f64 {
        config.fabric.host_gbits * float_of(config.fabric.hosts)
    }
}
