//! PCIe: ACS, link speed and width, payload and read request sizes, relaxed ordering.

use std::collections::BTreeSet;

use super::list;
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Analysis;
use nobounce_topology::bandwidth;
use nobounce_topology::facts::{Acs, Facts, Gpu, Link, Nic, PciDevice};

pub(super) fn check(analysis: &Analysis<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    access_control(analysis, &mut found);
    links(analysis, &mut found);
    rates(analysis, &mut found);
    sizes(analysis, &mut found);
    relaxed_ordering(analysis, &mut found);
    unread(analysis, &mut found);
    found
}

/// Adapters whose PCIe settings could not be read.
fn unread(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    if facts.gpus.is_empty() {
        return;
    }
    let blind: Vec<_> = facts
        .nics
        .iter()
        .filter(|nic| !nic.is_software())
        .filter_map(|nic| Some((nic, facts.pci_device(nic.address.as_deref()?)?.config.why_not()?)))
        .collect();
    let Some((first, why)) = blind.first() else { return };
    let names: Vec<_> = blind.iter().map(|(nic, _)| nic.name.clone()).collect();
    found.push(
        Finding::new(
            "pcie-unread",
            Severity::Unknown,
            format!("relaxed ordering, request sizes and ATS could not be read for {}", list(&names)),
        )
        .why("Strict ordering and small requests limit the bandwidth.")
        .seen(format!("configuration space of {}", first.name), *why)
        .fix(Fix::host().run("sudo nobounce doctor"))
        .root()
        .on(names),
    );
}

/// PCIe switch ports between GPUs and adapters with a common upstream switch. Only there does ACS
/// redirect packets to the root complex.
fn access_control(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let near: Vec<_> = analysis
        .pairs
        .iter()
        .filter(|pair| pair.distance.is_some_and(nobounce_topology::tree::Distance::is_below_switch))
        .collect();
    let mut redirecting: Vec<(&PciDevice, Acs)> = Vec::new();
    let mut unread: Vec<&PciDevice> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut hit: BTreeSet<String> = BTreeSet::new();
    for pair in &near {
        // The port at the turn does not matter: its ACS bits apply to packets from above.
        let Some(nic) = pair.nic.address.as_deref() else { continue };
        for port in analysis.tree.between(&pair.gpu.address, nic).ports {
            let redirects = match port.config.known() {
                Some(config) => config.acs.filter(|acs| acs.redirects()),
                None => {
                    if seen.insert(&port.address) {
                        unread.push(port);
                    }
                    continue;
                }
            };
            // An adapter with ATS may bypass the redirect if the port has Direct Translated P2P.
            let translates = analysis
                .tree
                .get(nic)
                .and_then(|device| device.config.known())
                .is_some_and(|config| config.ats == Some(true));
            if let Some(acs) = redirects.filter(|acs| !(translates && acs.passes_translated())) {
                hit.insert(pair.gpu.address.clone());
                hit.insert(pair.nic.name.clone());
                if seen.insert(&port.address) {
                    redirecting.push((port, acs));
                }
            }
        }
    }
    if let Some((first, acs)) = redirecting.first() {
        let bridges: Vec<_> = redirecting.iter().map(|(port, _)| port.address.clone()).collect();
        let finding = Finding::new("acs-redirect", Severity::Warning, format!("access control (ACS) on {} redirects packets between GPU and adapter to the processor", list(&bridges)))
            .why("GPU and adapter share a switch, but every packet goes through the root complex. With IOMMU translation, transfers fail.")
            .seen(format!("lspci -vvv -s {}: ACSCtl", first.address), format!("{:#06x}", acs.control));
        found.push(
            finding
                .fix(Fix::host().each(&bridges, "sudo setpci -s {} ECAP_ACS+0x6.w=0000").remark("until the next boot"))
                .fix(Fix::host().remark("permanently: disable ACS in the firmware setup. Hosts of virtual machines need it: keep it there, with ATS on the adapter"))
                .root()
                .slows()
                .on(bridges),
        );
    }
    if let Some(first) = unread.first() {
        let bridges: Vec<_> = unread.iter().map(|port| port.address.clone()).collect();
        found.push(
            Finding::new(
                "acs-unread",
                Severity::Unknown,
                format!("access control (ACS) could not be read for {}", list(&bridges)),
            )
            .why("If ACS is on, packets between GPU and adapter go through the processor.")
            .seen(
                format!("/sys/bus/pci/devices/{}/config", first.address),
                first.config.why_not().unwrap_or_default(),
            )
            .fix(Fix::host().run("sudo nobounce doctor"))
            .root()
            .on(bridges),
        );
    }
}

/// PCI addresses of adapters.
fn addresses<'a>(nics: impl Iterator<Item = &'a Nic>) -> Vec<String> {
    nics.filter_map(|nic| nic.address.clone()).collect()
}

/// The maximum of a link: the lesser of the device and the port above it.
fn could(analysis: &Analysis<'_>, device: &PciDevice, link: &Link) -> (f64, u32) {
    let above =
        device.parent.as_deref().and_then(|parent| analysis.tree.get(parent)).and_then(|port| port.link);
    match above {
        // The port's own link is the one down to the device, where the port is a downstream one:
        // what it can do limits.
        Some(port) => (link.max_speed.min(port.max_speed), link.max_width.min(port.max_width.max(1))),
        None => (link.max_speed, link.max_width),
    }
}

/// A device, its link, and the speed and width that the link could have.
type Limited<'a> = (&'a PciDevice, Link, f64, u32);

/// Links below their maximum, by what holds them back.
#[derive(Debug, Default)]
struct SlowLinks<'a> {
    degraded: Vec<Limited<'a>>,
    idle: Vec<&'a PciDevice>,
    slot: Vec<Limited<'a>>,
}

fn links(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let slow = slow_links(analysis);
    degraded_links(analysis, &slow.degraded, found);
    idle_links(&slow.idle, found);
    slot_links(analysis, &slow.slot, found);
}

/// The state of a link sorts GPUs, adapters and the bridges between them.
fn slow_links<'a>(analysis: &Analysis<'a>) -> SlowLinks<'a> {
    let facts = analysis.facts;
    let mut links = SlowLinks::default();
    let ends: BTreeSet<&str> = facts
        .gpus
        .iter()
        .map(|gpu| gpu.address.as_str())
        .chain(facts.nics.iter().filter_map(|nic| nic.address.as_deref()))
        .collect();
    let ways: BTreeSet<&str> = analysis.pairs.iter().flat_map(|pair| pair.bridges.iter().copied()).collect();
    for device in facts
        .pci
        .iter()
        .filter(|device| ends.contains(device.address.as_str()) || ways.contains(device.address.as_str()))
    {
        let Some(link) = device.link else { continue };
        let (speed, width) = could(analysis, device, &link);
        // Hypervisors invent links.
        if facts.is_virtual() && link.speed * f64::from(link.width) < 8.0 {
            continue;
        }
        let slower = link.speed < speed * 0.99;
        let narrower = link.width < width;
        let sleeps = gpu_sleeps(facts, device);
        if narrower || (slower && !sleeps && !is_above_sleeper(facts, device)) {
            // Bridges report the same link as the device below them: report it once, for the
            // device.
            let below = |child: &PciDevice| {
                child.parent.as_deref() == Some(&device.address) && ends.contains(child.address.as_str())
            };
            if !(device.is_bridge() && facts.pci.iter().any(below)) {
                links.degraded.push((device, link, speed, width));
            }
        } else if slower && sleeps {
            links.idle.push(device);
        } else if (link.max_speed > speed * 1.01 || link.max_width > width) && !device.is_bridge() {
            links.slot.push((device, link, speed, width));
        }
    }
    links
}

/// The performance state shows whether the device is a GPU that sleeps.
fn gpu_sleeps(facts: &Facts, device: &PciDevice) -> bool {
    facts.gpus.iter().find(|gpu| gpu.address == device.address).is_some_and(is_asleep)
}

/// The port above a sleeping GPU sleeps with it.
fn is_above_sleeper(facts: &Facts, device: &PciDevice) -> bool {
    device.is_bridge()
        && facts.pci.iter().any(|child| {
            child.parent.as_deref() == Some(&device.address)
                && facts.gpus.iter().any(|gpu| gpu.address == child.address && is_asleep(gpu))
        })
}

/// A performance state above 2, or an unread one, counts as sleep.
fn is_asleep(gpu: &Gpu) -> bool {
    gpu.performance_state.get().is_none_or(|state| state > 2)
}

/// An adapter's name labels its device; other devices keep their address.
fn label(facts: &Facts, device: &PciDevice) -> String {
    facts
        .nics
        .iter()
        .find(|nic| nic.address.as_deref() == Some(&device.address))
        .map_or_else(|| device.address.clone(), |nic| nic.name.clone())
}

/// Degraded links run below what both of their ends can do.
fn degraded_links(analysis: &Analysis<'_>, degraded: &[Limited<'_>], found: &mut Vec<Finding>) {
    if let Some((first, link, speed, width)) = degraded.first() {
        let names: Vec<_> = degraded.iter().map(|(device, ..)| label(analysis.facts, device)).collect();
        found.push(
            Finding::new(
                "pcie-degraded",
                Severity::Warning,
                format!("{}: PCIe runs at {} x{} instead of {} x{}", list(&names), bandwidth::generation(link.speed), link.width, bandwidth::generation(*speed), width),
            )
            .why("Causes: a dirty contact, a bad riser, a wrong slot, or failed link training after power-on.")
            .seen(format!("/sys/bus/pci/devices/{}/current_link_speed", first.address), format!("{} GT/s x{} (can do {} GT/s x{})", link.speed, link.width, link.max_speed, link.max_width))
            .fix(Fix::host().remark("power-cycle the machine (a reboot is not enough); reseat the card or riser; check bifurcation and link speed in the firmware setup"))
            .fix(Fix::host().run(format!("sudo lspci -vvv -s {} | grep LnkSta", first.address)).remark("shows the link"))
            .reboot()
            .slows()
            .on(degraded.iter().map(|(device, ..)| device.address.clone()).chain(names)),
        );
    }
}

/// Sleeping GPUs lower the speed of their links.
fn idle_links(idle: &[&PciDevice], found: &mut Vec<Finding>) {
    if !idle.is_empty() {
        let names: Vec<_> = idle.iter().map(|device| device.address.clone()).collect();
        found.push(
            Finding::new("gpu-link-idle", Severity::Info, format!("{}: the link is slow because the GPU is idle", list(&names)))
                .why("Idle GPUs lower their link speed and raise it under load; check again while a program uses the GPU.")
                .seen(format!("/sys/bus/pci/devices/{}/current_link_speed", names[0]), idle[0].link.map_or_else(String::new, |link| format!("{} GT/s", link.speed)))
                .on(names),
        );
    }
}

/// Some slots can do less than their card.
fn slot_links(analysis: &Analysis<'_>, slot: &[Limited<'_>], found: &mut Vec<Finding>) {
    if let Some((first, link, speed, width)) = slot.first() {
        let names: Vec<_> = slot.iter().map(|(device, ..)| label(analysis.facts, device)).collect();
        found.push(
            Finding::new(
                "pcie-slot",
                Severity::Info,
                format!(
                    "{}: capable of {} x{}, its slot of {} x{}",
                    list(&names),
                    bandwidth::generation(link.max_speed),
                    link.max_width,
                    bandwidth::generation(*speed),
                    width
                ),
            )
            .why("The slot sets the limit; nothing is broken.")
            .seen(
                format!("/sys/bus/pci/devices/{}/max_link_speed", first.address),
                format!("{} GT/s x{}", link.max_speed, link.max_width),
            )
            .fix(Fix::both().remark("move the card to a faster slot if there is one"))
            .on(names),
        );
    }
}

/// Adapters whose network link is faster than their slot.
fn rates(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let slower: Vec<_> = analysis
        .facts
        .nics
        .iter()
        .filter_map(|nic| {
            let device = analysis.facts.pci_device(nic.address.as_deref()?)?;
            let link = device.link?;
            let payload = device.config.known().and_then(|config| config.max_payload).unwrap_or(256);
            let pcie = bandwidth::link_now(&link, payload);
            let network = nic
                .ports
                .iter()
                .filter(|port| port.is_active())
                .filter_map(bandwidth::port)
                .fold(0.0, f64::max);
            (pcie < network * 0.95
                && !(analysis.facts.is_virtual() && link.speed * f64::from(link.width) < 8.0))
                .then_some((nic, link, pcie, network))
        })
        .collect();
    let Some((first, link, pcie, network)) = slower.first() else { return };
    let names: Vec<_> = slower.iter().map(|(nic, ..)| nic.name.clone()).collect();
    found.push(
        Finding::new("nic-behind-slot", Severity::Warning, format!("{}: the network could carry {network:.1} GB/s, its PCIe link {pcie:.1}", list(&names)))
            .why("The PCIe link is the bottleneck.")
            .seen(format!("/sys/bus/pci/devices/{}", first.address.as_deref().unwrap_or_default()), format!("{} GT/s x{}", link.speed, link.width))
            .fix(Fix::both().remark("use a slot with more lanes or a newer generation; socket-direct cards need both halves connected"))
            .slows()
            .on(names),
    );
}

fn sizes(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let small: Vec<_> = facts
        .nics
        .iter()
        .filter(|nic| !nic.is_software())
        .filter_map(|nic| {
            let device = facts.pci_device(nic.address.as_deref()?)?;
            let config = device.config.known()?;
            let (now, most) = (config.max_payload?, config.max_payload_supported?);
            // All ports on the path must agree: the minimum applies.
            let way = analysis.tree.bridges_above(&device.address);
            let most = way
                .iter()
                .filter_map(|port| port.config.known()?.max_payload_supported)
                .fold(most, u32::min)
                .min(512);
            (now < most && now < 256).then_some((nic, now, most))
        })
        .collect();
    if let Some((first, now, most)) = small.first() {
        let names: Vec<_> = small.iter().map(|(nic, ..)| nic.name.clone()).collect();
        found.push(
            Finding::new(
                "max-payload",
                Severity::Info,
                format!("{}: PCIe MaxPayload is {now} bytes, {most} are possible", list(&names)),
            )
            .why("Headers take 19 % of the link instead of 10 %.")
            .seen(format!("{} DevCtl: MaxPayload", first.name), format!("{now} bytes"))
            .fix(Fix::host().remark(
                "set 'Max Payload Size' to auto or 256 in the firmware setup, or boot with pci=pcie_bus_perf",
            ))
            .reboot()
            .on(names),
        );
    }
    let requests: Vec<_> = facts
        .nics
        .iter()
        .filter(|nic| !nic.is_software())
        .filter_map(|nic| {
            let request = facts.pci_device(nic.address.as_deref()?)?.config.known()?.max_read_request?;
            let rate = nic.port().and_then(|port| port.rate_gbps.known().copied()).unwrap_or(0.0);
            (request < 512 || (request == 512 && rate >= 200.0)).then_some((nic, request))
        })
        .collect();
    if let Some((first, request)) = requests.first() {
        let names: Vec<_> = requests.iter().map(|(nic, _)| nic.name.clone()).collect();
        let severity = if *request < 512 { Severity::Warning } else { Severity::Info };
        let finding = Finding::new("max-read-request", severity, format!("{}: PCIe read requests are only {request} bytes", list(&names)))
            .why("The adapter reads memory to send: small requests leave it waiting for round trips, and it cannot fill a fast link.")
            .seen(format!("{} DevCtl: MaxReadReq", first.name), format!("{request} bytes"))
            .fix(Fix::host().each(&addresses(small.iter().map(|(nic, ..)| *nic)), "sudo setpci -s {} CAP_EXP+8.w=5000:7000").remark("4096 bytes; until the next boot"))
            .root();
        found.push(if severity == Severity::Warning { finding.slows() } else { finding }.on(names));
    }
}

fn relaxed_ordering(analysis: &Analysis<'_>, found: &mut Vec<Finding>) {
    let facts = analysis.facts;
    let strict: Vec<_> = facts
        .nics
        .iter()
        .filter(|nic| !nic.is_software())
        .filter(|nic| {
            let config = nic
                .address
                .as_deref()
                .and_then(|address| facts.pci_device(address))
                .and_then(|device| device.config.known());
            config.is_some_and(|config| config.relaxed_ordering == Some(false))
        })
        .collect();
    let Some(first) = strict.first() else { return };
    let names: Vec<_> = strict.iter().map(|nic| nic.name.clone()).collect();
    found.push(
        Finding::new(
            "relaxed-ordering",
            Severity::Warning,
            format!("{}: relaxed ordering is disabled in the device", list(&names)),
        )
        .why("Writes in strict order wait for each other, whatever the link could carry.")
        .seen(format!("{} DevCtl: RlxdOrd", first.name), "-")
        .fix(
            Fix::host()
                .each(&addresses(strict.iter().copied()), "sudo setpci -s {} CAP_EXP+8.w=0010:0010")
                .remark("permanently: PCI_WR_ORDERING=1 with mlxconfig, and the firmware setup"),
        )
        .root()
        .slows()
        .on(names),
    );
}
