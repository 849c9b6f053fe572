//! Bytes that were moved, or not: `doctor --prove`.

use super::list;
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::facts::{Gpu, Transfer};

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let facts = analysis.facts;
    // The software NIC is a fact only below `nobounce run`.
    let is_software =
        |name: &str| facts.nics.iter().find(|nic| nic.name == name).is_none_or(|nic| nic.is_software());
    let mut found = Vec::new();
    for gpu in &facts.gpus {
        let failed =
            facts.transfers.iter().filter(|transfer| transfer.gpu == gpu.address && !transfer.probe.ok);
        let (software, hardware): (Vec<_>, Vec<_>) = failed.partition(|transfer| is_software(&transfer.nic));
        found.extend(of_adapters(gpu, &hardware));
        found.extend(of_window(gpu, &software));
    }
    found
}

/// Adapters that register the memory, and do not access it.
fn of_adapters(gpu: &Gpu, failed: &[&Transfer]) -> Option<Finding> {
    let first = failed.first()?;
    let mut nics: Vec<_> = failed.iter().map(|transfer| transfer.nic.clone()).collect();
    nics.dedup();
    Some(
        Finding::new(
            "moves-no-data",
            Severity::Error,
            format!("{} registers with {}, but moves no bytes directly", gpu.address, list(&nics)),
        )
        .why("A registration alone proves no path: --prove moved no bytes on it, wrong ones, or staged them.")
        .seen(format!("--prove on {}", first.nic), first.probe.detail.clone())
        .fix(
            Fix::host()
                .run("sudo dmesg | tail -n 20")
                .remark("IOMMU faults, PCIe errors, then check ACS and the adapter's address"),
        )
        .root()
        .blocks()
        .on(std::iter::once(gpu.address.clone()).chain(nics)),
    )
}

/// The software NIC, whose direct path is the CPU's window onto the GPU.
fn of_window(gpu: &Gpu, failed: &[&Transfer]) -> Option<Finding> {
    let first = failed.first()?;
    Some(
        Finding::new("moves-no-data", Severity::Warning, format!("{}: the software NIC moved no bytes through the window", gpu.address))
            .why("The probe of the CPU's window (BAR1) worked, and --prove staged bytes, failed, or got wrong ones. Adapters are not concerned.")
            .seen(format!("--prove on {}", first.nic), first.probe.detail.clone())
            .fix(Fix::both().run("nobounce doctor --all").remark("findings about BAR1 and the window; then").run("nobounce doctor --prove"))
            .on([gpu.address.clone()]),
    )
}

#[cfg(test)]
mod tests {
    use nobounce_topology::facts::{Facts, Probe, Transfer};
    use nobounce_topology::machines;

    use crate::finding::{Effect, Severity};
    use crate::{Style, diagnose, report};

    fn failed(facts: &mut Facts, nic: &str) {
        let probe = Probe::failed(None, "staged, although direct (window) was promised");
        let gpu = facts.gpus[0].address.clone();
        facts.transfers.push(Transfer { gpu, nic: nic.to_owned(), bytes: 1, probe });
    }

    #[test]
    fn the_software_nic_is_no_adapter() {
        let mut facts = machines::machine("workstation").unwrap();
        failed(&mut facts, "nb0");
        let of = |facts: &Facts| {
            diagnose(facts).findings.into_iter().find(|finding| finding.id == "moves-no-data")
        };
        let found = of(&facts).unwrap();
        assert_eq!((found.effect, found.severity), (Effect::Nothing, Severity::Warning), "{found:#?}");
        assert!(
            found.title.contains("window") && !found.fix.iter().any(|fix| fix.to_string().contains("ACS")),
            "{found:#?}"
        );
        assert!(!diagnose(&facts).direct_is_lost);
        facts.nics.clear();
        facts.pci.retain(|device| !device.is_network());
        let text = report(&facts, &diagnose(&facts), Style { color: false, width: 120, all: false });
        assert!(!text.contains("no usable RDMA adapter"), "{text}");
        let mut facts = machines::machine("workstation").unwrap();
        failed(&mut facts, "mlx5_0");
        let found = of(&facts).unwrap();
        assert_eq!(found.effect, Effect::Blocks, "{found:#?}");
        assert_eq!(found.devices, [facts.gpus[0].address.as_str(), "mlx5_0"]);
        assert!(!found.why.contains("failed on it"), "{found:#?}");
    }
}
