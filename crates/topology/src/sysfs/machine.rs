//! Processors, sockets, memory nodes, hypervisor.

use super::Root;
use crate::facts::{Cpu, Machine, NumaNode, Read};

/// The machine.
pub(super) fn machine(root: &Root) -> Machine {
    let info = root.text("/proc/cpuinfo").unwrap_or_default();
    // The first processor speaks for all.
    let first = info.split("\n\n").next().unwrap_or_default();
    let cpu = cpu(first);
    let arch = match root.text("/proc/sys/kernel/arch") {
        Ok(arch) => arch,
        Err(_) if cpu.vendor == "ARM" => "aarch64".to_owned(),
        Err(_) => std::env::consts::ARCH.to_owned(),
    };
    let product = root.text("/sys/class/dmi/id/product_name");
    let hypervisor = hypervisor(root, first, product.as_deref().ok());
    let (sockets, numa) = nodes(root);
    Machine { arch, product: product.into(), cpu, sockets, numa, hypervisor }
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

fn cpu(text: &str) -> Cpu {
    let number =
        |name: &str| field(text, name).and_then(|value| super::root::parse_number(value)?.try_into().ok());
    if let Some(vendor) = field(text, "vendor_id") {
        let name = field(text, "model name").unwrap_or_default().to_owned();
        return Cpu { vendor: vendor.to_owned(), family: number("cpu family"), model: number("model"), name };
    }
    match field(text, "CPU implementer") {
        Some("0x41") => {
            let model = number("CPU part");
            let name = if model == Some(0xd4f) { "Neoverse V2 (Grace and others)" } else { "ARM" };
            Cpu { vendor: "ARM".to_owned(), family: None, model, name: name.to_owned() }
        }
        Some(other) => Cpu { vendor: format!("ARM implementer {other}"), ..Cpu::default() },
        None => Cpu::default(),
    }
}

fn hypervisor(root: &Root, cpu: &str, product: Option<&str>) -> Read<Option<String>> {
    let vendor = root.text("/sys/class/dmi/id/sys_vendor").unwrap_or_default();
    let named = [vendor.as_str(), product.unwrap_or_default()].iter().find_map(|text| {
        [
            "QEMU",
            "KVM",
            "VMware",
            "Xen",
            "VirtualBox",
            "Virtual Machine",
            "Google Compute Engine",
            "Amazon EC2",
            "Alibaba",
            "OpenStack",
        ]
        .iter()
        .find(|name| text.contains(*name))
        .map(|name| (*name).to_owned())
    });
    if let Some(flags) = field(cpu, "flags") {
        let is_virtual = flags.split_whitespace().any(|flag| flag == "hypervisor");
        return Read::Yes(is_virtual.then(|| named.unwrap_or_else(|| "unknown".to_owned())));
    }
    match root.text("/sys/hypervisor/type") {
        Ok(kind) => Read::Yes(Some(kind)),
        Err(_) if product.is_none() && cpu.is_empty() => {
            Read::no("neither /proc/cpuinfo nor DMI can be read")
        }
        // ARM has no such flag; its firmware names a virtual machine.
        Err(_) => Read::Yes(named.filter(|name| name != "Amazon EC2" && name != "Alibaba")),
    }
}

fn nodes(root: &Root) -> (Read<u32>, Vec<NumaNode>) {
    const CPUS: &str = "/sys/devices/system/cpu";
    let package = |cpu: u32| -> Option<i32> {
        root.text(&format!("{CPUS}/cpu{cpu}/topology/physical_package_id")).ok()?.parse().ok()
    };
    let mut numa: Vec<NumaNode> = root
        .names("/sys/devices/system/node")
        .unwrap_or_default()
        .iter()
        .filter_map(|name| {
            let id: i32 = name.strip_prefix("node")?.parse().ok()?;
            let cpus = root.text(&format!("/sys/devices/system/node/{name}/cpulist")).ok()?;
            let first = crate::cpu_list::parse(&cpus)?.into_iter().next()?;
            Some(NumaNode { id, cpus, socket: package(first) })
        })
        .collect();
    numa.sort_by_key(|node| node.id);
    let mut packages: Vec<i32> = root
        .names(CPUS)
        .unwrap_or_default()
        .iter()
        .filter_map(|name| package(name.strip_prefix("cpu")?.parse().ok()?))
        .collect();
    packages.sort_unstable();
    packages.dedup();
    let sockets = match u32::try_from(packages.len()) {
        Ok(0) | Err(_) => Read::no("the kernel does not tell the sockets"),
        Ok(count) => Read::Yes(count),
    };
    (sockets, numa)
}
