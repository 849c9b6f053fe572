//! Parts from the facts of a machine: one GPU and one adapter of it.

use super::fabric::{Fabric, Kind};
use super::parts::{Memory, Software, Spec};
use super::plausible;
use super::rails::far_rails;
use super::slot::Slot;
use nobounce_topology::analysis::{Analysis, Pair};
use nobounce_topology::facts::{Facts, Nic, Port};
use nobounce_topology::iommu;
use nobounce_topology::methods::Answer;
use nobounce_topology::platform::Platform;
use nobounce_topology::tree::{Distance, Tree};

/// Which GPU and adapter of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The GPU's number; the first where none is named.
    pub gpu: Option<u32>,
    /// The adapter's name; the best one for the GPU where none is named.
    pub nic: Option<String>,
    /// How many adapters are used together, and how many GPUs; one where nothing is said.
    pub rails: Option<u32>,
    /// As above.
    pub gpus: Option<u32>,
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
    /// A fact that no machine has.
    #[error("invalid facts: {field} is {value}, expected {expected}")]
    Absurd {
        /// Where it stands.
        field: String,
        /// What it says.
        value: String,
        /// What machines have.
        expected: &'static str,
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
    plausible::check(facts)?;
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
    let mut found = pair.map_or_else(|| host(facts, first), |pair| of_pair(&analysis, pair));
    if let Some(rails @ 2..) = choice.rails
        && found.spec.memory == Some(Memory::Gpu)
    {
        found.spec.far_rails = far_rails(&analysis, gpu, choice.gpus.unwrap_or(1), rails);
    }
    Ok(found)
}

/// The parts of one GPU with one adapter.
pub fn of_pair(analysis: &Analysis<'_>, pair: &Pair<'_>) -> Found {
    let facts = analysis.facts;
    let mut spec = adapter(facts, pair.nic);
    spec.iommu = translates(facts, pair.nic, Some(&pair.gpu.address));
    let coherent = pair.gpu.coherent_link.get() == Some(true);
    if coherent {
        spec.coherent = Some(true);
    } else {
        // A sleeping GPU's link wakes up: use its maximum speed at its current width.
        let link = facts.pci_device(&pair.gpu.address).and_then(|device| device.link);
        spec.gpu = link.and_then(|link| Slot::of_speed(link.max_speed, link.width));
        spec.distance = pair.distance;
        spec.acs_redirect = Some(is_redirected(&analysis.tree, pair));
        spec.unavailable = unavailable(pair);
        if is_link_down(facts, &pair.gpu.address) {
            spec.port_down = Some(format!("the PCIe link of {} is down", pair.gpu.label()));
        }
    }
    spec.memory = Some(Memory::Gpu);
    spec.gpu_vendor = Some(pair.gpu.vendor);
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
    let settings = Spec {
        relaxed_ordering: Some(true),
        max_read_request: Some(4096),
        bar1: None,
        acs_redirect: None,
        iommu: None,
        unavailable: None,
        port_down: None,
        ..now
    };
    Some(Spec { nic: slot.or(settings.nic), ..settings }.within_platform())
}

/// ACS redirect: packets below one switch go up through the CPU.
fn is_redirected(tree: &Tree<'_>, pair: &Pair<'_>) -> bool {
    let sent_up = |address: &&str| {
        let config = tree.get(address).and_then(|bridge| bridge.config.known());
        config.and_then(|config| config.acs).is_some_and(nobounce_topology::facts::Acs::redirects)
    };
    pair.distance.is_some_and(Distance::is_below_switch) && pair.bridges.iter().any(sent_up)
}

/// Whether an IOMMU translates the addresses of the GPU or the adapter. Adapters with ATS translate
/// themselves.
fn translates(facts: &Facts, nic: &Nic, gpu: Option<&str>) -> Option<bool> {
    let device = |address: &str| facts.pci_device(address);
    let nic = nic.address.as_deref().and_then(device);
    if nic.and_then(|nic| nic.config.known()).is_some_and(|config| config.ats == Some(true)) {
        return Some(false);
    }
    let ends = [gpu.and_then(device), nic];
    let known: Vec<bool> =
        ends.into_iter().flatten().filter_map(|one| iommu::translates(facts, one)).collect();
    (!known.is_empty()).then(|| known.contains(&true))
}

/// Why memory of this GPU cannot be registered with this adapter, if that is certain.
fn unavailable(pair: &Pair<'_>) -> Option<String> {
    if pair.proven.is_some() {
        return None;
    }
    let dma_buf = [&pair.export, &pair.import].into_iter().find_map(|answer| match answer {
        Answer::No(_, why) => Some(why),
        _ => None,
    })?;
    match &pair.peermem {
        Answer::No(_, why) => Some(format!("dma-buf: {dma_buf}; peer memory: {why}")),
        _ => None,
    }
}

/// Whether the PCIe link of a device is down: it has no lanes or no speed.
fn is_link_down(facts: &Facts, address: &str) -> bool {
    let link = facts.pci_device(address).and_then(|device| device.link);
    link.is_some_and(|link| link.width == 0 || link.speed == 0.0)
}

/// What of the adapter is not up: its PCIe link, or its port.
fn down(facts: &Facts, nic: &Nic, port: Option<&Port>) -> Option<String> {
    if nic.address.as_deref().is_some_and(|address| is_link_down(facts, address)) {
        return Some(format!("the PCIe link of {} is down", nic.name));
    }
    let port = port.filter(|port| !port.may_be_active())?;
    Some(format!("port {} of {} is {}", port.number, nic.name, port.state.to_lowercase()))
}

fn host(facts: &Facts, nic: &Nic) -> Found {
    let iommu = translates(facts, nic, None);
    let spec = Spec { memory: Some(Memory::Host), iommu, ..adapter(facts, nic) };
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
    let port_down = down(facts, nic, port);
    let rate = port.and_then(|port| port.rate_gbps.get());
    let mtu = port.and_then(|port| port.active_mtu.get());
    Spec {
        link: rate.filter(|rate| *rate > 0.0).map(|gbps| Fabric { kind, gbps: data_rate(kind, gbps) }),
        // Amazon's adapters say 4096 and send longer packets.
        mtu: mtu.filter(|_| !matches!(kind, Kind::Efa | Kind::Iwarp)),
        nic: device.and_then(|device| device.link).and_then(|link| Slot::of_speed(link.speed, link.width)),
        max_payload: config.and_then(|config| config.max_payload),
        max_read_request: config.and_then(|config| config.max_read_request),
        relaxed_ordering: config.and_then(|config| config.relaxed_ordering),
        platform: Some(Platform::of(&facts.machine.cpu)),
        memory_per_socket: Platform::memory_of(&facts.machine.cpu),
        sockets: facts.machine.sockets.get(),
        port_down,
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

#[cfg(test)]
mod tests {
    use super::super::factor::Factor;
    use super::super::model::direct;
    use super::super::parts::Parts;
    use super::super::upgrade::upgrades;
    use super::*;
    use nobounce_topology::facts::Read;
    use nobounce_topology::machines;

    fn rate(name: &str) -> f64 {
        let facts = machines::machine(name).unwrap();
        let parts = parts_of(&facts, &Choice::default()).unwrap().spec.resolve().unwrap();
        direct(&parts, 64 << 20).map_or(0.0, |estimate| estimate.gbytes_per_s.expected)
    }

    fn link_of<'a>(facts: &'a mut Facts, address: &str) -> &'a mut nobounce_topology::facts::Link {
        let device = facts.pci.iter_mut().find(|device| device.address == address);
        device.unwrap().link.as_mut().unwrap()
    }

    fn link_of_nic(facts: &mut Facts) -> &mut nobounce_topology::facts::Link {
        let address = facts.nics[0].address.clone().unwrap();
        link_of(facts, &address)
    }

    #[test]
    fn known_machines_do_what_they_are_known_for() {
        for (name, wanted) in [
            ("dgx-a100", 24.2),
            ("dgx-h100", 48.4),
            ("hgx-h100-roce", 47.9),
            ("dgx-b200", 48.4),
            ("gh200", 48.9),
            ("p5-efa", 12.3),
            ("workstation", 3.06),
        ] {
            let found = rate(name);
            assert!((found / wanted - 1.0).abs() < 0.02, "{name}: {found} instead of {wanted}");
        }
        let memory = |change: fn(&mut Facts)| {
            let mut facts = machines::machine("mi300x").unwrap();
            change(&mut facts);
            parts_of(&facts, &Choice::default()).unwrap().spec.memory_per_socket
        };
        assert_eq!(memory(|_| {}), Some(460.8));
        assert_eq!(memory(|facts| facts.machine.cpu.model = Some(1)), Some(204.8));
        assert_eq!(memory(|facts| facts.machine.cpu.name = "AMD Ryzen 9 7950X".to_owned()), None);
        // Its GPUs and adapters are on root ports of an EPYC.
        assert!(rate("dual-socket").abs() < 1e-9);
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
        let now =
            parts_of(&facts, &Choice { nic: Some(nic.name.clone()), ..Choice::default() }).unwrap().spec;
        assert!(rate(now) < 15.0);
        for memory in [Memory::Gpu, Memory::Host] {
            assert!(rate(at_its_best(&facts, &nic.name, memory).unwrap()) > 47.0);
        }
        assert_eq!(at_its_best(&facts, "rxe0", Memory::Host), None);
    }

    #[test]
    fn what_is_not_there_is_named() {
        let facts = machines::machine("dgx-h100").unwrap();
        let far = Choice { gpu: Some(0), nic: Some("mlx5_7".to_owned()), ..Choice::default() };
        assert_eq!(parts_of(&facts, &far).unwrap().spec.distance, Some(Distance::Sys));
        let gpu = parts_of(&facts, &Choice { gpu: Some(9), ..Choice::default() }).unwrap_err();
        assert_eq!(gpu.to_string(), "no GPU 9: the machine has 8 GPUs");
        let nic =
            parts_of(&facts, &Choice { nic: Some("eth9".to_owned()), ..Choice::default() }).unwrap_err();
        assert!(nic.to_string().contains("mlx5_0"));
    }

    #[test]
    fn packets_that_access_control_sends_up_pass_the_processor() {
        let mut facts = machines::machine("dgx-h100").unwrap();
        for device in &mut facts.pci {
            if let (true, Read::Yes(config)) = (device.is_bridge(), &mut device.config) {
                config.acs = Some(nobounce_topology::facts::Acs { control: 0x1d });
            }
        }
        let spec = parts_of(&facts, &Choice::default()).unwrap().spec;
        assert_eq!((spec.distance, spec.acs_redirect), (Some(Distance::Pix), Some(true)));
        let parts = spec.resolve().unwrap();
        let free = |parts: &Parts| {
            upgrades(parts, 1 << 30)
                .into_iter()
                .filter(|one| one.free)
                .map(|one| one.change)
                .collect::<Vec<_>>()
        };
        assert!(free(&parts).iter().any(|change| change.contains("ACS")), "{:?}", free(&parts));
        assert_eq!(direct(&parts, 1 << 30).unwrap().stream_binds, Factor::AcsRedirect);
    }

    /// What the doctor knows changes the figure, or takes it away with the reason.
    #[test]
    fn findings_of_the_doctor_change_the_prediction() {
        let said = |change: &dyn Fn(&mut Facts)| {
            let mut facts = machines::machine("dgx-h100").unwrap();
            change(&mut facts);
            let parts = parts_of(&facts, &Choice::default()).unwrap().spec.resolve().unwrap();
            direct(&parts, 1 << 30).map(|one| one.gbytes_per_s.expected).map_err(|error| error.to_string())
        };
        assert!(said(&|_| {}).unwrap() > 48.0);
        let translated = said(&|facts| {
            for device in &mut facts.pci {
                if let Read::Yes(Some(iommu)) = &mut device.iommu {
                    iommu.kind = Some("DMA-FQ".to_owned());
                }
            }
        });
        assert!(translated.unwrap_err().contains("iommu=pt"));
        let mut facts = machines::machine("dgx-h100").unwrap();
        facts.gpus.clear();
        for device in &mut facts.pci {
            if let Read::Yes(Some(iommu)) = &mut device.iommu {
                iommu.kind = Some("DMA".to_owned());
            }
        }
        assert_eq!(parts_of(&facts, &Choice::default()).unwrap().spec.iommu, Some(true));
        let down = said(&|facts| {
            for port in facts.nics.iter_mut().flat_map(|nic| &mut nic.ports) {
                port.state = "DOWN".to_owned();
            }
        });
        assert!(down.unwrap_err().contains("port 1 of mlx5"));
        let small = said(&|facts| {
            for gpu in &mut facts.gpus {
                gpu.bar1_bytes = Read::Yes(256 << 20);
            }
        });
        assert!(small.unwrap_err().contains("BAR1"));
        let absurd = |change: fn(&mut Facts)| {
            let mut facts = machines::machine("dgx-h100").unwrap();
            change(&mut facts);
            parts_of(&facts, &Choice::default()).unwrap_err().to_string()
        };
        let rate = absurd(|facts| facts.nics[0].ports[0].rate_gbps = Read::Yes(-400.0));
        assert!(rate.contains("ports[1].rate_gbps is -400"), "{rate}");
        let width =
            absurd(|facts| facts.pci.iter_mut().find_map(|one| one.link.as_mut()).unwrap().width = 1000);
        assert!(width.contains("link.width is 1000"), "{width}");
        let odd = absurd(|facts| link_of_nic(facts).width = 63);
        assert!(odd.contains("link.width is 63"), "{odd}");
        let nvlinks = absurd(|facts| facts.gpus[0].nvlinks = Read::Yes(1000));
        assert!(nvlinks.contains("nvlinks is 1000"), "{nvlinks}");
        for (what, change) in [
            ("mlx5", (|facts| link_of_nic(facts).width = 0) as fn(&mut Facts)),
            ("mlx5", |facts| link_of_nic(facts).speed = 0.0),
            ("GPU 0", |facts| {
                let address = facts.gpus[0].address.clone();
                link_of(facts, &address).width = 0;
            }),
        ] {
            let mut facts = machines::machine("dgx-h100").unwrap();
            change(&mut facts);
            let choice = Choice { nic: Some(facts.nics[0].name.clone()), ..Choice::default() };
            let parts = parts_of(&facts, &choice).unwrap().spec.resolve().unwrap();
            let found = direct(&parts, 1 << 20).unwrap_err().to_string();
            assert!(found.contains("PCIe link of") && found.contains(what), "{found}");
        }
        let mtu = absurd(|facts| facts.nics[0].ports[0].active_mtu = Read::Yes(5000));
        assert!(mtu.contains("ports[1].active_mtu is 5000"), "{mtu}");
        let bar1 = absurd(|facts| facts.gpus[0].bar1_bytes = Read::Yes(u64::MAX));
        assert!(bar1.contains("bar1_bytes is 18446744073709551615"), "{bar1}");
        let sizes = |change: fn(&mut nobounce_topology::facts::ConfigSpace)| {
            let mut facts = machines::machine("dgx-h100").unwrap();
            let address = facts.nics[0].address.clone().unwrap();
            let nic = facts.pci.iter_mut().find(|device| device.address == address).unwrap();
            if let Read::Yes(config) = &mut nic.config {
                change(config);
            }
            parts_of(&facts, &Choice::default()).unwrap_err().to_string()
        };
        let payload = sizes(|config| config.max_payload = Some(100_000));
        assert!(payload.contains("config.max_payload is 100000"), "{payload}");
        let request = sizes(|config| config.max_read_request = Some(100_000));
        assert!(request.contains("config.max_read_request is 100000"), "{request}");
        let closed = said(&|facts| {
            facts.registrations.clear();
            for gpu in &mut facts.gpus {
                gpu.gpudirect_rdma = Read::Yes(false);
                gpu.dma_buf = Read::Yes(false);
                gpu.export_probe = Read::default();
            }
        });
        assert!(closed.unwrap_err().contains("GPUDirect"));
    }
}
