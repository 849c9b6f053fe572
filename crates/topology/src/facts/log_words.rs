//! The words of the kernel's log that checks read: all others may be names.

/// Words, in lower case.
const WORDS: [&str; 46] = [
    "a",
    "about",
    "addr",
    "address",
    "aer",
    "amd-vi",
    "argument",
    "arm-smmu",
    "assigned",
    "bar1",
    "bus",
    "core",
    "corrected",
    "device",
    "disagrees",
    "dma",
    "dmar",
    "err",
    "error",
    "event",
    "exec",
    "failed",
    "fault",
    "fatal",
    "for",
    "format",
    "i/o",
    "init",
    "invalid",
    "io_page_fault",
    "is",
    "loading",
    "logged",
    "module",
    "nonfatal",
    "of",
    "pci",
    "pcie",
    "pcieport",
    "read",
    "reason",
    "region",
    "request",
    "symbol",
    "unknown",
    "write",
];

/// Words of messages of one driver each.
const MORE: [&str; 46] = [
    "port",
    "cable",
    "high",
    "temperature",
    "unplugged",
    "plugged",
    "link",
    "down",
    "nic",
    "power",
    "budget",
    "exceeded",
    "bad",
    "or",
    "shorted",
    "no",
    "eeprom",
    "enforce",
    "part",
    "number",
    "list",
    "identifier",
    "long",
    "range",
    "stuck",
    "insufficient",
    "insufficient/unadvertised",
    "cable/module",
    "powered",
    "built",
    "driver",
    "opensource",
    "proprietary",
    "gdrdrv",
    "0m",
    "avc",
    "callback",
    "context",
    "denied",
    "detected",
    "nvidia",
    "this",
    "to",
    "type",
    "version",
    "your",
];

/// Beginnings of words.
const BEGINNINGS: [&str; 15] = [
    "event[error",
    "bnxt_en",
    "gdrdrv:gdrdrv_init",
    "efa_nv_peermem",
    "ib_",
    "nvidia_p2p_",
    "nvidia_peermem",
    "nvidia-peermem",
    "nv_peer_mem",
    "mlx5_core",
    // Denials of SELinux and AppArmor.
    "apparmor=\"denied",
    "path=\"/dev/infiniband",
    "name=\"/dev/infiniband",
    "path=\"/dev/nvidia",
    "name=\"/dev/nvidia",
];

/// The words of a kernel log line that a check uses. Everything else may be a name, and becomes
/// `…`.
pub(super) fn known_words(line: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    for word in line.split_whitespace() {
        let bare = word.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_ascii_lowercase();
        let known = WORDS.contains(&bare.as_str())
            || MORE.contains(&bare.as_str())
            || BEGINNINGS.iter().any(|begin| bare.starts_with(begin))
            || crate::sysfs::pci::is_address(&bare);
        match (known, kept.last()) {
            (true, _) => kept.push(word),
            (false, Some(&"…")) => {}
            (false, _) => kept.push("…"),
        }
    }
    kept.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_keep_what_checks_read_and_no_names() {
        let line = "Nov 15 node12 kernel: nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client";
        assert_eq!(
            known_words(line),
            "… nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client"
        );
        assert_eq!(
            known_words("pcieport 0000:00:01.0: AER: Corrected error received: rack7"),
            "pcieport 0000:00:01.0: AER: Corrected error …"
        );
        let line = "mlx5_core 0000:14:00.0 rack7-eth3: Link down";
        assert_eq!(known_words(line), "mlx5_core 0000:14:00.0 … Link down");
        let line =
            "mlx5_core 0000:14:00.0: Port module event[error]: module 0, Cable error, High Temperature";
        assert!(known_words(line).contains("Port module event[error]: module"), "{}", known_words(line));
        assert!(known_words(line).ends_with("Cable error, High Temperature"));
    }
}
