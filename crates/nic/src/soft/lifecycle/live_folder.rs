//! The live folder: where the devices of a user publish their counters.
//!
//! It lies in the user's runtime directory, which is in memory and readable by that user only. A
//! device that is open holds a lock on its marker, which the kernel takes away with the process.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// How long counters of a device are kept after its end.
const KEPT: Duration = Duration::from_secs(600);
/// Ended devices that are kept at most.
const MOST_KEPT: usize = 256;

/// The path of the live folder: `$XDG_RUNTIME_DIR/nobounce`, or below `/run/user/UID`; `/run` for
/// root. It may not exist.
#[must_use]
pub fn path() -> Option<PathBuf> {
    let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let runtime = named.or_else(|| {
        // SAFETY: the call has no preconditions.
        let user = unsafe { libc::geteuid() };
        let own = PathBuf::from(format!("/run/user/{user}"));
        if own.is_dir() { Some(own) } else { (user == 0).then(|| PathBuf::from("/run")) }
    })?;
    Some(runtime.join("nobounce"))
}

/// The live folder, created if need be. `None` if it cannot be, or if others could look into it.
pub(crate) fn create() -> Option<PathBuf> {
    let folder = path()?;
    let _ = DirBuilder::new().mode(0o700).create(&folder); // may exist
    let found = fs::symlink_metadata(&folder).ok()?;
    // SAFETY: the call has no preconditions.
    let user = unsafe { libc::geteuid() };
    (found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0).then_some(folder)
}

/// Locks a marker until this process ends. A forked child does not have the lock.
pub(crate) fn lock(marker: File) -> io::Result<File> {
    let lock = whole_file();
    // SAFETY: a descriptor, and a description of the lock that lives during the call.
    match unsafe { libc::fcntl(marker.as_raw_fd(), libc::F_SETLK, &raw const lock) } {
        0 => Ok(marker),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the process that opened the device of this marker is alive. Not for markers of the
/// calling process: their lock would end.
#[must_use]
pub fn is_alive(marker: &Path) -> bool {
    let Ok(file) = File::open(marker) else { return false };
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

/// Removes the files of devices that ended long ago, and of the oldest if there are many.
pub fn prune(folder: &Path) {
    let mut ended: Vec<(SystemTime, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let kind = path.extension().and_then(OsStr::to_str);
        let last = match kind {
            Some("json") => path.clone(),
            // Opening a marker of this process and closing it would end its lock.
            Some("open") if !is_ours(&path) && !is_alive(&path) => path.with_extension("live"),
            // Left by a process that was killed while it wrote its report.
            Some("part") => path.clone(),
            _ => continue,
        };
        let time = fs::metadata(&last).or_else(|_| fs::metadata(&path)).and_then(|found| found.modified());
        ended.extend(time.ok().map(|time| (time, path)));
    }
    ended.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
    let is_old = |time: &SystemTime| time.elapsed().is_ok_and(|age| age > KEPT);
    for (_, path) in
        ended.iter().enumerate().filter(|(n, (time, _))| *n >= MOST_KEPT || is_old(time)).map(|(_, one)| one)
    {
        for kind in ["live", "json", "part", "open"] {
            let _ = fs::remove_file(path.with_extension(kind)); // most do not exist
        }
    }
}

/// Whether a marker is one of this process.
fn is_ours(marker: &Path) -> bool {
    let name = marker.file_name().and_then(OsStr::to_str).unwrap_or_default();
    name.split_once('-').is_some_and(|(pid, _)| pid.parse() == Ok(std::process::id()))
}
