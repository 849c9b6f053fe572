//! Variables and files of settings that NCCL, UCX and their users read; and installations of UCX.

use std::collections::BTreeMap;

use super::Root;
use crate::facts::{Library, Read, Ucx};

/// Beginnings of the names that matter.
const PREFIXES: [&str; 13] = [
    "NCCL_",
    "UCX_",
    "RCCL_",
    "NVSHMEM_",
    "MC_",
    "MOONCAKE_",
    "MV2_",
    "OMPI_MCA_",
    "FI_",
    "NOBOUNCE_",
    "IBV_",
    "MLX5_",
    "DEEP_EP_",
];
/// Whole names that matter.
const NAMES: [&str; 7] = [
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "RDMAV_FORK_SAFE",
    "CUDA_MPS_PIPE_DIRECTORY",
];

/// Whether a variable is one that a check may look at.
#[must_use]
pub fn matters(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || NAMES.contains(&name)
}

/// Files of settings: by path, what they set.
pub(super) fn config_files(root: &Root, home: Option<&str>) -> BTreeMap<String, BTreeMap<String, String>> {
    let mut paths =
        vec!["/etc/nccl.conf".to_owned(), "/etc/ucx/ucx.conf".to_owned(), "/usr/etc/ucx/ucx.conf".to_owned()];
    if let Some(home) = home {
        paths.extend([
            format!("{home}/.nccl.conf"),
            format!("{home}/.config/nccl.conf"),
            format!("{home}/ucx.conf"),
        ]);
    }
    paths
        .into_iter()
        .filter_map(|path| {
            let settings = parse(&root.text(&path).ok()?);
            (!settings.is_empty()).then_some((path, settings))
        })
        .collect()
}

/// `NAME=value` in lines; `#` begins a comment.
fn parse(text: &str) -> BTreeMap<String, String> {
    text.lines()
        .filter_map(|line| line.split('#').next()?.split_once('='))
        .map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()))
        .filter(|(name, _)| matters(name))
        .collect()
}

const LIBRARY_FOLDERS: [&str; 9] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/opt/ucx/lib",
    "/opt/hpcx/ucx/lib",
    "/usr/local/ucx/lib",
    "/usr/local/cuda/lib64",
];

/// The first UCX in the usual places: its version by the name of the library's file, its transports by the modules beside it.
pub(super) fn ucx(root: &Root) -> Read<Option<Ucx>> {
    for folder in LIBRARY_FOLDERS {
        if !root.exists(&format!("{folder}/libucp.so.0")) {
            continue;
        }
        let modules = root.names(&format!("{folder}/ucx")).unwrap_or_default();
        let mut modules: Vec<String> = modules
            .iter()
            .filter_map(|name| Some(name.strip_prefix("libuct_")?.split(".so").next()?.to_owned()))
            .collect();
        modules.sort();
        modules.dedup();
        // The file's version is the ABI's, not the release's: pkg-config tells the release.
        let version = [format!("{folder}/pkgconfig/ucx.pc"), "/usr/share/pkgconfig/ucx.pc".to_owned()]
            .iter()
            .find_map(|path| root.text(path).ok())
            .and_then(|text| {
                text.lines().find_map(|line| Some(line.strip_prefix("Version:")?.trim().to_owned()))
            });
        return Read::Yes(Some(Ucx { version, modules }));
    }
    Read::Yes(None)
}

/// The first NCCL in the usual places, by the name of its file.
pub(super) fn nccl(root: &Root) -> Read<Option<Library>> {
    for folder in LIBRARY_FOLDERS {
        let Ok(names) = root.names(folder) else { continue };
        if let Some(version) =
            names.iter().filter_map(|name| name.strip_prefix("libnccl.so.")).max_by_key(|rest| rest.len())
        {
            let version = version.contains('.').then(|| version.to_owned());
            return Read::Yes(Some(Library { version, ..Library::default() }));
        }
    }
    Read::Yes(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_lines_with_an_equals_sign() {
        let found = parse("# comment\nNCCL_IB_DISABLE = 1 # why\nPATH=/bin\nnonsense\nNCCL_DEBUG=INFO\n");
        let pairs: Vec<_> = found.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(pairs, [("NCCL_DEBUG", "INFO"), ("NCCL_IB_DISABLE", "1")]);
    }
}
