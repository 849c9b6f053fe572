//! Blocks fetched at random times: requests one way, blocks the other.

use std::collections::BTreeMap;

use super::{Traffic, exponential};
use crate::config::Config;
use crate::network::{Network, Notice};
use crate::units::{Picos, float, float_of, index};

/// Bytes of a request.
const REQUEST: u32 = 64;
/// Marks the tokens of blocks.
const BLOCK: u64 = 1 << 32;
/// Blocks: share of the requests in percent, bytes, class.
const BLOCKS: [(u64, u32, &str); 3] =
    [(50, 16 << 10, "block of 16 KiB"), (40, 128 << 10, "block of 128 KiB"), (10, 1 << 20, "block of 1 MiB")];

/// A request under way.
#[derive(Clone, Copy, Debug)]
struct Fetch {
    /// The end of the server.
    end: u32,
    kind: usize,
    asked: Picos,
}

#[derive(Debug)]
pub(crate) struct Kv {
    clients: usize,
    servers: usize,
    load: f64,
    /// The client's end for each pair that talked.
    ends: BTreeMap<(u32, u32), u32>,
    fetches: Vec<Fetch>,
    free: Vec<usize>,
    request_class: usize,
    classes: Vec<usize>,
}

impl Kv {
    pub(crate) fn new(hosts: usize, load: f64) -> Self {
        Self {
            clients: hosts / 2,
            servers: hosts - hosts / 2,
            load,
            ends: BTreeMap::new(),
            fetches: Vec::new(),
            free: Vec::new(),
            request_class: 0,
            classes: Vec::new(),
        }
    }

    fn wait(&self, network: &mut Network, client: u64) {
        let mean: f64 =
            BLOCKS.iter().map(|(share, bytes, _)| float(*share) / 100.0 * f64::from(*bytes)).sum();
        let picos_per_byte = 8_000.0 / network.config.fabric.host_gbits;
        let pause = exponential(network, mean * picos_per_byte / self.load);
        network.wake_at(network.now() + pause, client);
    }

    fn fetch(&mut self, network: &mut Network, client: u32) {
        let server =
            index(self.clients) + index(usize::try_from(network.rng.below(self.servers as u64)).unwrap_or(0));
        let draw = network.rng.below(100);
        let mut sum = 0;
        let kind = BLOCKS.iter().position(|(share, ..)| {
            sum += share;
            draw < sum
        });
        let end = *self.ends.entry((client, server)).or_insert_with(|| network.connect(client, server));
        let fetch = Fetch { end: end ^ 1, kind: kind.unwrap_or(0), asked: network.now() };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.fetches[slot] = fetch;
                slot
            }
            None => {
                self.fetches.push(fetch);
                self.fetches.len() - 1
            }
        };
        network.post(end, REQUEST, self.request_class, slot as u64);
    }
}

impl Traffic for Kv {
    fn start(&mut self, network: &mut Network) {
        self.request_class = network.messages.class("request");
        self.classes = BLOCKS.iter().map(|(.., name)| network.messages.class(name)).collect();
        for client in 0..self.clients as u64 {
            self.wait(network, client);
        }
    }

    fn handle(&mut self, network: &mut Network, notice: Notice) {
        match notice {
            Notice::Wake { token } => {
                self.fetch(network, u32::try_from(token).unwrap_or(0));
                self.wait(network, token);
            }
            Notice::Delivered { token } if token < BLOCK => {
                let Fetch { end, kind, asked } = self.fetches[usize::try_from(token).unwrap_or(0)];
                // The latency of a block counts from its request.
                network.post_since(asked, end, BLOCKS[kind].1, self.classes[kind], BLOCK | token);
            }
            Notice::Delivered { token } => self.free.push(usize::try_from(token & (BLOCK - 1)).unwrap_or(0)),
            Notice::Acknowledged { .. } => {}
        }
    }

    fn shares(&self, network: &Network) -> Vec<f64> {
        network.received[..self.clients].iter().map(|bytes| float(*bytes)).collect()
    }

    fn capacity(&self, config: &Config) -> f64 {
        config.fabric.host_gbits * float_of(self.clients) * self.load
    }
}
