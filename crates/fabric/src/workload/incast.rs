//! Many senders, one receiver.

use super::{Traffic, exponential};
use crate::config::Config;
use crate::network::{Network, Notice};
use crate::units::{float, index};

/// Long messages that each sender keeps posted.
const POSTED: usize = 2;
/// Marks the tokens of short messages.
const SHORT: u64 = 1 << 32;

#[derive(Debug)]
pub(crate) struct Incast {
    senders: usize,
    message: u32,
    short: u32,
    short_load: f64,
    /// Sending ends: long messages, short messages.
    long_ends: Vec<u32>,
    short_ends: Vec<u32>,
    classes: [usize; 2],
}

impl Incast {
    pub(crate) fn new(senders: usize, message: u32, short: u32, short_load: f64) -> Self {
        let ends = Vec::new;
        Self { senders, message, short, short_load, long_ends: ends(), short_ends: ends(), classes: [0; 2] }
    }

    fn post_long(&self, network: &mut Network, sender: u64) {
        let end = self.long_ends[usize::try_from(sender).unwrap_or(0)];
        network.post(end, self.message, self.classes[0], sender);
    }

    fn wait(&self, network: &mut Network, sender: u64) {
        let picos_per_byte = 8_000.0 / network.config.fabric.host_gbits;
        let each = self.short_load / crate::units::float_of(self.senders);
        let pause = exponential(network, f64::from(self.short) * picos_per_byte / each);
        network.wake_at(network.now() + pause, sender);
    }
}

impl Traffic for Incast {
    fn start(&mut self, network: &mut Network) {
        self.classes = [network.messages.class("long"), network.messages.class("short")];
        for sender in 1..=index(self.senders) {
            self.long_ends.push(network.connect(sender, 0));
            self.short_ends.push(network.connect(sender, 0));
        }
        for sender in 0..self.senders as u64 {
            if self.message > 0 {
                for _ in 0..POSTED {
                    self.post_long(network, sender);
                }
            }
            if self.short > 0 && self.short_load > 0.0 {
                self.wait(network, sender);
            }
        }
    }

    fn handle(&mut self, network: &mut Network, notice: Notice) {
        match notice {
            Notice::Acknowledged { token } if token < SHORT => self.post_long(network, token),
            Notice::Wake { token } => {
                let end = self.short_ends[usize::try_from(token).unwrap_or(0)];
                network.post(end, self.short, self.classes[1], SHORT | token);
                self.wait(network, token);
            }
            _ => {}
        }
    }

    fn shares(&self, network: &Network) -> Vec<f64> {
        self.long_ends.iter().map(|end| float(network.received_by(end ^ 1))).collect()
    }

    fn capacity(&self, config: &Config) -> f64 {
        config.fabric.host_gbits
    }
}
