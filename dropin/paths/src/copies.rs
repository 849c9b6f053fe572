//! Notes who reads the list of verbs devices: a copy of rdma-core inside a program does so itself,
//! and does not find nb0. `nobounce run` looks into the noted files and says which have one.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU8, Ordering};

use crate::view::{PATH_MAX, REPORT};

/// Callers looked at: the first one outside this library is wanted.
const FRAMES: c_int = 8;

/// Callers noted: the first may be a library that uses libibverbs, a later one has the copy.
const MAX_NOTED: u8 = 8;
static NOTED: AtomicU8 = AtomicU8::new(0);

/// Notes the file that the caller of the interposed function belongs to.
#[cold]
pub(crate) fn note() {
    let more = |count: u8| (count < MAX_NOTED).then_some(count + 1);
    if NOTED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
        return;
    }
    // SAFETY: the calling thread's errno, which is restored below.
    let errno = unsafe { *libc::__errno_location() };
    let mut path = [0_u8; PATH_MAX];
    if let Some(len) = caller(&mut path) {
        append(&mut path, len);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// The path of the first file on the stack besides this library.
fn caller(path: &mut [u8; PATH_MAX]) -> Option<usize> {
    let mut frames = [std::ptr::null_mut::<c_void>(); FRAMES as usize];
    // SAFETY: room for as many frames.
    let count = unsafe { libc::backtrace(frames.as_mut_ptr(), FRAMES) };
    let file = |address: *const c_void| {
        let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: the structure is filled when the result is not 0; its name is a C string.
        unsafe {
            let known = libc::dladdr(address, found.as_mut_ptr()) != 0;
            let name = found.assume_init().dli_fname;
            (known && !name.is_null()).then(|| CStr::from_ptr(name))
        }
    };
    let own = file(note as *const c_void)?;
    let other = frames
        .iter()
        .take(usize::try_from(count).ok()?)
        .find_map(|at| file(*at).filter(|name| *name != own))?;
    let name = other.to_bytes();
    if name.first() == Some(&b'/') {
        let len = name.len().min(PATH_MAX - 1);
        path[..len].copy_from_slice(&name[..len]);
        return Some(len);
    }
    // The program itself, by the name that it was called.
    // SAFETY: a C string, and room for as many bytes.
    let len = unsafe {
        libc::readlink(c"/proc/self/exe".as_ptr(), path.as_mut_ptr().cast::<c_char>(), PATH_MAX - 1)
    };
    usize::try_from(len).ok().filter(|len| *len > 0)
}

/// Adds a line to `PID.verbs` in the folder of the run.
fn append(path: &mut [u8; PATH_MAX], len: usize) {
    let Some(folder) = REPORT.get() else { return };
    let mut name = [0_u8; PATH_MAX];
    // SAFETY: getpid cannot fail.
    let (mut digits, mut pid) = ([0_u8; 10], unsafe { libc::getpid() }.unsigned_abs());
    let mut at = digits.len();
    while at > 0 && (pid > 0 || at == digits.len()) {
        at -= 1;
        digits[at] = b'0' + u8::try_from(pid % 10).unwrap_or(0);
        pid /= 10;
    }
    let mut end = 0;
    for part in [folder, b"/", &digits[at..], b".verbs"] {
        let Some(place) = name.get_mut(end..end + part.len()) else { return };
        place.copy_from_slice(part);
        end += part.len();
    }
    path[len] = b'\n';
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND | libc::O_CLOEXEC | libc::O_NOFOLLOW;
    // SAFETY: `name` ends with a NUL (it is longer than its parts), `path` has `len + 1` bytes.
    unsafe {
        let fd = libc::open(name.as_ptr().cast(), flags, 0o600);
        if fd >= 0 {
            libc::write(fd, path.as_ptr().cast(), len + 1);
            libc::close(fd);
        }
    }
}
