//! Bytes and operations, by route.

use nobounce_memory::path::Mechanism;

/// What was moved on one route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Bytes of payload.
    pub bytes: u64,
    /// Messages whose last byte took this route.
    pub operations: u64,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.operations += other.operations;
    }
}

/// What was moved in one direction, by route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathTotals {
    /// Host memory, copied by the CPU.
    pub cpu: Tally,
    /// GPU memory through a window: loads and stores.
    pub window: Tally,
    /// GPU memory by the copy engine, straight from the link's buffer.
    pub copy_engine: Tally,
    /// GPU memory by a network adapter's own DMA, registered by dma-buf.
    pub dma_buf: Tally,
    /// GPU memory by a network adapter's own DMA, registered by nvidia-peermem.
    pub peermem: Tally,
    /// GPU memory with one more host copy, or placed by the copy engine for lack of a window.
    pub staged: Tally,
}

/// What was moved in both directions, by route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathCounters {
    /// From the wire into registered memory.
    pub inbound: PathTotals,
    /// From registered memory to the wire.
    pub outbound: PathTotals,
}

/// The route that bytes took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BytePath {
    Direct(Mechanism),
    Staged,
}

impl PathTotals {
    pub(crate) fn count(&mut self, route: BytePath, bytes: u64, ends_message: bool) {
        let tally = match route {
            BytePath::Direct(Mechanism::Window) => &mut self.window,
            BytePath::Direct(Mechanism::CopyEngine) => &mut self.copy_engine,
            BytePath::Direct(Mechanism::DmaBuf) => &mut self.dma_buf,
            BytePath::Direct(Mechanism::Peermem) => &mut self.peermem,
            BytePath::Direct(Mechanism::Cpu) => &mut self.cpu,
            BytePath::Staged => &mut self.staged,
        };
        tally.bytes += bytes;
        tally.operations += u64::from(ends_message);
    }

    /// Names and values, in a fixed order.
    pub fn list(&self) -> [(&'static str, Tally); 6] {
        [
            (Mechanism::Cpu.name(), self.cpu),
            (Mechanism::Window.name(), self.window),
            (Mechanism::CopyEngine.name(), self.copy_engine),
            (Mechanism::DmaBuf.name(), self.dma_buf),
            (Mechanism::Peermem.name(), self.peermem),
            ("staged", self.staged),
        ]
    }

    /// Bytes on all routes.
    pub fn bytes(&self) -> u64 {
        self.list().iter().map(|(_, tally)| tally.bytes).sum()
    }

    fn add(&mut self, other: &Self) {
        self.cpu.add(&other.cpu);
        self.window.add(&other.window);
        self.copy_engine.add(&other.copy_engine);
        self.dma_buf.add(&other.dma_buf);
        self.peermem.add(&other.peermem);
        self.staged.add(&other.staged);
    }
}

impl PathCounters {
    pub(crate) fn add(&mut self, other: &Self) {
        self.inbound.add(&other.inbound);
        self.outbound.add(&other.outbound);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_has_its_own_count() {
        let routes = [
            BytePath::Direct(Mechanism::Cpu),
            BytePath::Direct(Mechanism::Window),
            BytePath::Direct(Mechanism::CopyEngine),
            BytePath::Direct(Mechanism::DmaBuf),
            BytePath::Direct(Mechanism::Peermem),
            BytePath::Staged,
        ];
        let mut totals = PathTotals::default();
        for (bytes, way) in (1..).zip(routes) {
            totals.count(way, bytes, true);
        }
        let mut twice = totals;
        twice.add(&totals);
        for (nth, (name, tally)) in (1..).zip(twice.list()) {
            assert_eq!(tally, Tally { bytes: 2 * nth, operations: 2 }, "{name}");
        }
        assert_eq!(totals.bytes(), (1..=6).sum());
    }
}
