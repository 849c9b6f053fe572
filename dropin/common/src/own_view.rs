//! The view of a process that no launcher gave one: made at first use, shared by all processes of
//! the user with the same devices, and left for the next one. It takes some forty small files.

use std::collections::hash_map::{DefaultHasher, RandomState};
use std::ffi::OsString;
use std::fs;
use std::hash::{BuildHasher as _, Hash as _, Hasher as _};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use nobounce_nic::soft::{Config, DeviceLimits, PortSpeed};

use crate::shared_dir::{Found, SharedDir, user};
use crate::view::{self, System};

/// The longest path of a view that libnobounce-paths takes.
pub const LONGEST_PATH: usize = 512;

/// Directories that the system sets up.
const OF_SYSTEM: [&str; 4] = ["/dev/shm", "/tmp", "/var/tmp", "/run"];

/// Number of the layout: a new one whenever the code that writes the files has changed.
const LAYOUT: u64 = number_of(include_bytes!("view.rs"));

/// FNV-1a.
const fn number_of(text: &[u8]) -> u64 {
    let (mut hash, mut at) = (0xcbf2_9ce4_8422_2325_u64, 0);
    while at < text.len() {
        hash = (hash ^ text[at] as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    hash
}

/// The folder that stands for the root in this process.
///
/// # Errors
/// Why there is none, and what to do.
pub fn root() -> Result<PathBuf, String> {
    let addrs = Config::addrs_from_env().map_err(|error| error.to_string())?;
    let speed = std::env::var("NOBOUNCE_SPEED").ok().and_then(|speed| speed.parse().ok()).unwrap_or_default();
    make_in(&parents(|name| std::env::var_os(name)), &addrs, speed, &System::here())
}

/// Folders that may take it, the best one first: those in memory, which end with the session or the
/// container. A root file system that is read-only leaves /dev/shm.
fn parents(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let named = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let own = PathBuf::from(format!("/run/user/{}", user()));
    let fixed = OF_SYSTEM.map(PathBuf::from);
    let all = named("XDG_RUNTIME_DIR").into_iter().chain([own]).chain(named("TMPDIR")).chain(fixed);
    all.collect()
}

fn make_in(
    parents: &[PathBuf],
    addrs: &[IpAddr],
    speed: PortSpeed,
    system: &System<'_>,
) -> Result<PathBuf, String> {
    let name = name(addrs, speed, system);
    let mut failed = Vec::new();
    for parent in parents {
        match make_at(parent, &name, addrs, speed, system) {
            Ok(root) => return Ok(root),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => failed.push(format!("{}: {error}", parent.display())),
        }
    }
    Err(format!(
        "programs that read /sys/class/infiniband do not find nb0: no directory can hold the files for it ({}). Mount a tmpfs at \
         /dev/shm, or set XDG_RUNTIME_DIR to a directory that can be written",
        failed.join("; ")
    ))
}

/// By all that the files depend on: processes with other devices have another folder.
fn name(addrs: &[IpAddr], speed: PortSpeed, system: &System<'_>) -> String {
    let mut hash = DefaultHasher::new();
    let DeviceLimits { gid_table, gids, .. } = DeviceLimits::OURS;
    (env!("CARGO_PKG_VERSION"), LAYOUT, gid_table, gids, addrs, speed.rate()).hash(&mut hash);
    addrs.iter().for_each(|addr| view::interface_of(addr).hash(&mut hash));
    let real = fs::read_dir(system.sys.join("class/infiniband")).into_iter().flatten().flatten();
    let mut real: Vec<_> = real.map(|entry| entry.file_name()).collect();
    real.sort();
    real.hash(&mut hash);
    format!("nobounce-view-{}-{:016x}", user(), hash.finish())
}

fn make_at(
    parent: &Path,
    name: &str,
    addrs: &[IpAddr],
    speed: PortSpeed,
    system: &System<'_>,
) -> io::Result<PathBuf> {
    let shared = SharedDir::open(parent, OF_SYSTEM.iter().any(|path| parent == Path::new(path)))?;
    let root = shared.path_of(name);
    if root.as_os_str().len() > LONGEST_PATH {
        return Err(io::Error::other(format!("the path of a view has at most {LONGEST_PATH} bytes")));
    }
    if shared.inspect(name)? != Found::Whole {
        // Containers that share /dev/shm have the same process IDs.
        let random = RandomState::new().build_hasher().finish();
        shared.make(name, random, |root| view::make(root, addrs, speed, system))?;
    }
    Ok(root)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("own-view-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        path
    }

    const HERE: [IpAddr; 1] = [IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)];

    fn made_in(parents: &[PathBuf]) -> Result<PathBuf, String> {
        make_in(
            parents,
            &HERE,
            PortSpeed::default(),
            &System { sys: Path::new("/no"), dev: Path::new("/no") },
        )
    }

    #[test]
    fn it_is_made_once_for_the_same_devices() {
        let parent = folder("once");
        let parents = [PathBuf::from("/proc/nothing"), parent.clone()];
        let root = made_in(&parents).unwrap();
        assert!(root.starts_with(&parent));
        let class = root.join("sys/class/infiniband/nb0");
        assert!(class.join("ports/1/gids/0").exists());
        assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(made_in(&parents), Ok(root.clone()));
        let two = [HERE[0], "127.0.0.2".parse().unwrap()];
        let other = make_in(&parents, &two, PortSpeed::default(), &System::here()).unwrap();
        assert_ne!(other, root);
        assert_eq!(fs::read_dir(&parent).unwrap().count(), 2, "nothing half-made is left");
        fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn many_at_one_time_find_one() {
        let parent = folder("many");
        let parents = [parent.clone()];
        let roots: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(|| made_in(&parents))).collect();
            all.into_iter().map(|one| one.join().unwrap().unwrap()).collect()
        });
        assert!(roots.iter().all(|root| *root == roots[0]), "{roots:?}");
        assert_eq!(fs::read_dir(&parent).unwrap().count(), 1);
        fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn a_folder_that_others_may_have_made_is_not_used() {
        let (parent, second) = (folder("others"), folder("second"));
        let root = made_in(std::slice::from_ref(&parent)).unwrap();
        fs::set_permissions(&root, fs::Permissions::from_mode(0o777)).unwrap();
        let elsewhere = made_in(&[parent.clone(), second.clone()]).unwrap();
        assert!(elsewhere.starts_with(&second));
        fs::remove_dir_all(&root).unwrap();
        symlink(&elsewhere, &root).unwrap();
        let error = made_in(std::slice::from_ref(&parent)).unwrap_err();
        assert!(error.contains("is not a private directory") && error.contains("/dev/shm"), "{error}");
        for folder in [parent, second] {
            fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn a_view_that_lost_files_is_made_again() {
        let parent = folder("lost");
        let root = made_in(std::slice::from_ref(&parent)).unwrap();
        let node_type = root.join("sys/class/infiniband/nb0/node_type");
        // What systemd-tmpfiles leaves after ten days: folders without files.
        for file in [&node_type, &root.join(".complete")] {
            fs::remove_file(file).unwrap();
        }
        assert_eq!(made_in(std::slice::from_ref(&parent)), Ok(root));
        assert!(node_type.exists());
        assert_eq!(fs::read_dir(&parent).unwrap().count(), 1);
        fs::remove_dir_all(parent).unwrap();
    }

    #[test]
    fn a_parent_of_another_user_is_not_used() {
        if user() != 0 {
            return; // only root can make one
        }
        let (parent, second) = (folder("foreign"), folder("own"));
        std::os::unix::fs::chown(&parent, Some(4321), None).unwrap();
        let root = made_in(&[parent.clone(), second.clone()]).unwrap();
        assert!(root.starts_with(&second));
        assert_eq!(fs::metadata(&root).unwrap().uid(), 0);
        let error = made_in(std::slice::from_ref(&parent)).unwrap_err();
        assert!(error.contains("another user (4321)"), "{error}");
        for folder in [parent, second] {
            fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn a_path_that_programs_cannot_take_is_not_used() {
        let (parent, second) = (folder("long"), folder("short"));
        let long = (0..3).fold(parent.clone(), |path, _| path.join("x".repeat(200)));
        fs::create_dir_all(&long).unwrap();
        assert!(made_in(&[long.clone(), second.clone()]).unwrap().starts_with(&second));
        assert!(made_in(&[long]).unwrap_err().contains("at most 512 bytes"));
        for folder in [parent, second] {
            fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn memory_comes_first() {
        let some = |name: &str| (name == "TMPDIR").then(|| OsString::from("/scratch"));
        let all = parents(some);
        assert_eq!(all[1..4], ["/scratch", "/dev/shm", "/tmp"].map(PathBuf::from));
        let relative = parents(|_| Some("relative".into()));
        assert!(relative.iter().all(|path| path.is_absolute()));
    }
}
