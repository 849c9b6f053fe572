//! The third method to show the InfiniBand folders: a mount namespace, for programs that make raw
//! system calls.
//!
//! /sys and /dev do not accept new folders. So a small tmpfs covers a folder, with its former
//! contents bind-mounted next to ours. The mounts are planned before the fork. The new process
//! performs them, where allocation is not allowed. Only that process and its children see the
//! mounts, which disappear with the last of them. The parent stays outside: removing a run's folder
//! must never descend into a mounted /dev.

use std::ffi::{CStr, CString, OsStr};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::null;

use nobounce_dropin::view::System;

/// The namespace could not be made as wanted.
#[derive(Debug, thiserror::Error)]
#[error("--mounts: {what}: {source}.{}", hint(.source))]
pub(crate) struct MountsError {
    what: String,
    source: io::Error,
}

impl MountsError {
    fn new(what: &str, source: io::Error) -> Self {
        Self { what: what.to_owned(), source }
    }
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::ENOSPC | libc::EUSERS | libc::ENOSYS) => {
            " User namespaces may be disabled (sysctl user.max_user_namespaces, container policy). Programs that use the C \
             library do not need --mounts"
        }
        _ => "",
    }
}

/// One thing to do in the new process.
#[derive(Debug)]
enum MountStep {
    /// A mount namespace, inside a user namespace unless we are privileged; user and group IDs stay
    /// the same.
    Namespace {
        uids: String,
        gids: String,
    },
    Tmpfs(CString),
    Folder(CString),
    File(CString),
    Link {
        to: CString,
        at: CString,
    },
    /// What was there before, if it still is.
    Keep {
        from: CString,
        at: CString,
    },
    Bind {
        from: CString,
        at: CString,
    },
    Move {
        from: CString,
        to: CString,
    },
}

impl MountStep {
    /// What did not work, for people.
    fn describe(&self) -> String {
        let show = |path: &CStr| path.to_string_lossy().into_owned();
        match self {
            Self::Namespace { .. } => "cannot create the namespace".to_owned(),
            Self::Tmpfs(at) => format!("cannot mount a tmpfs on {}", show(at)),
            Self::Folder(at) | Self::File(at) | Self::Link { at, .. } => {
                format!("cannot create {}", show(at))
            }
            Self::Keep { from, at } | Self::Bind { from, at } | Self::Move { from, to: at } => {
                format!("cannot mount {} on {}", show(from), show(at))
            }
        }
    }
}

/// All steps, and the pipe through which the new process reports a failure.
#[derive(Debug)]
pub(crate) struct Mounts {
    steps: Vec<MountStep>,
    told: File,
    tell: OwnedFd,
}

impl Mounts {
    /// Plans how to show the folders of `view` where `system` has or would have them. `cover` is
    /// the name of a folder to build in.
    pub(crate) fn plan(view: &Path, cover: &Path, system: &System<'_>) -> Result<Self, MountsError> {
        let (told, tell) = pipe().map_err(|source| MountsError::new("cannot create a pipe", source))?;
        let mut plan = MountPlan { steps: vec![namespace()], cover };
        fs::create_dir(cover)
            .map_err(|source| MountsError::new("cannot create the build directory", source))?;
        let places = [
            ("sys/devices/virtual", system.sys.join("devices/virtual"), &["nobounce"][..]),
            ("sys/class", system.sys.join("class"), &["infiniband", "infiniband_verbs"]),
            ("dev", system.dev.to_owned(), &["infiniband"]),
        ];
        for (ours, theirs, names) in places {
            plan.show(&view.join(ours), &theirs, names)
                .map_err(|source| MountsError::new(&format!("cannot read {}", theirs.display()), source))?;
        }
        Ok(Self { steps: plan.steps, told, tell })
    }

    /// Performs all steps in the process that becomes the command; reports a failure through the
    /// pipe. Neither allocates nor locks.
    pub(crate) fn perform(&self) -> io::Result<()> {
        for (number, step) in self.steps.iter().enumerate() {
            if let Err(error) = perform(step) {
                let number = number.to_ne_bytes();
                // SAFETY: the pipe is open, and the bytes are there.
                unsafe { libc::write(self.tell.as_raw_fd(), number.as_ptr().cast(), number.len()) };
                return Err(error);
            }
        }
        Ok(())
    }

    /// Why the command did not start, if the mounts were the cause. Call it when the new process is
    /// gone: its report is complete by then.
    pub(crate) fn failure(&self, source: io::Error) -> Result<MountsError, io::Error> {
        let mut number = [0; size_of::<usize>()];
        match (&self.told).read_exact(&mut number).map(|()| self.steps.get(usize::from_ne_bytes(number))) {
            Ok(Some(step)) => Ok(MountsError { what: step.describe(), source }),
            _ => Err(source),
        }
    }
}

/// The list of steps as it grows.
struct MountPlan<'a> {
    steps: Vec<MountStep>,
    cover: &'a Path,
}

impl MountPlan<'_> {
    /// Shows the folders `names` of `ours` in `theirs`, next to what is there. An existing folder
    /// keeps its contents.
    fn show(&mut self, ours: &Path, theirs: &Path, names: &[&str]) -> io::Result<()> {
        let mut missing = Vec::new();
        for name in names {
            if theirs.join(name).is_dir() {
                let entries: Vec<_> = fs::read_dir(ours.join(name))?.collect::<io::Result<_>>()?;
                let new = entries.iter().map(fs::DirEntry::file_name);
                let new: Vec<_> = new.filter(|entry| !theirs.join(name).join(entry).exists()).collect();
                let new: Vec<&OsStr> = new.iter().map(AsRef::as_ref).collect();
                self.cover(&ours.join(name), &theirs.join(name), &new)?;
            } else {
                missing.push(OsStr::new(name));
            }
        }
        if missing.is_empty() { Ok(()) } else { self.cover(ours, theirs, &missing) }
    }

    /// Covers `theirs` with a folder that has all its contents, and `new` from `ours`.
    fn cover(&mut self, ours: &Path, theirs: &Path, new: &[&OsStr]) -> io::Result<()> {
        let cover = text(self.cover);
        self.steps.push(MountStep::Tmpfs(cover.clone()));
        for entry in fs::read_dir(theirs)? {
            self.put(entry?.path(), |from, at| MountStep::Keep { from, at })?;
        }
        for name in new {
            self.put(ours.join(name), |from, at| MountStep::Bind { from, at })?;
        }
        self.steps.push(MountStep::Move { from: cover, to: text(theirs) });
        Ok(())
    }

    fn put(&mut self, from: PathBuf, mount: fn(CString, CString) -> MountStep) -> io::Result<()> {
        let at = text(&self.cover.join(from.file_name().unwrap_or_default()));
        let kind = match fs::symlink_metadata(&from) {
            Ok(facts) => facts.file_type(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        if kind.is_symlink() {
            let to = text(&fs::read_link(&from)?);
            self.steps.push(MountStep::Link { to, at });
            return Ok(());
        }
        let point = if kind.is_dir() { MountStep::Folder } else { MountStep::File };
        self.steps.extend([point(at.clone()), mount(text(&from), at)]);
        Ok(())
    }
}

/// Paths come from the system, and have no NUL in them.
fn text(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap_or_default()
}

fn namespace() -> MountStep {
    // SAFETY: they only return numbers.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    MountStep::Namespace { uids: format!("{uid} {uid} 1"), gids: format!("{gid} {gid} 1") }
}

fn pipe() -> io::Result<(File, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: there is room for two descriptors.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) })?;
    // SAFETY: both descriptors are new and have no other owner.
    Ok(unsafe { (File::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

fn perform(step: &MountStep) -> io::Result<()> {
    match step {
        MountStep::Namespace { uids, gids } => enter(uids, gids),
        MountStep::Tmpfs(at) => mount(Some(c"tmpfs"), at, Some(c"tmpfs"), 0, Some(c"mode=755")),
        // SAFETY: the path ends with a NUL.
        MountStep::Folder(at) => check(unsafe { libc::mkdir(at.as_ptr(), 0o755) }),
        MountStep::File(at) => {
            // SAFETY: the path ends with a NUL.
            check(unsafe { libc::mknod(at.as_ptr(), libc::S_IFREG | 0o644, 0) })
        }
        // SAFETY: both end with a NUL.
        MountStep::Link { to, at } => check(unsafe { libc::symlink(to.as_ptr(), at.as_ptr()) }),
        MountStep::Keep { from, at } => match bind(from, at) {
            // It went in the meantime.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            outcome => outcome,
        },
        MountStep::Bind { from, at } => bind(from, at),
        MountStep::Move { from, to } => mount(Some(from), to, None, libc::MS_MOVE, None),
    }
}

fn enter(uids: &str, gids: &str) -> io::Result<()> {
    // SAFETY: unshare changes what this process sees, and it has one thread.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        // SAFETY: as above.
        check(unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) })?;
        // without it an ordinary user may not map its group
        write(c"/proc/self/setgroups", "deny")?;
        write(c"/proc/self/uid_map", uids)?;
        write(c"/proc/self/gid_map", gids)?;
    }
    // Slave propagation: later mounts of the host appear here; mounts made here stay private.
    mount(None, c"/", None, libc::MS_REC | libc::MS_SLAVE, None)
}

fn write(path: &CStr, text: &str) -> io::Result<()> {
    // SAFETY: the path ends with a NUL.
    let file = unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC) };
    check(file)?;
    // SAFETY: the descriptor is ours, and so are the bytes.
    let written = unsafe { libc::write(file, text.as_ptr().cast(), text.len()) };
    let outcome = if written < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: it was opened above.
    unsafe { libc::close(file) };
    outcome
}

fn bind(from: &CStr, at: &CStr) -> io::Result<()> {
    mount(Some(from), at, None, libc::MS_BIND | libc::MS_REC, None)
}

fn mount(
    from: Option<&CStr>,
    at: &CStr,
    kind: Option<&CStr>,
    flags: libc::c_ulong,
    options: Option<&CStr>,
) -> io::Result<()> {
    let pointer = |text: Option<&CStr>| text.map_or(null(), CStr::as_ptr);
    // SAFETY: all texts end with a NUL, and the call keeps none of them.
    check(unsafe { libc::mount(pointer(from), at.as_ptr(), pointer(kind), flags, pointer(options).cast()) })
}

fn check(outcome: libc::c_int) -> io::Result<()> {
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
