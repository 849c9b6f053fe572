//! Memory that is gone, or was never there, ends in an error; what lies before it is copied.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use nobounce_memory::{AccessError, HostBuffer, Window, guard, page_size};

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from(i * 31 % 251 + 1).unwrap()).collect()
}

/// A window onto a buffer with a guard page before and behind it.
fn with_margins(buffer: &HostBuffer) -> Window {
    let page = page_size();
    guard::ensure_installed().unwrap();
    // SAFETY: the buffer's own memory and its guard pages; each test uses it while the buffer
    // lives.
    unsafe { Window::new(buffer.as_mut_ptr().wrapping_sub(page), buffer.len() + 2 * page) }
}

fn fault_at(result: Result<(), AccessError>) -> u64 {
    match result {
        Err(AccessError::Faulted { address }) => address,
        other => panic!("expected a fault, got {other:?}"),
    }
}

#[test]
fn copies_stop_where_the_memory_stops() {
    let page = page_size();
    let buffer = HostBuffer::guarded(4 * page).unwrap();
    let window = with_margins(&buffer);
    let end = buffer.addr() + buffer.len() as u64;
    let source = bytes(5 * page);
    // The lengths cover every kind of loop, the distances every alignment; the private side is
    // shifted against the window too.
    for reach in (1..200).chain([1000, 4095, 4096, 4099, 3 * page]) {
        for beyond in [1, 2, 3, 4, 7, 8, 9, 31, 64, 130, 4096] {
            for shift in [0, 1, 4] {
                let (len, offset) = (reach + beyond, page + buffer.len() - reach);
                let data = &source[shift..][..len];
                buffer.write_at(buffer.len() - reach, &vec![0; reach]).unwrap();
                assert_eq!(fault_at(window.store(offset, data)), end, "{reach} + {beyond}");
                let mut stored = vec![0; reach];
                buffer.read_at(buffer.len() - reach, &mut stored).unwrap();
                assert!(stored == data[..reach], "store of {reach} + {beyond}, shift {shift}");

                let mut loaded = vec![0xEE; len + shift];
                assert_eq!(fault_at(window.load(offset, &mut loaded[shift..])), end);
                assert!(
                    loaded[shift..][..reach] == data[..reach],
                    "load of {reach} + {beyond}, shift {shift}"
                );
                assert!(loaded[shift + reach..].iter().all(|&byte| byte == 0xEE));

                assert_eq!(fault_at(window.store_last(offset, data)), end);
            }
        }
    }
    assert_eq!(fault_at(window.load(page - 3, &mut [0; 8])), buffer.addr() - 3);
}

#[test]
fn words_and_atomics_fault_too() {
    let buffer = HostBuffer::guarded(page_size()).unwrap();
    let window = with_margins(&buffer);
    let fault = AccessError::Faulted { address: buffer.addr() - 8 };
    let offset = page_size() - 8;
    assert_eq!(window.load_u64(offset), Err(fault));
    assert_eq!(window.store_u64(offset, 1), Err(fault));
    assert_eq!(window.fetch_add(offset, 1), Err(fault));
    assert_eq!(window.compare_swap(offset, 0, 1), Err(fault));
    assert!(fault.is_fault());
}

#[test]
fn wild_addresses_fault() {
    guard::ensure_installed().unwrap();
    // Null, a non-canonical address (another exception with no address), and the kernel's half.
    for address in [0usize, 0x8000_0000_0000_0000 - 4096, usize::MAX - 8191] {
        // SAFETY: nothing of ours can be mapped at these addresses.
        let window = unsafe { Window::new(ptr::without_provenance_mut(address), 4096) };
        assert!(window.load(0, &mut [0; 256]).unwrap_err().is_fault());
        assert!(window.store(0, &[0; 256]).unwrap_err().is_fault());
        assert!(window.fetch_add(0, 1).unwrap_err().is_fault());
    }
}

#[test]
fn read_only_memory_loads_but_does_not_store() {
    let buffer = HostBuffer::new(page_size()).unwrap();
    buffer.write_at(0, &bytes(page_size())).unwrap();
    guard::ensure_installed().unwrap();
    // SAFETY: the buffer outlives the window.
    let window = unsafe { buffer.window() };
    // SAFETY: our own mapping.
    assert_eq!(unsafe { libc::mprotect(buffer.as_mut_ptr().cast(), buffer.len(), libc::PROT_READ) }, 0);
    let mut back = vec![0; page_size()];
    window.load(0, &mut back).unwrap();
    assert_eq!(back, bytes(page_size()));
    assert_eq!(fault_at(window.store(0, &[9; 100])), buffer.addr());
    assert_eq!(fault_at(window.store_last(8, &[9; 100])), buffer.addr() + 8);
    // Even a comparison that fails is a write to the processor.
    assert!(window.compare_swap(0, 0, 1).unwrap_err().is_fault());
    assert!(window.fetch_add(0, 0).unwrap_err().is_fault());
    assert!(window.store_u64(0, 0).unwrap_err().is_fault());
    window.load(0, &mut back).unwrap();
    assert_eq!(back, bytes(page_size()));
}

#[test]
fn a_file_truncated_under_its_mapping_is_a_fault() {
    let page = page_size();
    // SAFETY: a plain system call; the name is a constant.
    let fd = unsafe { libc::memfd_create(c"truncated".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the descriptor was just made and has no other owner.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(4 * page as u64).unwrap();
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping of our own file.
    let base =
        unsafe { libc::mmap(ptr::null_mut(), 4 * page, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    assert_ne!(base, libc::MAP_FAILED);
    guard::ensure_installed().unwrap();
    // SAFETY: the mapping stays until the end of the test.
    let window = unsafe { Window::new(base.cast(), 4 * page) };
    window.store(0, &bytes(4 * page)).unwrap();

    file.set_len(page as u64).unwrap();
    let mut back = vec![0; 4 * page];
    assert_eq!(fault_at(window.load(0, &mut back)), window.base_addr() + page as u64);
    assert_eq!(back[..page], bytes(page));
    assert_eq!(fault_at(window.store(0, &back)), window.base_addr() + page as u64);
    assert!(window.fetch_add(2 * page, 1).unwrap_err().is_fault());
    // SAFETY: our own mapping, not used any more.
    unsafe { libc::munmap(base, 4 * page) };
}

#[test]
fn memory_taken_away_by_another_thread() {
    let len = 64 * page_size();
    let buffer = HostBuffer::new(len).unwrap();
    guard::ensure_installed().unwrap();
    // SAFETY: the buffer outlives all use. The other thread removes and restores the permissions,
    // so that the addresses stay ours.
    let window = unsafe { buffer.window() };
    let done = AtomicBool::new(false);
    let (mut faults, mut whole, mut other) = (0, 0, None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let base = buffer.as_mut_ptr();
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            while !done.load(Ordering::Relaxed) {
                // SAFETY: replaces pages of our own mapping, first by inaccessible ones, then by
                // fresh zeros.
                unsafe {
                    libc::mmap(base.add(len / 2).cast(), len / 2, libc::PROT_NONE, flags, -1, 0);
                    std::thread::yield_now();
                    libc::mmap(base.add(len / 2).cast(), len / 2, rights, flags, -1, 0);
                }
                std::thread::yield_now();
            }
        });
        let mut copy = vec![0; len];
        for round in 0..200_000 {
            let outcome = if round % 2 == 0 { window.load(0, &mut copy) } else { window.store(0, &copy) };
            match outcome {
                Ok(()) => whole += 1,
                Err(error) if error.is_fault() => faults += 1,
                Err(error) => other = Some(error),
            }
            if faults >= 100 && whole >= 100 {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(other, None);
    assert!(faults > 0 && whole > 0, "{faults} faults, {whole} whole copies");
}

#[test]
fn a_thread_that_blocks_all_signals_can_admit_faults() {
    let buffer = HostBuffer::guarded(page_size()).unwrap();
    let window = with_margins(&buffer);
    std::thread::spawn(move || {
        // SAFETY: plain data, filled before use; changes this thread's mask only.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, ptr::null_mut());
        }
        guard::admit_faults().unwrap();
        assert!(window.load(0, &mut [0; 8]).unwrap_err().is_fault());
    })
    .join()
    .unwrap();
}
