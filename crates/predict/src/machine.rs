//! Parts from the facts of a machine: one GPU and one adapter of it.

use super::fabric::{Fabric, Kind};
use super::parts::{Memory, Software, Spec};
use super::slot::Slot;
use nobounce_topology::analysis::{Analysis, Pair};
use nobounce_topology::facts::{Facts, Nic, Port};
use nobounce_topology::platform::Platform;
use nobounce_topology::tree::{Distance, Tree};

/// Which GPU and adapter of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The GPU's number; the first where none is named.
    pub gpu: Option<u32>,
    /// The adapter's name; the best one for the GPU where none is named.
    pub nic: Option<String>,
}

/// A machine whose parts were found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// What it is made of.
    pub spec: Spec,
    /// For people: what was taken.
    pub title: String,
}

/// The machine has no such parts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChoiceError {
    /// No such GPU.
    #[error("no GPU {asked}: the machine has {have} GPUs")]
    Gpu {
        /// The number.
        asked: u32,
        /// How many there are.
        have: usize,
    },
    /// No such adapter.
    #[error("no adapter {asked}: the machine has {have}")]
    Nic {
        /// The name.
        asked: String,
        /// What there is.
        have: String,
    },
}

/// The parts of a machine. Without an adapter it is the software NIC between two processes, and the
/// title says so.
///
/// # Errors
/// A GPU or adapter was named that is not there.
pub fn parts_of(facts: &Facts, choice: &Choice) -> Result<Found, ChoiceError> {
    let analysis = Analysis::of(facts);
    let hardware: Vec<&Nic> = facts.nics.iter().filter(|nic| !nic.is_software()).collect();
    if let Some(asked) = &choice.nic
        && !hardware.iter().any(|nic| &nic.name == asked)
    {
        let names: Vec<_> = hardware.iter().map(|nic| nic.name.as_str()).collect();
        let have = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        return Err(ChoiceError::Nic { asked: asked.clone(), have });
    }
    let gpu = match choice.gpu {
        Some(asked) => {
            let found = facts.gpus.iter().position(|gpu| gpu.index == Some(asked));
            Some(found.ok_or(ChoiceError::Gpu { asked, have: facts.gpus.len() })?)
        }
        None => (!facts.gpus.is_empty()).then_some(0),
    };
    let Some(first) = hardware.first() else { return Ok(software(facts)) };
    let Some(gpu) = gpu else {
        let nic = choice
            .nic
            .as_ref()
            .and_then(|name| hardware.iter().find(|nic| &nic.name == name))
            .unwrap_or(first);
        return Ok(host(facts, nic));
    };
    let named = choice.nic.as_deref();
    let address = &facts.gpus[gpu].address;
    let pair = match named {
        Some(name) => analysis.pairs_of(address).into_iter().find(|pair| pair.nic.name == name),
        None => analysis.best().get(gpu).copied().flatten().filter(|pair| !pair.nic.is_software()),
    };
    Ok(pair.map_or_else(|| host(facts, first), |pair| of_pair(&analysis, pair)))
}

/// The parts of one GPU with one adapter.
pub fn of_pair(analysis: &Analysis<'_>, pair: &Pair<'_>) -> Found {
    let facts = analysis.facts;
    let mut spec = adapter(facts, pair.nic);
    let coherent = pair.gpu.coherent_link.get() == Some(true);
    if coherent {
        spec.coherent = Some(true);
    } else {
        // A sleeping GPU's link wakes up: use its maximum speed at its current width.
        let link = facts.pci_device(&pair.gpu.address).and_then(|device| device.link);
        spec.gpu = link.and_then(|link| Slot::of_speed(link.max_speed, link.width));
        spec.distance = pair.distance.map(|distance| redirected(&analysis.tree, pair, distance));
    }
    spec.memory = Some(Memory::Gpu);
    spec.bar1 = pair.gpu.bar1_bytes.get();
    let spec = spec.within_platform();
    let distance = spec.distance.map_or(String::new(), |distance| format!(", {distance}"));
    Found {
        title: format!("{} ({}) and {}{distance}", pair.gpu.label(), pair.gpu.title(), pair.nic.name),
        spec,
    }
}

/// The potential of one adapter between two machines like this one, with its link and settings as
/// they should be. Runs are compared with it. `None` without such an adapter, or if nothing is
/// known of it, as of software ones.
#[must_use]
pub fn at_its_best(facts: &Facts, nic: &str, memory: Memory) -> Option<Spec> {
    let analysis = Analysis::of(facts);
    let nic = facts.nics.iter().find(|one| one.name == nic && !one.is_software())?;
    let now = match memory {
        Memory::Host => host(facts, nic).spec,
        Memory::Gpu => {
            let pairs = analysis.pairs_of(&facts.gpus.first()?.address);
            of_pair(&analysis, pairs.into_iter().find(|pair| pair.nic.name == nic.name)?).spec
        }
    };
    let link = nic.address.as_deref().and_then(|address| facts.pci_device(address)?.link);
    let slot = link.and_then(|link| Slot::of_speed(link.max_speed, link.max_width));
    let settings = Spec { relaxed_ordering: Some(true), max_read_request: Some(4096), bar1: None, ..now };
    Some(Spec { nic: slot.or(settings.nic), ..settings }.within_platform())
}

/// ACS redirect: packets below one switch go up through the CPU.
fn redirected(tree: &Tree<'_>, pair: &Pair<'_>, distance: Distance) -> Distance {
    let sent_up = |address: &&str| {
        let config = tree.get(address).and_then(|bridge| bridge.config.known());
        config.and_then(|config| config.acs).is_some_and(nobounce_topology::facts::Acs::redirects)
    };
    if distance.is_below_switch() && pair.bridges.iter().any(sent_up) { Distance::Phb } else { distance }
}

fn host(facts: &Facts, nic: &Nic) -> Found {
    let spec = Spec { memory: Some(Memory::Host), ..adapter(facts, nic) };
    Found { spec, title: format!("host memory and {}", nic.name) }
}

/// No adapter: our own, between two processes.
fn software(facts: &Facts) -> Found {
    let link = Fabric { kind: Kind::Loopback, gbps: 1000.0 };
    let memory = if facts.gpus.is_empty() { Memory::Host } else { Memory::Gpu };
    let spec = Spec {
        link: Some(link),
        memory: Some(memory),
        software: Some(Software::Nobounce),
        coherent: (memory == Memory::Gpu).then_some(true),
        ..Spec::default()
    };
    Found {
        spec,
        title: "no RDMA adapter: the software NIC between two processes of this machine".to_owned(),
    }
}

fn adapter(facts: &Facts, nic: &Nic) -> Spec {
    let device = nic.address.as_deref().and_then(|address| facts.pci_device(address));
    let config = device.and_then(|device| device.config.known());
    let fastest = |a: &&Port, b: &&Port| {
        let rate = |port: &Port| port.rate_gbps.get().unwrap_or(0.0);
        rate(a).total_cmp(&rate(b))
    };
    let port = nic.ports.iter().filter(|port| port.is_active()).max_by(fastest).or_else(|| nic.ports.first());
    let kind = match (nic.driver.as_deref(), port) {
        (Some("efa"), _) => Kind::Efa,
        (Some("iw_cxgb4" | "siw"), _) => Kind::Iwarp,
        (_, Some(port)) if port.is_ethernet() => Kind::RoceV2,
        _ => Kind::InfiniBand,
    };
    let rate = port.and_then(|port| port.rate_gbps.get());
    let mtu = port.and_then(|port| port.active_mtu.get());
    Spec {
        link: rate.filter(|rate| *rate > 0.0).map(|gbps| Fabric { kind, gbps: data_rate(kind, gbps) }),
        // Amazon's adapters say 4096 and send longer packets.
        mtu: mtu.filter(|mtu| kind != Kind::Efa && matches!(mtu, 256 | 512 | 1024 | 2048 | 4096)),
        nic: device.and_then(|device| device.link).and_then(|link| Slot::of_speed(link.speed, link.width)),
        max_payload: config.and_then(|config| config.max_payload).filter(|bytes| exists(*bytes)),
        max_read_request: config.and_then(|config| config.max_read_request).filter(|bytes| exists(*bytes)),
        relaxed_ordering: config.and_then(|config| config.relaxed_ordering),
        platform: Some(Platform::of(&facts.machine.cpu)),
        sockets: facts.machine.sockets.get(),
        ..Spec::default()
    }
}

/// The kernel tells QDR and older by their signalling rate, of which the line code takes a fifth.
fn data_rate(kind: Kind, gbps: f64) -> f64 {
    match (kind, gbps) {
        (Kind::InfiniBand, rate) if rate <= 40.0 => rate * 0.8,
        (Kind::InfiniBand, rate) if (50.0..60.0).contains(&rate) => 54.54,
        (_, rate) => rate,
    }
}

const fn exists(bytes: u32) -> bool {
    matches!(bytes, 128 | 256 | 512 | 1024 | 2048 | 4096)
}

#[cfg(test)]
mod tests {
    use super::super::model::direct;
    use super::*;
    use nobounce_topology::machines;

    fn rate(name: &str) -> f64 {
        let facts = machines::machine(name).unwrap();
        let parts = parts_of(&facts, &Choice::default()).unwrap().spec.resolve().unwrap();
        direct(&parts, 64 << 20).map_or(0.0, |estimate| estimate.gbytes_per_s.expected)
    }

    #[test]
    fn known_machines_do_what_they_are_known_for() {
        for (name, wanted) in [
            ("dgx-a100", 24.2),
            ("dgx-h100", 48.4),
            ("hgx-h100-roce", 47.9),
            ("dgx-b200", 48.4),
            ("gh200", 48.9),
            ("dual-socket", 23.9),
            ("p5-efa", 12.3),
            ("workstation", 3.06),
        ] {
            let found = rate(name);
            assert!((found / wanted - 1.0).abs() < 0.02, "{name}: {found} instead of {wanted}");
        }
    }

    #[test]
    fn every_known_machine_can_be_predicted() {
        for name in machines::NAMES {
            let facts = machines::machine(name).unwrap();
            let found = parts_of(&facts, &Choice::default()).unwrap();
            assert!(found.spec.resolve().is_ok(), "{name}: {:?}", found.spec.resolve());
        }
        let nothing = parts_of(&Facts::default(), &Choice::default()).unwrap();
        assert!(nothing.title.contains("software NIC"));
        assert!(nothing.spec.resolve().is_ok());
    }

    #[test]
    fn an_adapter_at_its_best_has_its_own_slot() {
        let mut facts = machines::machine("dgx-h100").unwrap();
        let nic = facts.nics[0].clone();
        for device in facts.pci.iter_mut().filter(|device| Some(&device.address) == nic.address.as_ref()) {
            device.link.as_mut().unwrap().width = 4;
        }
        let rate = |spec: Spec| direct(&spec.resolve().unwrap(), 64 << 20).unwrap().gbytes_per_s.expected;
        let now = parts_of(&facts, &Choice { gpu: None, nic: Some(nic.name.clone()) }).unwrap().spec;
        assert!(rate(now) < 15.0);
        for memory in [Memory::Gpu, Memory::Host] {
            assert!(rate(at_its_best(&facts, &nic.name, memory).unwrap()) > 47.0);
        }
        assert_eq!(at_its_best(&facts, "rxe0", Memory::Host), None);
    }

    #[test]
    fn what_is_not_there_is_named() {
        let facts = machines::machine("dgx-h100").unwrap();
        let far = Choice { gpu: Some(0), nic: Some("mlx5_7".to_owned()) };
        assert_eq!(parts_of(&facts, &far).unwrap().spec.distance, Some(Distance::Sys));
        let gpu = parts_of(&facts, &Choice { gpu: Some(9), nic: None }).unwrap_err();
        assert_eq!(gpu.to_string(), "no GPU 9: the machine has 8 GPUs");
        let nic = parts_of(&facts, &Choice { gpu: None, nic: Some("eth9".to_owned()) }).unwrap_err();
        assert!(nic.to_string().contains("mlx5_0"));
    }

    #[test]
    fn packets_that_access_control_sends_up_pass_the_processor() {
        let mut facts = machines::machine("dgx-h100").unwrap();
        for device in &mut facts.pci {
            if let (true, nobounce_topology::facts::Read::Yes(config)) =
                (device.is_bridge(), &mut device.config)
            {
                config.acs = Some(nobounce_topology::facts::Acs { control: 0x1d });
            }
        }
        assert_eq!(parts_of(&facts, &Choice::default()).unwrap().spec.distance, Some(Distance::Phb));
    }
}
