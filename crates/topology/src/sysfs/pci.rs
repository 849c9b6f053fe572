//! The PCI tree from `/sys/bus/pci/devices`.

use std::collections::BTreeSet;
use std::io;

use super::Root;
use super::config_space;
use crate::facts::{Bar, Gpu, GpuVendor, Iommu, Link, PciDevice, Read};

const DEVICES: &str = "/sys/bus/pci/devices";
/// Most functions that are looked at.
const MAX_DEVICES: usize = 4096;

/// GPUs, adapters and NVMe drives, and the bridges above them, in the order of their addresses.
pub(super) fn devices(root: &Root) -> io::Result<Vec<PciDevice>> {
    let names = root.names(DEVICES)?;
    let mut wanted = BTreeSet::new();
    for name in names.iter().filter(|name| is_address(name)).take(MAX_DEVICES) {
        let class = root.number::<u32>(&format!("{DEVICES}/{name}/class")).unwrap_or(0);
        let vendor = root.number::<u32>(&format!("{DEVICES}/{name}/vendor")).unwrap_or(0);
        let device = PciDevice { address: name.clone(), class, vendor, ..PciDevice::default() };
        if device.is_gpu() || device.is_network() || device.is_nvme() {
            let ancestors = ancestors(root, name).1;
            // An Intel GPU on the root bus is part of the CPU.
            if device.is_gpu() && vendor == 0x8086 && ancestors.is_empty() {
                continue;
            }
            wanted.extend(ancestors);
            wanted.insert(name.clone());
        }
    }
    Ok(wanted.iter().map(|address| device(root, address)).collect())
}

/// The root bus of a device, and the bridges above it from the top down.
fn ancestors(root: &Root, address: &str) -> (String, Vec<String>) {
    let Ok(parts) = root.real_parts(&format!("{DEVICES}/{address}")) else { return Default::default() };
    let Some(at) = parts.iter().rposition(|part| is_root_bus(part)) else { return Default::default() };
    let bridges =
        parts[at + 1..].iter().filter(|part| is_address(part) && *part != address).cloned().collect();
    (parts[at].clone(), bridges)
}

fn device(root: &Root, address: &str) -> PciDevice {
    let file = |name: &str| format!("{DEVICES}/{address}/{name}");
    let (bus, bridges) = ancestors(root, address);
    let config = match root.bytes(&file("config")) {
        Ok(bytes) => config_space::parse(&bytes).map_or_else(|error| Read::no(error.to_string()), Read::Yes),
        Err(error) => Read::no(error.to_string()),
    };
    PciDevice {
        address: address.to_owned(),
        parent: bridges.last().cloned(),
        root: bus,
        class: root.number(&file("class")).unwrap_or(0),
        vendor: root.number(&file("vendor")).unwrap_or(0),
        device: root.number(&file("device")).unwrap_or(0),
        driver: root.link_name(&file("driver")).ok(),
        numa_node: node(root, &file("numa_node")),
        link: link(root, address),
        bars: root.text(&file("resource")).map(|text| bars(&text)).unwrap_or_default(),
        config,
        iommu: iommu(root, &file("iommu_group")),
        virtual_function_of: root.link_name(&file("physfn")).ok(),
    }
}

fn node(root: &Root, path: &str) -> Read<i32> {
    match root.text(path) {
        Ok(text) => text.parse().map_or_else(|_| Read::no(format!("{text:?} is no node")), Read::Yes),
        Err(error) => Read::no(error.to_string()),
    }
}

fn iommu(root: &Root, path: &str) -> Read<Option<Iommu>> {
    if !root.exists(path) {
        return Read::Yes(None);
    }
    let Some(group) = root.link_name(path).ok().and_then(|name| name.parse().ok()) else {
        return Read::no("the link to its group cannot be read");
    };
    let kind = root.text(&format!("/sys/kernel/iommu_groups/{group}/type")).ok();
    Read::Yes(Some(Iommu { group, kind }))
}

fn link(root: &Root, address: &str) -> Option<Link> {
    let file = |name: &str| root.text(&format!("{DEVICES}/{address}/{name}")).ok();
    let link = Link {
        speed: speed(&file("current_link_speed")?)?,
        max_speed: speed(&file("max_link_speed")?)?,
        width: file("current_link_width")?.parse().ok()?,
        max_width: file("max_link_width")?.parse().ok()?,
    };
    // 255 lanes is how the kernel reports an invalid register; devices inside a CPU have no lanes
    // at all.
    (link.width > 0 && link.width <= 32 && link.max_width <= 32).then_some(link)
}

/// `16.0 GT/s PCIe`.
fn speed(text: &str) -> Option<f64> {
    let value: f64 = text.split_whitespace().next()?.parse().ok()?;
    (value.is_finite() && value > 0.0 && value < 1000.0).then_some(value)
}

/// The memory regions of a device. Behind the first six come the ROM and those of virtual
/// functions.
fn bars(resource: &str) -> Vec<Bar> {
    const MEMORY: u64 = 0x200;
    const PREFETCH: u64 = 0x2000;
    resource
        .lines()
        .take(6)
        .zip(0..)
        .filter_map(|(line, index)| {
            let mut fields = line.split_whitespace().map(super::root::parse_number);
            let (start, end, flags) = (fields.next()??, fields.next()??, fields.next()??);
            let bytes = end.checked_sub(start)?.checked_add(1)?;
            (flags & MEMORY != 0 && end > start).then_some(Bar {
                index,
                bytes,
                prefetchable: flags & PREFETCH != 0,
            })
        })
        .collect()
}

/// BAR1: the largest prefetchable BAR, or the largest one of more than 128 MiB where a hypervisor
/// hides that bit.
pub fn bar1(device: &PciDevice) -> Option<u64> {
    let largest =
        |wanted: fn(&Bar) -> bool| device.bars.iter().filter(|bar| wanted(bar)).map(|bar| bar.bytes).max();
    largest(|bar| bar.prefetchable).or_else(|| largest(|bar| bar.bytes >= 128 << 20))
}

/// The GPUs of the PCI tree. Only what sysfs shows is set; the caller adds what the driver reports.
pub(super) fn gpus(devices: &[PciDevice]) -> Vec<Gpu> {
    devices
        .iter()
        .filter(|device| device.is_gpu())
        .map(|device| Gpu {
            address: device.address.clone(),
            vendor: match device.vendor {
                0x1002 => GpuVendor::Amd,
                0x8086 => GpuVendor::Intel,
                _ => GpuVendor::Nvidia,
            },
            bar1_bytes: bar1(device).map_or_else(|| Read::no("no region is large enough"), Read::Yes),
            ..Gpu::default()
        })
        .collect()
}

/// `0000:1b:00.0`; domains may be longer.
pub fn is_address(name: &str) -> bool {
    let mut parts = name.split(':');
    let (Some(domain), Some(bus), Some(rest), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let Some((slot, function)) = rest.split_once('.') else { return false };
    let hex = |text: &str, len: std::ops::RangeInclusive<usize>| {
        len.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    hex(domain, 4..=8) && hex(bus, 2..=2) && hex(slot, 2..=2) && hex(function, 1..=1)
}

fn is_root_bus(name: &str) -> bool {
    name.strip_prefix("pci").and_then(|rest| rest.split_once(':')).is_some_and(|(domain, bus)| {
        (4..=8).contains(&domain.len())
            && bus.len() == 2
            && domain.bytes().chain(bus.bytes()).all(|b| b.is_ascii_hexdigit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart() {
        assert!(
            is_address("0000:1b:00.0")
                && is_address("10000:e1:00.0")
                && !is_address("pci0000:00")
                && !is_address("0000:1b:00")
        );
        assert!(is_root_bus("pci0000:17") && !is_root_bus("0000:17:00.0") && !is_root_bus("pcie"));
    }

    #[test]
    fn numbers_of_sysfs_are_understood() {
        assert_eq!(speed("16.0 GT/s PCIe"), Some(16.0));
        assert_eq!(speed("2.5 GT/s"), Some(2.5));
        assert_eq!(speed("Unknown"), None);
        let text = "0x0000380040000000 0x0000380043ffffff 0x000000000014220c\n0x0 0x0 0x0\n0x384000000000 0x387fffffffff 0x14220c\n";
        let device = PciDevice { bars: bars(text), ..PciDevice::default() };
        assert_eq!(device.bars.len(), 2);
        assert_eq!(bar1(&device), Some(256 << 30));
        assert!(bars("0x2 0x1 0x200\nnonsense\n0x0 0xffffffffffffffff 0x200").is_empty());
    }
}
