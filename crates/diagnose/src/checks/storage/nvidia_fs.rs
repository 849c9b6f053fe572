//! The module nvidia-fs: is it loaded, may this process use it, and did the storage driver
//! register?

use super::{ChainStep, filesystem, step};
use crate::checks::list;
use crate::finding::{Finding, Fix, Severity};
use crate::storage_verdict::State;
use nobounce_topology::facts::{BlockKind, DeviceNode, Facts, Storage};

const EPERM: i32 = 1;
const EACCES: i32 = 13;

pub(super) fn steps(facts: &Facts, storage: &Storage) -> Vec<ChainStep> {
    let loaded = is_loaded(facts, storage);
    let mut steps = vec![module(facts, storage, loaded)];
    steps.extend(client(storage, loaded));
    steps
}

fn is_loaded(facts: &Facts, storage: &Storage) -> Option<bool> {
    if storage.nvidia_fs.clients.known().is_some() {
        return Some(true);
    }
    facts.kernel.is_loaded("nvidia_fs")
}

fn module(facts: &Facts, storage: &Storage, loaded: Option<bool>) -> ChainStep {
    const NAME: &str = "nvidia-fs";
    let fs = &storage.nvidia_fs;
    let container = facts.is_container();
    let version = fs.version.known().map_or_else(String::new, |version| format!(" {version}"));
    match loaded {
        Some(true) => {}
        Some(false) => {
            let installed =
                facts.kernel.installed.known().is_some_and(|names| names.iter().any(|n| n == "nvidia_fs"));
            let fixes = if container || installed {
                vec![Fix::host().run("sudo modprobe nvidia-fs")]
            } else {
                vec![
                    Fix::host()
                        .run("sudo apt install nvidia-gds && sudo modprobe nvidia-fs")
                        .remark("on Debian and Ubuntu"),
                    Fix::host()
                        .run("sudo dnf install nvidia-gds && sudo modprobe nvidia-fs")
                        .remark("on RHEL and Fedora"),
                ]
            };
            let finding = Finding::new("storage-nvidia-fs", Severity::Error, "nvidia-fs is not loaded")
                .why("cuFile reads directly by nvidia-fs, or by P2PDMA. Without the module, and without P2PDMA, it says 'running in compatible mode' in cufile.log and copies through host memory.")
                .seen("/sys/module/nvidia_fs", "not there")
                .fixes(fixes)
                .root();
            return step(NAME, State::NotNeeded, State::Blocks, "not loaded").because(finding);
        }
        None => {
            let why = facts.kernel.modules.why_not().unwrap_or("not recorded");
            let finding =
                Finding::new("storage-unread", Severity::Unknown, "whether nvidia-fs is loaded is unknown")
                    .why("cuFile reads directly by nvidia-fs, or by P2PDMA.")
                    .seen("/sys/module", why)
                    .fix(Fix::both().run("lsmod | grep nvidia_fs; cat /proc/driver/nvidia-fs/version"));
            return step(NAME, State::NotNeeded, State::Unknown, why).because(finding);
        }
    }
    let known_bad = (fs.version.known().map(String::as_str) == Some("2.25.6")).then(|| {
        Finding::new("storage-nvidia-fs-version", Severity::Warning, "nvidia-fs 2.25.6 is known to fail")
            .why("NVIDIA's release notes name failures of cuFile with this version, and recommend 2.25.7 or newer.")
            .seen("/sys/module/nvidia_fs/version", "2.25.6")
            .fix(Fix::host().run("sudo apt install --only-upgrade nvidia-fs-dkms && sudo modprobe -r nvidia-fs && sudo modprobe nvidia-fs"))
            .root()
    });
    let Some(nodes) = fs.nodes.known() else {
        let why = fs.nodes.why_not().unwrap_or_default();
        let finding = Finding::new(
            "storage-unread",
            Severity::Unknown,
            "whether this process may use nvidia-fs is unknown",
        )
        .why("cuFile opens /dev/nvidia-fs0 and the others.")
        .seen("/dev", why)
        .fix(Fix::both().run("ls -l /dev/nvidia-fs*"));
        return step(
            NAME,
            State::NotNeeded,
            State::Unknown,
            format!("{version} loaded; device files: {why}"),
        )
        .because(finding);
    };
    match no_node(nodes, container) {
        Some((text, finding)) => {
            step(NAME, State::NotNeeded, State::Blocks, text).because(finding).noting(known_bad)
        }
        None => {
            step(NAME, State::NotNeeded, State::Ok, format!("loaded{version}, device files: {}", nodes.len()))
                .noting(known_bad)
        }
    }
}

fn no_node(nodes: &[DeviceNode], container: bool) -> Option<(String, Finding)> {
    if nodes.iter().any(|node| node.open.ok) {
        return None;
    }
    let finding = |title: String| {
        Finding::new("storage-nvidia-fs-nodes", Severity::Error, title)
            .why("The module is loaded, but cuFile cannot open its device files. Some releases of libcufile then close file descriptor 0 of the process.")
    };
    let start = Fix::container()
        .option("--gpus all -v /run/udev:/run/udev:ro $(for f in /dev/nvidia-fs*; do echo --device $f; done)")
        .remark("or, with NVIDIA's container toolkit")
        .option("-e NVIDIA_GDS=enabled");
    let Some(first) = nodes.first() else {
        let finding = finding("nvidia-fs is loaded, but there is no /dev/nvidia-fs*".to_owned())
            .seen("/dev", "no nvidia-fs*");
        let finding = if container {
            finding.fix(start)
        } else {
            finding
                .fix(
                    Fix::host()
                        .run("sudo modprobe -r nvidia-fs && sudo modprobe nvidia-fs && ls /dev/nvidia-fs*"),
                )
                .root()
        };
        return Some(("loaded, but no /dev/nvidia-fs*".to_owned(), finding));
    };
    let finding = finding(format!("{} cannot be opened: {}", first.path, first.open.detail))
        .seen(first.path.clone(), first.open.detail.clone());
    let finding = match (first.open.errno, container) {
        (Some(EPERM), true) => finding.fix(start),
        (Some(EACCES), _) => finding.fix(Fix::host().run("sudo chmod 666 /dev/nvidia-fs*")).root(),
        (_, true) => finding.fix(start),
        _ => finding.fix(Fix::host().run("ls -l /dev/nvidia-fs*; sudo dmesg | grep -i nvfs")).root(),
    };
    Some((format!("loaded, but {}: {}", first.path, first.open.detail), finding))
}

/// The storage driver has to register with nvidia-fs: the kernel's own NVMe driver does not.
fn client(storage: &Storage, loaded: Option<bool>) -> Option<ChainStep> {
    const NAME: &str = "nvidia-fs client";
    let mount = storage.mount.known()?;
    let needed = match filesystem::client(&mount.kind) {
        Some(client) => client,
        None if filesystem::is_local(&mount.kind) => nvme(storage)?,
        None => return None,
    };
    let symbols = storage.kernel_symbols.known();
    let of_nvme = |symbols: &Vec<String>| {
        symbols.iter().filter(|symbol| symbol.starts_with("nvme_v")).cloned().collect::<Vec<_>>()
    };
    let finding = |severity, seen: &str, value: String| {
        let fix = match needed {
            "nvme" | "nvme_rdma" => {
                Fix::host().run("sudo apt install doca-all mlnx-nvme-dkms && sudo update-initramfs -u && sudo reboot").remark("then").run("sudo modprobe nvidia-fs; cat /proc/driver/nvidia-fs/modules")
            }
            "rpcrdma" => {
                Fix::host().run("sudo apt install mlnx-nfsrdma-dkms && sudo modprobe rpcrdma && sudo modprobe -r nvidia-fs && sudo modprobe nvidia-fs")
            }
            _ => {
                Fix::host().run("sudo modprobe -r nvidia-fs && sudo modprobe nvidia-fs && cat /proc/driver/nvidia-fs/modules")
            }
        };
        Finding::new("storage-nvidia-fs-client", severity, format!("the driver {needed} is not registered with nvidia-fs"))
            .why("nvidia-fs needs storage drivers that know it. The kernel's own nvme does not: gdscheck then prints 'NVMe : Unsupported', and cufile.log 'NVMe Driver not registered with nvidia-fs'. The drivers of MLNX_OFED or DOCA register, if both were built for the same interface.")
            .seen(seen, value)
            .fix(fix)
            .reboot()
    };
    let has = |clients: &Vec<String>| clients.iter().any(|client| client == needed);
    Some(match (storage.nvidia_fs.clients.known(), loaded) {
        (Some(clients), _) if has(clients) => {
            step(NAME, State::NotNeeded, State::Ok, format!("{needed} is registered"))
        }
        (Some(clients), _) => {
            let registered = if clients.is_empty() { "none".to_owned() } else { list(clients) };
            let mut found = finding(Severity::Error, "/proc/driver/nvidia-fs/modules", registered);
            // Both sides choose the interface when they are built, and nothing reports a mismatch.
            let offered = symbols.map(of_nvme).unwrap_or_default();
            if needed == "nvme" && !offered.is_empty() {
                found = found
                    .seen("/proc/kallsyms", format!("nvme offers {}: nvidia-fs may be built for another interface, or loaded before it", list(&offered)))
                    .fix(Fix::host().run("sudo dkms build nvidia-fs/$(modinfo -F version nvidia-fs) --force && sudo modprobe -r nvidia-fs && sudo modprobe nvidia-fs"));
                found.fix.rotate_right(1);
            }
            step(NAME, State::NotNeeded, State::Blocks, format!("{needed} is not registered")).because(found)
        }
        (None, Some(false)) if needed == "nvme" => match symbols.map(of_nvme) {
            Some(offered) if !offered.is_empty() => {
                step(NAME, State::NotNeeded, State::Ok, format!("nvme offers {}", list(&offered)))
            }
            Some(_) => {
                step(NAME, State::NotNeeded, State::Blocks, "the loaded nvme driver does not know nvidia-fs")
                    .because(finding(
                        Severity::Error,
                        "/proc/kallsyms",
                        "no nvme_v1_register_nvfs_dma_ops, no nvme_v2_register_nvfs_dma_ops".to_owned(),
                    ))
            }
            None => step(
                NAME,
                State::NotNeeded,
                State::Unknown,
                "whether the nvme driver knows nvidia-fs is unknown",
            )
            .because(finding(
                Severity::Unknown,
                "/proc/kallsyms",
                storage.kernel_symbols.why_not().unwrap_or_default().to_owned(),
            )),
        },
        _ => {
            let why = storage.nvidia_fs.clients.why_not().unwrap_or_default().to_owned();
            step(NAME, State::NotNeeded, State::Unknown, format!("whether {needed} is registered is unknown"))
                .because(finding(Severity::Unknown, "/proc/driver/nvidia-fs/modules", why))
        }
    })
}

/// The client that the drives need; none where they are no NVMe drives.
fn nvme(storage: &Storage) -> Option<&'static str> {
    let mut needed = None;
    for drive in storage.drives().filter(|drive| drive.kind == BlockKind::Nvme) {
        let rdma = drive.controllers.iter().any(|c| c.transport.known().is_some_and(|t| t == "rdma"));
        needed = Some(if rdma { "nvme_rdma" } else { "nvme" });
    }
    needed
}
