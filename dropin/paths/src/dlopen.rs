//! `dlopen` of a library's development name, such as libibverbs.so (NCCL 2.27 to 2.28 does so): the
//! preloaded library is known by its soname only, and an image with development packages has
//! another file of that name.
//!
//! The C library looks up a name in the folders of the library that calls, which it knows by the
//! return address. So the trampoline changes the name and jumps.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::original::Original;

/// Development names and the sonames that stand for them.
const NAMES: [(&CStr, &CStr); 5] = [
    (c"libibverbs.so", c"libibverbs.so.1"),
    (c"librdmacm.so", c"librdmacm.so.1"),
    (c"libgdrapi.so", c"libgdrapi.so.2"),
    (c"libmlx5.so", c"libmlx5.so.1"),
    (c"libefa.so", c"libefa.so.1"),
];

/// The C library's function, for the trampoline.
static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Finds the C library's function.
pub(crate) fn resolve() {
    static ORIGINAL: Original = Original::new(c"dlopen");
    NEXT.store(ORIGINAL.get(), Ordering::Relaxed);
}

/// The name to load.
unsafe extern "C" fn name(wanted: *const c_char) -> *const c_char {
    if NEXT.load(Ordering::Relaxed).is_null() {
        resolve(); // a constructor that runs before ours
    }
    if wanted.is_null() {
        return wanted;
    }
    // SAFETY: the caller of dlopen passes a C string or null.
    let name = unsafe { CStr::from_ptr(wanted) };
    let known = NAMES.iter().find(|(development, _)| *development == name);
    known.map_or(wanted, |(_, soname)| soname.as_ptr())
}

/// `dlopen`.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlopen(path: *const c_char, mode: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "push rsi",
        "call {name}",
        "pop rsi",
        "mov rdi, rax",
        "jmp qword ptr [rip + {next}]",
        name = sym name,
        next = sym NEXT,
    )
}

/// `dlopen`.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlopen(path: *const c_char, mode: c_int) -> *mut c_void {
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "str x1, [sp, #16]",
        "bl {name}",
        "ldr x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "adrp x16, {next}",
        "ldr x16, [x16, #:lo12:{next}]",
        "br x16",
        name = sym name,
        next = sym NEXT,
    )
}
