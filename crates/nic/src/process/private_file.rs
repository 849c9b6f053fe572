//! Files that other users can neither read nor redirect.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;

/// Options to write a file with mode 0600 that is not opened through a symbolic link.
pub(crate) fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options
}
