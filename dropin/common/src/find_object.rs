//! `_dl_find_object` for the unwinder that is linked into each library (`dropin/link`).
//!
//! glibc has the function since 2.35 only, and images with 2.34 are common. This one does the same
//! by `dl_iterate_phdr`. It is hidden: programs and other libraries use glibc's. It is weak: a
//! static program has glibc's as well.

use std::ffi::{c_int, c_void};
use std::ptr;

/// The beginning of glibc's structure: what the unwinder reads.
#[repr(C)]
struct FoundObject {
    flags: u64,
    map_start: usize,
    map_end: usize,
    link_map: *mut c_void,
    /// The segment with the table of stack frames.
    eh_frame: usize,
}

struct Search {
    address: usize,
    found: *mut FoundObject,
}

/// Looks at one loaded object; 1 ends the iteration.
unsafe extern "C" fn visit(object: *mut libc::dl_phdr_info, _len: usize, search: *mut c_void) -> c_int {
    // SAFETY: the loader passes a valid description, and `find` its own search.
    let (object, search) = unsafe { (&*object, &*search.cast::<Search>()) };
    let base = usize::try_from(object.dlpi_addr).unwrap_or(0);
    // SAFETY: as many segments as the description says.
    let segments = unsafe { std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()) };
    let start = |segment: &libc::Elf64_Phdr| base + usize::try_from(segment.p_vaddr).unwrap_or(0);
    let end = |segment: &libc::Elf64_Phdr| start(segment) + usize::try_from(segment.p_memsz).unwrap_or(0);
    let loaded = segments.iter().filter(|segment| segment.p_type == libc::PT_LOAD);
    if !loaded.clone().any(|segment| (start(segment)..end(segment)).contains(&search.address)) {
        return 0;
    }
    let Some(frames) = segments.iter().find(|segment| segment.p_type == libc::PT_GNU_EH_FRAME) else {
        return 0;
    };
    let found = FoundObject {
        flags: 0,
        map_start: loaded.clone().map(start).min().unwrap_or(0),
        map_end: loaded.map(end).max().unwrap_or(0),
        link_map: ptr::null_mut(),
        eh_frame: start(frames),
    };
    // SAFETY: the unwinder's structure, which is longer.
    unsafe { search.found.write(found) };
    1
}

/// 0, and the object that has the address; -1 if there is none.
unsafe extern "C" fn find(address: *mut c_void, found: *mut FoundObject) -> c_int {
    let mut search = Search { address: address.addr(), found };
    // SAFETY: the function gets the search, which lives during the call.
    match unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) } {
        1 => 0,
        _ => -1,
    }
}

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .text._dl_find_object,\"ax\",@progbits",
    ".weak _dl_find_object",
    ".hidden _dl_find_object",
    ".type _dl_find_object,@function",
    "_dl_find_object:",
    "jmp {find}",
    ".size _dl_find_object, . - _dl_find_object",
    ".popsection",
    find = sym find,
);

#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".pushsection .text._dl_find_object,\"ax\",@progbits",
    ".weak _dl_find_object",
    ".hidden _dl_find_object",
    ".type _dl_find_object,@function",
    "_dl_find_object:",
    "b {find}",
    ".size _dl_find_object, . - _dl_find_object",
    ".popsection",
    find = sym find,
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_finds_what_glibc_finds() {
        // SAFETY: the name is a C string.
        let theirs = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_dl_find_object".as_ptr()) };
        if theirs.is_null() {
            return; // an older glibc
        }
        // SAFETY: glibc's function of this name has this type.
        let theirs = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *mut FoundObject) -> c_int>(
                theirs,
            )
        };
        let of = |search: unsafe extern "C" fn(*mut c_void, *mut FoundObject) -> c_int,
                  address: *mut c_void| {
            let mut found = [0_u64; 16];
            // SAFETY: more room than the structure takes.
            let code = unsafe { search(address, found.as_mut_ptr().cast()) };
            (code, found[4])
        };
        let heap = Box::into_raw(Box::new(0_u8)).cast();
        for address in [find as *mut c_void, libc::qsort as *mut c_void, ptr::null_mut(), heap] {
            assert_eq!(of(find, address), of(theirs, address), "{address:?}");
        }
        // SAFETY: made above.
        drop(unsafe { Box::from_raw(heap.cast::<u8>()) });
    }
}
