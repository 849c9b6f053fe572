//! The secrets of a device: from a file, or from a descriptor that the process was started with.

use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::{self, Read as _};
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd as _, RawFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nobounce_protocol::seal::{KeyError, KeyRing};

/// More than any file of two secrets has.
const MAX_LEN: u64 = 4096;

/// What changes with a file: its number, and the time of its last change in seconds and
/// nanoseconds.
pub type FileVersion = (u64, i64, i64);

/// Where secrets are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// A file, read anew when it changes.
    File(PathBuf),
    /// An open descriptor, read once.
    Descriptor(RawFd),
}

impl KeySource {
    /// Reads `fd:N`, or the path of a file.
    pub fn from_text(text: &str) -> Self {
        let number = text.strip_prefix("fd:").and_then(|number| number.parse().ok());
        number.map_or_else(|| Self::File(text.into()), Self::Descriptor)
    }

    /// Reads the secrets.
    ///
    /// # Errors
    /// It cannot be read, other users can, or it holds something else.
    pub fn read(&self) -> Result<KeyRing, KeyFileError> {
        let text = match self {
            Self::File(path) => read_file(path)?,
            Self::Descriptor(fd) => read_descriptor(*fd)?,
        };
        KeyRing::parse(&text).map_err(|source| KeyFileError::Content { at: self.clone(), source })
    }

    /// What changes when the file is written or replaced; `None` for a descriptor, and for a file
    /// that is not there.
    pub(super) fn version(&self) -> Option<FileVersion> {
        let Self::File(path) = self else { return None };
        // The time of the last change of rights, too: a file that was refused may be readable now.
        fs::metadata(path).ok().map(|meta| (meta.ino(), meta.ctime(), meta.ctime_nsec()))
    }
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Descriptor(fd) => write!(f, "fd:{fd}"),
        }
    }
}

/// Why secrets cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyFileError {
    /// It cannot be read.
    #[error("cannot read the key {at} ({source}). NOBOUNCE_KEY names a file, or fd:N for an open descriptor")]
    Read {
        /// The source.
        at: KeySource,
        /// What the system said.
        source: io::Error,
    },
    /// Others may read or change the file.
    #[error("other users may read or change the key {} (mode {mode:04o}, owner {owner}). Run `chmod 600` on it, as its owner", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its access rights.
        mode: u32,
        /// Its user.
        owner: u32,
    },
    /// It has other content.
    #[error("the key {at} is invalid: {source}")]
    Content {
        /// The source.
        at: KeySource,
        /// What is wrong.
        source: KeyError,
    },
}

fn read_file(path: &Path) -> Result<String, KeyFileError> {
    let failed = |source| KeyFileError::Read { at: KeySource::File(path.to_owned()), source };
    // A pipe without a writer must not block.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    let meta = file.metadata().map_err(failed)?;
    if !meta.is_file() {
        return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
    }
    if is_exposed(&meta) {
        let (mode, owner) = (meta.mode() & 0o7777, meta.uid());
        return Err(KeyFileError::Exposed { path: path.to_owned(), mode, owner });
    }
    let mut text = String::new();
    file.take(MAX_LEN).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

/// Whether users other than ours and root may read or change the file.
fn is_exposed(meta: &Metadata) -> bool {
    // SAFETY: the call has no arguments and cannot fail.
    let ours = unsafe { libc::geteuid() };
    meta.mode() & 0o077 != 0 || (meta.uid() != 0 && meta.uid() != ours)
}

/// Read once in a process: a pipe gives its content only once, and a process may open several
/// devices.
fn read_descriptor(fd: RawFd) -> Result<String, KeyFileError> {
    static READ: Mutex<Vec<(RawFd, String)>> = Mutex::new(Vec::new());
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, text)) = read.iter().find(|(known, _)| *known == fd) {
        return Ok(text.clone());
    }
    let failed = |source| KeyFileError::Read { at: KeySource::Descriptor(fd), source };
    // SAFETY: fcntl with F_GETFD only looks at the number, open or not.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    // SAFETY: the descriptor is open, and stays open: this owner is never dropped.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let mut text = String::new();
    let mut room = [0; 4096]; // MAX_LEN
    // From the start, wherever another process has read to; a pipe has no start.
    match file.read_at(&mut room, 0) {
        Ok(len) => text.push_str(&String::from_utf8_lossy(&room[..len])),
        Err(error) if error.raw_os_error() == Some(libc::ESPIPE) => {
            (&*file).take(MAX_LEN).read_to_string(&mut text).map_err(failed)?;
        }
        Err(error) => return Err(failed(error)),
    }
    read.push((fd, text.clone()));
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn file(name: &str, text: &str, mode: u32) -> PathBuf {
        let path = std::env::temp_dir().join(format!("nobounce-key-{name}-{}", std::process::id()));
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn a_file_is_read_if_it_is_ours_alone() {
        let path = file("good", &"5a".repeat(32), 0o600);
        let source = KeySource::from_text(path.to_str().unwrap());
        assert_eq!(source.read().unwrap().ids().len(), 1);
        let before = source.version();
        assert!(before.is_some());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let error = source.read().unwrap_err().to_string();
        assert!(error.contains("0640") && error.contains("chmod 600"), "{error}");
        fs::remove_file(&path).unwrap();
        let error = source.read().unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()) && error.contains("NOBOUNCE_KEY"), "{error}");
        let path = file("bad", "no key", 0o600);
        let error = KeySource::File(path.clone()).read().unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("openssl rand -hex 32"), "{error}");
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_descriptor_of_a_file_or_a_pipe_is_read_once() {
        let path = file("fd", &"5a".repeat(32), 0o600);
        let open = File::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let (pipe, mut writer) = io::pipe().unwrap();
        writer.write_all("5a".repeat(32).as_bytes()).unwrap();
        drop(writer);
        for fd in [open.as_raw_fd(), pipe.as_raw_fd()] {
            let source = KeySource::from_text(&format!("fd:{fd}"));
            for _ in 0..2 {
                assert_eq!(source.read().unwrap().ids().len(), 1);
            }
            assert_eq!(source.version(), None);
        }
        let error = KeySource::from_text("fd:9999").read().unwrap_err().to_string();
        assert!(error.contains("fd:9999"), "{error}");
    }
}
