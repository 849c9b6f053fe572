//! The block devices: NVMe drives of this machine, or something in between.

use super::{ChainStep, filesystem, shell, step};
use crate::checks::list;
use crate::finding::{Finding, Fix, Severity};
use crate::storage_verdict::State;
use nobounce_topology::facts::{BlockDevice, BlockKind, Storage};

/// What one device does to both routes, and the finding that tells it.
struct DeviceEffect {
    p2pdma: State,
    nvidia_fs: State,
    id: &'static str,
    what: String,
}

pub(super) fn steps(storage: &Storage, asks_p2pdma: bool, has_nvme: bool) -> Vec<ChainStep> {
    let Some(mount) = storage.mount.known() else {
        return vec![step("drive", State::Unknown, State::Unknown, "the filesystem is unknown")];
    };
    if !filesystem::is_local(&mount.kind) {
        let text = "no block device of this machine is read";
        return vec![step("drive", State::NotNeeded, State::NotNeeded, text)];
    }
    let Some(devices) = storage.devices.known().filter(|devices| !devices.is_empty()) else {
        let why = storage.devices.why_not().unwrap_or("no block device was found");
        let finding = Finding::new(
            "storage-unread",
            Severity::Unknown,
            format!("the block device of {} is unknown", mount.point),
        )
        .why("Direct routes need NVMe drives, and no LVM, encryption or virtual disk in between.")
        .seen("/sys/dev/block", why)
        .fix(Fix::both().run(format!("lsblk -s \"$(findmnt -no SOURCE -T {})\"", shell(&storage.path))));
        return vec![step("drive", State::Unknown, State::Unknown, why).because(finding)];
    };
    let mut steps = vec![drive(storage, devices, asks_p2pdma, has_nvme)];
    if devices.iter().any(|device| device.kind == BlockKind::Nvme && is_pcie(device) != Some(false)) {
        steps.push(multipath(storage, devices, asks_p2pdma));
    }
    steps
}

/// Whether all controllers of a namespace are on PCIe.
fn is_pcie(device: &BlockDevice) -> Option<bool> {
    if device.controllers.is_empty() {
        return None;
    }
    let mut all = Some(true);
    for controller in &device.controllers {
        match controller.transport.known().map(String::as_str) {
            Some("pcie") => {}
            Some(_) => return Some(false),
            None => all = None,
        }
    }
    all
}

fn drive(storage: &Storage, devices: &[BlockDevice], asks_p2pdma: bool, has_nvme: bool) -> ChainStep {
    let scsi =
        storage.nvidia_fs.clients.known().is_some_and(|clients| clients.iter().any(|c| c == "scsi_mod"));
    let seen: Vec<DeviceEffect> = devices.iter().map(|device| one(device, scsi)).collect();
    let text: Vec<&str> =
        seen.iter().map(|seen| seen.what.as_str()).filter(|what| !what.is_empty()).collect();
    let text = text.join(", ");
    let p2pdma = seen.iter().map(|seen| seen.p2pdma).max().unwrap_or(State::Unknown);
    let mut nvidia_fs = seen.iter().map(|seen| seen.nvidia_fs).max().unwrap_or(State::Unknown);
    // The gravest device is named: the first that stops both routes, or one of them.
    let worst = seen.iter().rev().max_by_key(|seen| (seen.nvidia_fs, seen.p2pdma));
    let Some(worst) = worst.filter(|_| p2pdma.max(nvidia_fs) > State::Ok) else {
        return step("drive", p2pdma, nvidia_fs, text);
    };
    // With use_pci_p2pdma cuFile fails on devices that P2PDMA does not serve, instead of taking
    // nvidia-fs (seen with NVMe over RDMA).
    let mistaken = asks_p2pdma && p2pdma == State::Blocks && nvidia_fs == State::Ok;
    if mistaken {
        nvidia_fs = State::Unknown;
    }
    let finding = explain(worst, mistaken).seen("/sys/class/block", text.clone());
    let told = worst.id;
    let step = step("drive", p2pdma, nvidia_fs, text).because(finding);
    // Without an NVMe drive there is nowhere better to put the file.
    if told == "storage-not-nvme" && !has_nvme { step.for_good() } else { step }
}

fn one(device: &BlockDevice, scsi: bool) -> DeviceEffect {
    use State::{Blocks, Ok, Unknown};
    let name = &device.name;
    let seen = |p2pdma, nvidia_fs, id, what: String| DeviceEffect { p2pdma, nvidia_fs, id, what };
    match device.kind {
        BlockKind::Partition => seen(Ok, Ok, "", String::new()),
        BlockKind::Nvme => {
            let transports: Vec<&str> =
                device.controllers.iter().filter_map(|c| c.transport.known().map(String::as_str)).collect();
            match is_pcie(device) {
                Some(true) => {
                    let at: Vec<&str> = device.controllers.iter().filter_map(|c| c.pci.as_deref()).collect();
                    seen(Ok, Ok, "", format!("{name}: NVMe on PCIe ({})", list(&at)))
                }
                Some(false) if transports.iter().all(|transport| matches!(*transport, "rdma" | "pcie")) => {
                    seen(Blocks, Ok, "storage-fabrics", format!("{name}: NVMe over RDMA"))
                }
                Some(false) => {
                    let by = transports.iter().find(|transport| **transport != "pcie").unwrap_or(&"?");
                    seen(Blocks, Blocks, "storage-fabrics", format!("{name}: NVMe over {by}"))
                }
                None => seen(Unknown, Unknown, "storage-unread", format!("{name}: NVMe, transport unknown")),
            }
        }
        BlockKind::Md => {
            let level = device.level.as_deref().unwrap_or("unknown level");
            let nvidia_fs = match level {
                "raid0" | "raid1" => Ok,
                "raid4" | "raid5" | "raid6" => Blocks,
                _ => Unknown,
            };
            seen(Blocks, nvidia_fs, "storage-raid", format!("{name}: md {level} of {}", list(&device.below)))
        }
        BlockKind::Lvm => seen(Blocks, Blocks, "storage-device-mapper", format!("{name}: LVM")),
        BlockKind::Crypt => seen(Blocks, Blocks, "storage-device-mapper", format!("{name}: dm-crypt")),
        BlockKind::DmMultipath => {
            seen(Blocks, Blocks, "storage-device-mapper", format!("{name}: dm-multipath"))
        }
        BlockKind::Dm => seen(Blocks, Blocks, "storage-device-mapper", format!("{name}: device mapper")),
        BlockKind::Loop => {
            seen(Blocks, Blocks, "storage-not-nvme", format!("{name}: a file as a device (loop)"))
        }
        BlockKind::Virtio => {
            seen(Blocks, Blocks, "storage-not-nvme", format!("{name}: a virtual disk (virtio)"))
        }
        BlockKind::Scsi => {
            let nvidia_fs = if scsi { Unknown } else { Blocks };
            seen(Blocks, nvidia_fs, "storage-not-nvme", format!("{name}: SCSI, SAS or SATA"))
        }
        BlockKind::Other => {
            seen(Blocks, Unknown, "storage-not-nvme", format!("{name}: of a kind that is not known here"))
        }
    }
}

fn explain(worst: &DeviceEffect, mistaken: bool) -> Finding {
    const OFF: &str = "CUFILE_USE_PCIP2PDMA=false";
    let what = &worst.what;
    match worst.id {
        "storage-raid" => {
            let finding = Finding::new("storage-raid", Severity::Error, format!("P2PDMA does not work on RAID ({what})"))
                .why("NVIDIA supports md RAID with nvidia-fs for levels 0 and 1, and not with P2PDMA. Levels with parity compute on the CPU.");
            match (mistaken, worst.nvidia_fs) {
                (true, _) => finding.fix(Fix::container().set(OFF)),
                (false, State::Ok) => finding.fix(Fix::host().run("sudo modprobe nvidia-fs")),
                _ => finding.fix(Fix::both().run("lsblk -o NAME,TYPE,SIZE,MOUNTPOINTS").remark("put the file on a single NVMe drive, or on RAID 0")),
            }
        }
        "storage-fabrics" => {
            let finding = Finding::new("storage-fabrics", Severity::Error, format!("the drive is remote ({what})"))
                .why("P2PDMA serves drives of this machine only. nvidia-fs reads NVMe over RDMA; with use_pci_p2pdma cuFile was seen to fail there with an I/O error. Other transports pass host memory.");
            match (mistaken, worst.nvidia_fs) {
                (true, _) => finding.fix(Fix::container().set(OFF)),
                (false, State::Ok) => finding.fix(Fix::host().run("sudo modprobe nvidia-fs")),
                _ => finding.fix(Fix::both().run("sudo nvme list-subsys").remark("connect with -t rdma, or use a drive of this machine")),
            }
        }
        "storage-device-mapper" => Finding::new("storage-device-mapper", Severity::Error, format!("cuFile does not support the device mapper ({what})"))
            .why("cuFile reports 'Unsupported block device: /dev/dm-0' and falls back to compat mode. Encryption also needs the CPU for every byte.")
            .fix(Fix::both().run("lsblk -o NAME,TYPE,FSTYPE,MOUNTPOINTS").remark("put ext4 or xfs on the NVMe drive or its partition itself")),
        "storage-unread" => Finding::new("storage-unread", Severity::Unknown, format!("the transport of a drive is unknown ({what})"))
            .why("Drives on PCIe can be read directly, remote ones by RDMA only.")
            .fix(Fix::both().run("cat /sys/class/nvme/*/transport")),
        _ => Finding::new("storage-not-nvme", Severity::Error, format!("the drive is no NVMe drive ({what})"))
            .why("GPUDirect Storage needs a drive that writes into GPU memory by itself: NVMe. Other disks are read through host memory.")
            .fix(Fix::both().run("lsblk -d -o NAME,TRAN,MODEL").remark("nvme in the column TRAN; put the file on such a drive")),
    }
}

fn multipath(storage: &Storage, devices: &[BlockDevice], asks_p2pdma: bool) -> ChainStep {
    const NAME: &str = "NVMe multipath";
    const FILE: &str = "/sys/module/nvme_core/parameters/multipath";
    let heads: Vec<&str> = devices.iter().filter(|d| d.multipath).map(|d| d.name.as_str()).collect();
    let finding = |severity, title: String, value: &str| {
        Finding::new("storage-multipath", severity, title)
            .why("NVMe multipathing puts a virtual device above the drive. It hides the drive's support of P2PDMA, and NVIDIA requires nvme_core.multipath=N. nvidia-fs is not concerned.")
            .seen(FILE, value)
            .fix(Fix::host().run("echo 'options nvme_core multipath=N' | sudo tee /etc/modprobe.d/nvme.conf && (sudo update-initramfs -u -k all || sudo dracut -f) && sudo reboot"))
            .reboot()
    };
    match (heads.is_empty(), storage.nvme_multipath.known()) {
        (false, value) => {
            let value = match value {
                Some(Some(true)) => "Y",
                Some(Some(false)) => "N, but the drive was joined before",
                _ => "unread; /sys/class/block shows a multipath device",
            };
            let nvidia_fs = if asks_p2pdma { State::Unknown } else { State::Ok };
            step(NAME, State::Blocks, nvidia_fs, format!("{} is a multipath device", list(&heads)))
                .because(finding(Severity::Error, format!("NVMe multipathing hides {}", list(&heads)), value))
        }
        (true, Some(Some(false) | None)) => step(NAME, State::Ok, State::NotNeeded, "off"),
        (true, Some(Some(true))) => {
            step(NAME, State::Unknown, State::NotNeeded, "on (multipath=Y), but not used by this drive")
                .because(finding(
                    Severity::Unknown,
                    "NVMe multipathing is on, which NVIDIA rules out for P2PDMA".to_owned(),
                    "Y",
                ))
        }
        (true, None) => {
            let why = storage.nvme_multipath.why_not().unwrap_or_default();
            step(NAME, State::Unknown, State::NotNeeded, why).because(finding(
                Severity::Unknown,
                "whether NVMe multipathing is on is unknown".to_owned(),
                why,
            ))
        }
    }
}
