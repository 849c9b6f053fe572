//! The kernel, its options and modules.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};

use super::{Root, gzip};
use crate::facts::{Gdrdrv, Kernel, Module, NvidiaModule, Read};

/// Relevant modules: drivers of GPUs and adapters, and what connects them.
const MODULES: [&str; 27] = [
    "amdgpu",
    "amdkfd",
    "bnxt_re",
    "cxgb4",
    "efa",
    "erdma",
    "gdrdrv",
    "hns_roce_hw_v2",
    "ib_core",
    "ib_ipoib",
    "ib_umad",
    "ib_uverbs",
    "ionic_rdma",
    "irdma",
    "mlx4_ib",
    "mlx5_core",
    "mlx5_ib",
    "nouveau",
    "nv_peer_mem",
    "nvidia",
    "nvidia_fs",
    "nvidia_peermem",
    "nvidia_uvm",
    "rdma_cm",
    "rdma_rxe",
    "rdma_ucm",
    "siw",
];
const OPTIONS: [&str; 8] = [
    "DMA_SHARED_BUFFER",
    "PCI_P2PDMA",
    "DMABUF_MOVE_NOTIFY",
    "HSA_AMD_P2P",
    "INFINIBAND_USER_ACCESS",
    "INFINIBAND_USER_MEM",
    "IOMMU_DEFAULT_PASSTHROUGH",
    "INFINIBAND_ON_DEMAND_PAGING",
];
/// Parameters of NVIDIA's module that matter.
const PARAMETERS: [&str; 6] = [
    "RegistryDwords",
    "EnableStreamMemOPs",
    "EnableResizableBar",
    "DmaRemapPeerMmio",
    "OpenRmEnableUnsupportedGpus",
    "GrdmaPciTopoCheckOverride",
];

/// Everything about the kernel.
pub(super) fn kernel(root: &Root) -> Kernel {
    let release = root.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let modules = modules(root);
    let loaded = |name: &str| modules.known().is_some_and(|modules| modules.contains_key(name));
    Kernel {
        command_line: root.text("/proc/cmdline").into(),
        options: options(root, &release, &OPTIONS),
        installed: installed(root, &release),
        at_boot: at_boot(root),
        peer_memory_clients: peer_memory_clients(root),
        peer_memory_api: peer_memory_api(root, loaded("ib_core")),
        nvidia: nvidia(root),
        gdrdrv: gdrdrv(root, &modules),
        ofed: ofed(root, loaded("mlx5_core")),
        log: Read::default(),
        modules,
        release,
    }
}

fn modules(root: &Root) -> Read<BTreeMap<String, Module>> {
    match root.names("/sys/module") {
        Ok(names) => Read::Yes(
            names
                .into_iter()
                .filter(|name| MODULES.contains(&name.as_str()))
                .map(|name| {
                    let version = root.text(&format!("/sys/module/{name}/version")).ok();
                    (name, Module { version })
                })
                .collect(),
        ),
        Err(error) => Read::no(format!("/sys/module: {error}")),
    }
}

/// The requested options that the kernel was built with.
pub(super) fn options(root: &Root, release: &str, wanted: &[&str]) -> Read<BTreeMap<String, String>> {
    let places = [
        format!("/boot/config-{release}"),
        format!("/lib/modules/{release}/config"),
        format!("/usr/lib/modules/{release}/config"),
        format!("/usr/src/linux-headers-{release}/.config"),
        format!("/lib/modules/{release}/build/.config"),
    ];
    let packed = || gzip::unpack(&root.bytes("/proc/config.gz").ok()?);
    let text = places.iter().find_map(|place| root.text(place).ok()).or_else(packed);
    let Some(text) = text else {
        return Read::no(format!("there is neither /boot/config-{release} nor /proc/config.gz"));
    };
    let mut found: BTreeMap<String, String> =
        wanted.iter().map(|name| ((*name).to_owned(), "n".to_owned())).collect();
    for line in text.lines() {
        let Some((name, value)) = line.strip_prefix("CONFIG_").and_then(|line| line.split_once('=')) else {
            continue;
        };
        if let Some(known) = found.get_mut(name) {
            *known = value.to_owned();
        }
    }
    Read::Yes(found)
}

fn installed(root: &Root, release: &str) -> Read<Vec<String>> {
    let places =
        [format!("/lib/modules/{release}/modules.dep"), format!("/usr/lib/modules/{release}/modules.dep")];
    let Some(text) = places.iter().find_map(|place| root.text(place).ok()) else {
        return Read::no(format!("there is no {}", places[0]));
    };
    let mut found: Vec<String> = text
        .lines()
        .filter_map(|line| {
            let path = line.split(':').next()?;
            let name = path.rsplit('/').next()?.split(".ko").next()?.replace('-', "_");
            MODULES.contains(&name.as_str()).then_some(name)
        })
        .collect();
    found.sort();
    found.dedup();
    Read::Yes(found)
}

fn at_boot(root: &Root) -> Read<Vec<String>> {
    let mut files = vec!["/etc/modules".to_owned()];
    let mut readable = root.exists("/etc/modules");
    for folder in ["/etc/modules-load.d", "/run/modules-load.d", "/usr/lib/modules-load.d"] {
        if let Ok(names) = root.names(folder) {
            readable = true;
            files.extend(
                names
                    .into_iter()
                    .filter(|name| name.ends_with(".conf"))
                    .map(|name| format!("{folder}/{name}")),
            );
        }
    }
    if !readable {
        return Read::no("there is no /etc/modules-load.d");
    }
    let mut found: Vec<String> = files
        .iter()
        .filter_map(|file| root.text(file).ok())
        .flat_map(|text| text.lines().map(|line| line.trim().replace('-', "_")).collect::<Vec<_>>())
        .filter(|name| MODULES.contains(&name.as_str()))
        .collect();
    found.sort();
    found.dedup();
    Read::Yes(found)
}

fn peer_memory_clients(root: &Root) -> Read<Vec<String>> {
    match root.names("/sys/kernel/mm/memory_peers") {
        Ok(names) => Read::Yes(names),
        // Newer OFEDs have no such folder, whatever client is registered.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Read::no(crate::facts::NO_FOLDER),
        Err(error) => Read::no(error.to_string()),
    }
}

/// OFED's ib_core exports a function that the kernel's own does not have. Newer ones no longer show
/// a folder.
fn peer_memory_api(root: &Root, ib_core: bool) -> Read<bool> {
    if root.exists("/sys/kernel/mm/memory_peers") {
        return Read::Yes(true);
    }
    if !ib_core {
        return Read::Yes(false);
    }
    let Ok(file) = std::fs::File::open(root.join("/proc/kallsyms")) else {
        return Read::no("/proc/kallsyms cannot be read");
    };
    // Some ten megabytes that the kernel generates on the fly: read line by line, and no further
    // than needed.
    let mut lines = 0_u64;
    for line in BufReader::with_capacity(1 << 16, file).split(b'\n').take(4_000_000) {
        let Ok(line) = line else { return Read::no("/proc/kallsyms cannot be read") };
        lines += 1;
        if line.windows(30).any(|part| part == b"ib_register_peer_memory_client") {
            return Read::Yes(true);
        }
    }
    if lines == 0 { Read::no("/proc/kallsyms is empty") } else { Read::Yes(false) }
}

fn nvidia(root: &Root) -> Read<Option<NvidiaModule>> {
    let text = match root.text("/proc/driver/nvidia/version") {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            // Some containers hide /proc/driver; the module's own folder still tells the version.
            return match root.text("/sys/module/nvidia/version") {
                Ok(version) => Read::Yes(Some(NvidiaModule { version, ..NvidiaModule::default() })),
                Err(_) if root.exists("/sys/module/nvidia") => {
                    Read::no("the module does not tell its version")
                }
                Err(_) => Read::Yes(None),
            };
        }
        Err(error) => return Read::no(error.to_string()),
    };
    let Some(first) = text.lines().next() else { return Read::no("/proc/driver/nvidia/version is empty") };
    let version = first.split_whitespace().find(|word| {
        word.contains('.')
            && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    });
    let Some(version) = version else { return Read::no("/proc/driver/nvidia/version names no version") };
    let parameters = root
        .text("/proc/driver/nvidia/params")
        .map(|text| {
            text.lines()
                .filter_map(|line| line.split_once(':'))
                .map(|(name, value)| (name.trim().to_owned(), value.trim().trim_matches('"').to_owned()))
                .filter(|(name, value)| {
                    PARAMETERS.contains(&name.as_str()) && !value.is_empty() && value != "0"
                })
                .collect()
        })
        .unwrap_or_default();
    Read::Yes(Some(NvidiaModule {
        version: version.to_owned(),
        open: Some(first.contains("Open Kernel Module")),
        parameters,
    }))
}

/// GDRCopy's module: its version, and the flavour of NVIDIA's that it was built for.
fn gdrdrv(root: &Root, modules: &Read<BTreeMap<String, Module>>) -> Read<Option<Gdrdrv>> {
    let module = match modules {
        Read::Yes(modules) => modules.get("gdrdrv"),
        // `modules` has the reason.
        Read::No(_) => return Read::default(),
    };
    Read::Yes(module.map(|module| {
        let told = root.text("/proc/driver/gdrdrv/params").unwrap_or_default();
        let line = told.lines().find(|line| line.contains("flavor")).unwrap_or_default();
        Gdrdrv { version: module.version.clone(), open: Gdrdrv::flavour(line) }
    }))
}

/// OFED's modules carry a version with a release date or a long number; those of the kernel have
/// none, or had `5.0-0`.
fn ofed(root: &Root, mlx5: bool) -> Read<Option<String>> {
    if !mlx5 {
        return Read::Yes(None);
    }
    let version = root.text("/sys/module/mlx5_core/version").ok();
    Read::Yes(version.filter(|version| {
        !matches!(version.as_str(), "5.0-0" | "4.0-0" | "3.0-1" | "") && version.contains('-')
    }))
}
