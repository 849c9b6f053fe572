//! The filesystem: does cuFile support it, in the mode that it is mounted in?

use super::{ChainStep, shell, step};
use crate::finding::{Finding, Fix, Severity};
use crate::storage_verdict::State;
use nobounce_topology::facts::{Mount, Storage, version_pair};

/// From this version of GDS on, the library reads ext4's mode where the mount table does not name
/// it. Up to the other one it does not. In between is not known.
const MODE_READ: (u32, u32) = (1, 13);
const MODE_NOT_READ: (u32, u32) = (1, 7);

/// A filesystem over a network that cuFile supports: what registers with nvidia-fs for it.
pub(super) fn client(kind: &str) -> Option<&'static str> {
    match kind {
        "nfs" | "nfs4" => Some("rpcrdma"),
        "lustre" => Some("lnet"),
        "wekafs" => Some("wekafsio"),
        "gpfs" | "mmfs" => Some("mmfslinux"),
        "beegfs" => Some("beegfs"),
        _ => None,
    }
}

/// Whether the files of a filesystem are on a block device that cuFile takes.
pub(super) fn is_local(kind: &str) -> bool {
    matches!(kind, "ext4" | "xfs")
}

pub(super) fn steps(storage: &Storage, has_nvme: bool) -> Vec<ChainStep> {
    let Some(mount) = storage.mount.known() else {
        let why = storage.mount.why_not().unwrap_or_default();
        let finding = Finding::new("storage-unread", Severity::Unknown, "the filesystem of the path is unknown")
            .why("cuFile supports ext4 and xfs on NVMe drives, and a few network filesystems. Without its type no route can be told.")
            .seen("/proc/self/mountinfo", why)
            .fix(Fix::both().run(format!("findmnt -T {}", shell(&storage.path))));
        return vec![step("filesystem", State::Unknown, State::Unknown, why).because(finding)];
    };
    let mut steps = vec![kind(storage, mount, has_nvme)];
    if mount.kind == "ext4" {
        steps.push(journal(storage, mount));
    }
    if is_local(&mount.kind) {
        steps.push(direct_io(storage));
    }
    steps
}

fn kind(storage: &Storage, mount: &Mount, has_nvme: bool) -> ChainStep {
    let at = format!("{} on {}", mount.kind, mount.point);
    if is_local(&mount.kind) {
        return step("filesystem", State::Ok, State::Ok, at);
    }
    if let Some(client) = client(&mount.kind) {
        let rdma = !mount.kind.starts_with("nfs")
            || mount.options.iter().any(|option| option == "proto=rdma" || option == "rdma");
        if rdma {
            let text = format!("{at}: by nvidia-fs and {client}; P2PDMA reads local drives only");
            return step("filesystem", State::Blocks, State::Ok, text);
        }
        let proto =
            mount.options.iter().find(|option| option.starts_with("proto=")).map_or("no proto=rdma", |o| o);
        let finding = Finding::new(
            "storage-nfs-tcp",
            Severity::Error,
            format!("NFS at {} does not use RDMA", mount.point),
        )
        .why("GPUDirect Storage reads NFS by RDMA only. Over TCP all bytes pass host memory.")
        .seen("/proc/self/mountinfo", proto)
        .fix(Fix::host().run(format!(
            "sudo umount {0} && sudo modprobe rpcrdma && sudo mount -o proto=rdma,port=20049 {1} {0}",
            shell(&mount.point),
            shell(&mount.source)
        )))
        .root();
        return step("filesystem", State::Blocks, State::Blocks, format!("{at}: without RDMA"))
            .because(finding);
    }
    if matches!(mount.kind.as_str(), "virtiofs" | "scatefs") {
        let finding = Finding::new("storage-filesystem", Severity::Unknown, format!("cuFile's route for {} is unknown", mount.kind))
            .why("Newer releases of GDS name this filesystem. Which driver must register with nvidia-fs is not documented.")
            .seen("/proc/self/mountinfo", at.clone())
            .fix(Fix::both().run("/usr/local/cuda/gds/tools/gdscheck -p"));
        return step("filesystem", State::Blocks, State::Unknown, at).because(finding);
    }
    let finding = Finding::new(
        "storage-filesystem",
        Severity::Error,
        format!("cuFile has no direct route for files on {}", mount.kind),
    )
    .why(why_not(&mount.kind))
    .seen("/proc/self/mountinfo", at.clone());
    let finding = match mount.kind.as_str() {
        "overlay" | "fuse.fuse-overlayfs" => finding.fix(
            Fix::container().option("-v /data:/data").remark("a volume on ext4 or xfs, and the file in it"),
        ),
        _ => finding.fix(
            Fix::both()
                .run(format!("cp {} /data/", shell(&storage.path)))
                .remark("to ext4 or xfs on an NVMe drive; findmnt -t ext4,xfs lists them"),
        ),
    };
    let step = step("filesystem", State::Blocks, State::Blocks, at).because(finding);
    // Without a drive there is nowhere better to put the file.
    if has_nvme || mount.kind == "overlay" { step } else { step.for_good() }
}

fn why_not(kind: &str) -> &'static str {
    match kind {
        "overlay" | "fuse.fuse-overlayfs" => {
            "The file is in the writable layer or the image of a container. cuFile cannot register files of an overlay (errors 5027 and 5030), and reads them in compat mode or not at all."
        }
        "tmpfs" | "ramfs" | "hugetlbfs" => {
            "The file is in host memory: there is no drive that could write into the GPU."
        }
        "btrfs" | "zfs" | "bcachefs" => {
            "It checks or transforms all data on the CPU, so that bytes must pass host memory. NVIDIA classifies it as compat mode only."
        }
        _ => {
            "cuFile supports ext4 and xfs on NVMe drives, and NFS, Lustre, WekaFS, Spectrum Scale and BeeGFS by RDMA. Others are read in compat mode."
        }
    }
}

/// cuFile takes ext4 in ordered mode, and asks the mount table for it.
fn journal(storage: &Storage, mount: &Mount) -> ChainStep {
    const NAME: &str = "ext4 mode";
    let written = mount.options.iter().find_map(|option| option.strip_prefix("data="));
    let mode = written.or(mount.journal.known().map(String::as_str));
    let library = storage.cufile.library.known().and_then(Option::as_ref);
    let version = library.and_then(|library| library.version.as_deref());
    let remount = format!(
        "sudo umount {0} && sudo mount -t ext4 -o data=ordered {1} {0}",
        shell(&mount.point),
        shell(&mount.source)
    );
    let finding = |severity: Severity, title: String| {
        Finding::new("storage-ext4-mode", severity, title)
            .why("cuFile reads ext4 directly in data=ordered mode. Older releases look for that word in the mount table, where the kernel leaves the default out.")
            .seen("/proc/self/mountinfo", mount.options.join(","))
            .seen("/proc/fs/ext4/*/options", mount.journal.known().map_or_else(
                || format!("unread: {}", mount.journal.why_not().unwrap_or_default()),
                |mode| format!("data={mode}"),
            ))
            .seen("libcufile", version.unwrap_or("version unknown"))
            .fix(Fix::host().run(remount.clone()))
            .root()
    };
    match (mode, written) {
        (Some("ordered"), Some(_)) => step(NAME, State::Ok, State::Ok, "data=ordered in the mount options"),
        (Some("ordered"), None) => match version.and_then(version_pair) {
            Some(version) if version >= MODE_READ => {
                step(NAME, State::Ok, State::Ok, "data=ordered, by default")
            }
            Some(version) if version <= MODE_NOT_READ => {
                step(NAME, State::Blocks, State::Blocks, "data=ordered is not written in the mount options")
                    .because(finding(
                        Severity::Error,
                        format!("this libcufile wants data=ordered in the mount options of {}", mount.point),
                    ))
            }
            _ => step(
                NAME,
                State::Unknown,
                State::Unknown,
                "data=ordered by default; whether this libcufile sees it is unknown",
            )
            .because(finding(
                Severity::Unknown,
                format!("data=ordered is not written in the mount options of {}", mount.point),
            )),
        },
        (Some(other), _) => step(NAME, State::Blocks, State::Blocks, format!("data={other}"))
            .because(finding(Severity::Error, format!("ext4 at {} is in data={other} mode", mount.point))),
        (None, _) => step(NAME, State::Unknown, State::Unknown, "the journaling mode is unknown").because(
            finding(Severity::Unknown, format!("the journaling mode of ext4 at {} is unknown", mount.point)),
        ),
    }
}

fn direct_io(storage: &Storage) -> ChainStep {
    const NAME: &str = "O_DIRECT";
    match storage.direct_io.known() {
        Some(Some(align)) => {
            let how = if align.reported { "statx" } else { "open" };
            let text =
                format!("taken ({how}); memory at {} bytes, offsets at {}", align.memory, align.offset);
            step(NAME, State::Ok, State::Ok, text)
        }
        Some(None) => {
            let finding = Finding::new("storage-no-direct-io", Severity::Error, "the file does not take O_DIRECT")
                .why("Direct routes bypass the page cache. Encrypted, compressed, inline and verity files do not allow that.")
                .seen("open with O_DIRECT, statx", "not supported")
                .fix(Fix::both().run(format!("lsattr {0}; dd if={0} of=/dev/null bs=1M count=1 iflag=direct", shell(&storage.path))));
            step(NAME, State::Blocks, State::Blocks, "not supported for this file").because(finding)
        }
        None => {
            let why = storage.direct_io.why_not().unwrap_or_default();
            let finding = Finding::new(
                "storage-unread",
                Severity::Unknown,
                "whether the file takes O_DIRECT is unknown",
            )
            .why("Direct routes bypass the page cache, which some files do not allow.")
            .seen("open with O_DIRECT", why)
            .fix(
                Fix::both()
                    .run(format!("dd if={} of=/dev/null bs=1M count=1 iflag=direct", shell(&storage.path))),
            );
            step(NAME, State::Unknown, State::Unknown, format!("not tried: {why}")).because(finding)
        }
    }
}
