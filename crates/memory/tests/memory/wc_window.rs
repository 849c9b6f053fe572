//! `GpuWindow` on ordinary memory: bounds, bytes, words, faults, atomics and the record of
//! unsettled stores.
//!
//! Properties that need a GPU (ordering, stale loads) are in the litmus tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nobounce_memory::gpu::{GpuWindow, Shadowed};
use nobounce_memory::wc::Isa;
use nobounce_memory::{AccessError, HostBuffer, guard, page_size};

fn over(buffer: &Arc<HostBuffer>, start: usize, len: usize) -> GpuWindow {
    guard::ensure_installed().unwrap();
    // SAFETY: the window keeps the buffer alive; these tests make no reference into it.
    unsafe { GpuWindow::new(buffer.as_mut_ptr().wrapping_add(start), len, buffer.clone(), false) }
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from((i * 31 + i / 251) % 251 + 1).unwrap()).collect()
}

#[test]
fn every_end_of_a_message_lands_whole_and_nowhere_else() {
    let buffer = Arc::new(HostBuffer::new(8192).unwrap());
    let source = bytes(5000);
    for len in (0..300).chain([1000, 4096, 4097]) {
        for start in [0, 1, 7, 8, 33, 56, 63, 64] {
            buffer.write_at(0, &[0xEE; 8192]).unwrap();
            let window = over(&buffer, 128 + start, len);
            if (len + start) % 2 == 0 {
                window.store(0, &source[..len])
            } else {
                window.store_last(0, &source[..len])
            }
            .unwrap();
            window.complete().unwrap();
            let mut all = vec![0; 8192];
            buffer.read_at(0, &mut all).unwrap();
            let mut expected = vec![0xEE; 8192];
            expected[128 + start..][..len].copy_from_slice(&source[..len]);
            assert!(all == expected, "{len} bytes at {start}");
            let mut back = vec![0; len];
            window.load(0, &mut back).unwrap();
            assert!(back == source[..len], "load of {len} bytes at {start}");
        }
    }
}

#[test]
fn bounds_and_alignment_are_checked_before_anything_is_touched() {
    let buffer = Arc::new(HostBuffer::new(256).unwrap());
    let window = over(&buffer, 0, 100);
    for (offset, len) in [(0, 101), (100, 1), (101, 0), (usize::MAX, 2)] {
        let error = AccessError::OutOfBounds { offset, len, window: 100 };
        assert_eq!(window.store(offset, &vec![1; len]), Err(error));
        assert_eq!(window.store_last(offset, &vec![1; len]), Err(error));
        assert_eq!(window.load(offset, &mut vec![1; len]), Err(error));
    }
    for offset in 1..8 {
        assert!(matches!(window.fetch_add(offset, 1), Err(AccessError::Misaligned { .. })));
        assert!(matches!(window.compare_swap(offset, 0, 1), Err(AccessError::Misaligned { .. })));
        assert!(matches!(window.load_u64(offset), Err(AccessError::Misaligned { .. })));
        assert!(matches!(window.store_u64(offset, 1), Err(AccessError::Misaligned { .. })));
    }
    assert!(matches!(window.fetch_add(96, 1), Err(AccessError::OutOfBounds { .. })));
    assert!(!window.is_dirty());
    let mut all = [1; 256];
    buffer.read_at(0, &mut all).unwrap();
    assert_eq!(all, [0; 256]);
}

#[test]
fn stores_are_remembered_until_a_load() {
    let buffer = Arc::new(HostBuffer::new(256).unwrap());
    let window = over(&buffer, 0, 256);
    let clean = || {
        assert!(window.is_dirty());
        window.settle().unwrap();
        assert!(!window.is_dirty());
    };
    window.settle().unwrap();
    window.store(0, &[]).unwrap();
    assert!(!window.is_dirty());
    window.store(3, &[1]).unwrap();
    clean();
    window.store_last(3, &[1; 200]).unwrap();
    clean();
    window.store_u64(8, 5).unwrap();
    clean();
    assert_eq!(window.fetch_add(8, 2), Ok(5));
    clean();
    // A comparison that fails stores nothing.
    assert_eq!(window.compare_swap(8, 6, 9), Ok(7));
    assert!(!window.is_dirty());
    assert_eq!(window.compare_swap(8, 7, 9), Ok(7));
    assert!(window.is_dirty());
    assert_eq!(window.load_u64(8), Ok(9));
    assert!(!window.is_dirty());
    window.store(0, &[1]).unwrap();
    window.load(100, &mut [0]).unwrap();
    assert!(!window.is_dirty());
    window.store(0, &[1]).unwrap();
    window.read_back().unwrap();
    // The stores may have left their processor only now.
    window.complete().unwrap();
    clean();

    // SAFETY: as in `over`.
    let flushed = unsafe { GpuWindow::new(buffer.as_mut_ptr(), 256, buffer.clone(), true) };
    flushed.store_last(0, &[1; 100]).unwrap();
    flushed.complete().unwrap();
    assert!(!flushed.is_dirty(), "a GPU that needs a load for each message gets it");
}

#[test]
fn a_mapping_that_is_gone_is_an_error() {
    let page = page_size();
    let buffer = Arc::new(HostBuffer::guarded(page).unwrap());
    let window = over(&buffer, 0, 2 * page);
    let end = AccessError::Faulted { address: buffer.addr() + page as u64 };
    let data = bytes(page);
    assert_eq!(window.store(page - 100, &data[..200]), Err(end));
    assert_eq!(window.store_last(page - 100, &data[..110]), Err(end));
    assert_eq!(window.load(page - 100, &mut [0; 200]), Err(end));
    assert!(window.is_dirty(), "a load that failed settles nothing");
    assert_eq!(window.load_u64(page), Err(end));
    assert_eq!(window.store_u64(page, 1), Err(end));
    assert_eq!(window.fetch_add(page, 1), Err(end));
    assert_eq!(window.compare_swap(page, 0, 1), Err(end));
    for isa in Isa::available() {
        assert_eq!(window.store_by(isa, page - 5, &data[..100]), Err(end), "{isa}");
        assert_eq!(window.load_by(isa, page - 5, &mut [0; 100]), Err(end), "{isa}");
    }
    // SAFETY: our own mapping.
    let closed = unsafe { libc::mprotect(buffer.as_mut_ptr().cast(), page, libc::PROT_NONE) };
    assert_eq!(closed, 0);
    assert!(window.read_back().unwrap_err().is_fault());
    assert!(window.settle().unwrap_err().is_fault());
}

#[test]
fn atomics_count_right_through_two_windows() {
    const EACH: u64 = 20_000;
    let buffer = Arc::new(HostBuffer::new(4096).unwrap());
    let windows = [over(&buffer, 0, 4096), over(&buffer, 64, 1024)];
    thread::scope(|scope| {
        scope.spawn(|| (0..EACH).for_each(|_| _ = windows[0].fetch_add(64, 1).unwrap()));
        scope.spawn(|| {
            for _ in 0..EACH {
                let mut seen = windows[1].load_u64(0).unwrap();
                loop {
                    match windows[1].compare_swap(0, seen, seen + 1).unwrap() {
                        old if old == seen => break,
                        old => seen = old,
                    }
                }
            }
        });
    });
    assert_eq!(windows[0].load_u64(64), Ok(2 * EACH));
}

#[cfg(target_arch = "x86_64")]
/// Atomics do not load from the memory, and store into it.
#[test]
fn a_shadow_has_the_words_that_atomics_stored() {
    const LEN: usize = 100;
    let buffer = Arc::new(HostBuffer::new(256).unwrap());
    buffer.write_at(0, &bytes(256)).unwrap();
    let word = |at: usize| {
        let mut word = [0; 8];
        buffer.read_at(64 + at, &mut word).unwrap();
        u64::from_ne_bytes(word)
    };
    let window = over(&buffer, 64, LEN).with_shadow(Shadowed::Words).unwrap();
    let (first, second, last) = (word(0), word(8), word(88));
    assert_eq!(window.fetch_add(0, 5), Ok(first));
    assert_eq!(word(0), first + 5);
    buffer.write_at(64, &[0; 8]).unwrap(); // which is not allowed, and not seen
    assert_eq!((window.fetch_add(0, 1), word(0)), (Ok(first + 5), first + 6));
    assert_eq!(window.compare_swap(8, second, 77), Ok(second));
    assert_eq!((window.compare_swap(8, second, 78), word(8)), (Ok(77), 77));
    assert_eq!((window.reset(8), word(8)), (Ok(()), 0));
    assert_eq!(window.fetch_add(88, 1), Ok(last));
    // Behind the last whole word, and no word.
    assert!(window.fetch_add(96, 1).is_err() && window.fetch_add(4, 1).is_err());
    assert!(over(&buffer, 3, 64).with_shadow(Shadowed::Words).is_err());
}

#[cfg(target_arch = "x86_64")]
/// A kernel that sees the flag asks for a reset; without the flag it may store 0 itself.
#[test]
fn signals_are_flagged_until_they_are_reset() {
    let buffer = Arc::new(HostBuffer::new(256).unwrap());
    let pair = |at: usize| {
        let mut words = [0; 16];
        buffer.read_at(at, &mut words).unwrap();
        u128::from_ne_bytes(words)
    };
    let (flag, by_kernel) = (1_u128 << 64, [0; 16]);
    let window = over(&buffer, 0, 128).with_shadow(Shadowed::Signals).unwrap();
    assert_eq!(window.fetch_add(64, 5), Ok(0));
    assert_eq!((window.fetch_add(64, 1), pair(64), pair(0)), (Ok(5), flag | 6, 0));
    assert_eq!((window.reset(64), pair(64)), (Ok(()), flag));
    buffer.write_at(64, &by_kernel).unwrap();
    assert_eq!((window.fetch_add(64, 2), pair(64)), (Ok(0), flag | 2));
    assert!(window.reset(128).is_err() && window.reset(4).is_err());
}

#[test]
fn words_are_never_torn_by_any_set() {
    let buffer = Arc::new(HostBuffer::new(8192).unwrap());
    let window = over(&buffer, 0, 8192);
    for isa in Isa::available() {
        // Stores against a reader of words, then loads against a writer of words.
        let done = AtomicBool::new(false);
        let mut torn = None;
        thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..20_000 {
                    let (len, start) = [(24, 0), (120, 8), (512, 24), (4096, 24), (4040, 56)][round / 2 % 5];
                    let data = vec![if round % 2 == 0 { 0 } else { 0xFF }; len];
                    window.store_by(isa, start, &data).unwrap();
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                for word in 0..600 {
                    let seen = window.load_u64(word * 8).unwrap();
                    torn = torn.or((seen != 0 && seen != u64::MAX).then_some(seen));
                }
            }
        });
        assert_eq!(torn, None, "stored by {isa}");

        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut value = u64::MAX;
                while !done.load(Ordering::Relaxed) {
                    (0..1024).for_each(|word| window.store_u64(word * 8, value).unwrap());
                    value = !value;
                }
            });
            for round in 0..12_000 {
                let (len, start) = [(24, 0), (120, 1), (517, 3), (4096, 8), (4096, 61)][round % 5];
                let mut private = vec![0; len];
                window.load_by(isa, start, &mut private).unwrap();
                torn = torn.or(private[start.next_multiple_of(8) - start..]
                    .chunks_exact(8)
                    .map(|word| u64::from_ne_bytes(word.try_into().unwrap()))
                    .find(|&word| word != 0 && word != u64::MAX));
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(torn, None, "loaded by {isa}");
    }
}
