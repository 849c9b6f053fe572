//! NIC counters: bytes and operations, by path.

use std::fmt;

use nobounce::{PathCounters, PathTotals, Tally};
use serde::{Deserialize, Serialize};

use crate::size::Bytes;

/// Counters of both ends' NICs, in one case or in a whole run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counted {
    /// The end that asks.
    pub(crate) here: EndCounted,
    /// The end that serves.
    pub(crate) there: EndCounted,
}

/// What one end's NIC counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EndCounted {
    /// From the wire into memory.
    pub(crate) inbound: Ways,
    /// From memory to the wire.
    pub(crate) outbound: Ways,
}

/// One direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ways {
    /// Host memory, copied by the CPU.
    pub(crate) cpu: Moved,
    /// GPU memory through the window.
    pub(crate) window: Moved,
    /// GPU memory by the copy engine, directly from the link's buffer.
    pub(crate) copy_engine: Moved,
    /// GPU memory by an adapter's own DMA, registered by dma-buf.
    #[serde(default)]
    pub(crate) dma_buf: Moved,
    /// The same, registered by nvidia-peermem.
    #[serde(default)]
    pub(crate) peermem: Moved,
    /// GPU memory with one more copy on the way.
    pub(crate) staged: Moved,
}

/// How much.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Moved {
    /// Payload bytes.
    pub(crate) bytes: u64,
    /// Messages.
    pub(crate) operations: u64,
}

impl Counted {
    /// Bytes that were staged, at both ends.
    pub(crate) fn staged_bytes(&self) -> u64 {
        let end = |end: &EndCounted| end.inbound.staged.bytes + end.outbound.staged.bytes;
        end(&self.here) + end(&self.there)
    }

    /// Adds another case's.
    pub(crate) fn add(&mut self, other: &Self) {
        self.here = self.here.with(&other.here, u64::saturating_add);
        self.there = self.there.with(&other.there, u64::saturating_add);
    }
}

impl EndCounted {
    /// What was counted since `earlier`.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        self.with(earlier, u64::saturating_sub)
    }

    /// Together with another device's.
    pub(crate) fn plus(&self, other: &Self) -> Self {
        self.with(other, u64::saturating_add)
    }

    fn with(&self, other: &Self, f: fn(u64, u64) -> u64) -> Self {
        Self {
            inbound: self.inbound.with(&other.inbound, f),
            outbound: self.outbound.with(&other.outbound, f),
        }
    }
}

impl Ways {
    fn with(&self, other: &Self, f: fn(u64, u64) -> u64) -> Self {
        let one = |a: Moved, b: Moved| Moved {
            bytes: f(a.bytes, b.bytes),
            operations: f(a.operations, b.operations),
        };
        Self {
            cpu: one(self.cpu, other.cpu),
            window: one(self.window, other.window),
            copy_engine: one(self.copy_engine, other.copy_engine),
            dma_buf: one(self.dma_buf, other.dma_buf),
            peermem: one(self.peermem, other.peermem),
            staged: one(self.staged, other.staged),
        }
    }
}

impl From<PathCounters> for EndCounted {
    fn from(counters: PathCounters) -> Self {
        Self { inbound: counters.inbound.into(), outbound: counters.outbound.into() }
    }
}

impl From<PathTotals> for Ways {
    fn from(totals: PathTotals) -> Self {
        let moved = |tally: Tally| Moved { bytes: tally.bytes, operations: tally.operations };
        Self {
            cpu: moved(totals.cpu),
            window: moved(totals.window),
            copy_engine: moved(totals.copy_engine),
            dma_buf: moved(totals.dma_buf),
            peermem: moved(totals.peermem),
            staged: moved(totals.staged),
        }
    }
}

impl fmt::Display for EndCounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "in {}; out {}", self.inbound, self.outbound)
    }
}

impl fmt::Display for Ways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ways = [
            ("cpu", self.cpu, true),
            ("window", self.window, true),
            ("copy-engine", self.copy_engine, true),
            ("dma-buf", self.dma_buf, false),
            ("peermem", self.peermem, false),
            ("staged", self.staged, true),
        ];
        // An adapter's ways are shown where there is one.
        let shown = ways.into_iter().filter(|(_, moved, always)| *always || moved.bytes > 0);
        for (at, (name, moved, _)) in shown.enumerate() {
            write!(f, "{}{name} {}", if at > 0 { ", " } else { "" }, Bytes(moved.bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up_and_show_every_way() {
        let moved = |bytes| Moved { bytes, operations: 1 };
        let mut earlier = EndCounted::default();
        earlier.inbound.window = moved(100);
        let mut later = earlier;
        later.inbound.window = moved(2148);
        later.outbound.staged = moved(7);
        let since = later.since(&earlier);
        assert_eq!((since.inbound.window.bytes, since.inbound.window.operations), (2048, 0));
        let mut total = Counted::default();
        let case = Counted { here: since, there: since };
        total.add(&case);
        total.add(&case);
        assert_eq!(total.staged_bytes(), 28);
        let mut adapter = EndCounted::default();
        adapter.inbound.dma_buf = moved(2048);
        assert!(adapter.to_string().contains("copy-engine 0 B, dma-buf 2 KiB, staged 0 B; out"), "{adapter}");
        let shown = total.here.to_string();
        assert_eq!(
            shown,
            "in cpu 0 B, window 4 KiB, copy-engine 0 B, staged 0 B; out cpu 0 B, window 0 B, copy-engine 0 B, staged 14 B"
        );
    }
}
