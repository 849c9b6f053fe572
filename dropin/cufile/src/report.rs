//! Which way the bytes of this process went: one line for `nobounce run`, and for the log.

use std::ffi::c_char;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nobounce::Tally;
use nobounce::file::{FileReport, file_counters};

use crate::entry::guarded;
use crate::log;
use crate::transfer::Direction;

/// Bytes of GPU memory that the program has not registered: read, and written.
static UNREGISTERED: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
/// The process that has files: a child of `fork` has counters of its parent.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Counts bytes that have moved although their memory is not registered.
pub(crate) fn count_unregistered(direction: Direction, len: usize) {
    UNREGISTERED[usize::from(direction == Direction::Write)].fetch_add(len as u64, Ordering::Relaxed);
}

/// Has the line written when the process exits.
pub(crate) fn at_exit() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        PROCESS.store(std::process::id(), Ordering::Relaxed);
        // SAFETY: the function lives as long: the library is never unloaded.
        unsafe { libc::atexit(write) };
    });
}

/// Writes `window 4096 staged 0` and so on to the text: the bytes that this process has read from
/// files, by path. `nobounce doctor` tells this library from others by this function. Returns the
/// length of the whole text; what does not fit is cut off.
///
/// # Safety
/// `text` has room for `len` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nobounce_cufile_read_paths(text: *mut c_char, len: usize) -> usize {
    let word = |(way, tally): (&str, Tally)| format!("{} {}", way.replace(' ', "-"), tally.bytes);
    let words = guarded(|| Ok(file_counters().read.paths.list().map(word).join(" "))).unwrap_or_default();
    // SAFETY: the caller's promise.
    unsafe { text.cast::<u8>().copy_from_nonoverlapping(words.as_ptr(), words.len().min(len)) };
    words.len()
}

extern "C" fn write() {
    if PROCESS.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let counters = file_counters();
    let both = [("read", &counters.read), ("written", &counters.written)];
    for ((what, report), unregistered) in both.into_iter().zip(&UNREGISTERED) {
        if let Some(line) = line(what, report, unregistered.load(Ordering::Relaxed)) {
            log::note("files", &line);
        }
    }
}

/// `cuFile read 4096 bytes: 4096 by window`.
fn line(what: &str, report: &FileReport, unregistered: u64) -> Option<String> {
    if report.bytes() == 0 {
        return None;
    }
    let ways = report.paths.list().into_iter().filter(|(_, tally)| tally.bytes > 0);
    let text = |way: &str, bytes| {
        if way == "staged" { format!("{bytes} staged") } else { format!("{bytes} by {way}") }
    };
    let ways: Vec<_> = ways.map(|(way, tally)| text(way, tally.bytes)).collect();
    let mut line = format!("cuFile {what} {} bytes: {}", report.bytes(), ways.join(", "));
    let reasons: Vec<_> = report.staged.iter().map(|staged| staged.reason.to_string()).collect();
    if !reasons.is_empty() {
        line.push_str(&format!(" (staged: {})", reasons.join("; ")));
    }
    if unregistered > 0 {
        line.push_str(&format!("; buffers of {unregistered} bytes were not registered (cuFileBufRegister)"));
    }
    Some(line)
}
