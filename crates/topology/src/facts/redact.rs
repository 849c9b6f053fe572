//! Leaving out what names a machine or a network, before facts are sent to somebody.

use super::{Facts, Gid, Read};

impl Facts {
    /// The same facts without host name, addresses and the paths and names in variables that may hold them. What the checks look at stays.
    #[must_use]
    pub fn redacted(mut self) -> Self {
        self.host = None;
        for port in self.nics.iter_mut().flat_map(|nic| &mut nic.ports) {
            if let Read::Yes(gids) = &mut port.gids {
                for gid in gids {
                    gid.value = form(gid).to_owned();
                }
            }
        }
        if let Read::Yes(line) = &mut self.kernel.command_line {
            *line = line.split_whitespace().filter(|word| is_harmless(word)).collect::<Vec<_>>().join(" ");
        }
        if let Read::Yes(lines) = &mut self.kernel.log {
            for line in lines {
                *line = line.split_whitespace().map(hide_address).collect::<Vec<_>>().join(" ");
            }
        }
        for value in self
            .environment
            .values_mut()
            .chain(self.config_files.values_mut().flat_map(|file| file.values_mut()))
        {
            *value = value.split(',').map(hide_address).collect::<Vec<_>>().join(",");
        }
        let files = std::mem::take(&mut self.config_files);
        self.config_files = files.into_iter().map(|(path, file)| (hide_home(&path), file)).collect();
        self
    }
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

/// The words of the kernel's command line that the checks look at: none of them names a machine or a disk.
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

/// A file in somebody's home loses the name of the home.
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
    fn addresses_and_names_go_and_what_checks_need_stays() {
        assert_eq!(hide_address("10.1.2.3"), "ADDRESS");
        assert_eq!(hide_address("10.1.2.3:4791"), "ADDRESS");
        assert_eq!(hide_address("fe80::1"), "ADDRESS");
        assert_eq!(hide_address("mlx5_0:1"), "mlx5_0:1");
        assert_eq!(hide_address("PHB"), "PHB");
        assert!(is_harmless("iommu=pt") && is_harmless("iommu.passthrough=1") && !is_harmless("root=UUID=1"));
        assert_eq!(hide_home("/etc/nccl.conf"), "/etc/nccl.conf");
        assert_eq!(hide_home("/users/someone/.nccl.conf"), "~/.nccl.conf");
    }
}
