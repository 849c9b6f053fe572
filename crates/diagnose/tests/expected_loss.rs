//! What doctor expects of a pair, and what is lost, by the predictor.

use nobounce_diagnose::verdict::{PathKind, Verdict};
use nobounce_diagnose::{Style, diagnose, report};
use nobounce_topology::facts::{Acs, Facts, Read};
use nobounce_topology::machines;

fn first(facts: &Facts) -> Verdict {
    diagnose(facts).verdicts.into_iter().find(|verdict| verdict.best).unwrap()
}

#[test]
fn a_machine_in_good_state_loses_nothing() {
    for name in ["dgx-a100", "dgx-h100", "dgx-b200", "hgx-h100-roce", "gh200"] {
        let verdict = first(&machines::machine(name).unwrap());
        assert!(verdict.expected_gbs.unwrap() > 20.0 && verdict.loss().is_none(), "{name}: {verdict:?}");
    }
}

#[test]
fn a_detour_with_strict_ordering_costs_two_thirds() {
    let mut facts = machines::machine("dgx-h100").unwrap();
    for device in &mut facts.pci {
        let (bridge, network) = (device.is_bridge(), device.is_network());
        if let Read::Yes(config) = &mut device.config {
            if bridge {
                config.acs = Some(Acs { control: 0x1d });
            }
            if network {
                config.relaxed_ordering = Some(false);
            }
        }
    }
    let verdict = first(&facts);
    assert_eq!(verdict.path, PathKind::Slow);
    assert!((0.6..0.7).contains(&verdict.loss().unwrap()), "{verdict:?}");
    let text = report(&facts, &diagnose(&facts), Style { color: false, width: 120, all: true });
    assert!(text.contains("16.0 GB/s, -67 %"), "{text}");
}

#[test]
fn a_narrow_slot_and_staging_are_losses() {
    let mut facts = machines::machine("dgx-h100").unwrap();
    for device in facts.pci.iter_mut().filter(|device| device.is_network()) {
        device.link.as_mut().unwrap().width = 8;
    }
    let verdict = first(&facts);
    assert!((0.3..0.5).contains(&verdict.loss().unwrap()), "{verdict:?}");
    let staged = machines::machine("dgx-h100").map(|mut facts| {
        for gpu in &mut facts.gpus {
            gpu.gpudirect_rdma = Read::Yes(false);
            gpu.dma_buf = Read::Yes(false);
        }
        facts
    });
    let verdict = first(&staged.unwrap());
    if verdict.path == PathKind::Staged {
        assert!(verdict.loss().unwrap() > 0.1, "{verdict:?}");
    }
}
