//! The folder where programs find the device's files of sysfs, where no launcher made one.

use std::ffi::{CString, c_char};
use std::os::unix::ffi::OsStringExt as _;
use std::ptr;
use std::sync::OnceLock;

use nobounce_dropin::{log, own_view};

/// `const char *nobounce_view(void)`: the folder that stands for the root, made by the first call.
/// For libnobounce-paths, which makes no folders itself. NULL if there is none.
pub(crate) unsafe extern "C" fn view() -> *const c_char {
    static ROOT: OnceLock<Option<CString>> = OnceLock::new();
    let made = ROOT.get_or_init(|| match own_view::root() {
        Ok(root) => CString::new(root.into_os_string().into_vec()).ok(),
        Err(error) => {
            log::error(|| error);
            None
        }
    });
    made.as_ref().map_or(ptr::null(), |root| root.as_ptr())
}
