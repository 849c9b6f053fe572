//! The InfiniBand folders as programs expect them: /sys/class/infiniband,
//! /sys/class/infiniband_verbs, /dev/infiniband.
//!
//! The tree has the kernel's layout: the class folder holds links into /sys/devices. Real devices
//! of the machine stay visible: they are linked next to ours.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::unix::fs::symlink;
use std::path::Path;

use nobounce_nic::soft::{DeviceLimits, PortSpeed};

/// Vendor and device IDs for programs that look for adapters they know. Neither is assigned: a real
/// ID such as 0x1d0f would activate code for other hardware.
const VENDOR: &str = "0x6e62";
const PART: &str = "0x0001";

/// Where kernel modules announce that adapters reach memory of other devices.
const MEMORY_PEERS: &str = "sys/kernel/mm/memory_peers";

/// The real folders, from where the links to real devices go.
#[derive(Debug)]
pub struct System<'a> {
    /// Where sysfs is mounted.
    pub sys: &'a Path,
    /// Where device files are.
    pub dev: &'a Path,
}

impl System<'static> {
    /// Of this machine.
    #[must_use]
    pub fn here() -> Self {
        Self { sys: Path::new("/sys"), dev: Path::new("/dev") }
    }
}

impl System<'_> {
    /// Whether the machine has RDMA adapters.
    #[must_use]
    pub fn has_adapters(&self) -> bool {
        fs::read_dir(self.sys.join("class/infiniband")).is_ok_and(|mut all| all.next().is_some())
    }
}

/// Writes the tree below `root`: one device for each address.
///
/// # Errors
/// A file or link cannot be created.
pub fn make(root: &Path, addrs: &[IpAddr], speed: PortSpeed, system: &System<'_>) -> io::Result<()> {
    let class = root.join("sys/class/infiniband");
    let verbs = root.join("sys/class/infiniband_verbs");
    let nodes = root.join("dev/infiniband");
    for folder in [&class, &verbs, &nodes] {
        fs::create_dir_all(folder)?;
    }
    link_all(&system.sys.join("class/infiniband"), &class)?;
    link_all(&system.sys.join("class/infiniband_verbs"), &verbs)?;
    link_all(&system.dev.join("infiniband"), &nodes)?;
    if !verbs.join("abi_version").exists() {
        fs::write(verbs.join("abi_version"), "6\n")?;
    }

    // Programs take it as a sign that GPU memory can be registered. That of a real adapter depends
    // on a kernel module.
    let (peers, real_peers) = (root.join(MEMORY_PEERS), system.sys.join("kernel/mm/memory_peers"));
    fs::create_dir_all(&peers)?;
    link_all(&real_peers, &peers)?;
    if !system.has_adapters() && !peers.join("nv_mem").exists() {
        write(&peers.join("nv_mem"), &[("version", "1.0-0")])?;
    }

    let first = first_free(&verbs)?;
    for (number, addr) in addrs.iter().enumerate() {
        let (name, node) = (format!("nb{number}"), format!("uverbs{}", first + number));
        let device = root.join("sys/devices/virtual/nobounce").join(&name);
        let here = device.join("infiniband").join(&name);
        write(&device, &[("numa_node", "-1"), ("vendor", VENDOR), ("device", PART)])?;
        write_device(&here, &name, addr, speed)?;
        symlink("../..", here.join("device"))?;
        if let Some(interface) = interface_of(addr) {
            fs::create_dir_all(device.join("net"))?;
            symlink(system.sys.join("class/net").join(&interface), device.join("net").join(interface))?;
        }
        symlink(format!("../../devices/virtual/nobounce/{name}/infiniband/{name}"), class.join(&name))?;
        write(&verbs.join(&node), &[("ibdev", &name), ("abi_version", "1")])?;
        symlink(format!("../../../devices/virtual/nobounce/{name}"), verbs.join(&node).join("device"))?;
        // Programs only test for a character device that they may open.
        symlink("/dev/null", nodes.join(&node))?;
    }
    Ok(())
}

fn write_device(here: &Path, name: &str, addr: &IpAddr, speed: PortSpeed) -> io::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    let description = format!("nobounce {name}");
    write(
        here,
        &[
            ("node_type", "1: CA"),
            ("fw_ver", version),
            ("hw_rev", "0x1"),
            ("board_id", "nobounce"),
            ("hca_type", "nobounce"),
            ("node_desc", &description),
        ],
    )?;
    let port = here.join("ports/1");
    write(
        &port,
        &[
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("rate", &speed.rate()),
            ("link_layer", "Ethernet"),
            ("lid", "0x0"),
            ("lid_mask_count", "0"),
            ("sm_lid", "0x0"),
            ("sm_sl", "0"),
            ("cap_mask", "0x00010000"),
        ],
    )?;
    let interface = interface_of(addr);
    let DeviceLimits { gid_table, gids, .. } = DeviceLimits::OURS;
    for index in 0..gid_table {
        let (index, filled) = (index.to_string(), index < gids);
        let text = if filled { gid(addr) } else { gid(&Ipv6Addr::UNSPECIFIED.into()) };
        write(&port.join("gids"), &[(&index, &text)])?;
        if filled {
            write(&port.join("gid_attrs/types"), &[(&index, "RoCE v2")])?;
            if let Some(interface) = &interface {
                write(&port.join("gid_attrs/ndevs"), &[(&index, interface)])?;
            }
        }
    }
    write(&port.join("pkeys"), &[("0", "0xffff")])?;
    Ok(())
}

/// Files of one line each.
fn write(folder: &Path, files: &[(&str, &str)]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    files.iter().try_for_each(|(name, text)| fs::write(folder.join(name), format!("{text}\n")))
}

/// A link for everything in `from`, if there is such a folder.
fn link_all(from: &Path, to: &Path) -> io::Result<()> {
    let Ok(entries) = fs::read_dir(from) else { return Ok(()) };
    for entry in entries {
        let entry = entry?;
        // Links of the kernel are relative to where they stand.
        let target = entry.path().canonicalize().unwrap_or_else(|_| entry.path());
        symlink(target, to.join(entry.file_name()))?;
    }
    Ok(())
}

/// The first number above those of real devices.
fn first_free(verbs: &Path) -> io::Result<usize> {
    let mut free = 0;
    for entry in fs::read_dir(verbs)? {
        let number =
            entry?.file_name().to_str().and_then(|name| name.strip_prefix("uverbs")?.parse::<usize>().ok());
        free = free.max(number.map_or(0, |number| number + 1));
    }
    Ok(free)
}

/// Eight groups of four digits, as the kernel prints it.
fn gid(addr: &IpAddr) -> String {
    let v6 = match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => *v6,
    };
    Ipv6Addr::segments(&v6).map(|group| format!("{group:04x}")).join(":")
}

/// The interface that has the address. All of 127.0.0.0/8 belongs to loopback, listed or not.
pub(crate) fn interface_of(addr: &IpAddr) -> Option<String> {
    if addr.is_loopback() {
        return Some("lo".to_owned());
    }
    nobounce_nic::interfaces::interface_of(*addr)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("view-test-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn read(path: &Path) -> String {
        fs::read_to_string(path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
            .trim_end()
            .to_owned()
    }

    #[test]
    fn two_devices_and_what_programs_read_of_them() {
        let root = folder("two");
        let none = System { sys: Path::new("/no/such"), dev: Path::new("/no/such") };
        make(&root, &["127.0.0.7".parse().unwrap(), "::1".parse().unwrap()], PortSpeed::default(), &none)
            .unwrap();
        let class = root.join("sys/class/infiniband");
        assert_eq!(read(&class.join("nb0/ports/1/gids/0")), "0000:0000:0000:0000:0000:ffff:7f00:0007");
        assert_eq!(read(&class.join("nb1/ports/1/gids/0")), "0000:0000:0000:0000:0000:0000:0000:0001");
        assert_eq!(read(&class.join("nb0/ports/1/gid_attrs/ndevs/0")), "lo");
        assert_eq!(read(&class.join("nb0/ports/1/gid_attrs/types/3")), "RoCE v2");
        let gid = |index: u32| read(&class.join(format!("nb0/ports/1/gids/{index}")));
        assert!(gid(3) == gid(0) && gid(7) == "0000:0000:0000:0000:0000:0000:0000:0000");
        assert!(fs::symlink_metadata(class.join("nb0/device/net/lo")).unwrap().is_symlink());
        assert_eq!(read(&class.join("nb0/device/numa_node")), "-1");
        assert_eq!(read(&root.join("sys/kernel/mm/memory_peers/nv_mem/version")), "1.0-0");
        // As some programs find the PCI device: two folders above the real one.
        let real = class.join("nb1").canonicalize().unwrap();
        assert_eq!(read(&real.join("../../vendor")), VENDOR);
        assert_eq!(read(&root.join("sys/class/infiniband_verbs/uverbs1/ibdev")), "nb1");
        let node = fs::metadata(root.join("dev/infiniband/uverbs0")).unwrap();
        assert!(std::os::unix::fs::FileTypeExt::is_char_device(&node.file_type()));
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn real_devices_stay_and_ours_come_after_them() {
        let (root, system) = (folder("real"), folder("system"));
        fs::create_dir_all(system.join("sys/class/infiniband/mlx5_0/ports")).unwrap();
        fs::create_dir_all(system.join("sys/class/infiniband_verbs/uverbs2")).unwrap();
        fs::create_dir_all(system.join("dev/infiniband")).unwrap();
        fs::write(system.join("dev/infiniband/uverbs2"), "real").unwrap();
        let there = System { sys: &system.join("sys"), dev: &system.join("dev") };
        make(&root, &["127.0.0.7".parse().unwrap()], PortSpeed::default(), &there).unwrap();
        assert!(root.join("sys/class/infiniband/mlx5_0/ports").is_dir());
        let peers = root.join("sys/kernel/mm/memory_peers");
        assert!(!peers.join("nv_mem").exists(), "the real adapter has no peer memory");
        assert_eq!(read(&root.join("dev/infiniband/uverbs2")), "real");
        assert_eq!(read(&root.join("sys/class/infiniband_verbs/uverbs3/ibdev")), "nb0");
        fs::remove_dir_all(&root).unwrap();
        fs::remove_dir_all(&system).unwrap();
    }
}
