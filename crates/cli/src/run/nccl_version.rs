//! Whether the command's NCCL takes a plugin of type GPI, as far as the names of files tell.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use nobounce_topology::sysfs::{self, Root, Surroundings};

/// The first release that does.
const FIRST_GPI: [u32; 3] = [2, 30, 5];

/// Whether every NCCL that the command may load does. A wrong yes would crash NCCL 2.28.
pub(super) fn is_gpi(root: &Root, program: &OsStr, now: impl Fn(&str) -> Option<OsString>) -> bool {
    let folders = now("LD_LIBRARY_PATH").unwrap_or_default();
    let named = std::env::split_paths(&folders)
        .filter_map(|folder| Some(sysfs::nccl_versions_in(root, folder.to_str()?.trim_end_matches('/'))));
    let mut versions: Vec<String> = named.flatten().collect();
    let text = |value: OsString| value.into_string().ok();
    let own = environment_of(root, program, now("PATH").as_deref()).map(PathBuf::into_os_string);
    // The command may activate another one than its own.
    for environment in [now("VIRTUAL_ENV"), now("CONDA_PREFIX"), own] {
        let mut surroundings = Surroundings { home: now("HOME").and_then(text), ..Surroundings::default() };
        let environment = environment.and_then(text).map(|value| ("VIRTUAL_ENV".to_owned(), value));
        surroundings.environment.extend(environment);
        versions.extend(sysfs::nccl_versions(root, &surroundings));
    }
    !versions.is_empty() && versions.iter().all(|version| has_gpi(version))
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
    let is_one = |mark| root.exists(&folder.join(mark).to_string_lossy());
    ["pyvenv.cfg", "conda-meta"].into_iter().any(is_one).then(|| folder.to_owned())
}

fn has_gpi(version: &str) -> bool {
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
    fn all_that_the_command_may_load_decide() {
        let folder = std::env::temp_dir().join(format!("nobounce-nccl-version-{}", std::process::id()));
        let make = |path: &str| {
            let path = folder.join(path.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        };
        let wheel = |environment: &str, version: &str| {
            let packages = format!("{environment}/lib/python3.12/site-packages");
            make(&format!("{packages}/nvidia/nccl/lib/libnccl.so.2"));
            make(&format!("{packages}/nvidia_nccl_cu13-{version}.dist-info/METADATA"));
            make(&format!("{environment}/pyvenv.cfg"));
            make(&format!("{environment}/bin/python"));
        };
        wheel("/envs/new", "2.30.7");
        wheel("/envs/old", "2.28.9");
        make("/opt/unknown/libnccl.so.2");
        make("/opt/new/libnccl.so.2.30.7");
        make("/opt/new/libnccl.so.2");
        make("/opt/both/libnccl.so.2.30.7");
        make("/opt/both/libnccl.so.2.28.9");
        let root = Root::new(&folder);
        let is_gpi = |program: &str, variables: &[(&str, &str)]| {
            let now = |name: &str| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
            };
            is_gpi(&root, OsStr::new(program), now)
        };
        let wheels = "/envs/new/lib/python3.12/site-packages/nvidia/nccl/lib/";
        for (expected, program, variables) in [
            // There is none to be seen.
            (false, "/usr/bin/all_reduce_perf", &[][..]),
            (true, "/envs/new/bin/python", &[]),
            (true, "python", &[("PATH", "/usr/bin:/envs/new/bin")]),
            (true, "bash", &[("VIRTUAL_ENV", "/envs/new")]),
            (false, "/envs/new/bin/python", &[("VIRTUAL_ENV", "/envs/old")]),
            (true, "x", &[("LD_LIBRARY_PATH", "/nowhere:/opt/new")]),
            (true, "x", &[("LD_LIBRARY_PATH", wheels)]),
            (false, "x", &[("LD_LIBRARY_PATH", "/opt/new:/opt/unknown")]),
            (false, "x", &[("LD_LIBRARY_PATH", "/opt/both")]),
        ] {
            assert_eq!(is_gpi(program, variables), expected, "{program} {variables:?}");
        }
        // The system's own may be what the program is linked with.
        make("/usr/lib64/libnccl.so.2.28.3");
        assert!(!is_gpi("/envs/new/bin/python", &[]));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
