//! Files below a directory, and no others.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A directory. The kernel resolves each path below it in one call (`openat2`): neither `..`, nor a
/// symbolic link, nor a rename at the same time leads out.
#[derive(Debug)]
pub(crate) struct Root(OwnedFd);

impl Root {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let directory = File::options().read(true).custom_flags(libc::O_DIRECTORY).open(path)?;
        let root = Self(directory.into());
        // Kernels before 5.6 and some seccomp profiles have no such call: say so now.
        root.open_below(".", libc::O_RDONLY | libc::O_DIRECTORY, 0).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::ENOSYS | libc::EPERM) => io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the kernel or a seccomp profile refuses openat2, which keeps paths inside; Linux 5.6 has it",
                ),
                _ => error,
            }
        })?;
        Ok(root)
    }

    /// Opens a file for reading; or, to write, creates it where there is none.
    pub(crate) fn file(&self, path: &str, is_write: bool) -> io::Result<File> {
        // A pipe without a peer must not block.
        let common = libc::O_NONBLOCK | libc::O_NOCTTY;
        let flags = if is_write { libc::O_RDWR | libc::O_CREAT } else { libc::O_RDONLY };
        Ok(self.open_below(path, common | flags, 0)?.into())
    }

    /// Opens a file for reading if the kernel knows the path without asking a disk or a server.
    pub(crate) fn cached_file(&self, path: &str) -> io::Result<File> {
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_RDONLY;
        Ok(self.open_below(path, flags, libc::RESOLVE_CACHED)?.into())
    }

    fn open_below(&self, path: &str, flags: i32, resolve: u64) -> io::Result<OwnedFd> {
        let path = CString::new(path).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: the structure is plain integers; zeros are a valid value.
        let mut how: libc::open_how = unsafe { std::mem::zeroed() };
        how.flags = u64::from((flags | libc::O_CLOEXEC).unsigned_abs());
        how.mode = if flags & libc::O_CREAT == 0 { 0 } else { 0o600 };
        how.resolve = libc::RESOLVE_BENEATH | libc::RESOLVE_NO_MAGICLINKS | resolve;
        loop {
            // SAFETY: the path is a C string; the structure has the stated size.
            let fd = unsafe {
                let size = size_of::<libc::open_how>();
                libc::syscall(libc::SYS_openat2, self.0.as_raw_fd(), path.as_ptr(), &raw const how, size)
            };
            if let Ok(fd @ 0..) = i32::try_from(fd) {
                // SAFETY: a fresh descriptor without another owner.
                return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EAGAIN) if resolve & libc::RESOLVE_CACHED != 0 => return Err(error),
                // A rename raced with `..` in the path.
                Some(libc::EAGAIN | libc::EINTR) => {}
                Some(libc::EXDEV) => {
                    return Err(io::Error::other("the path leads out of the served directory"));
                }
                _ => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;

    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn nothing_leads_out() {
        let folder = Folder(std::env::temp_dir().join(format!("nobounce-root-{}", std::process::id())));
        let root = folder.0.join("root");
        fs::create_dir_all(root.join("inner")).unwrap();
        fs::write(folder.0.join("secret"), b"secret").unwrap();
        fs::write(root.join("inner/file"), b"served").unwrap();
        symlink("../secret", root.join("relative")).unwrap();
        symlink(folder.0.join("secret"), root.join("absolute")).unwrap();
        symlink("inner/file", root.join("inside")).unwrap();
        symlink("/proc/self/fd/0", root.join("magic")).unwrap();
        let served = Root::open(&root).unwrap();
        for path in ["inner/file", "inside", "inner/../inner/file", "./inner//file"] {
            let mut text = String::new();
            served.file(path, false).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "served", "{path}");
            // Whether the kernel has resolved it before is its own affair.
            if let Ok(mut again) = served.cached_file(path) {
                let mut text = String::new();
                again.read_to_string(&mut text).unwrap();
                assert_eq!(text, "served", "{path}");
            }
        }
        let absolute = folder.0.join("secret").display().to_string();
        for path in
            ["../secret", "inner/../../secret", "relative", "absolute", "magic", &absolute, "/etc/passwd"]
        {
            let error = served.file(path, false).unwrap_err();
            assert!(error.to_string().contains("leads out"), "{path}: {error}");
            assert!(served.file(path, true).is_err(), "{path}");
            assert!(served.cached_file(path).is_err(), "{path}");
        }
        assert!(served.file("nul\0byte", false).is_err());
        assert!(served.file("missing", false).is_err());
        served.file("inner/new", true).unwrap();
        assert!(root.join("inner/new").exists());
        assert!(Root::open(&root.join("inner/file")).is_err(), "not a directory");
    }

    /// Exchanges two names at once.
    fn exchange(one: &Path, other: &Path) {
        let [one, other] = [one, other].map(|path| CString::new(path.to_str().unwrap()).unwrap());
        // SAFETY: both are C strings.
        let done = unsafe {
            let (cwd, flags) = (libc::AT_FDCWD, libc::RENAME_EXCHANGE);
            libc::renameat2(cwd, one.as_ptr(), cwd, other.as_ptr(), flags)
        };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }

    #[test]
    fn renames_during_the_resolution_lead_nowhere_else() {
        let folder = Folder(std::env::temp_dir().join(format!("nobounce-renames-{}", std::process::id())));
        let (root, outside) = (folder.0.join("root"), folder.0.join("outside"));
        // Both folders have a file at the same depth, inside and outside.
        for (at, text) in [(&root, "served"), (&outside, "secret")] {
            fs::create_dir_all(at.join("folder/deep")).unwrap();
            fs::write(at.join("folder/deep/file"), text).unwrap();
            fs::write(at.join("file"), text).unwrap();
        }
        symlink("../outside/folder", root.join("link")).unwrap();
        let served = Root::open(&root).unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let (mut read, mut refused, mut wrong) = (0, 0, Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    exchange(&root.join("folder"), &root.join("link"));
                    exchange(&root.join("folder"), &root.join("link"));
                    // `..` of a folder that moves out is another one.
                    exchange(&root.join("folder"), &outside.join("folder"));
                    exchange(&root.join("folder"), &outside.join("folder"));
                }
            });
            let paths = ["folder/deep/file", "link/deep/file", "folder/deep/../../file", "folder/../file"];
            let end = std::time::Instant::now() + std::time::Duration::from_secs(1);
            while std::time::Instant::now() < end {
                for path in paths {
                    let Ok(mut file) = served.file(path, false) else {
                        refused += 1;
                        continue;
                    };
                    let mut text = String::new();
                    let length = file.read_to_string(&mut text);
                    // The folders themselves change places: what is inside then was outside.
                    let is_right = length.is_ok() && (text == "served" || path.ends_with("deep/file"));
                    if !is_right {
                        wrong.push((path, text));
                    }
                    read += 1;
                }
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert!(wrong.is_empty(), "{wrong:?}");
        assert!(read > 0 && refused > 0, "{read} read, {refused} refused");
    }
}
