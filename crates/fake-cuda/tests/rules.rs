//! Tests the driver rules that the stand-in models: other tests rely on them.
//!
//! The stand-in has one global state per process; tests that set its knobs are serialised.

use std::sync::mpsc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fake_cuda::client::{GLOBAL, IpcHandle, RELAXED, StandIn, THREAD_LOCAL};

const MIB: usize = 1 << 20;
const NON_BLOCKING: u32 = 1;

const INVALID_VALUE: u32 = 1;
const INVALID_CONTEXT: u32 = 201;
const NOT_READY: u32 = 600;
const DESTROYED: u32 = 709;
const NOT_SUPPORTED: u32 = 801;
const CAPTURE_UNSUPPORTED: u32 = 900;
const CAPTURE_INVALIDATED: u32 = 901;

/// A call that does not return while a kernel spins.
type Blocked = Box<dyn FnOnce() -> u32 + Send>;

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Polls until `done`; a test that waits longer than this has failed.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} did not come");
        thread::sleep(Duration::from_micros(50));
    }
}

#[test]
fn calls_that_need_a_context_are_refused_without_one() {
    let _turn = turn();
    let cuda = StandIn::program();
    let memory = cuda.malloc(4096);
    thread::spawn(move || {
        let (mut out, mut len, mut fd) = (0, 0, 0);
        assert_eq!(cuda.alloc(&mut out, 4096), INVALID_CONTEXT);
        assert_eq!(cuda.address_range(&mut out, &mut len, memory), INVALID_CONTEXT);
        assert_eq!(cuda.export_range(&mut fd, memory, 4096, 1, 0), INVALID_CONTEXT);
        assert_eq!(cuda.ipc_handle(&mut IpcHandle::default(), memory), INVALID_CONTEXT);
        assert_eq!(cuda.attribute(&mut out, 7, memory), 0, "pointer attributes need none");
    })
    .join()
    .unwrap();
    assert_eq!(cuda.free(memory), 0);
}

#[test]
fn a_device_address_is_not_a_pointer() {
    let _turn = turn();
    let cuda = StandIn::program();
    let memory = cuda.malloc(4096);
    let (from, mut to) = (usize::try_from(memory).unwrap(), [0u8; 8]);
    let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(from), iov_len: 8 };
    // SAFETY: the kernel reads the remote side for us, and returns an error where it cannot.
    let read =
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    assert_eq!(read, -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
    assert_eq!(cuda.free(memory), 0);
}

#[test]
fn an_address_used_again_has_another_identity() {
    let _turn = turn();
    let cuda = StandIn::program();
    let (mut first_id, mut second_id) = (0, 0);
    let first = cuda.malloc(4 * MIB);
    assert_eq!(cuda.attribute(&mut first_id, 7, first), 0);
    assert_eq!(cuda.free(first), 0);
    assert_eq!(cuda.attribute(&mut second_id, 7, first), INVALID_VALUE, "freed");
    let second = cuda.malloc(4 * MIB);
    assert_eq!(second, first, "the address is used again");
    assert_eq!(cuda.attribute(&mut second_id, 7, second), 0);
    assert_ne!(first_id, second_id);
    assert_eq!(cuda.free(second), 0);
}

#[test]
fn small_allocations_share_a_block() {
    let _turn = turn();
    let cuda = StandIn::program();
    let (first, second) = (cuda.malloc(700), cuda.malloc(5000));
    assert_eq!(first / (2 * MIB as u64), second / (2 * MIB as u64));
    assert_ne!(second % 4096, 0, "it begins inside a page");
    let (mut base, mut len) = (0, 0);
    assert_eq!(cuda.address_range(&mut base, &mut len, second + 100), 0);
    assert_eq!((base, len), (second, 5000));
    let mut handle = IpcHandle::default();
    assert_eq!(cuda.ipc_handle(&mut handle, second), 0);
    assert_eq!(u64::from(handle.0[7]), second % (2 * MIB as u64), "the offset in the block");
    assert_eq!(cuda.free(first), 0);
    assert_eq!(cuda.free(second), 0);
}

#[test]
fn copies_are_not_over_when_the_call_returns() {
    let _turn = turn();
    let cuda = StandIn::program();
    let memory = cuda.malloc(MIB);
    let mut host = 0;
    assert_eq!(cuda.alloc_host(&mut host, 4096, 0), 0);
    cuda.poke(memory, &[7; 4096]);
    let stream = cuda.stream(NON_BLOCKING);
    let mut event = 0;
    assert_eq!(cuda.create_event(&mut event, 2), 0);
    assert_eq!(cuda.query_event(event), 0, "never recorded");
    cuda.set_copy_delay_us(50_000);
    assert_eq!(cuda.read_async(host, memory, 4096, stream), 0);
    assert_eq!(cuda.record(event, stream), 0);
    assert_eq!(cuda.query_event(event), NOT_READY);
    assert_eq!(cuda.query_stream(stream), NOT_READY);
    assert_eq!(cuda.peek(host, 1), [0]);
    eventually("the event", || cuda.query_event(event) == 0);
    assert_eq!(cuda.peek(host, 4096), [7; 4096]);
    cuda.set_copy_delay_us(5);
    for code in
        [cuda.destroy_event(event), cuda.destroy_stream(stream), cuda.free_host(host), cuda.free(memory)]
    {
        assert_eq!(code, 0);
    }
}

#[test]
fn a_capture_is_broken_by_threads_that_are_not_relaxed() {
    let _turn = turn();
    let cuda = StandIn::program();
    let (captured, other) = (cuda.stream(NON_BLOCKING), cuda.stream(NON_BLOCKING));
    let mut context = 0;
    assert_eq!(cuda.current(&mut context), 0);
    // Capture mode, mode of the calling thread, whether that thread is the capturing one; then
    // whether the call is allowed.
    for (capture, mode, same_thread, allowed) in [
        (GLOBAL, GLOBAL, true, false),
        (GLOBAL, GLOBAL, false, false),
        (GLOBAL, THREAD_LOCAL, true, false),
        (GLOBAL, THREAD_LOCAL, false, true),
        (GLOBAL, RELAXED, true, true),
        (GLOBAL, RELAXED, false, true),
        (THREAD_LOCAL, GLOBAL, true, false),
        (THREAD_LOCAL, GLOBAL, false, true),
        (RELAXED, GLOBAL, true, true),
        (RELAXED, GLOBAL, false, true),
    ] {
        assert_eq!(cuda.begin_capture(captured, capture), 0);
        let ask = move || {
            assert_eq!(cuda.push(context), 0);
            let mut before = mode;
            assert_eq!(cuda.exchange_mode(&mut before), 0);
            let code = cuda.query_stream(other);
            assert_eq!(cuda.exchange_mode(&mut before), 0);
            assert_eq!(before, mode);
            assert_eq!(cuda.pop(&mut 0), 0);
            code
        };
        let code = if same_thread { ask() } else { thread::spawn(ask).join().unwrap() };
        let case = format!("capture {capture}, thread {mode}, same thread {same_thread}");
        assert_eq!(code, if allowed { 0 } else { CAPTURE_UNSUPPORTED }, "{case}");
        let mut graph = 0;
        let end = cuda.end_capture(captured, &mut graph);
        assert_eq!(end, if allowed { 0 } else { CAPTURE_INVALIDATED }, "{case}");
        assert_eq!(graph != 0, allowed, "{case}");
    }
    assert_eq!((cuda.destroy_stream(captured), cuda.destroy_stream(other)), (0, 0));
}

#[test]
fn all_calls_wait_while_they_are_held() {
    let _turn = turn();
    let cuda = StandIn::program();
    let memory = cuda.malloc(4096);
    cuda.hold_calls(1);
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(cuda.attribute(&mut 0, 7, memory)).unwrap());
    // The tests' own work continues.
    cuda.poke(memory, &[5; 8]);
    assert_eq!(cuda.peek(memory, 8), [5; 8]);
    assert!(receiver.recv_timeout(Duration::from_millis(20)).is_err());
    cuda.hold_calls(0);
    assert_eq!(receiver.recv_timeout(Duration::from_secs(20)), Ok(0));
    assert_eq!(cuda.free(memory), 0);
}

#[test]
fn freeing_and_synchronous_copies_wait_for_a_spinning_kernel() {
    let _turn = turn();
    let cuda = StandIn::program();
    let mut context = 0;
    assert_eq!(cuda.current(&mut context), 0);
    let (memory, kept) = (cuda.malloc(MIB), cuda.malloc(MIB));
    let mut host = 0;
    assert_eq!(cuda.alloc_host(&mut host, 4096, 0), 0);
    let (free, bound) = (cuda.stream(NON_BLOCKING), cuda.stream(0));
    cuda.spin(1);
    let (sender, receiver) = mpsc::channel();
    let blocked: [(&str, Blocked); 3] = [
        ("cuMemFree", Box::new(move || cuda.free(memory))),
        ("cuMemcpyDtoH", Box::new(move || cuda.read_sync(host, kept, 64))),
        ("cuStreamSynchronize", Box::new(move || cuda.synchronize_stream(0))),
    ];
    for (name, call) in blocked {
        let sender = sender.clone();
        thread::spawn(move || {
            assert_eq!(cuda.push(context), 0);
            sender.send((name, call())).unwrap();
        });
    }
    // A stream of its own goes on; one that waits for the default stream does not.
    assert_eq!(cuda.read_async(host, kept, 64, free), 0);
    eventually("the copy on a stream of its own", || cuda.query_stream(free) == 0);
    assert_eq!(cuda.read_async(host, kept, 64, bound), 0);
    assert!(receiver.recv_timeout(Duration::from_millis(100)).is_err(), "nothing that blocks has returned");
    assert_eq!(cuda.query_stream(bound), NOT_READY);
    cuda.spin(0);
    for _ in 0..3 {
        let (name, code) =
            receiver.recv_timeout(Duration::from_secs(20)).expect("it returns when the kernel ends");
        assert_eq!(code, 0, "{name}");
    }
    eventually("the copy on the other stream", || cuda.query_stream(bound) == 0);
    for code in [cuda.destroy_stream(free), cuda.destroy_stream(bound), cuda.free_host(host), cuda.free(kept)]
    {
        assert_eq!(code, 0);
    }
}

#[test]
fn kinds_of_memory_are_shared_as_a_driver_shares_them() {
    let _turn = turn();
    let cuda = StandIn::program();
    let (mut handle, mut out, mut fd) = (IpcHandle::default(), 0, -1);
    let stream = cuda.stream(NON_BLOCKING);

    let mut pool = 0;
    assert_eq!(cuda.alloc_async(&mut pool, 4 * MIB, stream), 0);
    assert_eq!(cuda.ipc_handle(&mut handle, pool), INVALID_VALUE);
    assert_eq!(cuda.export_range(&mut fd, pool, 4 * MIB, 1, 0), 0);
    assert_eq!(cuda.live(c"fds"), 1);
    // SAFETY: the descriptor that we received.
    assert_eq!(unsafe { libc::close(fd) }, 0);
    assert_eq!(cuda.live(c"fds"), 0);
    assert_eq!(cuda.free_async(pool, stream), 0);
    eventually("the free", || cuda.attribute(&mut out, 7, pool) == INVALID_VALUE);

    let memory = cuda.malloc(4 * MIB);
    assert_eq!(cuda.export_range(&mut fd, memory + 8, 4096, 1, 0), INVALID_VALUE, "not on a page");
    assert_eq!(cuda.retain_handle(&mut out, memory), INVALID_VALUE, "not VMM");
    assert_eq!(cuda.ipc_handle(&mut handle, memory), 0);
    assert_eq!(cuda.ipc_open(&mut out, handle, 1), INVALID_CONTEXT, "a process cannot import its own");
    cuda.allow_self_import(1);
    assert_eq!(cuda.ipc_open(&mut out, handle, 1), 0);
    cuda.allow_self_import(0);
    cuda.poke(memory + 5, b"hello");
    assert_eq!(cuda.peek(out + 5, 5), b"hello", "the same bytes under another address");
    assert_eq!(cuda.ipc_close(out), 0);
    assert_eq!(cuda.free(memory), 0);

    let (open, private) = (cuda.vmm(1, 2 * MIB, true), cuda.vmm(2, 2 * MIB, false));
    for (memory, wanted) in [(&open, 0), (&private, INVALID_VALUE)] {
        assert_eq!(cuda.retain_handle(&mut out, memory.addr), 0);
        assert_eq!(cuda.export_handle(&mut fd, out, 1, 0), wanted);
        assert_eq!(cuda.release(out), 0);
    }
    // SAFETY: the descriptor that we received.
    assert_eq!(unsafe { libc::close(fd) }, 0);
    assert_eq!(
        cuda.export_range(&mut fd, private.addr, private.len, 1, 0),
        NOT_SUPPORTED,
        "two handles, one memfd"
    );
    cuda.poke(private.addr + 2 * MIB as u64 - 3, b"across");
    assert_eq!(cuda.peek(private.addr + 2 * MIB as u64, 3), b"oss");
    cuda.free_vmm(open);
    cuda.free_vmm(private);
    assert_eq!(cuda.live(c"handles"), 0);
    assert_eq!(cuda.destroy_stream(stream), 0);
}

#[test]
fn a_reset_ends_everything_but_the_handle() {
    let _turn = turn();
    let cuda = StandIn::program();
    let (mut context, mut before, mut after, mut out) = (0, 0, 0, 0);
    assert_eq!(cuda.current(&mut context), 0);
    assert_eq!(cuda.context_id(context, &mut before), 0);
    let memory = cuda.malloc(MIB);
    let stream = cuda.stream(NON_BLOCKING);
    cuda.device_reset();
    assert_eq!(cuda.alloc(&mut out, MIB), DESTROYED);
    assert_eq!(cuda.query_stream(stream), DESTROYED);
    assert_eq!(cuda.attribute(&mut out, 7, memory), INVALID_VALUE);
    assert_eq!(cuda.push(context), DESTROYED);
    // The device is used again: the handle is the same, the context is not.
    let mut again = 0;
    assert_eq!(cuda.retain_primary(&mut again, 0), 0);
    assert_eq!(again, context);
    assert_eq!(cuda.context_id(context, &mut after), 0);
    assert_ne!(before, after);
    assert_eq!(cuda.query_stream(stream), DESTROYED, "what was made in the old one is gone");
    assert_eq!(cuda.push(context), 0);
}

#[test]
fn the_next_call_fails_when_told_to() {
    let _turn = turn();
    let cuda = StandIn::program();
    let before = cuda.calls(c"cuMemAlloc_v2");
    cuda.fail_next(c"cuMemAlloc_v2", 2);
    let mut out = 0;
    assert_eq!(cuda.alloc(&mut out, 64), 2);
    assert_eq!(cuda.alloc(&mut out, 64), 0);
    assert_eq!(cuda.calls(c"cuMemAlloc_v2"), before + 2);
    assert_eq!(cuda.free(out), 0);
}

/// A word behind a copy is written when the copy is over, into pinned memory only.
#[test]
fn a_word_is_written_behind_the_copy() {
    let _turn = turn();
    let cuda = StandIn::program();
    let stream = cuda.stream(NON_BLOCKING);
    let (from, mut pinned) = (cuda.malloc(4096), 0);
    assert_eq!(cuda.alloc_host(&mut pinned, 8192, 0), 0);
    cuda.poke(from, &[7; 64]);
    cuda.poke(pinned, &[0; 8192]);
    cuda.set_copy_delay_us(20_000);
    assert_eq!(cuda.read_async(pinned, from, 64, stream), 0);
    assert_eq!(cuda.write_value(stream, pinned + 4096, 0xABCD, 0), 0);
    assert_eq!(cuda.peek(pinned + 4096, 4), [0; 4], "the copy is not over");
    eventually("the word", || cuda.peek(pinned + 4096, 4) == 0xABCDu32.to_ne_bytes());
    assert_eq!(cuda.peek(pinned, 64), [7; 64]);
    cuda.set_copy_delay_us(5);
    assert_eq!(cuda.write_value(stream, from, 1, 0), INVALID_VALUE);
}
