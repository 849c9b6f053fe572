//! The folder of one run: private, and removed after it. A killed run leaves its folder behind; the
//! next run removes it.

use std::collections::hash_map::RandomState;
use std::fs::{self, File};
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

const PREFIX: &str = "nobounce-run-";
/// Names in use are skipped; so many in a row indicate another problem.
const ATTEMPTS: u32 = 100;

/// A number that other users cannot guess: they must not take the names of our folders first.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A folder that is locked for the lifetime of this value, and removed with it.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
    /// The lock marks the folder as in use. Children do not inherit it.
    _lock: File,
}

impl Scratch {
    /// Creates one below `parent`, after removing leftovers of this user's killed runs.
    pub(crate) fn new(parent: &Path) -> io::Result<Self> {
        remove_leftovers(parent);
        for attempt in 0..ATTEMPTS {
            let path = parent.join(format!("{PREFIX}{}-{:016x}-{attempt}", std::process::id(), random()));
            // Others may pass, not list: the command may change its user and look at the view of
            // sysfs.
            match fs::DirBuilder::new().mode(0o711).create(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
            // A concurrent cleanup may have removed the folder before it was locked, or even
            // opened: then create another one.
            let lock = match File::open(&path) {
                Ok(lock) => lock,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            if try_lock(&lock) && same(&lock, &path) {
                return Ok(Self { path, _lock: lock });
            }
        }
        Err(io::Error::other(format!("{ATTEMPTS} directory names in a row already exist")))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path); // the next run tries again
    }
}

/// Removes the folders of finished runs. Anything doubtful stays.
fn remove_leftovers(parent: &Path) {
    // SAFETY: geteuid only returns a number.
    let me = unsafe { libc::geteuid() };
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if !entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()) {
            continue;
        }
        let path = entry.path();
        // Not a symlink, and owned by this user.
        let ours = fs::symlink_metadata(&path).is_ok_and(|facts| facts.is_dir() && facts.uid() == me);
        if !ours {
            continue;
        }
        if let Ok(lock) = File::open(&path)
            && try_lock(&lock)
            && same(&lock, &path)
        {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

fn try_lock(folder: &File) -> bool {
    // SAFETY: the descriptor is open.
    unsafe { libc::flock(folder.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

/// Whether the path still leads to what was opened.
fn same(folder: &File, path: &Path) -> bool {
    match (folder.metadata(), fs::symlink_metadata(path)) {
        (Ok(opened), Ok(there)) => (opened.dev(), opened.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parent(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("scratch-test-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn it_goes_with_its_owner_and_a_live_one_stays() {
        let parent = parent("live");
        let first = Scratch::new(&parent).unwrap();
        let second = Scratch::new(&parent).unwrap();
        assert!(first.path().is_dir() && second.path().is_dir() && first.path() != second.path());
        let path = first.path().to_owned();
        drop(first);
        assert!(!path.exists());
        drop(second);
        fs::remove_dir(&parent).unwrap();
    }

    /// Each of them cleans while others make theirs.
    #[test]
    fn many_at_once_do_not_take_each_others_away() {
        let parent = parent("many");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let mine = Scratch::new(&parent).unwrap();
                        assert!(mine.path().is_dir());
                    }
                });
            }
        });
        fs::remove_dir(&parent).unwrap();
    }

    #[test]
    fn what_a_killed_run_left_is_removed_and_nothing_else() {
        let parent = parent("left");
        let left = parent.join(format!("{PREFIX}99999999-0"));
        fs::create_dir_all(left.join("deep/er")).unwrap();
        fs::create_dir(parent.join("other")).unwrap();
        std::os::unix::fs::symlink(parent.join("other"), parent.join(format!("{PREFIX}link"))).unwrap();
        drop(Scratch::new(&parent).unwrap());
        assert!(!left.exists() && parent.join("other").exists());
        fs::remove_dir_all(&parent).unwrap();
    }
}
