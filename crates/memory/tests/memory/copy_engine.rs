//! The copy engine on the stand-in driver: bytes in both directions; chunks reused only once they
//! have no reader; no call that blocks; none that invalidates a stream capture; no leaks.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{MIB, Made, alone, eventually, register, within};
use fake_cuda::client::{GLOBAL, StandIn};
use nobounce_memory::gpu::calibration::Calibration;
use nobounce_memory::gpu::copy_engine::{CopyEngine, CopyError, PendingCopy, PinnedChunk};
use nobounce_memory::gpu::{Gone, Gpu, GpuBuffer, GpuMemory, naive};

fn gpu() -> Arc<Gpu> {
    Gpu::by_ordinal(0).unwrap().unwrap()
}

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from((i * 31 + i / 251 + seed * 17) % 251).unwrap()).collect()
}

fn filled(engine: &CopyEngine, data: &[u8]) -> PinnedChunk {
    let mut chunk = engine.take_chunk().unwrap();
    chunk.get_mut().unwrap()[..data.len()].copy_from_slice(data);
    chunk
}

fn finish(engine: &CopyEngine, copy: PendingCopy) -> PinnedChunk {
    eventually("the end of a copy", || engine.poll(&copy).unwrap());
    copy.into_chunk().unwrap()
}

/// 4 MiB of memory as another program makes it, registered.
fn memory(cuda: &StandIn) -> GpuMemory {
    let (addr, len) = Made::Malloc.make(cuda);
    register(addr, len).unwrap()
}

#[test]
fn bytes_go_both_ways() {
    alone("copy_engine::bytes_go_both_ways", &[], || {
        let cuda = StandIn::program();
        let engine = CopyEngine::new(&gpu(), 4, 10_000).unwrap();
        assert_eq!(engine.chunk_len(), 10_000);
        for made in [Made::Malloc, Made::Vmm, Made::VmmSeveral, Made::Pool, Made::Managed] {
            let (addr, len) = made.make(cuda);
            let memory = register(addr, len).unwrap();
            for (turn, (offset, len)) in
                [(0, 10_000), (7, 1), (2 * MIB - 5000, 9999), (4 * MIB - 10, 10), (5, 0)]
                    .into_iter()
                    .enumerate()
            {
                let data = bytes(len, turn);
                let chunk = filled(&engine, &data);
                finish(&engine, engine.start_write(&memory, offset, chunk, len).unwrap());
                if len > 0 {
                    assert!(cuda.peek(addr + offset as u64, len) == data, "{made:?}, {len} at {offset}");
                }
                let copy = engine.start_read(&memory, offset, len, engine.take_chunk().unwrap()).unwrap();
                assert_eq!((copy.len(), copy.is_empty()), (len, len == 0));
                let chunk = finish(&engine, copy);
                assert!(chunk[..len] == data, "{made:?}, {len} at {offset}");
            }
        }
    });
}

#[test]
fn a_gather_sees_what_was_stored_through_the_window() {
    alone("copy_engine::a_gather_sees_what_was_stored_through_the_window", &[], || {
        let memory = memory(StandIn::program());
        let engine = CopyEngine::new(&gpu(), 2, 4096).unwrap();
        let window = memory.window().unwrap();
        let data = bytes(4000, 3);
        window.store(96, &data).unwrap();
        assert!(window.is_dirty());
        let copy = engine.start_read(&memory, 96, 4000, engine.take_chunk().unwrap()).unwrap();
        assert!(!window.is_dirty(), "the stores were not settled before the copy");
        assert_eq!(finish(&engine, copy)[..4000], data);
    });
}

#[test]
fn a_chunk_is_used_again_only_when_no_process_can_see_it() {
    alone("copy_engine::a_chunk_is_used_again_only_when_no_process_can_see_it", &[], || {
        let cuda = StandIn::program();
        let memory = memory(cuda);
        let engine = CopyEngine::new(&gpu(), 1, 4096).unwrap();
        let in_use =
            |outcome: Result<PendingCopy, CopyError>| matches!(outcome, Err(CopyError::ChunkInUse { .. }));

        // Clones.
        let mut chunk = filled(&engine, b"first");
        let clone = chunk.clone();
        assert!(chunk.get_mut().is_none() && engine.take_chunk().is_none());
        assert!(in_use(engine.start_read(&memory, 0, 5, chunk)), "a clone would see the bytes change");
        assert_eq!(clone[..5], *b"first");
        drop(clone);
        assert!(engine.take_chunk().is_some());

        // A copy in flight, of which a clone is left, then nothing.
        cuda.set_copy_delay_us(30_000);
        let mut chunk = filled(&engine, b"second");
        let copy = engine.start_write(&memory, 0, chunk.clone(), 6).unwrap();
        assert!(!engine.poll(&copy).unwrap());
        assert!(in_use(engine.start_write(&memory, 8, chunk.clone(), 6)));
        let copy = copy.into_chunk().unwrap_err();
        assert_eq!(chunk[..6], *b"second");
        drop(copy);
        assert!(chunk.get_mut().is_none(), "the GPU still reads it");
        drop(chunk);
        assert!(engine.take_chunk().is_none(), "the GPU still reads it");
        eventually("the end of the copy that was given up", || engine.take_chunk().is_some());
        assert_eq!(cuda.peek(memory.addr(), 6), b"second");

        // An engine that goes while copies fly: the next one of its shape waits for them.
        let chunk = engine.take_chunk().unwrap();
        drop(engine.start_read(&memory, 0, 4096, chunk).unwrap());
        drop(engine);
        let engine = CopyEngine::new(&gpu(), 1, 4096).unwrap();
        assert!(engine.take_chunk().is_none());
        eventually("the end of the earlier engine's copy", || engine.take_chunk().is_some());

        let other = CopyEngine::new(&gpu(), 1, 4096).unwrap();
        assert!(in_use(engine.start_read(&memory, 0, 1, other.take_chunk().unwrap())));
    });
}

#[test]
fn copies_that_cannot_be_made_are_not_started() {
    alone("copy_engine::copies_that_cannot_be_made_are_not_started", &[], || {
        let cuda = StandIn::program();
        let memory = memory(cuda);
        let engine = CopyEngine::new(&gpu(), 2, 4096).unwrap();
        let chunk = || engine.take_chunk().unwrap();
        let before = (cuda.calls(c"cuMemcpyDtoHAsync_v2"), cuda.calls(c"cuMemcpyHtoDAsync_v2"));
        for (offset, len) in [(0, 4097), (4 * MIB, 1), (4 * MIB - 10, 11), (usize::MAX, 2), (4 * MIB + 1, 0)]
        {
            let out = CopyError::OutOfBounds { offset, len, memory: 4 * MIB, chunk: 4096 };
            assert_eq!(engine.start_read(&memory, offset, len, chunk()).unwrap_err(), out);
            assert_eq!(engine.start_write(&memory, offset, chunk(), len).unwrap_err(), out);
        }
        assert_eq!(cuda.free(memory.addr()), 0);
        let freed = engine.start_read(&memory, 0, 10, chunk()).unwrap_err();
        assert!(matches!(freed, CopyError::Gone(Gone::Freed { .. } | Gone::Reused { .. })), "{freed}");
        // Reallocated memory at the same address must not be touched.
        let (again, len) = Made::Malloc.make(cuda);
        let poked = bytes(len, 9);
        cuda.poke(again, &poked);
        assert!(engine.start_write(&memory, 0, chunk(), 10).is_err());
        assert!(cuda.peek(again, len) == poked);
        assert_eq!(before, (cuda.calls(c"cuMemcpyDtoHAsync_v2"), cuda.calls(c"cuMemcpyHtoDAsync_v2")));
    });
}

#[test]
fn a_driver_that_refuses_is_an_error_and_loses_no_chunk_that_is_free() {
    alone("copy_engine::a_driver_that_refuses_is_an_error_and_loses_no_chunk_that_is_free", &[], || {
        let cuda = StandIn::program();
        let memory = memory(cuda);
        let engine = CopyEngine::new(&gpu(), 2, 4096).unwrap();
        cuda.fail_next(c"cuMemcpyDtoHAsync_v2", 700);
        let error = engine.start_read(&memory, 0, 10, engine.take_chunk().unwrap()).unwrap_err();
        assert!(error.to_string().contains("cuMemcpyDtoHAsync_v2"), "{error}");
        let both = [engine.take_chunk().unwrap(), engine.take_chunk().unwrap()];
        drop(both);
        // The copy is in flight and has no event: its chunk is not handed out again, the other one
        // is.
        cuda.fail_next(c"cuEventRecord", 700);
        engine.start_read(&memory, 0, 10, engine.take_chunk().unwrap()).unwrap_err();
        let left = engine.take_chunk();
        assert!(left.is_some() && engine.take_chunk().is_none());
        for call in [c"cuStreamCreate", c"cuEventCreate"] {
            cuda.fail_next(call, 2);
            let error = CopyEngine::new(&gpu(), 3, 4096).unwrap_err();
            assert!(error.to_string().contains(call.to_str().unwrap()), "{error}");
        }
        // Memory that cannot be registered is allocated by the driver instead.
        let before = cuda.calls(c"cuMemHostAlloc");
        cuda.fail_next(c"cuMemHostRegister_v2", 801);
        let engine = CopyEngine::new(&gpu(), 5, 4096).unwrap();
        assert_eq!(cuda.calls(c"cuMemHostAlloc"), before + 1);
        finish(&engine, engine.start_read(&memory, 0, 10, engine.take_chunk().unwrap()).unwrap());
        assert_eq!(CopyEngine::new(&gpu(), usize::MAX / 2, 4096).unwrap_err(), CopyError::TooLarge);
    });
}

#[test]
fn nothing_waits_for_a_kernel_that_spins() {
    alone("copy_engine::nothing_waits_for_a_kernel_that_spins", &[], || {
        let cuda = StandIn::program();
        let memory = memory(cuda);
        let gpu = gpu();
        cuda.spin(1);
        within(Duration::from_secs(20), "the copy engine", move || {
            for round in 0..3 {
                let engine = CopyEngine::new(&gpu, 4, 4096 + round).unwrap();
                let chunk = filled(&engine, &bytes(4096, round));
                finish(&engine, engine.start_write(&memory, 0, chunk, 4096).unwrap());
                let chunk = finish(
                    &engine,
                    engine.start_read(&memory, 0, 4096, engine.take_chunk().unwrap()).unwrap(),
                );
                assert!(chunk[..4096] == bytes(4096, round));
                drop(engine.start_read(&memory, 0, 100, engine.take_chunk().unwrap()).unwrap());
            }
        });
        cuda.spin(0);
    });
}

#[test]
fn a_capture_under_way_survives() {
    alone("copy_engine::a_capture_under_way_survives", &[], || {
        let cuda = StandIn::program();
        let memory = memory(cuda);
        let stream = cuda.stream(1);
        assert_eq!(cuda.begin_capture(stream, GLOBAL), 0);
        let work = || {
            let engine = CopyEngine::new(&gpu(), 4, 4096).unwrap();
            let copy = engine.start_read(&memory, 0, 4096, engine.take_chunk().unwrap()).unwrap();
            finish(&engine, copy);
        };
        work();
        std::thread::scope(|scope| scope.spawn(work).join().unwrap());
        let mut graph = 0;
        assert_eq!(cuda.end_capture(stream, &mut graph), 0, "the capture is broken");
    });
}

#[test]
fn engines_that_come_and_go_leave_nothing_behind() {
    alone("copy_engine::engines_that_come_and_go_leave_nothing_behind", &[], || {
        let cuda = StandIn::program();
        let memory = memory(cuda);
        let turn = || {
            let engine = CopyEngine::new(&gpu(), 8, 65_536).unwrap();
            let copy = engine.start_read(&memory, 0, 100, engine.take_chunk().unwrap()).unwrap();
            let chunk = finish(&engine, copy);
            drop(engine);
            // A chunk may outlive its engine.
            assert_eq!(chunk.len(), 65_536);
        };
        turn();
        let before = (cuda.live_all(), crate::common::open_files());
        let mappings = crate::common::mappings();
        (0..1000).for_each(|_| turn());
        assert_eq!(before, (cuda.live_all(), crate::common::open_files()));
        // The allocator of this process may have added a few of its own.
        assert!(crate::common::mappings() < mappings + 20);
    });
}

#[test]
fn a_device_reset_is_an_error_and_chunks_stay_readable() {
    alone("copy_engine::a_device_reset_is_an_error_and_chunks_stay_readable", &[], || {
        let cuda = StandIn::program();
        let memory = memory(cuda);
        let engine = CopyEngine::new(&gpu(), 4, 4096).unwrap();
        let chunk = filled(&engine, b"still here");
        let copy = engine.start_read(&memory, 0, 10, engine.take_chunk().unwrap()).unwrap();
        cuda.device_reset();
        assert_eq!(chunk[..10], *b"still here");
        engine.start_write(&memory, 0, chunk, 10).unwrap_err();
        // Over before the reset, or an error that says so.
        if let Err(error) = engine.poll(&copy) {
            assert!(error.to_string().contains("context was destroyed"), "{error}");
        }
    });
}

#[test]
fn a_calibration_is_made_once_and_says_what_it_found() {
    alone("copy_engine::a_calibration_is_made_once_and_says_what_it_found", &[], || {
        let cuda = StandIn::program();
        let calibration = Calibration::of(&gpu()).unwrap();
        println!("{calibration}");
        assert!(calibration.load_crossover > 0 && calibration.load_crossover <= 64 << 10);
        // The stand-in's copies share the processors with other tests; on a GPU this takes a few
        // milliseconds.
        assert!(calibration.took < Duration::from_millis(500), "{calibration}");
        if !calibration.is_whole {
            // the machine was so busy that some sizes were left out: it is made again, and finds
            // something else
            return;
        }
        let (reads, live) = (cuda.calls(c"cuMemcpyDtoHAsync_v2"), cuda.live(c"reservations"));
        assert_eq!(Calibration::of(&gpu()).unwrap(), calibration);
        assert_eq!(reads, cuda.calls(c"cuMemcpyDtoHAsync_v2"), "it was measured again");
        // Its scratch memory is gone, and our own memory works like the program's.
        let buffer = GpuBuffer::new(&gpu(), MIB).unwrap();
        assert_eq!(cuda.live(c"reservations"), live + 1);
        drop(buffer);
    });
}

#[test]
fn without_a_window_everything_is_the_copy_engines() {
    alone(
        "copy_engine::without_a_window_everything_is_the_copy_engines",
        &[("NOBOUNCE_WINDOW", "off")],
        || {
            let _cuda = StandIn::program();
            let calibration = Calibration::of(&gpu()).unwrap();
            assert_eq!(calibration.load_crossover, 0);
            assert_eq!((calibration.load_latency, calibration.store_rate), (None, None));
            assert!(calibration.to_string().contains("store unknown"), "{calibration}");
        },
    );
}

#[test]
fn double_buffering_moves_all_bytes_and_frees_everything() {
    alone("copy_engine::double_buffering_moves_all_bytes_and_frees_everything", &[], || {
        let cuda = StandIn::program();
        let buffer = GpuBuffer::new(&gpu(), 100_000).unwrap();
        let before = cuda.live_all();
        let bytes: Vec<u8> = (0..100_000_u32).map(|at| at.to_le_bytes()[0] ^ at.to_le_bytes()[1]).collect();
        cuda.set_copy_delay_us(200);
        let mut stage = naive::DoubleBuffer::new(&buffer, 2, 4096).unwrap();
        for (number, piece) in bytes.chunks(4096).enumerate() {
            stage.buffer().unwrap()[..piece.len()].copy_from_slice(piece);
            stage.copy(number * 4096, piece.len()).unwrap();
        }
        assert!(stage.copy(0, 4097).is_err() && stage.copy(99_000, 1001).is_err());
        stage.settle().unwrap();
        assert!(cuda.peek(buffer.addr(), 100_000) == bytes);
        drop(stage);
        assert_eq!(cuda.live_all(), before);
    });
}
