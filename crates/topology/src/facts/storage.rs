//! A path, and what a read from it into GPU memory depends on: filesystem, drive, nvidia-fs,
//! cuFile.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{DeviceNode, Read};

/// Facts of one path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Storage {
    /// The path, absolute and without links.
    pub path: String,
    /// The filesystem that holds it.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub mount: Read<Mount>,
    /// The block devices below the filesystem: its own first, then what that consists of. Empty for
    /// filesystems without one (NFS, tmpfs, overlay).
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub devices: Read<Vec<BlockDevice>>,
    /// What O_DIRECT requires on this file; null where the file does not take it.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub direct_io: Read<Option<DirectIo>>,
    /// Options of the kernel that P2PDMA needs, without `CONFIG_`: `y`, `m` or `n`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub kernel_options: Read<BTreeMap<String, String>>,
    /// Symbols of the kernel that matter: `p2pdma_pgmap_ops`, `*_register_nvfs_dma_ops`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub kernel_symbols: Read<Vec<String>>,
    /// The parameter `multipath` of nvme_core; null where the kernel has none.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub nvme_multipath: Read<Option<bool>>,
    /// `RegistryDwords` of NVIDIA's module; null where it is empty.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub registry_dwords: Read<Option<String>>,
    /// The module nvidia-fs.
    #[serde(default)]
    pub nvidia_fs: NvidiaFs,
    /// cuFile: library and settings.
    #[serde(default)]
    pub cufile: Cufile,
}

/// A mounted filesystem.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// Where it is mounted.
    pub point: String,
    /// Its type: `ext4`, `xfs`, `nfs4`, `overlay`.
    pub kind: String,
    /// What is mounted: `/dev/nvme0n1p1`, `server:/export`.
    #[serde(default)]
    pub source: String,
    /// Its options, those of the mount and those of the filesystem.
    #[serde(default)]
    pub options: Vec<String>,
    /// The journaling mode of ext4 as the kernel reports it: `ordered`, `writeback`, `journal`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub journal: Read<String>,
}

/// A kind of block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockKind {
    /// A partition of another device.
    Partition,
    /// A namespace of an NVMe drive.
    Nvme,
    /// Software RAID (md).
    Md,
    /// A logical volume (LVM).
    Lvm,
    /// An encrypted device (dm-crypt).
    Crypt,
    /// A device of multipathd (dm-multipath).
    DmMultipath,
    /// Another target of the device mapper.
    Dm,
    /// A file as a device.
    Loop,
    /// A disk of a hypervisor (virtio-blk).
    Virtio,
    /// A disk of the SCSI layer: SATA, SAS, USB.
    Scsi,
    /// Something else.
    #[default]
    Other,
}

/// A block device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockDevice {
    /// The kernel's name: `nvme0n1p1`.
    pub name: String,
    /// Its kind.
    pub kind: BlockKind,
    /// The RAID level, for md: `raid0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// Names of the devices that it consists of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub below: Vec<String>,
    /// Whether it is the head of NVMe multipathing, which hides the drive's own queue.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub multipath: bool,
    /// The controllers of an NVMe namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub controllers: Vec<NvmeController>,
}

/// An NVMe controller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvmeController {
    /// The kernel's name: `nvme0`.
    pub name: String,
    /// `pcie`, `rdma`, `tcp`, `fc`, `loop`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub transport: Read<String>,
    /// Its PCI address, if it is a drive of this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci: Option<String>,
}

/// Alignment that O_DIRECT requires, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DirectIo {
    /// Of the memory.
    pub memory: u32,
    /// Of offset and length in the file.
    pub offset: u32,
    /// Whether the kernel reported it (STATX_DIOALIGN); otherwise it is a safe guess.
    #[serde(default)]
    pub reported: bool,
}

/// The module nvidia-fs. Whether it is loaded is among the modules of the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvidiaFs {
    /// Its version (`/proc/driver/nvidia-fs/version`).
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub version: Read<String>,
    /// Storage drivers that are registered with it (`/proc/driver/nvidia-fs/modules`): `nvme`,
    /// `rpcrdma`, `lnet`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub clients: Read<Vec<String>>,
    /// Its device files, `/dev/nvidia-fs*`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub nodes: Read<Vec<DeviceNode>>,
}

/// cuFile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cufile {
    /// The library; null if it was not found.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub library: Read<Option<CufileLibrary>>,
    /// The file of settings that the library reads; null if there is none.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub config: Read<Option<CufileConfig>>,
    /// Variables of cuFile and KvikIO.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// Whether `/run/udev` can be read: cuFile and KvikIO identify drives by it.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub udev: Read<bool>,
}

/// The library libcufile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CufileLibrary {
    /// Where it is.
    pub path: String,
    /// Its version, if the file's name has it: `1.16.1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// A file of settings of cuFile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CufileConfig {
    /// Where it is.
    pub path: String,
    /// Settings of `properties` that matter, as text.
    #[serde(default)]
    pub properties: BTreeMap<String, String>,
    /// `denylist`: filesystems, mounts, devices and drivers that cuFile leaves alone.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub denylist: BTreeMap<String, Vec<String>>,
}

impl Storage {
    /// Devices without anything below them: drives.
    pub fn drives(&self) -> impl Iterator<Item = &BlockDevice> {
        self.devices.known().into_iter().flatten().filter(|device| device.below.is_empty())
    }

    /// PCI addresses of the drives, each once.
    #[must_use]
    pub fn pci_addresses(&self) -> Vec<&str> {
        let mut found: Vec<&str> = self
            .drives()
            .flat_map(|drive| &drive.controllers)
            .filter_map(|controller| controller.pci.as_deref())
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// A property of cuFile: its variable first, then the file. The text, and where it is from.
    #[must_use]
    pub fn property(&self, variable: &str, name: &str) -> Option<(&str, String)> {
        if let Some(value) = self.cufile.environment.get(variable) {
            return Some((value, format!("{variable} (environment)")));
        }
        let config = self.cufile.config.known()?.as_ref()?;
        let value = config.properties.get(name)?;
        Some((value, format!("properties.{name} in {}", config.path)))
    }
}
