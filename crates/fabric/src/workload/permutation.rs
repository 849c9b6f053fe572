//! Every host sends to one other.

use super::{Traffic, shuffled};
use crate::config::Config;
use crate::network::{Network, Notice};
use crate::units::{float, float_of};

/// Messages that each queue pair keeps posted.
const POSTED: usize = 2;

#[derive(Debug)]
pub(crate) struct Permutation {
    message: u32,
    class: usize,
    /// Sending ends; those of one pair of hosts are adjacent.
    ends: Vec<u32>,
    ports: usize,
}

impl Permutation {
    pub(crate) fn new(message: u32) -> Self {
        Self { message, class: 0, ends: Vec::new(), ports: 1 }
    }

    fn post(&self, network: &mut Network, number: usize) {
        network.post(self.ends[number], self.message, self.class, number as u64);
    }
}

impl Traffic for Permutation {
    fn start(&mut self, network: &mut Network) {
        self.class = network.messages.class("message");
        self.ports = network.config.transport.ports.max(1);
        // One cycle through all hosts in random order: no host sends to itself.
        let order = shuffled(network, network.config.fabric.hosts);
        for (at, from) in order.iter().enumerate() {
            let to = order[(at + 1) % order.len()];
            for _ in 0..self.ports {
                self.ends.push(network.connect(*from, to));
            }
        }
        for number in 0..self.ends.len() {
            for _ in 0..POSTED {
                self.post(network, number);
            }
        }
    }

    fn handle(&mut self, network: &mut Network, notice: Notice) {
        if let Notice::Acknowledged { token } = notice {
            self.post(network, usize::try_from(token).unwrap_or(0));
        }
    }

    fn shares(&self, network: &Network) -> Vec<f64> {
        let received = |end: &u32| float(network.received_by(end ^ 1));
        self.ends.chunks(self.ports).map(|pair| pair.iter().map(received).sum()).collect()
    }

    fn capacity(&self, config: &Config) -> f64 {
        config.fabric.host_gbits * float_of(config.fabric.hosts)
    }
}
