//! Variables and files of settings that NCCL, UCX and their users read; and installations of UCX.

use std::collections::BTreeMap;

use super::{Root, Surroundings};
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

pub(super) const LIBRARY_FOLDERS: [&str; 9] = [
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

/// The first UCX in the usual places: its version by pkg-config, Debian's list of packages or
/// Python's, its transports by the modules beside it.
pub(super) fn ucx(root: &Root, surroundings: &Surroundings) -> Read<Option<Ucx>> {
    for folder in LIBRARY_FOLDERS {
        if !root.exists(&format!("{folder}/libucp.so.0")) {
            continue;
        }
        let modules = modules(root, &format!("{folder}/ucx"));
        // The file's version is the ABI's, not the release's: pkg-config tells the release.
        let version = [format!("{folder}/pkgconfig/ucx.pc"), "/usr/share/pkgconfig/ucx.pc".to_owned()]
            .iter()
            .find_map(|path| root.text(path).ok())
            .and_then(|text| {
                text.lines().find_map(|line| Some(line.strip_prefix("Version:")?.trim().to_owned()))
            })
            .or_else(|| debian_version(root, "libucx0"));
        return Read::Yes(Some(Ucx { version, modules }));
    }
    for folder in python_folders(root, surroundings) {
        if let Some(version) = python_version(root, &folder, "libucx_cu") {
            let modules = modules(root, &format!("{folder}/libucx/lib/ucx"));
            return Read::Yes(Some(Ucx { version: Some(version), modules }));
        }
    }
    Read::Yes(None)
}

/// Transports by the names of their files.
pub(super) fn modules(root: &Root, folder: &str) -> Vec<String> {
    let mut found: Vec<String> = root
        .names(folder)
        .unwrap_or_default()
        .iter()
        .filter_map(|name| {
            // Those of wheels have a hash: `libuct_ib-5e6f8a.so.0`.
            let name = name.strip_prefix("libuct_")?.split_once(".so")?.0;
            Some(name.split('-').next().unwrap_or(name).to_owned())
        })
        .collect();
    found.sort();
    found.dedup();
    found
}

/// NCCL as a program would find it: that of the Python environment in use, of the system, of the
/// system's Python; by the names of files.
pub(super) fn nccl(root: &Root, surroundings: &Surroundings) -> Read<Option<Library>> {
    let library = |version| Read::Yes(Some(Library { version, ..Library::default() }));
    let of_python = |folders: Vec<String>| {
        folders.iter().find_map(|folder| python_version(root, folder, "nvidia_nccl_cu"))
    };
    let (active, others): (Vec<_>, Vec<_>) = python_folders(root, surroundings)
        .into_iter()
        .partition(|folder| environments(surroundings).iter().any(|begin| folder.starts_with(begin)));
    if let Some(version) = of_python(active) {
        return library(Some(version));
    }
    for folder in LIBRARY_FOLDERS {
        if let Some(version) = nccl_versions_in(root, folder).into_iter().max_by_key(String::len) {
            return library(Some(version).filter(|version| !version.is_empty()));
        }
    }
    match of_python(others) {
        Some(version) => library(Some(version)),
        None => Read::Yes(None),
    }
}

/// Versions of NCCL in a folder of libraries, by the names of files or of their wheel. Empty: one
/// whose version is not known.
pub fn nccl_versions_in(root: &Root, folder: &str) -> Vec<String> {
    let names = root.names(folder).unwrap_or_default();
    let numbers: Vec<&str> = names.iter().filter_map(|name| name.strip_prefix("libnccl.so.")).collect();
    let mut versions: Vec<String> =
        numbers.iter().filter(|number| number.contains('.')).map(|&number| number.to_owned()).collect();
    if versions.is_empty() && !numbers.is_empty() {
        let packages = folder.strip_suffix("/nvidia/nccl/lib");
        let of_wheel = packages.and_then(|packages| python_version(root, packages, "nvidia_nccl_cu"));
        versions.push(of_wheel.unwrap_or_default());
    }
    versions
}

/// Versions of all NCCLs of this machine that a program may load.
pub(super) fn nccl_versions(root: &Root, surroundings: &Surroundings) -> Vec<String> {
    let of_system = LIBRARY_FOLDERS.iter().flat_map(|folder| nccl_versions_in(root, folder));
    let folders = python_folders(root, surroundings);
    let of_python = folders.iter().filter_map(|folder| python_version(root, folder, "nvidia_nccl_cu"));
    of_system.chain(of_python).collect()
}

/// GDRCopy's library in the loader's folders, with its version by the names of files.
pub(super) fn gdrapi(root: &Root) -> Read<Option<Library>> {
    for folder in LIBRARY_FOLDERS {
        let names = root.names(folder).unwrap_or_default();
        let numbers: Vec<&str> = names.iter().filter_map(|name| name.strip_prefix("libgdrapi.so.")).collect();
        if let Some(longest) = numbers.iter().max_by_key(|number| number.len()) {
            // `libgdrapi.so.2` alone is the link, which tells no version.
            let version = longest.contains('.').then(|| (*longest).to_owned());
            return Read::Yes(Some(Library { version, ..Library::default() }));
        }
    }
    Read::Yes(None)
}

/// Where Amazon's installers put NCCL's plugin, outside of the loader's folders.
const PLUGIN_FOLDERS: [&str; 5] = [
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/amazon/ofi-nccl/lib/aarch64-linux-gnu",
    "/opt/amazon/aws-ofi-nccl/lib",
    "/opt/aws-ofi-nccl/lib",
];

/// Whether the loader finds a network plugin of NCCL's: in its own folders, in those of its
/// configuration or in those of `LD_LIBRARY_PATH`.
pub(super) fn ofi_plugin(root: &Root, surroundings: &Surroundings) -> Read<Option<bool>> {
    let holds = |folder: &str| {
        let names = root.names(folder).unwrap_or_default();
        names.iter().any(|name| name.starts_with("libnccl-net") && name.contains(".so"))
    };
    let path = surroundings.environment.get("LD_LIBRARY_PATH").map_or("", String::as_str);
    let configured = root.names("/etc/ld.so.conf.d").unwrap_or_default();
    let configured =
        configured.iter().filter_map(|name| root.text(&format!("/etc/ld.so.conf.d/{name}")).ok());
    let configured: Vec<String> = configured
        .flat_map(|text| text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>())
        .collect();
    let configured = configured.iter().map(String::as_str).filter(|folder| folder.starts_with('/'));
    let found = path.split(':').filter(|folder| !folder.is_empty()).chain(LIBRARY_FOLDERS).chain(configured);
    if found.into_iter().any(holds) {
        return Read::Yes(Some(true));
    }
    Read::Yes(PLUGIN_FOLDERS.into_iter().any(holds).then_some(false))
}

/// Folders of the Python environments that are in use.
fn environments(surroundings: &Surroundings) -> Vec<String> {
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"];
    active.iter().filter_map(|name| surroundings.environment.get(*name).cloned()).collect()
}

/// Folders of Python's packages, those in use first.
pub(super) fn python_folders(root: &Root, surroundings: &Surroundings) -> Vec<String> {
    let home = surroundings.home.iter().map(|home| format!("{home}/.local"));
    let mut found = Vec::new();
    for prefix in
        environments(surroundings).into_iter().chain(home).chain(["/usr/local".to_owned(), "/usr".to_owned()])
    {
        for lib in ["lib", "lib64"] {
            let names = root.names(&format!("{prefix}/{lib}")).unwrap_or_default();
            for name in names.iter().filter(|name| name.starts_with("python3")).take(16) {
                for packages in ["site-packages", "dist-packages"] {
                    let folder = format!("{prefix}/{lib}/{name}/{packages}");
                    if root.exists(&folder) {
                        found.push(folder);
                    }
                }
            }
        }
    }
    found
}

/// `nvidia_nccl_cu12-2.21.5.dist-info`.
fn python_version(root: &Root, folder: &str, begin: &str) -> Option<String> {
    let names = root.names(folder).ok()?;
    names.iter().find_map(|name| {
        let (_, version) = name.strip_prefix(begin)?.strip_suffix(".dist-info")?.split_once('-')?;
        Some(version.to_owned())
    })
}

/// The version of an installed package of Debian's, without its own number behind the dash.
fn debian_version(root: &Root, package: &str) -> Option<String> {
    let text = root.text("/var/lib/dpkg/status").ok()?;
    let entry =
        text.split("\n\n").find(|entry| entry.lines().next() == Some(&format!("Package: {package}")))?;
    let version = entry.lines().find_map(|line| line.strip_prefix("Version: "))?;
    // `1:1.13.1-1+b1`.
    let version = version.split_once(':').map_or(version, |(_, rest)| rest);
    Some(version.split(['-', '+', '~']).next()?.to_owned())
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

    #[test]
    fn a_plugin_counts_where_the_loader_looks() {
        let folder = std::env::temp_dir().join(format!("nobounce-plugin-{}", std::process::id()));
        let root = Root::new(&folder);
        let found = |path: &str| {
            let environment = BTreeMap::from([("LD_LIBRARY_PATH".to_owned(), path.to_owned())]);
            ofi_plugin(&root, &Surroundings { environment, home: None }).known().copied()
        };
        assert_eq!(found(""), Some(None));
        let below = folder.join("opt/amazon/ofi-nccl/lib");
        std::fs::create_dir_all(&below).unwrap();
        std::fs::write(below.join("libnccl-net.so"), "").unwrap();
        assert_eq!(found(""), Some(Some(false)));
        assert_eq!(found("/usr/lib:/opt/amazon/ofi-nccl/lib"), Some(Some(true)));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
