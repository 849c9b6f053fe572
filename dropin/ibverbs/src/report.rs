//! The report of this process's devices, for the process itself.

use std::ffi::c_char;

use crate::context::ContextObject;
use crate::live;

/// `size_t nobounce_report(char *to, size_t room)`: a JSON array with the report of each open
/// device (docs/reference/json.md), NUL-terminated, truncated to `room`. Returns its full length
/// without the NUL, as `snprintf` does.
pub(crate) unsafe extern "C" fn report(to: *mut c_char, room: usize) -> usize {
    // Cloned first: a report waits for the thread that drives the device.
    let devices = live::each(|context: &ContextObject| context.soft.clone());
    let reports: Vec<String> = devices.iter().filter_map(|device| device.report()).collect();
    let all = format!("[{}]", reports.join(","));
    if room > 0 && !to.is_null() {
        let fits = all.len().min(room - 1);
        // SAFETY: the caller has `room` bytes there, of which `fits` and one more are written.
        unsafe {
            to.copy_from_nonoverlapping(all.as_ptr().cast(), fits);
            to.add(fits).write(0);
        }
    }
    all.len()
}
