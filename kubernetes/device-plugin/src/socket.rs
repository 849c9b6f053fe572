//! The plugin's socket file, and the identity of files that others replace.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::time::timeout;

/// Longest path of a Unix socket (`sun_path` without its terminating zero).
pub(crate) const MAX_PATH: usize = 107;

/// Longest time that a process gets to take a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Tells a file from another one with the same path. File systems reuse inode numbers at once, so
/// the time of the last status change is a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileIdentity {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl FileIdentity {
    /// None where the file does not exist.
    pub(crate) fn of(path: &Path) -> Option<Self> {
        let metadata = fs::symlink_metadata(path).ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ClaimError {
    #[error("another process serves {0}; end the second instance of the plugin on this node")]
    Occupied(String),
    #[error("{0} is not a socket; remove it")]
    NotASocket(String),
    #[error("cannot create {path}: {source}; --plugin-dir must name the kubelet's writable directory")]
    Create { path: String, source: io::Error },
}

/// A socket file that this process has created. Dropping it removes the file.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    identity: FileIdentity,
}

impl SocketFile {
    /// Listens at the path. A file that a killed process has left is replaced; one that a process
    /// serves is not, so that two instances do not take the socket from each other in turns.
    pub(crate) async fn claim(path: &Path) -> Result<(UnixListener, Self), ClaimError> {
        let shown = || path.display().to_string();
        let create_error = |source| ClaimError::Create { path: shown(), source };
        if let Ok(metadata) = fs::symlink_metadata(path) {
            if !metadata.file_type().is_socket() {
                return Err(ClaimError::NotASocket(shown()));
            }
            if is_served(path).await {
                return Err(ClaimError::Occupied(shown()));
            }
            fs::remove_file(path).map_err(create_error)?;
        }
        let listener = UnixListener::bind(path).map_err(create_error)?;
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(create_error)?;
        let identity = FileIdentity::of(path).ok_or_else(|| create_error(io::ErrorKind::NotFound.into()))?;
        Ok((listener, Self { path: path.to_owned(), identity }))
    }

    /// False once the kubelet, or another process, has removed or replaced the file.
    pub(crate) fn is_in_place(&self) -> bool {
        FileIdentity::of(&self.path) == Some(self.identity)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A file that replaced ours belongs to another process.
        if self.is_in_place() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether a process listens there. Only a refusal means that none does: one that is busy or
/// stopped has a full queue, and an attempt that blocks would stop the plugin, too.
async fn is_served(path: &Path) -> bool {
    let gone = [io::ErrorKind::ConnectionRefused, io::ErrorKind::NotFound];
    match timeout(CONNECT_TIMEOUT, UnixStream::connect(path)).await {
        Ok(Err(error)) => !gone.contains(&error.kind()),
        Ok(Ok(_)) | Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net;

    use super::*;
    use crate::testing::TempDir;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let folder = TempDir::new("socket");
        let path = folder.path("a.sock");
        drop(net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());

        let (listener, file) = SocketFile::claim(&path).await.unwrap();
        assert!(file.is_in_place());
        assert!(matches!(SocketFile::claim(&path).await, Err(ClaimError::Occupied(_))));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop((listener, file));
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_file_of_another_process_is_not_removed() {
        let folder = TempDir::new("socket-replaced");
        let path = folder.path("a.sock");
        let (_listener, file) = SocketFile::claim(&path).await.unwrap();
        fs::remove_file(&path).unwrap();
        assert!(!file.is_in_place());
        let _other = net::UnixListener::bind(&path).unwrap();
        assert!(!file.is_in_place());
        drop(file);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn other_files_and_missing_directories_are_errors() {
        let folder = TempDir::new("socket-odd");
        fs::write(folder.path("a.sock"), "text").unwrap();
        assert!(matches!(SocketFile::claim(&folder.path("a.sock")).await, Err(ClaimError::NotASocket(_))));
        assert_eq!(fs::read(folder.path("a.sock")).unwrap(), b"text");
        let missing = SocketFile::claim(&folder.path("none/a.sock")).await.unwrap_err();
        assert!(missing.to_string().contains("--plugin-dir"), "{missing}");
    }
}
