//! The signal handler, and how it gets in place.

use std::io;
use std::mem;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use super::InstallError;
use super::history::{History, LIMIT};
use super::nesting;
use crate::copy;

/// A memory error found in the background and reported asynchronously (action optional): not a
/// fault of the interrupted code.
const BUS_MCEERR_AO: i32 = 5;

static SEGV: History = History::new();
static BUS: History = History::new();
/// Held while installing, never in the handler.
static INSTALL: Mutex<()> = Mutex::new(());

pub(super) fn ensure_installed() -> Result<(), InstallError> {
    let _one_at_a_time = INSTALL.lock().unwrap_or_else(PoisonError::into_inner);
    install(libc::SIGSEGV, "SIGSEGV", &SEGV)?;
    install(libc::SIGBUS, "SIGBUS", &BUS)
}

fn install(signal: i32, name: &'static str, history: &History) -> Result<(), InstallError> {
    let remember = |found: &libc::sigaction| {
        // SAFETY: the lock of `ensure_installed` is held.
        let room = unsafe { history.remember(found) };
        if room { Ok(()) } else { Err(InstallError::TooManyHandlers { signal: name, limit: LIMIT }) }
    };
    let found = disposition(signal, None).map_err(refused)?;
    if is_ours(&found) {
        return Ok(());
    }
    // Remembered before it is replaced: the handler may be called at once.
    remember(&found)?;
    // SAFETY: sigaction is plain data, and zero is an empty mask.
    let mut ours: libc::sigaction = unsafe { mem::zeroed() };
    ours.sa_sigaction = ours_address();
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | (found.sa_flags & libc::SA_RESTART);
    let replaced = disposition(signal, Some(&ours)).map_err(refused)?;
    // Another handler may have been installed between the two calls.
    if is_ours(&replaced) { Ok(()) } else { remember(&replaced) }
}

fn refused(source: io::Error) -> InstallError {
    InstallError::Refused { call: "sigaction", source }
}

/// Reads a signal's disposition, and replaces it if `new` is given.
fn disposition(signal: i32, new: Option<&libc::sigaction>) -> io::Result<libc::sigaction> {
    // SAFETY: sigaction is plain data.
    let mut old: libc::sigaction = unsafe { mem::zeroed() };
    // SAFETY: both structures live through the call, and a new handler, if given, is one that may
    // run at any time.
    let answer = unsafe { libc::sigaction(signal, new.map_or(ptr::null(), ptr::from_ref), &raw mut old) };
    if answer == 0 { Ok(old) } else { Err(io::Error::last_os_error()) }
}

fn is_ours(action: &libc::sigaction) -> bool {
    action.sa_sigaction == ours_address()
}

fn ours_address() -> usize {
    (on_fault as *const ()).addr()
}

/// Runs on any thread at any instruction: no allocation, no lock, no panic, and errno as it was.
extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel (or a handler that chains to us with SA_SIGINFO) passes valid structures.
    let code = unsafe { (*info).si_code };
    let is_fault = code > 0 && !(signal == libc::SIGBUS && code == BUS_MCEERR_AO);
    if is_fault {
        // SAFETY: as above; the context of a signal with SA_SIGINFO is a ucontext_t.
        let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
        // REG_RIP is a small positive constant.
        #[allow(clippy::cast_sign_loss, reason = "REG_RIP is the constant 16")]
        let instruction = &mut registers[libc::REG_RIP as usize];
        if let Some(resume) = copy::find_fixup(instruction.cast_unsigned()) {
            *instruction = resume.cast_signed();
            return;
        }
    }
    // SAFETY: errno's address is valid for this thread, always.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    pass_on(signal, is_fault, info, context);
    // SAFETY: as above.
    unsafe { *errno = saved };
}

/// The number of this thread, as a system call: glibc has no function for it before 2.30.
fn thread_id() -> i32 {
    // SAFETY: the call has no preconditions.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) };
    i32::try_from(thread).unwrap_or(0)
}

/// Does with the signal what would have happened without us.
fn pass_on(signal: i32, is_fault: bool, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let history = if signal == libc::SIGSEGV { &SEGV } else { &BUS };
    let frame_mark = 0u8;
    let thread = thread_id();
    let visit = nesting::enter(
        thread.cast_unsigned(),
        signal.cast_unsigned(),
        (&raw const frame_mark).addr(),
        context.addr(),
        !is_fault,
    );
    match history.at(visit.level) {
        Some(action) if action.sa_sigaction == libc::SIG_IGN && !is_fault => {}
        // The kernel does not let a fault be ignored: it takes the default action.
        Some(action) if action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN => {
            call(&action, signal, info, context);
        }
        _ => take_default(signal, is_fault, info),
    }
    visit.leave();
}

/// Calls a handler with its signal mask applied.
fn call(action: &libc::sigaction, signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: sigset_t is plain data; both are filled before they are read.
    let (mut before, mut own) = unsafe { mem::zeroed::<(libc::sigset_t, libc::sigset_t)>() };
    // SAFETY: the sets live through the calls, all of which are async-signal-safe. Ours blocks its
    // own signal and no other, so unblocking that one is all that SA_NODEFER takes.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const action.sa_mask, &raw mut before);
        if action.sa_flags & libc::SA_NODEFER != 0
            && libc::sigismember(&raw const action.sa_mask, signal) == 0
        {
            libc::sigemptyset(&raw mut own);
            libc::sigaddset(&raw mut own, signal);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const own, ptr::null_mut());
        }
    }
    if action.sa_flags & libc::SA_SIGINFO != 0 {
        type Informed = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
        // SAFETY: this address was installed with SA_SIGINFO, which requires a handler of three
        // arguments.
        let handler = unsafe { mem::transmute::<usize, Informed>(action.sa_sigaction) };
        handler(signal, info, context);
    } else {
        // SAFETY: this address was installed without SA_SIGINFO, which requires a handler of one
        // argument.
        let handler = unsafe { mem::transmute::<usize, extern "C" fn(i32)>(action.sa_sigaction) };
        handler(signal);
    }
    // SAFETY: `before` was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
}

/// Restores the default action and raises the signal again. A fault repeats by itself with its
/// instruction, so that the core dump shows the true location. A sent signal is sent again, with
/// the same sender.
fn take_default(signal: i32, is_fault: bool, info: *mut libc::siginfo_t) {
    // SAFETY: sigaction is plain data, and zero is SIG_DFL.
    let default: libc::sigaction = unsafe { mem::zeroed() };
    // SAFETY: sigaction is async-signal-safe, and the default action is always allowed.
    unsafe { libc::sigaction(signal, &raw const default, ptr::null_mut()) };
    if !is_fault {
        // SAFETY: a plain system call with numbers and a siginfo that lives through it.
        unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, libc::getpid(), thread_id(), signal, info) };
    }
}
