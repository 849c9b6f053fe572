//! Facts of a path from files: mounts and block devices planted below a folder, and what is broken
//! or meant to harm.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use nobounce_diagnose::diagnose;
use nobounce_topology::facts::{BlockKind, Facts, Storage};
use nobounce_topology::sysfs::{self, Root, Surroundings};

/// A folder that goes when the test does.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nobounce-storage-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn put(&self, path: &str, text: &str) -> &Self {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn link(&self, path: &str, target: &str) -> &Self {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
        self
    }

    /// An NVMe drive with one namespace and one partition.
    fn drive(&self, number: u32, address: &str, transport: &str) -> &Self {
        let controller = format!("devices/pci0000:10/{address}/nvme/nvme{number}");
        let disk = format!("{controller}/nvme{number}n1");
        self.put(&format!("sys/{disk}/nvme{number}n1p1/partition"), "1\n")
            .put(&format!("sys/{controller}/transport"), transport)
            .link(&format!("sys/class/nvme/nvme{number}"), &format!("../../{controller}"))
            .link(&format!("sys/class/block/nvme{number}n1"), &format!("../../{disk}"))
            .link(&format!("sys/class/block/nvme{number}n1p1"), &format!("../../{disk}/nvme{number}n1p1"))
            .link(&format!("sys/dev/block/259:{number}"), &format!("../../{disk}/nvme{number}n1p1"))
    }

    fn read(&self, path: &str) -> Storage {
        self.read_with(path, &[])
    }

    fn read_with(&self, path: &str, variables: &[(&str, &str)]) -> Storage {
        let environment: BTreeMap<String, String> =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        sysfs::storage(&Root::new(&self.0), &Surroundings { environment, home: None }, path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn kinds(storage: &Storage) -> Vec<(&str, BlockKind)> {
    storage.devices.known().unwrap().iter().map(|device| (device.name.as_str(), device.kind)).collect()
}

#[test]
fn a_partition_of_a_drive_is_found_with_its_address_and_all_of_gds() {
    let folder = Folder::new("drive");
    folder
        .drive(0, "0000:16:00.0", "pcie\n")
        .put("proc/self/mountinfo", "1 0 8:1 / / rw - xfs /dev/sda1 rw\n2 1 259:0 / /data rw,noatime - ext4 /dev/nvme0n1p1 rw\n")
        .put("proc/fs/ext4/nvme0n1p1/options", "rw\ndata=ordered\n")
        .put("proc/sys/kernel/osrelease", "6.8.0-60-generic\n")
        .put("boot/config-6.8.0-60-generic", "CONFIG_PCI_P2PDMA=y\nCONFIG_ZONE_DEVICE=y\n")
        .put("proc/kallsyms", "0 d p2pdma_pgmap_ops\n0 T nvme_v1_unregister_nvfs_dma_ops\t[nvme]\n0 T nvme_v1_register_nvfs_dma_ops\t[nvme]\n0 T x\n")
        .put("sys/module/nvme_core/parameters/multipath", "N\n")
        .put("proc/driver/nvidia/params", "Foo: 1\nRegistryDwords: \"RMForceStaticBar1=1;\"\n")
        .put("proc/driver/nvidia-fs/version", "version: 2.26\n")
        .put("proc/driver/nvidia-fs/modules", "nvme: 1\nrpcrdma: 1\n")
        .put("dev/nvidia-fs0", "")
        .put("dev/nvidia-fsx", "")
        .put("etc/cufile.json", "{ // comment\n\"properties\": {\"use_pci_p2pdma\": true} }")
        .put("usr/local/cuda/lib64/libcufile.so.0", "")
        .put("usr/local/cuda/lib64/libcufile.so.1.13.1", "")
        .put("run/udev/data/b259:0", "");
    let found = folder.read_with("/data/model", &[("CUFILE_ALLOW_COMPAT_MODE", "false"), ("PATH", "/bin")]);
    let mount = found.mount.known().unwrap();
    assert_eq!((mount.point.as_str(), mount.kind.as_str()), ("/data", "ext4"));
    assert_eq!(mount.journal.known().map(String::as_str), Some("ordered"));
    assert_eq!(kinds(&found), [("nvme0n1p1", BlockKind::Partition), ("nvme0n1", BlockKind::Nvme)]);
    assert_eq!(found.pci_addresses(), ["0000:16:00.0"]);
    assert_eq!(found.kernel_options.known().unwrap()["MEMORY_HOTPLUG"], "n");
    assert_eq!(found.kernel_symbols.known().unwrap(), &["nvme_v1_register_nvfs_dma_ops", "p2pdma_pgmap_ops"]);
    assert_eq!(found.nvme_multipath.get(), Some(Some(false)));
    assert_eq!(found.registry_dwords.known().unwrap().as_deref(), Some("RMForceStaticBar1=1;"));
    assert_eq!(found.nvidia_fs.clients.known().unwrap(), &["nvme", "rpcrdma"]);
    assert_eq!(found.nvidia_fs.version.known().map(String::as_str), Some("2.26"));
    assert_eq!(found.nvidia_fs.nodes.known().unwrap().len(), 1);
    let library = found.cufile.library.known().unwrap().as_ref().unwrap();
    assert_eq!(library.version.as_deref(), Some("1.13.1"));
    assert_eq!(found.property("CUFILE_USE_PCIP2PDMA", "use_pci_p2pdma").unwrap().0, "true");
    assert_eq!(found.cufile.environment.len(), 1);
    assert_eq!(found.cufile.udev.get(), Some(true));
    // What was read comes back from a file.
    let facts = Facts { storage: Some(found), ..Facts::default() };
    assert_eq!(Facts::from_json(&facts.to_json()).unwrap().storage, facts.storage);
}

#[test]
fn raid_volumes_multipath_and_remote_drives_are_told_apart() {
    let folder = Folder::new("stack");
    folder.drive(0, "0000:16:00.0", "pcie").drive(1, "0000:32:00.0", "pcie");
    folder
        .put("sys/devices/virtual/block/md0/md/level", "raid0\n")
        .link("sys/devices/virtual/block/md0/slaves/nvme0n1p1", "x")
        .link("sys/devices/virtual/block/md0/slaves/nvme1n1", "x")
        .link("sys/class/block/md0", "../../devices/virtual/block/md0")
        .put("sys/devices/virtual/block/dm-0/dm/uuid", "LVM-abcdef\n")
        .link("sys/devices/virtual/block/dm-0/slaves/md0", "x")
        .link("sys/class/block/dm-0", "../../devices/virtual/block/dm-0")
        .link("sys/dev/block/253:0", "../../devices/virtual/block/dm-0")
        .link("sys/dev/block/9:0", "../../devices/virtual/block/md0");
    folder.put(
        "proc/self/mountinfo",
        "1 0 253:0 / /lv rw - ext4 /dev/mapper/a rw\n2 0 9:0 / /raid rw - xfs /dev/md0 rw\n3 0 0:40 / /nfs rw - nfs4 server:/x rw,proto=rdma\n4 0 259:9 / /head rw - xfs /dev/nvme5n1 rw\n5 0 0:41 / /b rw - btrfs /dev/nvme0n1p1 rw\n",
    );
    // A drive behind multipathing: the block device is below its subsystem.
    folder
        .put("sys/devices/virtual/nvme-subsystem/nvme-subsys5/nvme5n1/size", "1")
        .link("sys/class/block/nvme5n1", "../../devices/virtual/nvme-subsystem/nvme-subsys5/nvme5n1")
        .link("sys/dev/block/259:9", "../../devices/virtual/nvme-subsystem/nvme-subsys5/nvme5n1")
        .link("sys/class/nvme-subsystem/nvme-subsys5", "../../devices/virtual/nvme-subsystem/nvme-subsys5")
        .link(
            "sys/devices/virtual/nvme-subsystem/nvme-subsys5/nvme7",
            "../../../pci0000:10/0000:17:00.0/nvme/nvme7",
        )
        .put("sys/devices/pci0000:10/0000:17:00.0/nvme/nvme7/transport", "pcie\n")
        .link("sys/class/nvme/nvme7", "../../devices/pci0000:10/0000:17:00.0/nvme/nvme7");
    let volume = folder.read("/lv/x");
    assert_eq!(
        kinds(&volume),
        [
            ("dm-0", BlockKind::Lvm),
            ("md0", BlockKind::Md),
            ("nvme0n1p1", BlockKind::Partition),
            ("nvme1n1", BlockKind::Nvme),
            ("nvme0n1", BlockKind::Nvme)
        ]
    );
    let raid = folder.read("/raid/x");
    assert_eq!(raid.devices.known().unwrap()[0].level.as_deref(), Some("raid0"));
    assert_eq!(raid.pci_addresses(), ["0000:16:00.0", "0000:32:00.0"]);
    assert_eq!(folder.read("/nfs/x").devices.known().unwrap().len(), 0);
    let head = folder.read("/head/x");
    let device = &head.devices.known().unwrap()[0];
    assert!(device.multipath);
    assert_eq!(device.controllers[0].name, "nvme7");
    assert_eq!(head.pci_addresses(), ["0000:17:00.0"]);
    // btrfs has a device number of its own.
    assert_eq!(kinds(&folder.read("/b/x"))[0], ("nvme0n1p1", BlockKind::Partition));
}

#[test]
fn a_tree_that_loops_or_lies_ends_in_unknown_facts() {
    let folder = Folder::new("loop");
    folder
        .put("sys/devices/virtual/block/md0/md/level", "raid0")
        .link("sys/devices/virtual/block/md0/slaves/md1", "x")
        .put("sys/devices/virtual/block/md1/md/level", "raid0")
        .link("sys/devices/virtual/block/md1/slaves/md0", "x")
        .link("sys/class/block/md0", "../../devices/virtual/block/md0")
        .link("sys/class/block/md1", "../../devices/virtual/block/md1")
        .link("sys/dev/block/9:0", "../../devices/virtual/block/md0")
        .link("sys/class/block/self", "self")
        .put("proc/self/mountinfo", "garbage\n- - -\n2 0 9:0 / / rw - xfs /dev/md0 rw\n")
        .put("etc/cufile.json", "{ \"properties\": [[[[")
        .put("proc/driver/nvidia/params", "nothing")
        .put("sys/module/nvme_core/parameters/multipath", "maybe");
    let found = folder.read("/x");
    assert_eq!(found.devices.known().unwrap().len(), 2);
    assert!(found.cufile.config.known().is_none() && found.registry_dwords.known().is_none());
    assert!(found.nvme_multipath.known().is_none() && found.kernel_symbols.known().is_none());
    let empty = Folder::new("empty").read("/x");
    for facts in [found, empty] {
        let facts = Facts { storage: Some(facts), ..Facts::default() };
        let storage = diagnose(&facts).storage.unwrap();
        assert!(storage.verdicts.is_empty() && !storage.chain.is_empty());
    }
}
