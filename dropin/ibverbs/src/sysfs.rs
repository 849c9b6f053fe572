//! Files of the system that programs read through us.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

use crate::entry::{self, Errno};

/// `ibv_get_sysfs_path`: the root of the files, "/sys" unless `SYSFS_PATH` says otherwise.
pub(crate) unsafe extern "C" fn get_sysfs_path() -> *const c_char {
    static ROOT: OnceLock<std::ffi::CString> = OnceLock::new();
    ROOT.get_or_init(|| {
        let chosen = std::env::var_os("SYSFS_PATH").map(|path| path.as_bytes().to_vec());
        let mut bytes = chosen.unwrap_or_else(|| b"/sys".to_vec());
        while bytes.len() > 1 && bytes.ends_with(b"/") {
            bytes.pop();
        }
        std::ffi::CString::new(bytes).unwrap_or_default()
    })
    .as_ptr()
}

/// `ibv_read_sysfs_file`: at most `size` bytes of a file, without the newline; their number, or -1.
pub(crate) unsafe extern "C" fn read_sysfs_file(
    folder: *const c_char,
    file: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> c_int {
    entry::minus_one(|| {
        if folder.is_null() || file.is_null() || buffer.is_null() {
            return Err(Errno::EINVAL);
        }
        // SAFETY: the caller passes C strings.
        let (folder, file) = unsafe { (CStr::from_ptr(folder), CStr::from_ptr(file)) };
        let path = Path::new(OsStr::from_bytes(folder.to_bytes())).join(OsStr::from_bytes(file.to_bytes()));
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(size as u64).read_to_end(&mut bytes)?;
        if bytes.ends_with(b"\n") {
            bytes.pop();
        }
        // SAFETY: the buffer has `size` bytes, and there are no more of ours.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), bytes.len());
            if bytes.len() < size {
                *buffer.add(bytes.len()) = 0;
            }
        }
        c_int::try_from(bytes.len()).map_err(|_| Errno::EINVAL)
    })
}
