//! Registered memory that is freed under the watcher: its window is revoked soon after, whatever
//! freed the memory, and for no other reason.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::{MIB, Made, alone, eventually, mappings, open_files, register};
use crate::gpu_standin_kinds::fake_gdrdrv;
use fake_cuda::client::StandIn;
use nobounce_memory::gpu::{Gone, GpuMemory, Method};

/// Three rounds of the watcher thread.
const A_WHILE: Duration = Duration::from_millis(60);

/// Registers memory and has it watched.
#[track_caller]
fn watched(addr: u64, len: usize) -> Arc<GpuMemory> {
    let memory = Arc::new(register(addr, len).unwrap());
    assert!(memory.window().is_some(), "{memory}");
    memory.end_when_freed().unwrap();
    memory
}

/// All of it is still reached.
#[track_caller]
fn lives(memory: &GpuMemory) {
    let window = memory.window().unwrap();
    window.store_last(0, &[1; 64]).unwrap();
    window.load(memory.len() - 64, &mut [0; 64]).unwrap();
    assert_eq!(memory.ended(), None);
}

/// Nothing of it is reached any more, from now on or soon.
#[track_caller]
fn ends(memory: &GpuMemory, why: &str) -> Gone {
    let (window, begin) = (memory.window().unwrap(), Instant::now());
    eventually("it is cut off", || window.store(0, &[2; 64]).is_err_and(|error| error.is_fault()));
    println!("{why}: cut off after {:?}", begin.elapsed());
    let gone = memory.ended().expect("a reason");
    assert!(gone.to_string().contains(why), "{gone}");
    assert_eq!(memory.ended_at(memory.len() - 8, 8), Some(gone));
    let far = memory.len() - 64;
    assert!(window.store_last(far, &[4; 64]).is_err() && window.load(far, &mut [0; 8]).is_err());
    assert!(window.fetch_add(0, 1).is_err() && window.read_back().is_err());
    gone
}

/// Short allocations are parts of a chunk, which CUDA reuses; the window keeps long ones alive, and
/// stores to them are lost.
#[test]
fn memory_that_was_freed_is_cut_off() {
    alone("gpu_standin_ended::memory_that_was_freed_is_cut_off", &[], || {
        let cuda = StandIn::program();
        for len in [256, 70_000, MIB, 2 * MIB, 5 * MIB] {
            let addr = cuda.malloc(len);
            let (old, other) = (watched(addr, len), watched(cuda.malloc(len), len));
            sleep(A_WHILE);
            lives(&old);
            assert_eq!(cuda.free(addr), 0);
            let again = cuda.malloc(len);
            cuda.poke(again, &[3; 64]);
            ends(&old, "was freed");
            cuda.poke(again, &[3; 64]);
            assert!(old.window().unwrap().store(0, &[4; 64]).is_err());
            assert_eq!(cuda.peek(again, 64), [3; 64]);
            // The new memory at that address is another registration, and the neighbour goes on.
            lives(&watched(again, len));
            lives(&other);
        }
    });
}

#[test]
fn vmm_memory_that_was_unmapped_is_cut_off() {
    alone("gpu_standin_ended::vmm_memory_that_was_unmapped_is_cut_off", &[], || {
        let cuda = StandIn::program();
        let vmm = cuda.vmm(1, 2 * MIB, true);
        let memory = watched(vmm.addr, vmm.len);
        sleep(A_WHILE);
        lives(&memory);
        assert_eq!(cuda.unmap(vmm.addr, vmm.len), 0);
        ends(&memory, "was freed");
    });
}

/// Of a range of several handles only what was unmapped ends.
#[test]
fn a_part_that_was_unmapped_ends_by_itself() {
    alone("gpu_standin_ended::a_part_that_was_unmapped_ends_by_itself", &[], || {
        let (cuda, each) = (StandIn::program(), 2 * MIB);
        let vmm = cuda.vmm(3, each, true);
        let memory = watched(vmm.addr, vmm.len);
        let window = memory.window().unwrap();
        for part in [1, 2, 0] {
            lives_at(&memory, part * each);
            assert_eq!(cuda.unmap(vmm.addr + (part * each) as u64, each), 0);
            eventually("it is cut off", || window.store(part * each, &[2; 64]).is_err());
            assert!(memory.ended_at(part * each, 1).is_some() && memory.ended().is_some());
            if part == 1 {
                lives_at(&memory, 0);
                lives_at(&memory, 2 * each);
                assert!(memory.ended_at(0, each + 1).is_some(), "a message that reaches into it");
            }
        }
    });
}

#[track_caller]
fn lives_at(memory: &GpuMemory, offset: usize) {
    memory.window().unwrap().store(offset, &[7; 64]).unwrap();
    assert_eq!(memory.ended_at(offset, 2 * MIB), None);
}

#[test]
fn memory_of_a_destroyed_context_is_cut_off() {
    alone("gpu_standin_ended::memory_of_a_destroyed_context_is_cut_off", &[], || {
        let cuda = StandIn::program();
        cuda.crash_on_dead_handles(1);
        let other = watched(cuda.malloc(4 * MIB), 4 * MIB);
        let mut context = 0;
        assert_eq!(cuda.create_context(&mut context, 0, 0), 0);
        let memory = watched(cuda.malloc(4 * MIB), 4 * MIB);
        lives(&memory);
        assert_eq!(cuda.destroy_context(context), 0);
        let gone = ends(&memory, "context");
        assert!(matches!(gone, Gone::Context { .. }), "{gone}");
        lives(&other);
    });
}

#[test]
fn memory_of_a_device_that_was_reset_is_cut_off() {
    alone("gpu_standin_ended::memory_of_a_device_that_was_reset_is_cut_off", &[], || {
        let cuda = StandIn::program();
        cuda.crash_on_dead_handles(1);
        let kinds = [Made::Malloc, Made::Small, Made::Vmm];
        let memories = kinds.map(|kind| {
            let (addr, len) = kind.make(cuda);
            watched(addr, len)
        });
        memories.iter().for_each(|memory| lives(memory));
        cuda.device_reset();
        for memory in memories {
            ends(&memory, "");
        }
        let cuda = StandIn::program();
        lives(&watched(cuda.malloc(4 * MIB), 4 * MIB));
    });
}

/// The same where the window is gdrdrv's, which keeps the pages pinned until it is closed.
#[test]
fn memory_by_gdrdrv_is_cut_off_with_its_context_and_its_device() {
    let (name, module) = ("memory_by_gdrdrv_is_cut_off_with_its_context_and_its_device", fake_gdrdrv());
    alone(&format!("gpu_standin_ended::{name}"), &[("LD_PRELOAD", &module)], || {
        let cuda = StandIn::program();
        cuda.refuse_dmabuf_mmap(1);
        cuda.crash_on_dead_handles(1);
        let by_gdrdrv = || {
            let memory = watched(cuda.malloc(4 * MIB), 4 * MIB);
            assert_eq!(memory.method(), Some(Method::Gdrdrv), "{memory}");
            lives(&memory);
            memory
        };
        let other = by_gdrdrv();
        let mut context = 0;
        assert_eq!(cuda.create_context(&mut context, 0, 0), 0);
        let memory = by_gdrdrv();
        assert_eq!(cuda.destroy_context(context), 0);
        ends(&memory, "context");
        lives(&other);
        cuda.device_reset();
        ends(&other, "");
    });
}

/// Any other query error says nothing about the memory; nor does one answer alone.
#[test]
fn a_driver_that_cannot_answer_takes_nothing_away() {
    alone("gpu_standin_ended::a_driver_that_cannot_answer_takes_nothing_away", &[], || {
        let cuda = StandIn::program();
        let addr = cuda.malloc(4 * MIB);
        let memory = watched(addr, 4 * MIB);
        for code in [1, 3, 4, 201, 700, 719, 999] {
            // The query of the first round consumes some failures, the confirming query the others.
            for _ in 0..(if code == 1 { 1 } else { 3 }) {
                cuda.fail_next(c"cuPointerGetAttribute", code);
            }
            eventually("the questions", || cuda.failures() == 0);
            sleep(A_WHILE);
            lives(&memory);
        }
        // It is still watched.
        assert_eq!(cuda.free(addr), 0);
        ends(&memory, "was freed");
    });
}

/// The program's captures stay valid, and the thread creates no context.
#[test]
fn looking_breaks_no_capture_and_makes_no_context() {
    alone("gpu_standin_ended::looking_breaks_no_capture_and_makes_no_context", &[], || {
        let cuda = StandIn::program();
        let memory = watched(cuda.malloc(4 * MIB), 4 * MIB);
        let (contexts, stream) = (cuda.live(c"contexts"), cuda.stream(1));
        assert_eq!(cuda.begin_capture(stream, fake_cuda::client::GLOBAL), 0);
        let asked = cuda.calls(c"cuPointerGetAttribute");
        eventually("three questions", || cuda.calls(c"cuPointerGetAttribute") >= asked + 3);
        assert_eq!(cuda.end_capture(stream, &mut 0), 0, "the capture was broken");
        assert_eq!(cuda.live(c"contexts"), contexts);
        lives(&memory);
    });
}

/// An allocation with many registrations is queried once per round; and deregistration leaves
/// nothing behind.
#[test]
fn registrations_of_one_allocation_are_asked_after_together() {
    alone("gpu_standin_ended::registrations_of_one_allocation_are_asked_after_together", &[], || {
        let cuda = StandIn::program();
        let addr = cuda.malloc(4 * MIB);
        let kept: Vec<_> = (0..1000).map(|at| watched(addr + at * 64, 4096)).collect();
        let (begin, asked) = (Instant::now(), cuda.calls(c"cuPointerGetAttribute"));
        sleep(A_WHILE);
        let asked = cuda.calls(c"cuPointerGetAttribute") - asked;
        let rounds = begin.elapsed().as_millis() / 20 + 1;
        assert!(u128::from(asked) <= rounds, "{asked} questions in {rounds} rounds");
        let before = (open_files(), mappings());
        for at in 0..2000 {
            drop(watched(addr + at % 7 * 4096, 4096));
        }
        assert_eq!((open_files(), mappings()), before);
        assert_eq!(cuda.free(addr), 0);
        for memory in [&kept[0], &kept[500], &kept[999]] {
            ends(memory, "was freed");
        }
        // Freed before it was deregistered, as NCCL does: silently.
        drop(kept);
    });
}

/// More allocations than one batch, and each is detected.
#[test]
fn many_allocations_are_all_looked_after() {
    alone("gpu_standin_ended::many_allocations_are_all_looked_after", &[], || {
        let cuda = StandIn::program();
        let addrs: Vec<u64> = (0..300).map(|_| cuda.malloc(4096)).collect();
        let memories: Vec<_> = addrs.iter().map(|addr| watched(*addr, 4096)).collect();
        for at in [0, 63, 64, 150, 299] {
            assert_eq!(cuda.free(addrs[at]), 0);
            ends(&memories[at], "was freed");
        }
        let living = (0..300).filter(|at| ![0, 63, 64, 150, 299].contains(at));
        living.for_each(|at| lives(&memories[at]));
    });
}

/// A revoked window releases the driver's memory at once, not only at deregistration.
#[test]
fn what_was_freed_is_not_kept() {
    alone("gpu_standin_ended::what_was_freed_is_not_kept", &[], || {
        let cuda = StandIn::program();
        let addr = cuda.malloc(4 * MIB);
        let memory = watched(addr, 4 * MIB);
        let at = format!("{:x}-", memory.window().unwrap().as_mut_ptr().addr());
        let mapped = || std::fs::read_to_string("/proc/self/maps").unwrap();
        let of_it = |maps: &str| maps.lines().find(|line| line.starts_with(&at)).map(str::to_owned);
        assert!(of_it(&mapped()).unwrap().contains("rw-s"), "a shared mapping of the driver's memory");
        assert_eq!(cuda.free(addr), 0);
        ends(&memory, "was freed");
        assert!(of_it(&mapped()).is_none_or(|line| line.contains("---p")), "{:?}", of_it(&mapped()));
        drop(memory);
    });
}

/// A child drops the parent's watched registrations, whatever state the thread was in; the parent's
/// stay watched.
#[test]
fn a_forked_child_lets_go() {
    alone("gpu_standin_ended::a_forked_child_lets_go", &[], || {
        let cuda = StandIn::program();
        let addr = cuda.malloc(4 * MIB);
        let memory = watched(addr, 4 * MIB);
        for exits in [false, true].repeat(10) {
            // SAFETY: the child drops what it has and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                drop(memory);
                if exits {
                    // SAFETY: runs the handlers of libraries, ours among them.
                    unsafe { libc::exit(0) };
                }
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(0) };
            }
            let mut status = 0;
            // SAFETY: the child made above; the call writes one int.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
        }
        lives(&memory);
        assert_eq!(cuda.free(addr), 0);
        ends(&memory, "was freed");
    });
}

/// At process exit the driver shuts down: the watcher makes no call once the driver's exit handler
/// runs.
#[test]
fn an_exiting_process_asks_nothing_more() {
    extern "C" fn after_ours() {
        let asked = || StandIn::load().calls(c"cuPointerGetAttribute");
        let before = asked();
        sleep(A_WHILE);
        if asked() != before {
            // SAFETY: ends the process, for the test to see.
            unsafe { libc::_exit(3) };
        }
    }
    alone("gpu_standin_ended::an_exiting_process_asks_nothing_more", &[], || {
        let cuda = StandIn::program();
        // SAFETY: the function lives as long as the process. It is registered first, as a driver's
        // is, and so runs last.
        assert_eq!(unsafe { libc::atexit(after_ours) }, 0);
        let memory = watched(cuda.malloc(4 * MIB), 4 * MIB);
        let asked = cuda.calls(c"cuPointerGetAttribute");
        eventually("a question", || cuda.calls(c"cuPointerGetAttribute") > asked + 1);
        // Left open, as programs do.
        std::mem::forget(memory);
    });
}
