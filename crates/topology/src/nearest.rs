//! Chooses an adapter for a GPU: the nearest by PCIe that works, and among equals the faster. Each
//! adapter gets a line with the reason.

use crate::analysis::{Analysis, Pair};
use crate::facts::{Facts, Nic, Port};

/// An adapter, and why it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Its name; `None` if no hardware adapter is usable.
    pub nic: Option<String>,
    /// One line for each adapter, best first.
    pub lines: Vec<String>,
}

/// The adapter for memory of a GPU, by the GPU's PCI address; without one, the fastest for host
/// memory.
#[must_use]
pub fn nic_for(facts: &Facts, gpu: Option<&str>) -> Choice {
    let Some(gpu) = gpu else { return fastest(facts) };
    let analysis = Analysis::of(facts);
    let best = analysis.best().into_iter().flatten().find(|pair| pair.gpu.address == gpu);
    let usable = |pair: &Pair<'_>| !pair.closed && works(pair.nic) && !pair.nic.is_software();
    let chosen = best.filter(|pair| usable(pair)).map(|pair| pair.nic.name.clone());
    let lines = analysis.pairs_of(gpu).into_iter().map(|pair| {
        let far = pair.distance.map_or("at a distance that is not known".to_owned(), |distance| {
            format!("{} ({})", distance.name(), distance.words())
        });
        let why = verdict(pair.nic, chosen.as_deref(), pair.closed, "another is nearer, faster or less used");
        format!("{}: {far}, {}: {why}", pair.nic.name, speed(pair.nic))
    });
    Choice { lines: lines.collect(), nic: chosen }
}

fn fastest(facts: &Facts) -> Choice {
    let closed = |nic: &Nic| crate::usable::nic(facts, nic).is_no();
    let mut nics: Vec<&Nic> = facts.nics.iter().collect();
    nics.sort_by(|a, b| rate(b).total_cmp(&rate(a)));
    let chosen =
        nics.iter().find(|nic| works(nic) && !closed(nic) && !nic.is_software()).map(|nic| nic.name.clone());
    let line = |nic: &&Nic| {
        let why = verdict(nic, chosen.as_deref(), closed(nic), "another is faster or comes first");
        format!("{}: {}: {why}", nic.name, speed(nic))
    };
    Choice { lines: nics.iter().map(line).collect(), nic: chosen }
}

fn verdict(nic: &Nic, chosen: Option<&str>, closed: bool, otherwise: &str) -> String {
    if chosen == Some(nic.name.as_str()) {
        "chosen".to_owned()
    } else if nic.is_software() {
        "a software device, taken only by name".to_owned()
    } else if !works(nic) {
        "no active port".to_owned()
    } else if closed {
        "this process cannot open it".to_owned()
    } else {
        otherwise.to_owned()
    }
}

fn works(nic: &Nic) -> bool {
    nic.ports.iter().any(Port::may_be_active)
}

fn rate(nic: &Nic) -> f64 {
    nic.port().and_then(|port| port.rate_gbps.known().copied()).unwrap_or(0.0)
}

fn speed(nic: &Nic) -> String {
    match rate(nic) {
        0.0 => "of unknown speed".to_owned(),
        rate => format!("{rate} Gb/s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::machine;

    #[test]
    fn every_gpu_of_a_server_gets_the_adapter_beside_it() {
        let facts = machine("dgx-h100").unwrap();
        let chosen: Vec<_> = facts
            .gpus
            .iter()
            .map(|gpu| nic_for(&facts, Some(&gpu.address)).nic.expect("an adapter"))
            .collect();
        let mut different = chosen.clone();
        different.sort();
        different.dedup();
        assert_eq!(different.len(), facts.gpus.len(), "no two GPUs share one: {chosen:?}");
        let choice = nic_for(&facts, Some(&facts.gpus[0].address));
        assert!(choice.lines[0].contains("PIX") || choice.lines[0].contains("PXB"), "{:?}", choice.lines);
        assert!(
            choice.lines.iter().filter(|line| line.ends_with("chosen")).count() == 1,
            "{:?}",
            choice.lines
        );
    }

    #[test]
    fn an_adapter_that_is_down_is_passed_over_and_the_line_says_so() {
        let mut facts = machine("dgx-h100").unwrap();
        let gpu = facts.gpus[0].address.clone();
        let first = nic_for(&facts, Some(&gpu)).nic.unwrap();
        for port in facts.nics.iter_mut().filter(|nic| nic.name == first).flat_map(|nic| &mut nic.ports) {
            port.state = "DOWN".to_owned();
        }
        let choice = nic_for(&facts, Some(&gpu));
        assert!(choice.nic.is_some() && choice.nic.as_ref() != Some(&first), "{choice:?}");
        let line = choice.lines.iter().find(|line| line.starts_with(&format!("{first}:"))).unwrap();
        assert!(line.contains("no active port"), "{line}");
    }

    #[test]
    fn host_memory_takes_the_fastest_and_nothing_is_nothing() {
        let facts = machine("dgx-h100").unwrap();
        let choice = nic_for(&facts, None);
        let fastest = facts.nics.iter().map(rate).fold(0.0, f64::max);
        let chosen = facts.nics.iter().find(|nic| Some(&nic.name) == choice.nic.as_ref()).unwrap();
        assert!((rate(chosen) - fastest).abs() < 1e-9, "{choice:?}");
        assert_eq!(nic_for(&Facts::default(), None), Choice::default());
    }
}
