//! Which NCCL the command will load, as far as the names of files tell.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use nobounce_topology::sysfs::{self, Root, Surroundings};

/// The first release that takes a plugin of type GPI.
const FIRST_GPI: [u32; 3] = [2, 30, 5];

/// The version, if it is known: in the folders that the user names, else in the command's Python
/// environment, else where doctor looks.
pub(super) fn find(root: &Root, program: &OsStr, now: impl Fn(&str) -> Option<OsString>) -> Option<String> {
    let folders = now("LD_LIBRARY_PATH").unwrap_or_default();
    let named = std::env::split_paths(&folders)
        .find_map(|folder| sysfs::nccl_version_in(root, folder.to_str()?.trim_end_matches('/')));
    if let Some(version) = named {
        return Some(version).filter(|version| !version.is_empty());
    }
    let mut surroundings = Surroundings::default();
    let text = |value: OsString| value.into_string().ok();
    surroundings.home = now("HOME").and_then(text);
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let value = now(name).and_then(text);
        surroundings.environment.extend(value.map(|value| (name.to_owned(), value)));
    }
    if let Some(folder) =
        environment_of(root, program, now("PATH").as_deref()).and_then(|path| text(path.into()))
    {
        surroundings.environment.insert("VIRTUAL_ENV".to_owned(), folder);
    }
    sysfs::nccl_version(root, &surroundings)
}

/// The virtual environment that the program belongs to.
fn environment_of(root: &Root, program: &OsStr, path: Option<&OsStr>) -> Option<PathBuf> {
    let given = Path::new(program);
    let found = if given.components().count() > 1 {
        std::path::absolute(given).ok()?
    } else {
        let folders = std::env::split_paths(path?);
        folders.map(|folder| folder.join(given)).find(|file| root.exists(&file.to_string_lossy()))?
    };
    let folder = found.parent()?.parent()?;
    root.exists(&folder.join("pyvenv.cfg").to_string_lossy()).then(|| folder.to_owned())
}

/// Whether that release chooses a plugin of type GPI before its other types, and does not crash where it
/// finds none of them.
pub(super) fn has_gpi(version: &str) -> bool {
    let release = version.split(['-', '+']).next().unwrap_or_default();
    let numbers: Option<Vec<u32>> = release.split('.').map(|number| number.parse().ok()).collect();
    numbers.is_some_and(|numbers| numbers[..] >= FIRST_GPI[..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_compare_by_their_numbers() {
        for version in ["2.30.5", "2.30.7-1+cuda13.0", "2.31.2", "3.0.1"] {
            assert!(has_gpi(version), "{version}");
        }
        for version in ["2.28.9", "2.30.4", "2.9.30", "2", "", "libnccl"] {
            assert!(!has_gpi(version), "{version}");
        }
    }

    #[test]
    fn the_command_s_own_nccl_is_found() {
        let folder = std::env::temp_dir().join(format!("nobounce-nccl-version-{}", std::process::id()));
        let make = |path: &str| {
            let path = folder.join(path.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        };
        make("/usr/lib64/libnccl.so.2.28.3");
        make("/usr/lib64/libnccl.so.2");
        make("/opt/nccl/libnccl.so.2");
        let packages = "/home/u/venv/lib/python3.12/site-packages";
        make(&format!("{packages}/nvidia/nccl/lib/libnccl.so.2"));
        make(&format!("{packages}/nvidia_nccl_cu13-2.30.7.dist-info/METADATA"));
        make("/home/u/venv/pyvenv.cfg");
        make("/home/u/venv/bin/python");
        let root = Root::new(&folder);
        let wheel = format!("{packages}/nvidia/nccl/lib/");
        for (program, variables, version) in [
            ("/usr/bin/all_reduce_perf", &[][..], Some("2.28.3")),
            ("/home/u/venv/bin/python", &[], Some("2.30.7")),
            ("python", &[("PATH", "/usr/bin:/home/u/venv/bin")], Some("2.30.7")),
            ("python", &[("VIRTUAL_ENV", "/home/u/venv")], Some("2.30.7")),
            ("x", &[("LD_LIBRARY_PATH", "/nowhere:/usr/lib64:/opt/nccl")], Some("2.28.3")),
            ("x", &[("LD_LIBRARY_PATH", wheel.as_str())], Some("2.30.7")),
            // One is named, and nothing tells which.
            ("x", &[("LD_LIBRARY_PATH", "/opt/nccl")], None),
        ] {
            let now = |name: &str| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
            };
            assert_eq!(find(&root, OsStr::new(program), now).as_deref(), version, "{program} {variables:?}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
