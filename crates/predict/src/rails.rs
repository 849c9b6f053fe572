//! Several adapters of a machine used together: how many of them are far from their GPU.

use nobounce_topology::analysis::Analysis;
use nobounce_topology::tree::Distance;

/// How many of the best adapters are on another socket than their GPU: those of one GPU, or, for
/// several GPUs, the best one of each first. `None` where the distance of one is unknown, or the
/// machine has fewer adapters.
pub(crate) fn far_rails(analysis: &Analysis<'_>, gpu: usize, gpus: u32, rails: u32) -> Option<u32> {
    let rails = usize::try_from(rails).ok()?;
    let mut all = Vec::new();
    if gpus > 1 {
        let best = analysis.best().into_iter().flatten().filter(|pair| !pair.nic.is_software());
        all.extend(best.take(usize::try_from(gpus).ok()?));
    }
    for gpu in analysis.facts.gpus.iter().skip(gpu).take(usize::try_from(gpus).ok()?.max(1)) {
        all.extend(analysis.pairs_of(&gpu.address).into_iter().filter(|pair| !pair.nic.is_software()));
    }
    let mut distances = Vec::new();
    let mut taken: Vec<&str> = Vec::new();
    for pair in all {
        if distances.len() < rails && !taken.contains(&pair.nic.name.as_str()) {
            taken.push(&pair.nic.name);
            distances.push(pair.distance?);
        }
    }
    let far = distances.iter().filter(|distance| **distance == Distance::Sys).count();
    (distances.len() == rails).then_some(u32::try_from(far).ok()?)
}

#[cfg(test)]
mod tests {
    use nobounce_topology::machines;

    use crate::machine::{Choice, parts_of};

    fn far(machine: &str, gpus: Option<u32>, rails: u32) -> Option<u32> {
        let facts = machines::machine(machine).unwrap();
        let choice = Choice { gpus, rails: Some(rails), ..Choice::default() };
        parts_of(&facts, &choice).unwrap().spec.far_rails
    }

    #[test]
    fn adapters_of_the_other_socket_are_counted() {
        // Four adapters on each socket.
        assert_eq!(far("dgx-h100", None, 4), Some(0), "they are on the GPU's socket");
        assert_eq!(far("dgx-h100", None, 8), Some(4));
        assert_eq!(far("dgx-h100", Some(8), 8), Some(0), "each GPU has its own");
        assert_eq!(far("dgx-h100", None, 100), None, "it has fewer");
        assert_eq!(far("dgx-h100", None, 1), None, "the distance says it");
    }
}
