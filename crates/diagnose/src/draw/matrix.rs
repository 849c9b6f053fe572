//! GPU by adapter: distances, and the best adapter of each GPU.

use serde::Serialize;

use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::Facts;
use nobounce_topology::tree::Distance;

/// Distances of all pairs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Matrix {
    /// Adapters, the columns.
    pub nics: Vec<String>,
    /// GPUs, the rows.
    pub gpus: Vec<MatrixRow>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MatrixRow {
    /// `GPU 0`.
    pub label: String,
    /// PCI address.
    pub address: String,
    /// Memory node.
    pub numa_node: Option<i32>,
    /// Distance to each adapter.
    pub distances: Vec<Option<Distance>>,
    /// The adapter to use.
    pub best: Option<String>,
}

impl Matrix {
    /// The matrix of these facts.
    #[must_use]
    pub fn of(facts: &Facts) -> Self {
        let analysis = Analysis::of(facts);
        let best = analysis.best();
        let gpus = facts
            .gpus
            .iter()
            .zip(best)
            .map(|(gpu, best)| MatrixRow {
                label: gpu.label(),
                address: gpu.address.clone(),
                numa_node: facts.pci_device(&gpu.address).and_then(|device| device.numa_node.get()),
                distances: analysis
                    .pairs
                    .iter()
                    .filter(|pair| pair.gpu.address == gpu.address)
                    .map(|pair| pair.distance)
                    .collect(),
                best: best.map(|pair| pair.nic.name.clone()),
            })
            .collect();
        Self { nics: facts.nics.iter().map(|nic| nic.name.clone()).collect(), gpus }
    }
}
