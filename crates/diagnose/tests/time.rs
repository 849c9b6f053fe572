//! How long a diagnosis and its report take on a machine with 8 GPUs and 16 adapters: healthy, and
//! with several faults.

use std::time::{Duration, Instant};

use nobounce_diagnose::{Style, diagnose, report};
use nobounce_topology::facts::{Acs, Facts, Read};
use nobounce_topology::machines;

/// What `doctor` may take; it takes about 15 ms.
const BOUND: Duration = Duration::from_millis(300);
const RUNS: usize = 5;

#[test]
fn a_large_machine_is_diagnosed_in_time() {
    let healthy = machine();
    let mut faulty = healthy.clone();
    faulty.kernel.peer_memory_clients = Read::Yes(Vec::new());
    if let Read::Yes(modules) = &mut faulty.kernel.modules {
        modules.remove("nvidia_peermem");
    }
    for gpu in &mut faulty.gpus {
        gpu.dma_buf = Read::Yes(false);
        gpu.export_probe = Read::default();
    }
    for device in &mut faulty.pci {
        let bridge = device.is_bridge();
        if let Read::Yes(config) = &mut device.config {
            config.relaxed_ordering = Some(false);
            config.acs = bridge.then_some(Acs { control: 0x1d });
        }
    }
    for (name, facts) in [("healthy", healthy), ("faulty", faulty)] {
        // The fastest run: others may have shared the CPU with other work.
        let fastest = (0..RUNS).map(|_| run(&facts)).min().unwrap_or_default();
        let (gpus, nics) = (facts.gpus.len(), facts.nics.len());
        assert!(fastest <= BOUND, "{name}: {gpus} GPUs, {nics} adapters: {fastest:.1?}, above {BOUND:?}");
    }
}

/// From the text of a facts file to the text of the report.
fn run(facts: &Facts) -> Duration {
    let text = facts.to_json();
    let start = Instant::now();
    let facts = Facts::from_json(&text).expect("facts that were just written");
    let told = report(&facts, &diagnose(&facts), Style { color: false, width: 120, all: true });
    assert!(!told.is_empty());
    start.elapsed()
}

/// Eight GPUs, each with two adapters below its switch.
fn machine() -> Facts {
    let mut facts = machines::machine("dgx-h100").expect("a known machine");
    for (number, mut nic) in facts.nics.clone().into_iter().enumerate() {
        let address = nic.address.clone().expect("adapters have addresses");
        let second = address.replace(".0", ".1");
        let device = facts.pci_device(&address).cloned().expect("adapters are in the tree");
        facts.pci.push(nobounce_topology::facts::PciDevice { address: second.clone(), ..device });
        nic.name = format!("mlx5_{}", number + 8);
        nic.address = Some(second);
        facts.nics.push(nic);
    }
    facts
}
