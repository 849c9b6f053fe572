//! Messages under way, and what became of those that ended.

use crate::stats::Histogram;
use crate::units::Picos;

/// A message: its number is the immediate data of its last packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    pub(crate) posted: Picos,
    pub(crate) bytes: u32,
    /// Latencies are reported by class.
    pub(crate) class: usize,
    /// What the traffic knows it by.
    pub(crate) token: u64,
}

/// Latencies of one class of messages, from the post to the last byte at the receiver.
#[derive(Debug)]
pub(crate) struct Class {
    pub(crate) name: &'static str,
    /// In picoseconds.
    pub(crate) latency: Histogram,
    pub(crate) bytes: u64,
}

/// All messages of a run.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    slots: Vec<Message>,
    free: Vec<u32>,
    pub(crate) classes: Vec<Class>,
}

impl Messages {
    /// The class of that name.
    pub(crate) fn class(&mut self, name: &'static str) -> usize {
        if let Some(known) = self.classes.iter().position(|class| class.name == name) {
            return known;
        }
        self.classes.push(Class { name, latency: Histogram::new(), bytes: 0 });
        self.classes.len() - 1
    }

    pub(crate) fn insert(&mut self, message: Message) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = message;
            return slot;
        }
        self.slots.push(message);
        crate::units::index(self.slots.len() - 1)
    }

    pub(crate) fn get(&self, slot: u32) -> Message {
        self.slots[slot as usize]
    }

    pub(crate) fn note_delivered(&mut self, now: Picos, slot: u32) {
        let message = self.slots[slot as usize];
        let class = &mut self.classes[message.class];
        class.latency.record(now - message.posted);
        class.bytes += u64::from(message.bytes);
    }

    /// The message ended; its number may be used again.
    pub(crate) fn remove(&mut self, slot: u32) -> Message {
        self.free.push(slot);
        self.slots[slot as usize]
    }
}
