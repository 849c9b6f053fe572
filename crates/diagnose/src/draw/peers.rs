//! GPU by GPU: peer access, as far as the driver told.

use std::fmt::Write as _;

use nobounce_topology::clean;
use nobounce_topology::facts::Facts;
use serde::Serialize;

/// Peer access of all pairs. What is not known is no access and none denied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Peers {
    /// `GPU 0`, rows and columns.
    pub gpus: Vec<String>,
    /// `NV`, `P2P`, `no`, `?` for unknown, `-` for the GPU itself.
    pub access: Vec<Vec<&'static str>>,
}

impl Peers {
    /// The matrix of these facts; empty where the driver was not asked.
    #[must_use]
    pub fn of(facts: &Facts) -> Self {
        if facts.gpus.len() < 2 || facts.gpu_peers.is_not_recorded() {
            return Self::default();
        }
        let pairs = facts.gpu_peers.known().map_or(&[][..], Vec::as_slice);
        let word = |one: &str, other: &str| {
            let pair = pairs.iter().find(|pair| {
                (pair.one == one && pair.other == other) || (pair.one == other && pair.other == one)
            });
            match pair.map(|pair| (pair.access.get(), pair.nvlink.get())) {
                _ if one == other => "-",
                Some((Some(true), Some(true))) => "NV",
                Some((Some(true), _)) => "P2P",
                Some((Some(false), _)) => "no",
                Some((None, _)) | None => "?",
            }
        };
        let row = |one: &str| facts.gpus.iter().map(|gpu| word(one, &gpu.address)).collect();
        Self {
            gpus: facts.gpus.iter().map(nobounce_topology::facts::Gpu::label).collect(),
            access: facts.gpus.iter().map(|gpu| row(&gpu.address)).collect(),
        }
    }

    /// Whether there is nothing to draw.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.gpus.is_empty()
    }

    /// As lines of text.
    pub(super) fn text(&self) -> String {
        let names: Vec<String> = self.gpus.iter().map(|name| clean(name)).collect();
        let first = names.iter().map(String::len).max().unwrap_or(0);
        let mut out = format!("{:first$}", "");
        for name in &names {
            let _ = write!(out, "  {name}");
        }
        out.push('\n');
        for (name, row) in names.iter().zip(&self.access) {
            let _ = write!(out, "{name:first$}");
            for (word, column) in row.iter().zip(&names) {
                let _ = write!(out, "  {word:<width$}", width = column.len());
            }
            out.truncate(out.trim_end().len());
            out.push('\n');
        }
        out + "peer access: NV over NVLink; P2P over PCIe; no: through host memory; ?: unknown\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nobounce_topology::facts::{GpuPeer, Read};
    use nobounce_topology::machines;

    #[test]
    fn access_that_is_not_known_is_drawn_as_unknown() {
        let mut facts = machines::machine("dgx-h100").unwrap();
        facts.gpus.truncate(3);
        assert!(Peers::of(&facts).is_empty());
        let address = |at: usize| facts.gpus[at].address.clone();
        facts.gpu_peers = Read::Yes(vec![GpuPeer {
            one: address(1),
            other: address(0),
            access: Read::Yes(true),
            nvlink: Read::Yes(true),
            denied: None,
        }]);
        let drawn = Peers::of(&facts);
        assert_eq!(drawn.access, [["-", "NV", "?"], ["NV", "-", "?"], ["?", "?", "-"]]);
        assert!(drawn.text().starts_with("       GPU 0  GPU 1  GPU 2\nGPU 0  -      NV     ?\n"));
        facts.gpu_peers = Read::no("NVML error 999");
        assert_eq!(Peers::of(&facts).access[0], ["-", "?", "?"]);
    }
}
