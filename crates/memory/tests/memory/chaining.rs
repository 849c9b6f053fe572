//! The guard among the program's own handlers. Each scenario runs in a process of its own (this
//! test binary again); its exit status is the result.

#![cfg(target_arch = "x86_64")]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use nobounce_memory::{HostBuffer, Window, guard, page_size};

const CHOSEN: &str = "NOBOUNCE_TEST_SCENARIO";

type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

/// Installs a handler and returns what was there before.
fn take(signal: i32, handler: usize, flags: i32) -> libc::sigaction {
    // SAFETY: plain data; the handlers of this file are made to run at any time.
    unsafe {
        let (mut new, mut old): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
        new.sa_sigaction = handler;
        new.sa_flags = flags;
        assert_eq!(libc::sigaction(signal, &raw const new, &raw mut old), 0);
        old
    }
}

fn address(handler: Handler) -> usize {
    handler as *const () as usize
}

/// A fault that is not ours.
fn crash() -> ! {
    // SAFETY: not safe at all: the point is to die of it, or to end in a handler.
    unsafe { ptr::without_provenance_mut::<u8>(16).write_volatile(1) };
    exit(99)
}

fn exit(code: i32) -> ! {
    // SAFETY: ends the process at once, also from a handler.
    unsafe { libc::_exit(code) }
}

/// Checks that a fault in a copy is still an error.
fn guarded_fault() {
    let buffer = HostBuffer::guarded(page_size()).unwrap();
    // SAFETY: the buffer and its guard page, which live through this function.
    let window = unsafe { Window::new(buffer.as_mut_ptr(), 2 * page_size()) };
    // A single word, so that there is exactly one fault.
    if !window.load(page_size(), &mut [0; 8]).is_err_and(|error| error.is_fault()) {
        exit(98);
    }
}

static CALLS: AtomicUsize = AtomicUsize::new(0);
static EXPECTED_BLOCKED: AtomicI32 = AtomicI32::new(0);
/// The handler that a chaining handler found, as a number.
static FOUND: AtomicUsize = AtomicUsize::new(0);

extern "C" fn exit_42(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel's structure, passed on unchanged.
    let address = unsafe { (*info).si_addr() }.addr();
    exit(if signal == libc::SIGSEGV && address == 16 { 42 } else { 97 })
}

extern "C" fn exit_43_without_info(signal: i32) {
    exit(if signal == libc::SIGSEGV { 43 } else { 97 })
}

extern "C" fn count_and_chain(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    CALLS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: stored by the scenario from what sigaction gave with SA_SIGINFO.
    let next = unsafe { std::mem::transmute::<usize, Handler>(FOUND.load(Ordering::Relaxed)) };
    next(signal, info, context);
}

extern "C" fn exit_by_calls(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    exit(50 + i32::try_from(CALLS.load(Ordering::Relaxed)).unwrap_or(0))
}

extern "C" fn exit_by_mask(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: plain data, filled by the call.
    let (own, other) = unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), &raw mut mask);
        (libc::sigismember(&raw const mask, signal), libc::sigismember(&raw const mask, libc::SIGUSR1))
    };
    exit(if (own, other) == (EXPECTED_BLOCKED.load(Ordering::Relaxed), 0) { 44 } else { 96 })
}

extern "C" fn open_the_page(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    CALLS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the scenario faults on its own guard page only; making it accessible lets the
    // instruction succeed.
    unsafe {
        let page = (*info).si_addr().map_addr(|address| address & !(page_size() - 1));
        libc::mprotect(page, page_size(), libc::PROT_READ | libc::PROT_WRITE);
    }
}

fn run(scenario: &str) {
    let info = libc::SA_SIGINFO;
    match scenario {
        "default" => {
            take(libc::SIGSEGV, libc::SIG_DFL, 0);
            guard::ensure_installed().unwrap();
            guarded_fault();
            crash();
        }
        "ignored" => {
            take(libc::SIGSEGV, libc::SIG_IGN, 0);
            guard::ensure_installed().unwrap();
            // Sent by a program, it is ignored; a fault cannot be.
            // SAFETY: a signal to ourselves.
            unsafe { libc::raise(libc::SIGSEGV) };
            guarded_fault();
            crash();
        }
        "sent" => {
            take(libc::SIGBUS, libc::SIG_DFL, 0);
            guard::ensure_installed().unwrap();
            // SAFETY: a signal to ourselves.
            unsafe { libc::raise(libc::SIGBUS) };
            exit(95);
        }
        "runtime" => {
            // Whatever the Rust runtime has installed stays below us.
            guard::ensure_installed().unwrap();
            guarded_fault();
            crash();
        }
        "before" => {
            take(libc::SIGSEGV, address(exit_42), info);
            guard::ensure_installed().unwrap();
            guarded_fault();
            crash();
        }
        "before, plain" => {
            take(libc::SIGSEGV, exit_43_without_info as *const () as usize, 0);
            guard::ensure_installed().unwrap();
            guarded_fault();
            crash();
        }
        "before, deferring" | "before, not deferring" => {
            let nodefer = scenario == "before, not deferring";
            EXPECTED_BLOCKED.store(i32::from(!nodefer), Ordering::Relaxed);
            take(libc::SIGSEGV, address(exit_by_mask), info | if nodefer { libc::SA_NODEFER } else { 0 });
            guard::ensure_installed().unwrap();
            crash();
        }
        "before, returning" => {
            take(libc::SIGSEGV, address(open_the_page), info);
            guard::ensure_installed().unwrap();
            let buffer = HostBuffer::guarded(page_size()).unwrap();
            let beyond = buffer.as_mut_ptr().wrapping_add(page_size());
            // SAFETY: the guard page, which the handler opens.
            unsafe { beyond.write_volatile(7) };
            // SAFETY: open by now.
            let value = unsafe { beyond.read_volatile() };
            guarded_fault();
            exit(if (value, CALLS.load(Ordering::Relaxed)) == (7, 1) { 45 } else { 94 });
        }
        "before, once" => {
            take(libc::SIGSEGV, address(open_the_page), info | libc::SA_RESETHAND);
            guard::ensure_installed().unwrap();
            crash_after_one_rescue();
        }
        "after, chaining" => {
            take(libc::SIGSEGV, address(exit_by_calls), info);
            guard::ensure_installed().unwrap();
            let found = take(libc::SIGSEGV, address(count_and_chain), info);
            FOUND.store(found.sa_sigaction, Ordering::Relaxed);
            guarded_fault();
            crash();
        }
        "after, chaining, and we come back on top" => {
            take(libc::SIGSEGV, address(exit_by_calls), info);
            guard::ensure_installed().unwrap();
            let found = take(libc::SIGSEGV, address(count_and_chain), info);
            FOUND.store(found.sa_sigaction, Ordering::Relaxed);
            for _ in 0..100 {
                guard::ensure_installed().unwrap();
            }
            guarded_fault();
            crash();
        }
        "after, not chaining, and we come back on top" => {
            guard::ensure_installed().unwrap();
            take(libc::SIGSEGV, address(exit_42), info);
            guard::ensure_installed().unwrap();
            guarded_fault();
            crash();
        }
        other => panic!("no scenario {other:?}"),
    }
}

/// The first fault is repaired by a one-shot handler; the second takes the default action.
fn crash_after_one_rescue() -> ! {
    let buffer = HostBuffer::guarded(page_size()).unwrap();
    let beyond = buffer.as_mut_ptr().wrapping_add(page_size());
    // SAFETY: the guard page, which the handler opens.
    unsafe { beyond.write_volatile(7) };
    crash();
}

fn play(scenario: &str) -> ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "chaining::scenario_process", "--test-threads=1", "--nocapture"])
        .env(CHOSEN, scenario)
        .output()
        .unwrap()
        .status
}

/// The body of the child process; does nothing in an ordinary run.
#[test]
fn scenario_process() {
    let Ok(scenario) = std::env::var(CHOSEN) else { return };
    // SAFETY: no core files, and an end in any case.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
        libc::alarm(20);
    }
    run(&scenario);
}

#[test]
fn faults_of_others_take_the_default_action() {
    for (scenario, signal) in [
        ("default", libc::SIGSEGV),
        ("ignored", libc::SIGSEGV),
        ("sent", libc::SIGBUS),
        ("runtime", libc::SIGSEGV),
        ("before, once", libc::SIGSEGV),
    ] {
        let status = play(scenario);
        assert_eq!(status.signal(), Some(signal), "{scenario}: {status}");
    }
}

#[test]
fn handlers_before_and_after_ours_get_their_own_faults() {
    for (scenario, code) in [
        ("before", 42),
        ("before, plain", 43),
        ("before, deferring", 44),
        ("before, not deferring", 44),
        ("before, returning", 45),
        // It sees our fault and the other one, and passes both on.
        ("after, chaining", 52),
        // It sees the other one only, and chains to us, and we chain to the oldest.
        ("after, chaining, and we come back on top", 51),
        ("after, not chaining, and we come back on top", 42),
    ] {
        let status = play(scenario);
        assert_eq!(status.code(), Some(code), "{scenario}: {status}");
    }
}
