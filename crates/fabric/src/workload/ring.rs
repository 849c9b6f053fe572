//! Ring all-reduce.

use super::{Traffic, shuffled};
use crate::config::Config;
use crate::network::{Network, Notice};
use crate::units::{Picos, float, float_of, index};

#[derive(Debug)]
pub(crate) struct Ring {
    hosts: usize,
    bytes: u64,
    shuffled: bool,
    class: usize,
    /// The sending end of each place in the ring.
    ends: Vec<u32>,
    /// Steps whose data each place has received.
    steps: Vec<usize>,
    done: usize,
    finished: Option<Picos>,
}

impl Ring {
    pub(crate) fn new(hosts: usize, bytes: u64, shuffled: bool) -> Self {
        Self {
            hosts,
            bytes,
            shuffled,
            class: 0,
            ends: Vec::new(),
            steps: vec![0; hosts],
            done: 0,
            finished: None,
        }
    }

    const fn all_steps(&self) -> usize {
        2 * (self.hosts - 1)
    }

    fn send(&self, network: &mut Network, place: usize) {
        let chunk = self.bytes.div_ceil(self.hosts as u64).clamp(1, 1 << 30);
        let chunk = index(usize::try_from(chunk).unwrap_or(1));
        network.post(self.ends[place], chunk, self.class, place as u64);
    }
}

impl Traffic for Ring {
    fn start(&mut self, network: &mut Network) {
        self.class = network.messages.class("chunk");
        let order =
            if self.shuffled { shuffled(network, self.hosts) } else { (0..index(self.hosts)).collect() };
        for (at, from) in order.iter().enumerate() {
            self.ends.push(network.connect(*from, order[(at + 1) % self.hosts]));
        }
        for place in 0..self.hosts {
            self.send(network, place);
        }
    }

    fn handle(&mut self, network: &mut Network, notice: Notice) {
        let Notice::Delivered { token } = notice else { return };
        let place = (usize::try_from(token).unwrap_or(0) + 1) % self.hosts;
        self.steps[place] += 1;
        if self.steps[place] < self.all_steps() {
            self.send(network, place);
        } else {
            self.done += 1;
            self.finished = (self.done == self.hosts).then(|| network.now());
        }
    }

    fn ends(&self) -> bool {
        true
    }

    fn finished(&self) -> Option<Picos> {
        self.finished
    }

    fn shares(&self, network: &Network) -> Vec<f64> {
        network.received.iter().map(|bytes| float(*bytes)).collect()
    }

    fn capacity(&self, config: &Config) -> f64 {
        config.fabric.host_gbits * float_of(config.fabric.hosts)
    }
}
