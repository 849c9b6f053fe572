//! Directories that users share, such as /tmp, and a private directory in one of them.
//!
//! All names are looked up relative to a descriptor of the shared directory. It is used only if no
//! other user can rename what is in it: a half-made private directory could be exchanged for a
//! link.

use std::ffi::CString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The last file of a private directory. Nothing reads it, so programs that remove old files remove
/// it with the first ones.
const MARKER: &str = ".complete";
/// Making takes milliseconds: what is older was left by a killed process.
const LEFT_AFTER: Duration = Duration::from_secs(3600);

/// The effective user ID.
pub(crate) fn user() -> u32 {
    // SAFETY: the call has no preconditions.
    unsafe { libc::geteuid() }
}

/// What has the name of a private directory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Nothing,
    /// A complete directory of this user.
    Whole,
    /// One of this user, of which files were removed.
    Incomplete,
}

/// An open directory in which no other user can rename files of this one.
#[derive(Debug)]
pub(crate) struct SharedDir {
    path: PathBuf,
    directory: File,
}

impl SharedDir {
    /// `is_of_system`: trusted as the root directory is, if the same user owns both.
    pub(crate) fn open(path: &Path, is_of_system: bool) -> io::Result<Self> {
        let directory =
            OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(path)?;
        let facts = directory.metadata()?;
        let root = is_of_system.then(|| fs::metadata("/").map(|root| root.uid()).ok()).flatten();
        check(facts.uid(), facts.mode(), root)?;
        Ok(Self { path: path.to_owned(), directory })
    }

    pub(crate) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// An error if another user may have made or changed what has the name.
    pub(crate) fn inspect(&self, name: &str) -> io::Result<Found> {
        let found = match self.open_below(name) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
            Err(error) => return Err(error),
        };
        let facts = found.metadata()?;
        if !(facts.is_dir() && facts.uid() == user() && facts.mode() & 0o077 == 0) {
            let path = self.path_of(name);
            return Err(io::Error::other(format!(
                "{} is not a private directory of this user",
                path.display()
            )));
        }
        let is_whole = self.open_below(&format!("{name}/{MARKER}")).is_ok();
        Ok(if is_whole { Found::Whole } else { Found::Incomplete })
    }

    /// Makes the directory under another name, has it filled, and renames it when it is complete:
    /// other processes see all of it or nothing. A complete one that appears meanwhile stays.
    pub(crate) fn make(
        &self,
        name: &str,
        random: u64,
        fill: impl FnOnce(&Path) -> io::Result<()>,
    ) -> io::Result<()> {
        self.sweep(name);
        let partly = format!("{name}.{random:016x}");
        let made = self.create(&partly).and_then(|root| {
            fill(root.path())?;
            fs::write(root.path().join(MARKER), "")?;
            self.publish(&partly, name)
        });
        // After an exchange it is the former one, after an error the half-made one.
        let _ = fs::remove_dir_all(self.path_of(&partly));
        match made {
            // another process was faster
            Err(_) if matches!(self.inspect(name), Ok(Found::Whole)) => Ok(()),
            made => made,
        }
    }

    fn create(&self, name: &str) -> io::Result<NewDir> {
        let text = c_string(name)?;
        // SAFETY: an open descriptor and a C string.
        if unsafe { libc::mkdirat(self.directory.as_raw_fd(), text.as_ptr(), 0o700) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let directory = self.open_below(name)?;
        let facts = directory.metadata()?;
        // By its descriptor; where /proc is not mounted, by its path.
        let by_descriptor = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
        let is_it = |path: &Path| fs::metadata(path).is_ok_and(|there| is_same(&there, &facts));
        let path = [by_descriptor, self.path_of(name)].into_iter().find(|path| is_it(path));
        let path = path.ok_or_else(|| io::Error::other("it was replaced while it was made"))?;
        Ok(NewDir { path, _directory: directory })
    }

    fn publish(&self, partly: &str, name: &str) -> io::Result<()> {
        match self.rename(partly, name, libc::RENAME_NOREPLACE) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            // A file system without this flag; a directory that is not empty is not replaced.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS)) => {
                if self.rename(partly, name, 0).is_ok() {
                    return Ok(());
                }
            }
            done => return done,
        }
        match self.inspect(name)? {
            Found::Whole => Ok(()),
            _ if self.rename(partly, name, libc::RENAME_EXCHANGE).is_ok() => Ok(()),
            _ => {
                let aside = format!("{partly}0");
                self.rename(name, &aside, 0)?;
                let done = self.rename(partly, name, 0);
                let _ = fs::remove_dir_all(self.path_of(&aside));
                done
            }
        }
    }

    /// Removes what killed processes of this user have left.
    fn sweep(&self, name: &str) {
        let family = name.rsplit_once('-').map_or(name, |(family, _)| family);
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let file = entry.file_name();
            let is_partly = file.to_str().and_then(|file| file.strip_prefix(family)).is_some_and(|rest| {
                rest.starts_with('-')
                    && rest.split_once('.').is_some_and(|(_, random)| matches!(random.len(), 16 | 17))
            });
            // Of the entry itself, not of what a link leads to.
            let is_old = |facts: &Metadata| {
                let age = facts.modified().ok().and_then(|at| SystemTime::now().duration_since(at).ok());
                facts.is_dir() && facts.uid() == user() && age.is_some_and(|age| age > LEFT_AFTER)
            };
            if is_partly && entry.metadata().is_ok_and(|facts| is_old(&facts)) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// A link as the last part of the path is opened itself.
    fn open_below(&self, name: &str) -> io::Result<File> {
        let name = c_string(name)?;
        let flags = libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        // SAFETY: an open descriptor and a C string.
        let found = unsafe { libc::openat(self.directory.as_raw_fd(), name.as_ptr(), flags) };
        if found < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call returned a new descriptor.
        Ok(unsafe { File::from_raw_fd(found) })
    }

    fn rename(&self, from: &str, to: &str, flags: libc::c_uint) -> io::Result<()> {
        let (from, to, at) = (c_string(from)?, c_string(to)?, self.directory.as_raw_fd());
        // SAFETY: an open descriptor and two C strings.
        let done = unsafe { libc::renameat2(at, from.as_ptr(), at, to.as_ptr(), flags) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// A directory that is being filled.
struct NewDir {
    path: PathBuf,
    /// The path may lead through it.
    _directory: File,
}

impl NewDir {
    fn path(&self) -> &Path {
        &self.path
    }
}

fn c_string(name: &str) -> io::Result<CString> {
    Ok(CString::new(Path::new(name).as_os_str().as_bytes())?)
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Whether only this user and the system can rename this user's files in a directory. In a user
/// namespace without root the system is `root`, the owner of the root directory.
fn check(owner: u32, mode: u32, root: Option<u32>) -> io::Result<()> {
    let is_own = owner == user();
    if !is_own && owner != 0 && root != Some(owner) {
        return Err(io::Error::other(format!("it belongs to another user ({owner})")));
    }
    let writers = if is_own { 0o002 } else { 0o022 };
    if mode & writers != 0 && mode & libc::S_ISVTX == 0 {
        let mode = mode & 0o7777;
        return Err(io::Error::other(format!(
            "other users can rename files in it (mode {mode:o}); chmod +t it"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("shared-dir-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        path
    }

    fn fill(root: &Path) -> io::Result<()> {
        fs::create_dir(root.join("sys"))?;
        fs::write(root.join("sys/file"), "text")
    }

    #[test]
    fn directories_in_which_others_can_rename_are_refused() {
        let (mine, other) = (user(), user() + 1);
        for (owner, mode, root, is_fine) in [
            (mine, 0o700, None, true),
            (mine, 0o775, None, true),
            (mine, 0o777, None, false),
            (0, 0o1777, None, true),
            (0, 0o755, None, true),
            (other, 0o700, None, false),
            (other, 0o1777, None, false),
            (other, 0o1777, Some(other), true),
            (other, 0o777, Some(other), false),
        ] {
            assert_eq!(check(owner, mode, root).is_ok(), is_fine, "{owner} {mode:o} {root:?}");
        }
        let error = check(other, 0o700, None).unwrap_err().to_string();
        assert!(error.contains("another user"), "{error}");
        let path = folder("open");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(SharedDir::open(&path, false).unwrap_err().to_string().contains("777"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o1777)).unwrap();
        assert!(SharedDir::open(&path, false).is_ok());
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn an_incomplete_directory_is_replaced() {
        let path = folder("incomplete");
        let parent = SharedDir::open(&path, false).unwrap();
        parent.make("a-1", 1, fill).unwrap();
        assert_eq!(parent.inspect("a-1").unwrap(), Found::Whole);
        // As a program that removes old files does.
        fs::remove_file(path.join("a-1").join(MARKER)).unwrap();
        fs::remove_file(path.join("a-1/sys/file")).unwrap();
        assert_eq!(parent.inspect("a-1").unwrap(), Found::Incomplete);
        parent.make("a-1", 2, fill).unwrap();
        assert_eq!(parent.inspect("a-1").unwrap(), Found::Whole);
        assert!(path.join("a-1/sys/file").exists());
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_whole_directory_stays_and_a_failed_one_goes() {
        let path = folder("stays");
        let parent = SharedDir::open(&path, false).unwrap();
        parent.make("a-1", 1, fill).unwrap();
        let first = fs::metadata(path.join("a-1")).unwrap();
        parent.make("a-1", 2, fill).unwrap();
        assert!(is_same(&fs::metadata(path.join("a-1")).unwrap(), &first));
        let failed = parent.make("a-2", 3, |_| Err(io::Error::other("full")));
        assert_eq!(failed.unwrap_err().to_string(), "full");
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
        symlink("a-1", path.join("a-3")).unwrap();
        assert!(parent.make("a-3", 4, fill).is_err());
        assert!(parent.inspect("a-3").is_err());
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn what_killed_processes_left_is_removed() {
        let path = folder("left");
        let parent = SharedDir::open(&path, false).unwrap();
        let (old, new, other) = ("a-5.00000000000000aa", "a-5.00000000000000bb", "b-5.00000000000000aa");
        let long_ago = SystemTime::now() - 2 * LEFT_AFTER;
        for name in [old, new, other, "a-5"] {
            fs::create_dir(path.join(name)).unwrap();
            if name != new {
                File::open(path.join(name)).unwrap().set_modified(long_ago).unwrap();
            }
        }
        parent.make("a-1", 1, fill).unwrap();
        let mut left: Vec<_> = fs::read_dir(&path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["a-1", "a-5", new, other]);
        fs::remove_dir_all(path).unwrap();
    }
}
