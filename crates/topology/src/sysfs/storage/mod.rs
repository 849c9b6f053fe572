//! One path: its filesystem, its drives, and the parts of GPUDirect Storage.

mod block;
mod cufile;
mod mount;

use std::io::{BufRead, BufReader};

use super::{Root, Surroundings, kernel};
use crate::facts::{DeviceNode, NvidiaFs, Probe, Read, Storage};

/// Options of the kernel that P2PDMA needs.
const OPTIONS: [&str; 4] = ["PCI_P2PDMA", "ZONE_DEVICE", "MEMORY_HOTPLUG", "KALLSYMS_ALL"];
/// What is searched for in the kernel's symbols: P2PDMA for user memory, and the functions by which
/// storage drivers register with nvidia-fs.
const P2PDMA: &[u8] = b"p2pdma_pgmap_ops";
const NVFS: &[u8] = b"_register_nvfs_dma_ops";
/// Most device files that are opened.
const MAX_NODES: usize = 64;

/// The facts of a path below the root. `path` is absolute, and without links where the machine is
/// the live one.
pub fn storage(root: &Root, surroundings: &Surroundings, path: &str) -> Storage {
    let mut mount = mount::of(root, path);
    let devices = match &mount {
        Read::Yes(found) => block::chain(root, found),
        Read::No(why) => Read::no(why.unread.clone()),
    };
    if let (Read::Yes(found), Some(first)) = (&mut mount, devices.known().and_then(|devices| devices.first()))
        && found.mount.kind == "ext4"
    {
        found.mount.journal = mount::journal(root, &first.name);
    }
    let release = root.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    Storage {
        path: path.to_owned(),
        mount: mount.map(|found| found.mount),
        devices,
        direct_io: Read::default(),
        kernel_options: kernel::options(root, &release, &OPTIONS),
        kernel_symbols: symbols(root),
        nvme_multipath: multipath(root),
        registry_dwords: registry(root),
        nvidia_fs: nvidia_fs(root),
        cufile: cufile::cufile(root, surroundings),
    }
}

/// The symbols that matter. The kernel generates some ten megabytes: they are read line by line.
fn symbols(root: &Root) -> Read<Vec<String>> {
    let file = match std::fs::File::open(root.join("/proc/kallsyms")) {
        Ok(file) => file,
        Err(error) => return Read::no(format!("/proc/kallsyms: {error}")),
    };
    let mut found: Vec<String> = Vec::new();
    let mut lines = 0_u64;
    for line in BufReader::with_capacity(1 << 16, file).split(b'\n').take(4_000_000) {
        let Ok(line) = line else { return Read::no("/proc/kallsyms cannot be read") };
        lines += 1;
        let has = |word: &[u8]| line.windows(word.len()).any(|part| part == word);
        if !(has(P2PDMA) || has(NVFS)) {
            continue;
        }
        let text = String::from_utf8_lossy(&line);
        let Some(name) = text.split_whitespace().nth(2) else { continue };
        let matters = name == "p2pdma_pgmap_ops" || name.ends_with("_register_nvfs_dma_ops");
        if matters && !name.contains("unregister") && found.len() < 32 && !found.iter().any(|f| f == name) {
            found.push(name.to_owned());
        }
    }
    found.sort();
    if lines == 0 { Read::no("/proc/kallsyms is empty") } else { Read::Yes(found) }
}

fn multipath(root: &Root) -> Read<Option<bool>> {
    const PARAMETER: &str = "/sys/module/nvme_core/parameters/multipath";
    match root.text(PARAMETER) {
        Ok(text) => match text.as_str() {
            "Y" | "1" => Read::Yes(Some(true)),
            "N" | "0" => Read::Yes(Some(false)),
            other => Read::no(format!("{PARAMETER}: {other:?} is neither Y nor N")),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Read::Yes(None),
        Err(error) => Read::no(format!("{PARAMETER}: {error}")),
    }
}

fn registry(root: &Root) -> Read<Option<String>> {
    const PARAMETERS: &str = "/proc/driver/nvidia/params";
    match root.text(PARAMETERS) {
        Ok(text) => {
            let value = text.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                (name.trim() == "RegistryDwords").then(|| value.trim().trim_matches('"').to_owned())
            });
            match value {
                Some(value) => Read::Yes(Some(value).filter(|value| !value.is_empty())),
                None => Read::no(format!("{PARAMETERS} has no RegistryDwords")),
            }
        }
        Err(error) => Read::no(format!("{PARAMETERS}: {error}")),
    }
}

fn nvidia_fs(root: &Root) -> NvidiaFs {
    const FOLDER: &str = "/proc/driver/nvidia-fs";
    let unread = |error: std::io::Error| error.to_string();
    let version = match root.text(&format!("{FOLDER}/version")) {
        Ok(text) => Read::Yes(text.trim_start_matches("version:").trim().to_owned()),
        Err(error) => match root.text("/sys/module/nvidia_fs/version") {
            Ok(version) => Read::Yes(version),
            Err(_) => Read::no(format!("{FOLDER}/version: {}", unread(error))),
        },
    };
    let clients = match root.text(&format!("{FOLDER}/modules")) {
        // `nvme: 1`, one a line.
        Ok(text) => Read::Yes(
            text.lines()
                .filter_map(|line| Some(line.split(':').next()?.trim().to_owned()))
                .filter(|name| !name.is_empty())
                .take(64)
                .collect(),
        ),
        Err(error) => Read::no(format!("{FOLDER}/modules: {}", unread(error))),
    };
    NvidiaFs { version, clients, nodes: nodes(root) }
}

fn nodes(root: &Root) -> Read<Vec<DeviceNode>> {
    let names = match root.names("/dev") {
        Ok(names) => names,
        Err(error) => return Read::no(format!("/dev: {error}")),
    };
    let is_node = |name: &&String| {
        name.strip_prefix("nvidia-fs")
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    Read::Yes(
        names
            .iter()
            .filter(is_node)
            .take(MAX_NODES)
            .map(|name| {
                let path = format!("/dev/{name}");
                let open = match root.open_device(&path) {
                    Ok(()) => Probe::worked(""),
                    Err(error) => Probe::failed(error.raw_os_error(), error.to_string()),
                };
                DeviceNode { path, open }
            })
            .collect(),
    )
}
