//! Redacts what names a machine or a network, before facts are shared.

use super::log_words::known_words;
use super::{Facts, Gid, Read, Storage};

impl Facts {
    /// The same facts without host name, addresses, interface names, and the paths and names in
    /// variables and log lines. What the checks use stays: they give the same findings.
    #[must_use]
    pub fn redacted(mut self) -> Self {
        self.host = None;
        let (mut interfaces, mut subnets): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
        let mut rename = |name: &mut String| {
            let at = interfaces.iter().position(|known| known == name).unwrap_or_else(|| {
                interfaces.push(name.clone());
                interfaces.len() - 1
            });
            *name = format!("net{at}");
        };
        for port in self.nics.iter_mut().flat_map(|nic| &mut nic.ports) {
            if let Some(netdev) = &mut port.netdev {
                rename(&mut netdev.name);
                if let Read::Yes(interface) = &mut netdev.sends_by {
                    rename(interface);
                }
                if let Some(unread) = netdev.ip.unread_mut() {
                    *unread = "it cannot be read".to_owned();
                }
                if let Read::Yes(list) = &mut netdev.subnets {
                    for subnet in list {
                        let known = subnets.iter().position(|known| known == subnet);
                        let at = known.unwrap_or_else(|| {
                            subnets.push(subnet.clone());
                            subnets.len() - 1
                        });
                        // The length of a prefix names nothing, and checks read it.
                        let length = subnet.split_once('/').map_or("", |(_, length)| length);
                        *subnet = format!("subnet{at}/{length}");
                    }
                }
            }
            if let Read::Yes(gids) = &mut port.gids {
                for gid in gids {
                    gid.value = form(gid).to_owned();
                    gid.netdev.as_mut().map(&mut rename);
                }
            }
        }
        if let Read::Yes(line) = &mut self.kernel.command_line {
            *line = line.split_whitespace().filter(|word| is_harmless(word)).collect::<Vec<_>>().join(" ");
        }
        if let Read::Yes(lines) = &mut self.kernel.log {
            for line in lines {
                *line = known_words(line);
            }
        }
        for transfer in &mut self.transfers {
            transfer.probe.detail = hide_addresses(&transfer.probe.detail);
        }
        for (name, value) in
            self.environment.iter_mut().chain(self.config_files.values_mut().flat_map(|file| file.iter_mut()))
        {
            *value = setting(name, value);
        }
        let files = std::mem::take(&mut self.config_files);
        self.config_files = files.into_iter().map(|(path, file)| (hide_home(&path), file)).collect();
        if let Read::Yes(wheels) = &mut self.libraries.wheels {
            for verbs in wheels.iter_mut().filter_map(|wheel| wheel.verbs.as_mut()) {
                verbs.file = hide_home(&verbs.file);
            }
        }
        if let Some(storage) = &mut self.storage {
            hide_storage(storage);
        }
        self
    }
}

/// Variables whose values the checks read: names of adapters, levels, lists of transports.
const READ: [&str; 36] = [
    "FI_PROVIDER",
    "FI_EFA_USE_DEVICE_RDMA",
    "FI_HMEM_CUDA_USE_GDRCOPY",
    "MC_FORCE_TCP",
    "MC_GID_INDEX",
    "MOONCAKE_PROTOCOL",
    "MV2_USE_GDRCOPY",
    "MV2_USE_GPUDIRECT_RDMA",
    "NCCL_DMABUF_ENABLE",
    "NCCL_IB_ADDR_FAMILY",
    "NCCL_IB_CUDA_SUPPORT",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GDR_LEVEL",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_PCI_RELAXED_ORDERING",
    "NCCL_NET",
    "NCCL_NET_GDR_C2C",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_GDR_READ",
    "NCCL_PLUGIN_P2P",
    "NVSHMEM_DISABLE_IB",
    "NVSHMEM_HCA_PREFIX",
    "NVSHMEM_IBGDA_NIC_HANDLER",
    "NVSHMEM_IB_ENABLE_IBGDA",
    "NVSHMEM_IB_GID_INDEX",
    "NVSHMEM_REMOTE_TRANSPORT",
    "OMPI_MCA_btl",
    "OMPI_MCA_btl_openib_want_cuda_gdr",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "UCX_IB_GID_INDEX",
    "UCX_NET_DEVICES",
    "UCX_RC_ECE",
    "UCX_RNDV_SCHEME",
    "UCX_TLS",
];

/// A value that is safe to share. Variables that no check reads, and those that may hold paths,
/// keep only numbers and switches.
fn setting(name: &str, value: &str) -> String {
    let plain = value.parse::<i64>().is_ok()
        || ["", "y", "n", "yes", "no", "on", "off", "try", "auto", "true", "false", "none"]
            .contains(&value.to_ascii_lowercase().as_str());
    // The plugin may be a path: its last part identifies it.
    let plugin = name == "NCCL_NET_PLUGIN";
    if plain || READ.contains(&name) || plugin {
        let value = if plugin { value.rsplit('/').next().unwrap_or_default() } else { value };
        return value.split(',').map(hide_address).collect::<Vec<_>>().join(",");
    }
    "set".to_owned()
}

fn form(gid: &Gid) -> &'static str {
    if gid.is_ipv4() {
        "::ffff:ipv4"
    } else if gid.is_link_local() {
        "fe80::"
    } else {
        "ipv6"
    }
}

/// The words of the kernel command line that the checks use: none of them names a machine or a
/// disk.
fn is_harmless(word: &str) -> bool {
    let key = word.split(['=', '.']).next().unwrap_or_default();
    [
        "iommu",
        "intel_iommu",
        "amd_iommu",
        "pci",
        "pcie_acs_override",
        "nvidia",
        "nokaslr",
        "pcie_aspm",
        "pci_pt",
    ]
    .contains(&key)
        || word.starts_with("iommu.")
}

/// An IPv4 or IPv6 address becomes `ADDRESS`.
fn hide_address(word: &str) -> String {
    let bare = word.trim_matches(|c: char| !(c.is_ascii_hexdigit() || c == ':' || c == '.'));
    let host = bare.rsplit_once(':').map_or(bare, |(host, _)| host);
    let is_address = bare.parse::<std::net::IpAddr>().is_ok() || host.parse::<std::net::Ipv4Addr>().is_ok();
    if is_address { word.replace(bare, "ADDRESS") } else { word.to_owned() }
}

/// Hides what names people, servers and projects in the facts of a path: the path, the mount point,
/// the source of a network mount, and paths in settings.
fn hide_storage(storage: &mut Storage) {
    let denied = storage
        .cufile
        .config
        .known()
        .and_then(Option::as_ref)
        .and_then(|config| config.denylist.get("mounts"))
        .zip(storage.mount.known())
        .is_some_and(|(mounts, mount)| mounts.contains(&mount.point));
    // Reasons of unread facts may name the path and files of settings.
    let path = std::mem::replace(&mut storage.path, "/PATH".to_owned());
    for unread in [
        storage.mount.unread_mut(),
        storage.devices.unread_mut(),
        storage.direct_io.unread_mut(),
        storage.cufile.config.unread_mut(),
    ]
    .into_iter()
    .flatten()
    {
        *unread = unread.replace(&path, "/PATH");
        if let Some((file, why)) = unread.split_once(": ")
            && file.starts_with('/')
        {
            *unread = format!("{}: {why}", hide_home(file));
        }
    }
    if let Read::Yes(mount) = &mut storage.mount {
        mount.point = "/".to_owned();
        if !mount.source.starts_with("/dev/") || mount.source.contains("mapper") {
            mount.source = "SOURCE".to_owned();
        }
        mount.options.retain(|option| {
            let key = option.split('=').next().unwrap_or_default();
            ["rw", "ro", "data", "proto", "vers", "rdma", "discard", "relatime", "noatime"].contains(&key)
        });
    }
    if let Read::Yes(Some(library)) = &mut storage.cufile.library {
        library.path = hide_home(&library.path);
    }
    if let Read::Yes(Some(config)) = &mut storage.cufile.config {
        config.path = hide_home(&config.path);
        if let Some(mounts) = config.denylist.get_mut("mounts") {
            *mounts = if denied { vec!["/".to_owned()] } else { Vec::new() };
        }
    }
    for (name, value) in &mut storage.cufile.environment {
        *value = setting(name, value);
    }
}

/// The text without addresses, and without folders and names in paths.
#[must_use]
pub fn hide_addresses(text: &str) -> String {
    let hidden = |word: &str| {
        let bare = word.trim_matches(|c: char| !c.is_ascii_alphanumeric() && c != '/');
        let is_path = bare.starts_with('/') && bare.matches('/').count() > 1 && hide_home(bare) != bare;
        if is_path { word.replace(bare, "PATH") } else { without_addresses(word) }
    };
    text.split(' ').map(hidden).collect::<Vec<_>>().join(" ")
}

/// Every IPv4 or IPv6 address in a word becomes `ADDRESS`, with its port.
fn without_addresses(word: &str) -> String {
    let is_part = |c: char| c.is_ascii_hexdigit() || c == ':' || c == '.';
    let is_address = |part: &str| {
        part.parse::<std::net::IpAddr>().is_ok() || part.parse::<std::net::SocketAddrV4>().is_ok()
    };
    let mut parts: Vec<String> = Vec::new();
    // Words like `std::fs` have parts that could be addresses: those have other letters beside
    // them.
    for piece in word.split_inclusive(|c: char| !is_part(c) && !c.is_alphanumeric()) {
        let run = piece.trim_end_matches(|c: char| !is_part(c));
        let bare = if is_address(run) { run } else { run.trim_end_matches(['.', ':']) };
        parts.push(if is_address(bare) { piece.replacen(bare, "ADDRESS", 1) } else { piece.to_owned() });
    }
    parts.concat()
}

/// Hides the user name in the path of a home directory.
fn hide_home(path: &str) -> String {
    match path.strip_prefix('/').and_then(|rest| rest.split_once('/')) {
        Some(("etc" | "usr" | "opt", _)) | None => path.to_owned(),
        Some(_) => format!("~/{}", path.rsplit('/').next().unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_what_checks_read_and_no_names() {
        assert_eq!(setting("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1"), "=mlx5_0:1,mlx5_1");
        assert_eq!(setting("NCCL_TOPO_FILE", "/users/someone/topo.xml"), "set");
        assert_eq!(setting("MC_METADATA_SERVER", "node12.example"), "set");
        assert_eq!(setting("NCCL_NET_PLUGIN", "/users/someone/libnccl-net-ofi.so"), "libnccl-net-ofi.so");
    }

    #[test]
    fn addresses_and_names_go_and_what_checks_need_stays() {
        assert_eq!(hide_address("10.1.2.3"), "ADDRESS");
        assert_eq!(hide_address("10.1.2.3:4791"), "ADDRESS");
        assert_eq!(hide_address("fe80::1"), "ADDRESS");
        assert_eq!(hide_address("mlx5_0:1"), "mlx5_0:1");
        assert_eq!(hide_address("PHB"), "PHB");
        let text = hide_addresses(
            "peer 10.1.2.3: (/users/someone/lib.so), /usr/lib/x.so, 5 GB/s on [fe80::1]:80 10.1.2.3/24, --peer=10.1.2.4:5. std::fs",
        );
        assert_eq!(
            text,
            "peer ADDRESS: (PATH), /usr/lib/x.so, 5 GB/s on [ADDRESS]:80 ADDRESS/24, --peer=ADDRESS. std::fs"
        );
        assert!(is_harmless("iommu=pt") && is_harmless("iommu.passthrough=1") && !is_harmless("root=UUID=1"));
        assert_eq!(hide_home("/etc/nccl.conf"), "/etc/nccl.conf");
        assert_eq!(hide_home("/users/someone/.nccl.conf"), "~/.nccl.conf");
    }
}
