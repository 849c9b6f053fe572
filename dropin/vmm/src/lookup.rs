//! `dlsym`, interposed.
//!
//! The C library finds the caller of `dlsym` by the return address: RTLD_NEXT and RTLD_DEFAULT mean
//! other libraries for each caller. So calls pass through as jumps, which leave that address alone.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::driver;

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// `dlsym` behind ours: of another library that interposes it, or of the C library.
static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Versions of `dlsym` in the C library, newest first.
#[cfg(target_arch = "x86_64")]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.2.5"];
#[cfg(not(target_arch = "x86_64"))]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.34", c"GLIBC_2.17"];

/// Finds the `dlsym` behind ours.
pub(crate) extern "C" fn resolve() -> *mut c_void {
    let known = NEXT.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    // SAFETY: C strings; RTLD_NEXT means the libraries after this one.
    let find = |version: &CStr| unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
    let of_libc = VERSIONS.into_iter().map(find).find(|found| !found.is_null()).unwrap_or_default();
    // That finds versioned symbols only, which those of other libraries are not.
    let next = call(of_libc, libc::RTLD_NEXT, c"dlsym");
    let found = if next.is_null() { of_libc } else { next };
    NEXT.store(found, Ordering::Relaxed);
    found
}

/// Looks a name up for this library, without our own `dlsym`.
pub(crate) fn find(handle: *mut c_void, name: &CStr) -> *mut c_void {
    call(resolve(), handle, name)
}

/// Looks a name of libcuda up behind this library: in the libraries that the program links, else in
/// a libcuda that was loaded for some of them only.
pub(crate) fn behind(name: &CStr) -> *mut c_void {
    let next = find(libc::RTLD_NEXT, name);
    if !next.is_null() {
        return next;
    }
    // SAFETY: a C string. Nothing is loaded: the handle is one more reference, which is given back.
    unsafe {
        let cuda = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if cuda.is_null() {
            libc::dlerror(); // that there is none is no error of the program
            return cuda;
        }
        let found = find(cuda, name);
        libc::dlclose(cuda);
        found
    }
}

fn call(dlsym: *mut c_void, handle: *mut c_void, name: &CStr) -> *mut c_void {
    if dlsym.is_null() {
        return dlsym;
    }
    // SAFETY: the address of a `dlsym`; a C string.
    unsafe { std::mem::transmute::<*mut c_void, Dlsym>(dlsym)(handle, name.as_ptr()) }
}

/// What `dlsym` returns, if it is not to ask the next one.
#[repr(C)]
struct Picked {
    address: *mut c_void,
    is_picked: usize,
}

/// For a name that begins as those of libcuda.
unsafe extern "C" fn pick(handle: *mut c_void, name: *const c_char) -> Picked {
    // SAFETY: `dlsym` below has checked that it is not null.
    let name = unsafe { CStr::from_ptr(name) };
    match driver::Replaced::named(name) {
        Some(replaced) => {
            let address = replaced.looked_up(find(handle, name), || behind(name));
            Picked { address, is_picked: 1 }
        }
        None => Picked { address: std::ptr::null_mut(), is_picked: 0 },
    }
}

/// `dlsym`.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "test rsi, rsi",
        "je 2f",
        "cmp rdi, -1", // RTLD_NEXT
        "je 2f",
        "cmp byte ptr [rsi], 'c'",
        "jne 2f",
        "cmp byte ptr [rsi + 1], 'u'",
        "jne 2f",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {pick}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rdx, rdx",
        "je 2f",
        "ret",
        "2:",
        "mov rax, qword ptr [rip + {next}]",
        "test rax, rax",
        "je 3f",
        "jmp rax",
        "3:", // before the constructor
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {resolve}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        next = sym NEXT,
        resolve = sym resolve,
        pick = sym pick,
    )
}

/// `dlsym`.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "cbz x1, 2f",
        "cmn x0, #1", // RTLD_NEXT
        "b.eq 2f",
        "ldrb w2, [x1]",
        "cmp w2, #99", // 'c'
        "b.ne 2f",
        "ldrb w2, [x1, #1]",
        "cmp w2, #117", // 'u'
        "b.ne 2f",
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "bl {pick}",
        "mov x2, x1",
        "mov x3, x0",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "cbz x2, 2f",
        "mov x0, x3",
        "ret",
        "2:",
        "adrp x2, {next}",
        "ldr x2, [x2, :lo12:{next}]",
        "cbz x2, 3f",
        "br x2",
        "3:", // before the constructor
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "bl {resolve}",
        "mov x2, x0",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "br x2",
        next = sym NEXT,
        resolve = sym resolve,
        pick = sym pick,
    )
}
