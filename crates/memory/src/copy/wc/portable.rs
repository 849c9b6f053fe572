//! Copies for architectures without assembly routines here: aligned 8-byte words by volatile
//! accesses, without a fault guard.

use std::ptr;

use super::Isa;

/// # Safety
/// As for [`super::store`], and the window is mapped.
pub(super) unsafe fn store(_isa: Isa, dst: *mut u8, src: *const u8, len: usize) -> usize {
    let mut done = 0;
    while done < len {
        let to = dst.wrapping_add(done);
        // SAFETY: `done` is below `len`, and a word is moved only where it fits and the window side
        // is aligned.
        unsafe {
            if to.addr().is_multiple_of(8) && len - done >= 8 {
                ptr::write_volatile(to.cast::<u64>(), ptr::read_unaligned(src.add(done).cast()));
                done += 8;
            } else {
                ptr::write_volatile(to, *src.add(done));
                done += 1;
            }
        }
    }
    0
}

/// # Safety
/// As for [`super::load`], and the window is mapped.
pub(super) unsafe fn load(_isa: Isa, dst: *mut u8, src: *const u8, len: usize) -> usize {
    let mut done = 0;
    while done < len {
        let from = src.wrapping_add(done);
        // SAFETY: as in `store`.
        unsafe {
            if from.addr().is_multiple_of(8) && len - done >= 8 {
                ptr::write_unaligned(dst.add(done).cast::<u64>(), ptr::read_volatile(from.cast()));
                done += 8;
            } else {
                *dst.add(done) = ptr::read_volatile(from);
                done += 1;
            }
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_every_size_and_alignment() {
        let source: Vec<u8> = (0..=255).cycle().take(300).collect();
        for len in 0..100 {
            for (to, from) in (0..9).flat_map(|to| [0, 1, 4, 8].map(|from| (to, from))) {
                let mut copies = [vec![0xEE; 200], vec![0xEE; 200]];
                let mut expected = vec![0xEE; 200];
                expected[16 + to..][..len].copy_from_slice(&source[from..][..len]);
                // SAFETY: both sides lie inside vectors that are long enough.
                unsafe {
                    store(Isa::Sse2, copies[0].as_mut_ptr().add(16 + to), source.as_ptr().add(from), len);
                    load(Isa::Sse2, copies[1].as_mut_ptr().add(16 + to), source.as_ptr().add(from), len);
                }
                assert!(copies.iter().all(|copy| *copy == expected), "{len} bytes, {from} -> {to}");
            }
        }
    }
}
