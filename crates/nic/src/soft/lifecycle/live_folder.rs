//! The live folder: where the devices of a user publish their counters.
//!
//! It lies in the user's runtime directory, which is in memory and readable by that user only. A
//! device that is open holds a lock on its marker, which the kernel takes away with the process.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// How long counters of a device are kept after its end.
const KEPT: Duration = Duration::from_secs(600);
/// Ended devices that are kept at most.
const MOST_KEPT: usize = 256;
/// Longest file that is read; a device's files have less than 40 KiB.
const MOST_BYTES: u64 = 1 << 20;

/// The path of the live folder: `$XDG_RUNTIME_DIR/nobounce`, or below `/run/user/UID`; `/run` for
/// root. It may not exist.
fn path() -> Option<PathBuf> {
    // SAFETY: the call has no preconditions.
    let user = unsafe { libc::geteuid() };
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let runtime = named.or_else(|| {
        let own = PathBuf::from(format!("/run/user/{user}"));
        if own.is_dir() { Some(own) } else { (user == 0).then(|| PathBuf::from("/run")) }
    })?;
    Some(runtime.join("nobounce"))
}

/// The live folder, created if need be. `None` if it cannot be, or if it is not private.
pub(crate) fn create() -> Option<PathBuf> {
    let _ = DirBuilder::new().mode(0o700).create(path()?); // may exist
    existing()
}

/// The live folder, if there is one that belongs to this user and that no other can read. A link to
/// another folder is none.
#[must_use]
pub fn existing() -> Option<PathBuf> {
    found().ok()
}

/// Why there is no live folder although devices may be open; `None` if there is one, or none yet.
#[must_use]
pub fn trouble() -> Option<String> {
    found().err().flatten()
}

/// The live folder, or what is wrong with it.
fn found() -> Result<PathBuf, Option<String>> {
    let none = "there is no runtime directory: set XDG_RUNTIME_DIR to a private folder";
    let folder = path().ok_or_else(|| Some(none.to_owned()))?;
    let wrong = |what: &str| Err(Some(format!("{} {what}; devices publish nothing", folder.display())));
    let found = match fs::symlink_metadata(&folder) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(None),
        Err(error) => return wrong(&format!("cannot be read ({error})")),
    };
    // SAFETY: the call has no preconditions.
    let user = unsafe { libc::geteuid() };
    if !found.is_dir() {
        wrong("is no folder")
    } else if found.uid() != user {
        wrong(&format!("belongs to user {}", found.uid()))
    } else if found.mode() & 0o077 != 0 {
        wrong(&format!("is open to other users (mode {:o}): chmod 700", found.mode() & 0o777))
    } else {
        Ok(folder)
    }
}

/// Opens a regular file for reading. Another kind of file could block the open, or the read.
fn open(path: &Path) -> Option<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let file = File::options().read(true).custom_flags(flags).open(path).ok()?;
    file.metadata().is_ok_and(|found| found.is_file()).then_some(file)
}

/// A file of the live folder; `None` if it is too long, or no regular file.
#[must_use]
pub fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(MOST_BYTES + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= MOST_BYTES).then_some(bytes)
}

/// Locks a marker until this process ends. A forked child does not have the lock.
pub(crate) fn lock(marker: &File) -> io::Result<()> {
    let lock = whole_file();
    // SAFETY: a descriptor, and a description of the lock that lives during the call.
    match unsafe { libc::fcntl(marker.as_raw_fd(), libc::F_SETLK, &raw const lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the process that opened the device of this marker is alive. Not for markers of the
/// calling process: their lock would end.
#[must_use]
pub fn is_alive(marker: &Path) -> bool {
    let Some(file) = open(marker) else { return false };
    let mut lock = whole_file();
    // SAFETY: as above.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut lock) };
    asked == 0 && i32::from(lock.l_type) != libc::F_UNLCK
}

fn whole_file() -> libc::flock {
    // SAFETY: zeroes are a valid description: of the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(libc::F_WRLCK).unwrap_or(0);
    lock
}

/// Renames the markers of killed processes (`.dead`), and removes the files of devices that ended
/// long ago, and of the oldest if there are many. `folder` is [`existing`].
pub fn prune(folder: &Path) {
    let mut ended: Vec<(SystemTime, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let Some(found) = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file) else { continue };
        match path.extension().and_then(OsStr::to_str) {
            // `part`: left by a process that was killed while it wrote its report.
            Some("json" | "dead" | "part") => ended.extend(found.modified().ok().map(|time| (time, path))),
            // Empty: its process has yet to lock it, or was killed before it could.
            Some("open") if found.len() == 0 => ended.extend(found.modified().ok().map(|time| (time, path))),
            // Opening a marker of this process and closing it would end its lock.
            Some("open") if !is_ours(&path) && !is_alive(&path) => {
                let dead = path.with_extension("dead");
                // Its age counts from now: stores through a mapping do not change a file's time.
                if fs::rename(&path, &dead).is_ok()
                    && let Some(file) = open(&dead)
                {
                    let _ = file.set_modified(SystemTime::now()); // it would go earlier
                }
            }
            _ => {}
        }
    }
    ended.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
    let is_old = |time: &SystemTime| time.elapsed().is_ok_and(|age| age > KEPT);
    for (_, path) in
        ended.iter().enumerate().filter(|(n, (time, _))| *n >= MOST_KEPT || is_old(time)).map(|(_, one)| one)
    {
        for kind in ["live", "json", "part", "dead", "open"] {
            let _ = fs::remove_file(path.with_extension(kind)); // most do not exist
        }
    }
}

/// Whether a marker is one of this process.
fn is_ours(marker: &Path) -> bool {
    let name = marker.file_name().and_then(OsStr::to_str).unwrap_or_default();
    name.split_once('-').is_some_and(|(pid, _)| pid.parse() == Ok(std::process::id()))
}
