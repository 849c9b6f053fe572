//! Guarantees of a window while its memory is mapped.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nobounce_memory::{AccessError, HostBuffer, page_size};

#[test]
fn every_small_size_at_every_alignment_matches_the_oracle() {
    let size = 3 * page_size();
    let buffer = HostBuffer::guarded(size).unwrap();
    // SAFETY: the buffer outlives the window.
    let window = unsafe { buffer.window() };
    let mut oracle = vec![0u8; size];
    let source: Vec<u8> = (0..=255u8).cycle().skip(7).take(size).collect();
    let mut turn = 0;
    for len in (0..=290).chain([511, 512, 4095, 4096, 4097, 5000]) {
        for offset in 0..17 {
            for shift in [0, 1, 2, 4, 7] {
                turn += 1;
                let data = &source[(shift + turn % 64)..][..len];
                if turn % 2 == 0 { window.store(offset, data) } else { window.store_last(offset, data) }
                    .unwrap();
                oracle[offset..][..len].copy_from_slice(data);
                let mut private = vec![0xAA; len + shift + 1];
                window.load(offset, &mut private[shift..][..len]).unwrap();
                assert!(private[shift..][..len] == *data, "load {len} at {offset}, shift {shift}");
                assert!(private[shift + len] == 0xAA && private[..shift].iter().all(|&byte| byte == 0xAA));
            }
        }
        let mut all = vec![0; size];
        window.load(0, &mut all).unwrap();
        assert!(all == oracle, "bytes outside a store of {len} changed");
    }
}

#[test]
fn bounds_and_alignment_are_checked_before_anything_is_touched() {
    let buffer = HostBuffer::new(100).unwrap();
    // SAFETY: the buffer outlives the window.
    let window = unsafe { buffer.window() };
    assert_eq!((window.len(), window.is_empty(), window.base_addr()), (100, false, buffer.addr()));
    window.store(100, &[]).unwrap();
    window.load(0, &mut [0; 100]).unwrap();
    for (offset, len) in [(0, 101), (100, 1), (101, 0), (usize::MAX, 2), (usize::MAX, 1)] {
        let error = AccessError::OutOfBounds { offset, len, window: 100 };
        assert_eq!(window.store(offset, &vec![1; len]), Err(error));
        assert_eq!(window.store_last(offset, &vec![1; len]), Err(error));
        assert_eq!(window.load(offset, &mut vec![1; len]), Err(error));
    }
    assert!(matches!(window.load_u64(96), Err(AccessError::OutOfBounds { .. })));
    for offset in 1..8 {
        let error = AccessError::Misaligned { address: buffer.addr() + offset };
        let offset = usize::try_from(offset).unwrap();
        assert_eq!(window.fetch_add(offset, 1), Err(error));
        assert_eq!(window.compare_swap(offset, 0, 1), Err(error));
        assert_eq!(window.load_u64(offset), Err(error));
        assert_eq!(window.store_u64(offset, 1), Err(error));
    }
    let mut all = [1; 100];
    window.load(0, &mut all).unwrap();
    assert_eq!(all, [0; 100]);
}

#[test]
fn atomics_do_what_the_standard_says() {
    let buffer = HostBuffer::new(64).unwrap();
    // SAFETY: the buffer outlives the window.
    let window = unsafe { buffer.window() };
    window.store_u64(8, u64::MAX - 1).unwrap();
    assert_eq!(window.fetch_add(8, 3), Ok(u64::MAX - 1));
    assert_eq!(window.load_u64(8), Ok(1));
    assert_eq!(window.compare_swap(8, 2, 9), Ok(1));
    assert_eq!(window.load_u64(8), Ok(1));
    assert_eq!(window.compare_swap(8, 1, 9), Ok(1));
    assert_eq!(window.load_u64(8), Ok(9));
    assert_eq!((window.load_u64(0), window.load_u64(16)), (Ok(0), Ok(0)));
}

#[test]
fn adds_of_several_threads_and_of_the_program_itself_all_count() {
    const EACH: u64 = 100_000;
    let buffer = HostBuffer::new(8).unwrap();
    // SAFETY: the buffer outlives the window and the reference to its one word, and all access to
    // it is atomic.
    let (window, word) = unsafe { (buffer.window(), AtomicU64::from_ptr(buffer.as_mut_ptr().cast())) };
    thread::scope(|scope| {
        scope.spawn(move || (0..EACH).for_each(|_| _ = window.fetch_add(0, 1).unwrap()));
        scope.spawn(move || {
            for _ in 0..EACH {
                let mut seen = window.load_u64(0).unwrap();
                loop {
                    match window.compare_swap(0, seen, seen + 1).unwrap() {
                        old if old == seen => break,
                        old => seen = old,
                    }
                }
            }
        });
        (0..EACH).for_each(|_| _ = word.fetch_add(1, Ordering::Relaxed));
    });
    assert_eq!(window.load_u64(0), Ok(3 * EACH));
}

/// Sizes that take each of the loops, at every offset of the private side that changes the choice.
#[cfg(target_arch = "x86_64")]
const SHAPES: [(usize, usize); 8] =
    [(24, 0), (64, 3), (120, 0), (512, 0), (512, 12), (4096, 0), (4096, 12), (8192, 8)];

#[cfg(target_arch = "x86_64")]
#[test]
fn loads_never_tear_a_word() {
    let buffer = HostBuffer::new(16384).unwrap();
    // SAFETY: the buffer outlives the window.
    let window = unsafe { buffer.window() };
    let done = std::sync::atomic::AtomicBool::new(false);
    // Asserted after the other thread was stopped: a failed assertion must not leave it running.
    let mut torn = None;
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = u64::MAX;
            while !done.load(Ordering::Relaxed) {
                (0..1024).for_each(|word| window.store_u64(word * 8, value).unwrap());
                value = !value;
            }
        });
        for (len, shift) in SHAPES {
            let mut private = vec![0; len + shift];
            for round in 0..20_000 {
                // A start inside a word: the bytes up to the first whole word are skipped below.
                let start = [0, 1, 5, 8][round % 4];
                window.load(start, &mut private[shift..]).unwrap();
                let whole_words = private[shift + start.next_multiple_of(8) - start..].chunks_exact(8);
                torn = torn.or(whole_words
                    .map(|word| u64::from_ne_bytes(word.try_into().unwrap()))
                    .find(|&word| word != 0 && word != u64::MAX)
                    .map(|word| (word, len)));
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(torn, None, "a torn word, and the length of its load");
}

#[cfg(target_arch = "x86_64")]
#[test]
fn stores_never_tear_a_word() {
    let buffer = HostBuffer::new(16384).unwrap();
    // SAFETY: the buffer outlives the window.
    let window = unsafe { buffer.window() };
    let done = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for (len, shift) in SHAPES {
                let private = [vec![0; len + shift], vec![0xFF; len + shift]];
                for round in 0..40_000 {
                    let data = &private[round % 2][shift..];
                    if round % 4 < 2 { window.store(0, data) } else { window.store_last(0, data) }.unwrap();
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            for word in 0..1024 {
                let seen = window.load_u64(word * 8).unwrap();
                // Where a message of 120 or 24 bytes ended, older words remain; each of them is
                // whole all the same.
                assert!(seen == 0 || seen == u64::MAX, "torn: {seen:x}");
            }
        }
    });
}

/// A reader spins on the last byte, as ib_write_lat does, and must then find the whole message.
#[test]
fn a_reader_that_sees_the_last_byte_sees_the_message() {
    for (len, offset) in [(1, 0), (8, 3), (64, 0), (65, 5), (100, 1), (1000, 4), (4096, 0), (9001, 7)] {
        let buffer = HostBuffer::new(16384).unwrap();
        // SAFETY: the buffer outlives the window.
        let window = unsafe { buffer.window() };
        let acknowledged = AtomicU64::new(0);
        let rounds = 1..=300u64;
        let deadline = Instant::now() + Duration::from_secs(60);
        thread::scope(|scope| {
            scope.spawn(|| {
                for round in rounds.clone() {
                    window.store_last(offset, &vec![u8::try_from(round % 251).unwrap(); len]).unwrap();
                    while acknowledged.load(Ordering::Acquire) < round && Instant::now() < deadline {
                        thread::yield_now();
                    }
                }
            });
            let mut message = vec![0; len];
            for round in rounds.clone() {
                let expected = u8::try_from(round % 251).unwrap();
                let mut last = [!expected];
                for spin in 1u64.. {
                    if last[0] == expected {
                        break;
                    }
                    if spin.is_multiple_of(1000) {
                        // The writer may have no processor.
                        thread::yield_now();
                    }
                    assert!(Instant::now() < deadline, "the last byte of round {round} never came");
                    window.load(offset + len - 1, &mut last).unwrap();
                }
                window.load(offset, &mut message).unwrap();
                let whole = message.iter().all(|&byte| byte == expected);
                // Even if it failed, let the writer end.
                acknowledged.store(if whole { round } else { u64::MAX }, Ordering::Release);
                assert!(whole, "{len} bytes, round {round}");
            }
        });
    }
}
