//! `Window::load_crc`: the CRC matches the bytes that arrived, under concurrent writes to the
//! window.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nobounce_memory::{AccessError, HostBuffer, guard, page_size};

#[test]
fn it_goes_on_from_an_earlier_sum() {
    let buffer = HostBuffer::new(8192).unwrap();
    let source: Vec<u8> = (0..8192u32).map(|i| u8::try_from(i * 31 % 251).unwrap()).collect();
    buffer.write_at(0, &source).unwrap();
    // SAFETY: the buffer outlives the window.
    let window = unsafe { buffer.window() };
    let mut copy = vec![0; 8192];
    let mut crc = 0;
    for (start, end) in [(0, 0), (0, 1), (1, 500), (500, 4096), (4096, 8191), (8191, 8192)] {
        crc = window.load_crc(start, &mut copy[start..end], crc).unwrap();
    }
    assert_eq!(copy, source);
    assert_eq!(crc, crc32fast::hash(&source));
}

#[test]
fn it_is_bounded_and_guarded_like_a_load() {
    guard::ensure_installed().unwrap();
    let buffer = HostBuffer::guarded(page_size()).unwrap();
    // SAFETY: the buffer outlives the window.
    let window = unsafe { buffer.window() };
    let mut copy = vec![0; page_size()];
    let out = AccessError::OutOfBounds { offset: 1, len: page_size(), window: page_size() };
    assert_eq!(window.load_crc(1, &mut copy, 0), Err(out));
    // SAFETY: our own mapping.
    let closed = unsafe { libc::mprotect(buffer.as_mut_ptr().cast(), buffer.len(), libc::PROT_NONE) };
    assert_eq!(closed, 0);
    let fault = AccessError::Faulted { address: buffer.addr() + 3 };
    assert_eq!(window.load_crc(3, &mut copy[3..], 0), Err(fault));
}

/// Another thread inverts the words continuously: the CRC must match the copied bytes, and no word
/// may be torn.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_window_that_changes_neither_spoils_the_sum_nor_tears_words() {
    let buffer = HostBuffer::new(8192).unwrap();
    // SAFETY: the buffer outlives the window.
    let window = unsafe { buffer.window() };
    let done = AtomicBool::new(false);
    let (mut wrong, mut torn, mut mixed) = (None, None, 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = u64::MAX;
            while !done.load(Ordering::Relaxed) {
                (0..1024).for_each(|word| window.store_u64(word * 8, value).unwrap());
                value = !value;
            }
        });
        for (len, shift) in [(200, 0), (300, 3), (1024, 16), (4096, 16), (4096, 12), (8000, 1)] {
            let mut private = vec![0; len + shift];
            for round in 0..10_000 {
                let start = [0, 1, 5, 8, 61, 64, 100][round % 7];
                let crc = window.load_crc(start, &mut private[shift..], 7).unwrap();
                let mut hasher = crc32fast::Hasher::new_with_initial(7);
                hasher.update(&private[shift..]);
                if crc != hasher.finalize() {
                    wrong = Some((len, start));
                }
                let whole = &private[shift + start.next_multiple_of(8) - start..];
                let mut words =
                    whole.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
                let first = words.next().unwrap();
                mixed += u32::from(words.clone().any(|word| word != first));
                torn = torn.or(words.find(|&word| word != 0 && word != u64::MAX).map(|word| (word, len)));
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(wrong, None, "length and start of a load whose sum is wrong");
    assert_eq!(torn, None, "a torn word, and the length of its load");
    assert!(mixed > 0, "the window never changed during a load: nothing was shown");
}
