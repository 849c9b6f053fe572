//! The block devices below a filesystem, down to the drives.

use super::mount::Found;
use crate::facts::{BlockDevice, BlockKind, NvmeController, Read};
use crate::sysfs::{Root, pci};

/// Most devices of a chain: a RAID of many drives has fewer, and a damaged copy may loop.
const MAX_DEVICES: usize = 128;

/// All devices, the filesystem's own first.
pub(super) fn chain(root: &Root, found: &Found) -> Read<Vec<BlockDevice>> {
    let first = match root.real_parts(&format!("/sys/dev/block/{}", found.device)) {
        Ok(parts) => parts.last().cloned(),
        // btrfs and others have a device number of their own: go by what is mounted.
        Err(_) if found.mount.source.starts_with("/dev/") => {
            let name = found.mount.source.rsplit('/').next().map(str::to_owned);
            name.filter(|name| root.exists(&format!("/sys/class/block/{name}")))
        }
        Err(_) if found.device.starts_with("0:") => return Read::Yes(Vec::new()),
        Err(error) => return Read::no(format!("/sys/dev/block/{}: {error}", found.device)),
    };
    let Some(first) = first else {
        return Read::no(format!("/sys/class/block has no {}", found.mount.source));
    };
    let mut names = vec![first];
    let mut devices: Vec<BlockDevice> = Vec::new();
    while let Some(name) = names.get(devices.len()).cloned() {
        let device = device(root, &name);
        for below in &device.below {
            if !names.contains(below) && names.len() < MAX_DEVICES {
                names.push(below.clone());
            }
        }
        devices.push(device);
    }
    Read::Yes(devices)
}

fn device(root: &Root, name: &str) -> BlockDevice {
    let folder = format!("/sys/class/block/{name}");
    let parts = root.real_parts(&folder).unwrap_or_default();
    let mut device = BlockDevice { name: name.to_owned(), ..BlockDevice::default() };
    if root.exists(&format!("{folder}/partition")) {
        device.kind = BlockKind::Partition;
        // The disk is the folder around it.
        device.below = parts.iter().rev().nth(1).cloned().into_iter().collect();
        return device;
    }
    device.below = root.names(&format!("{folder}/slaves")).unwrap_or_default();
    device.below.truncate(MAX_DEVICES);
    device.kind = if root.exists(&format!("{folder}/md")) {
        device.level = root.text(&format!("{folder}/md/level")).ok();
        BlockKind::Md
    } else if root.exists(&format!("{folder}/dm")) {
        mapped(&root.text(&format!("{folder}/dm/uuid")).unwrap_or_default())
    } else if name.starts_with("nvme") {
        device.multipath = parts.iter().any(|part| part.starts_with("nvme-subsys"));
        device.controllers = controllers(root, &parts);
        BlockKind::Nvme
    } else if name.starts_with("loop") {
        BlockKind::Loop
    } else if name.starts_with("vd") {
        BlockKind::Virtio
    } else if name.starts_with("sd") {
        BlockKind::Scsi
    } else {
        BlockKind::Other
    };
    device
}

/// By the beginning of the device mapper's identifier.
fn mapped(uuid: &str) -> BlockKind {
    match uuid.split('-').next() {
        Some("LVM") => BlockKind::Lvm,
        Some("CRYPT") => BlockKind::Crypt,
        Some("mpath") => BlockKind::DmMultipath,
        _ => BlockKind::Dm,
    }
}

/// The controllers of a namespace: the one above it, or all of its subsystem where multipathing
/// joins them.
fn controllers(root: &Root, parts: &[String]) -> Vec<NvmeController> {
    let is_controller =
        |name: &str| name.strip_prefix("nvme").is_some_and(|rest| rest.parse::<u32>().is_ok());
    let subsystem = parts
        .iter()
        .find(|part| part.starts_with("nvme-subsys") && part.as_str() != "nvme-subsystem")
        .map(|name| root.names(&format!("/sys/class/nvme-subsystem/{name}")).unwrap_or_default());
    let names = subsystem.unwrap_or_else(|| parts.to_vec());
    names
        .iter()
        .filter(|name| is_controller(name))
        .take(MAX_DEVICES)
        .map(|name| {
            let folder = format!("/sys/class/nvme/{name}");
            let transport = match root.text(&format!("{folder}/transport")) {
                Ok(text) => Read::Yes(text),
                Err(error) => Read::no(format!("{folder}/transport: {error}")),
            };
            let real = root.real_parts(&folder).unwrap_or_default();
            let address = real.iter().rev().find(|part| pci::is_address(part)).cloned();
            NvmeController { name: name.clone(), transport, pci: address }
        })
        .collect()
}
