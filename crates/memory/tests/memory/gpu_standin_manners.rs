//! We run inside the program's process: its stream captures, kernels, contexts and handles stay
//! undisturbed.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use crate::common::{MIB, Made, alone, eventually, mappings, open_files, register, within};
use fake_cuda::client::{GLOBAL, RELAXED, StandIn, THREAD_LOCAL};
use nobounce_memory::gpu::copy_engine::CopyEngine;
use nobounce_memory::gpu::{Driver, Gpu, GpuBuffer, GpuMemory, GpuOptions};

const NON_BLOCKING: u32 = 1;

/// All operations on memory, from registration to deregistration, with every byte compared.
fn everything(cuda: &StandIn, places: &[Place]) {
    for &(made, addr, len) in places {
        for options in [GpuOptions::default(), GpuOptions { window: false, ..GpuOptions::default() }] {
            let memory = GpuMemory::register(addr, len, &options).unwrap();
            memory.check_alive().unwrap();
            let wanted = options.window && made.has_window();
            assert_eq!(memory.window().is_some(), wanted, "{made:?}: {memory}");
            if let Some(window) = memory.window() {
                window.store_last(0, &[0x61; 100]).unwrap();
                window.complete().unwrap();
                window.load(0, &mut [0; 100]).unwrap();
                window.fetch_add(64, 1).unwrap();
            }
            if memory.host().is_some() {
                continue;
            }
            let engine = CopyEngine::new(memory.gpu(), 3, 4096).unwrap();
            let mut chunk = engine.take_chunk().unwrap();
            chunk.get_mut().unwrap().fill(0x62);
            let write = engine.start_write(&memory, 5, chunk, 1000).unwrap();
            eventually("the write", || engine.poll(&write).unwrap());
            assert_eq!(cuda.peek(addr + 5, 1000), [0x62; 1000]);
            let read = engine.start_read(&memory, 0, 4096, engine.take_chunk().unwrap()).unwrap();
            eventually("the read", || engine.poll(&read).unwrap());
            assert_eq!(read.into_chunk().unwrap()[5..1005], [0x62; 1000]);
            // One that is still in flight when all is dropped.
            drop(engine.start_read(&memory, 0, 4096, engine.take_chunk().unwrap()).unwrap());
        }
    }
    assert!(register(8, 8).is_err(), "an error on the way");
    let gpu = Gpu::list().unwrap().remove(0);
    let buffer = GpuBuffer::new(&gpu, MIB).unwrap();
    drop(register(buffer.addr(), buffer.len()).unwrap());
}

/// Memory of some kind: address and length.
type Place = (Made, u64, usize);

fn make_all(cuda: &StandIn) -> Vec<Place> {
    let make = |made: Made| {
        let (addr, len) = made.make(cuda);
        (made, addr, len)
    };
    Made::ALL.into_iter().map(make).collect()
}

/// A capture goes through, whatever we do on the capturing thread.
fn capture_on_this_thread(stream_flags: u32, mode: u32) {
    let cuda = StandIn::program();
    let places = make_all(cuda);
    let stream = cuda.stream(stream_flags);
    // The first time, with all that is made and proved then, and once more.
    for _ in 0..2 {
        assert_eq!(cuda.begin_capture(stream, mode), 0);
        everything(cuda, &places);
        let mut graph = 0;
        assert_eq!(cuda.end_capture(stream, &mut graph), 0, "the capture was broken");
        assert_ne!(graph, 0);
    }
}

#[test]
fn a_global_capture_on_this_thread() {
    alone("gpu_standin_manners::a_global_capture_on_this_thread", &[], || {
        capture_on_this_thread(NON_BLOCKING, GLOBAL)
    });
}

#[test]
fn a_global_capture_of_a_blocking_stream() {
    alone("gpu_standin_manners::a_global_capture_of_a_blocking_stream", &[], || {
        capture_on_this_thread(0, GLOBAL)
    });
}

#[test]
fn a_thread_local_capture_on_this_thread() {
    alone("gpu_standin_manners::a_thread_local_capture_on_this_thread", &[], || {
        capture_on_this_thread(0, THREAD_LOCAL)
    });
}

#[test]
fn a_relaxed_capture_on_this_thread() {
    alone("gpu_standin_manners::a_relaxed_capture_on_this_thread", &[], || {
        capture_on_this_thread(0, RELAXED)
    });
}

/// The same from a thread that has no context and captures nothing.
#[test]
fn a_global_capture_on_another_thread() {
    alone("gpu_standin_manners::a_global_capture_on_another_thread", &[], || {
        let cuda = StandIn::program();
        let places = make_all(cuda);
        let stream = cuda.stream(0);
        for _ in 0..2 {
            assert_eq!(cuda.begin_capture(stream, GLOBAL), 0);
            thread::scope(|scope| {
                scope.spawn(|| everything(cuda, &places));
            });
            assert_eq!(cuda.end_capture(stream, &mut 0), 0, "the capture was broken");
        }
    });
}

/// The test of the test: careless calls invalidate a capture.
#[test]
fn a_careless_call_breaks_a_capture() {
    alone("gpu_standin_manners::a_careless_call_breaks_a_capture", &[], || {
        let cuda = StandIn::program();
        let (stream, other) = (cuda.stream(0), cuda.stream(NON_BLOCKING));
        assert_eq!(cuda.begin_capture(stream, GLOBAL), 0);
        assert_eq!(cuda.query_stream(other), 900);
        assert_eq!(cuda.end_capture(stream, &mut 0), 901);
    });
}

/// A kernel that waits for our network spins on the GPU: whatever waits for it waits forever.
#[test]
fn nothing_waits_for_a_spinning_kernel() {
    alone("gpu_standin_manners::nothing_waits_for_a_spinning_kernel", &[], || {
        let cuda = StandIn::program();
        let places = make_all(cuda);
        // The program's work on the default stream is blocked too.
        let mut event = 0;
        assert_eq!(cuda.create_event(&mut event, 0), 0);
        cuda.spin(1);
        assert_eq!(cuda.record(event, 0), 0);
        for round in 0..3 {
            let places = places.clone();
            within(Duration::from_secs(20), "something we do while a kernel spins", move || {
                everything(cuda, &places);
            });
            assert_eq!(cuda.query_event(event), 600, "the kernel spun throughout round {round}");
        }
        cuda.spin(0);
        eventually("the end of the kernel", || cuda.query_event(event) == 0);
    });
}

/// Calls that wait for the GPU are not made at all, in any of this.
#[test]
fn calls_that_wait_are_never_made() {
    alone("gpu_standin_manners::calls_that_wait_are_never_made", &[], || {
        let cuda = StandIn::program();
        let places = make_all(cuda);
        everything(cuda, &places);
        for call in [
            c"cuMemFree_v2",
            c"cuMemFreeHost",
            c"cuMemHostUnregister",
            c"cuMemcpyHtoD_v2",
            c"cuMemcpyDtoH_v2",
            c"cuStreamSynchronize",
            c"cuCtxSynchronize",
            c"cuDevicePrimaryCtxReset_v2",
        ] {
            assert_eq!(cuda.calls(call), 0, "{call:?}");
        }
    });
}

/// Asking after the driver, its GPUs and a pointer creates no context.
#[test]
fn no_context_is_dragged_in() {
    alone("gpu_standin_manners::no_context_is_dragged_in", &[], || {
        let cuda = StandIn::load();
        Driver::get().unwrap();
        let gpus = Gpu::list().unwrap();
        assert_eq!(gpus.len(), 1);
        assert!(!gpus[0].primary_is_active().unwrap());
        assert!(register(0x5000, 64).is_err());
        assert_eq!(cuda.live(c"contexts"), 0);
        assert_eq!(cuda.live(c"streams") + cuda.live(c"events") + cuda.live(c"allocations"), 0);
    });
}

/// Their current context and capture mode are what they were.
#[test]
fn the_callers_thread_is_left_as_it_was() {
    alone("gpu_standin_manners::the_callers_thread_is_left_as_it_was", &[], || {
        let cuda = StandIn::program();
        let places = make_all(cuda);
        let (mut mine, mut other) = (0, 0);
        assert_eq!(cuda.current(&mut mine), 0);
        let state = || {
            let (mut context, mut mode) = (0, THREAD_LOCAL);
            assert_eq!(cuda.current(&mut context), 0);
            assert_eq!(cuda.exchange_mode(&mut mode), 0);
            assert_eq!(cuda.exchange_mode(&mut { mode }), 0);
            (context, mode)
        };
        everything(cuda, &places);
        assert_eq!(state(), (mine, GLOBAL));
        assert_eq!(cuda.create_context(&mut other, 0, 0), 0);
        everything(cuda, &places);
        assert_eq!(state(), (other, GLOBAL));
        thread::scope(|scope| {
            scope.spawn(|| {
                everything(cuda, &places);
                assert_eq!(state(), (0, GLOBAL), "a thread without a context still has none");
                let mut mode = THREAD_LOCAL;
                assert_eq!(cuda.exchange_mode(&mut mode), 0);
                everything(cuda, &places);
                assert_eq!(state(), (0, THREAD_LOCAL));
            });
        });
    });
}

/// Many threads at once.
#[test]
fn many_threads_at_once() {
    alone("gpu_standin_manners::many_threads_at_once", &[], || {
        let cuda = StandIn::program();
        // Each thread has its own memory, for `everything` compares what it wrote.
        let places: Vec<_> = (0..4).map(|_| make_all(cuda)).collect();
        thread::scope(|scope| {
            for places in &places {
                scope.spawn(move || {
                    for _ in 0..5 {
                        everything(cuda, places);
                    }
                });
            }
        });
    });
}

/// Registering and deregistering leaves nothing behind: no handle, no descriptor, no mapping.
#[test]
fn ten_thousand_registrations_leave_nothing_behind() {
    alone("gpu_standin_manners::ten_thousand_registrations_leave_nothing_behind", &[], || {
        let cuda = StandIn::program();
        cuda.set_copy_delay_us(0);
        let places = make_all(cuda);
        let gpu = Gpu::list().unwrap().remove(0);
        let cycle = |at: usize| {
            let (made, addr, len) = places[at % places.len()];
            match at % 5 {
                // The whole, a part, without a window, one that fails, and memory of our own.
                0 => assert_eq!(register(addr, len).unwrap().window().is_some(), made.has_window()),
                1 => assert_eq!(register(addr + 1000, 5000).unwrap().window().is_some(), made.has_window()),
                2 => drop(GpuMemory::register(
                    addr,
                    len,
                    &GpuOptions { staged: true, ..GpuOptions::default() },
                )),
                3 => assert!(register(addr, len + (64 << 30)).is_err()),
                _ => {
                    let buffer = GpuBuffer::new(&gpu, 100).unwrap();
                    assert!(register(buffer.addr(), buffer.len()).unwrap().window().is_some());
                }
            }
        };
        // Once through everything, for what is made once.
        (0..5 * places.len()).for_each(cycle);
        let before = (cuda.live_all(), open_files(), mappings());
        (0..10_000).for_each(cycle);
        assert_eq!((cuda.live_all(), open_files(), mappings()), before);
    });
}

/// The same where no window can be mapped: refused methods leave nothing behind either.
#[test]
fn refused_windows_leave_nothing_behind() {
    alone("gpu_standin_manners::refused_windows_leave_nothing_behind", &[], || {
        let cuda = StandIn::program();
        cuda.set_copy_delay_us(0);
        cuda.refuse_dmabuf_mmap(1);
        let places = make_all(cuda);
        let round = || places.iter().for_each(|&(_, addr, len)| drop(register(addr, len).unwrap()));
        round();
        let before = (cuda.live_all(), open_files(), mappings());
        (0..100).for_each(|_| round());
        assert_eq!((cuda.live_all(), open_files(), mappings()), before);
    });
}

/// Engines are created and dropped; their resources are reused by shape and do not accumulate.
#[test]
fn copy_engines_do_not_pile_up() {
    alone("gpu_standin_manners::copy_engines_do_not_pile_up", &[], || {
        let cuda = StandIn::program();
        let (addr, len) = Made::Malloc.make(cuda);
        let memory = register(addr, len).unwrap();
        let round = || {
            let engine = CopyEngine::new(memory.gpu(), 4, 8192).unwrap();
            let copy = engine.start_read(&memory, 0, 8192, engine.take_chunk().unwrap()).unwrap();
            eventually("the read", || engine.poll(&copy).unwrap());
        };
        round();
        let before = (cuda.live_all(), open_files(), mappings());
        (0..200).for_each(|_| round());
        assert_eq!((cuda.live_all(), open_files(), mappings()), before);
    });
}

/// Threads that make engines together find all idle ones, also while another thread looks for
/// those of destroyed contexts.
#[test]
fn copy_engines_of_several_threads_do_not_pile_up() {
    alone("gpu_standin_manners::copy_engines_of_several_threads_do_not_pile_up", &[], || {
        const THREADS: usize = 8;
        let cuda = StandIn::program();
        let gpu = Gpu::list().unwrap().remove(0);
        let together = Barrier::new(THREADS);
        let work = |number, count| {
            for _ in 0..count {
                if number == 0 {
                    CopyEngine::expire_idle();
                }
                let engine = CopyEngine::new(&gpu, 1, 8192).unwrap();
                // All of them live at this time.
                together.wait();
                drop(engine);
                together.wait();
            }
        };
        let rounds = |count| {
            thread::scope(|scope| {
                let threads = (0..THREADS).map(|number| scope.spawn(move || work(number, count)));
                let threads: Vec<_> = threads.collect();
                // CUDA lets all threads go on by a call or two at a time.
                while threads.iter().any(|thread| !thread.is_finished()) {
                    cuda.hold_calls(1);
                    thread::sleep(Duration::from_micros(300));
                    cuda.hold_calls(0);
                    thread::yield_now();
                }
            });
        };
        rounds(1);
        let before = cuda.live_all();
        rounds(30);
        assert_eq!(cuda.live_all(), before);
    });
}

/// A chunk whose copy is still in flight is not handed out again, whichever holder was dropped
/// meanwhile.
#[test]
fn a_chunk_in_flight_is_not_used_again() {
    alone("gpu_standin_manners::a_chunk_in_flight_is_not_used_again", &[], || {
        let cuda = StandIn::program();
        let (addr, len) = Made::Malloc.make(cuda);
        cuda.poke(addr, &vec![0x77; len]);
        let memory = register(addr, len).unwrap();
        cuda.set_copy_delay_us(100_000);
        let engine = CopyEngine::new(memory.gpu(), 1, 4096).unwrap();
        let copy = engine.start_read(&memory, 0, 4096, engine.take_chunk().unwrap()).unwrap();
        assert!(!engine.poll(&copy).unwrap());
        let copy = copy.into_chunk().expect_err("not over");
        drop(copy);
        assert!(engine.take_chunk().is_none(), "its one chunk is still being written");
        eventually("the chunk", || engine.take_chunk().is_some());

        // An engine is dropped while its chunk is in flight: the next one must not hand the chunk
        // out either.
        drop(engine.start_read(&memory, 0, 4096, engine.take_chunk().unwrap()).unwrap());
        drop(engine);
        let next = CopyEngine::new(memory.gpu(), 1, 4096).unwrap();
        if let Some(mut chunk) = next.take_chunk() {
            chunk.get_mut().unwrap().fill(0);
            thread::sleep(Duration::from_millis(300));
            assert!(
                chunk.iter().all(|byte| *byte == 0),
                "an old copy landed in a chunk that was given out again"
            );
        }
    });
}
