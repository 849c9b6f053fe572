//! Destroyed contexts of the program: their handles, and those of their streams and events, never
//! reach the driver again. A real driver may crash on them. The stand-in ends the process when that
//! happens.

use crate::common::{MIB, Made, alone, eventually, register};
use fake_cuda::client::StandIn;
use nobounce_memory::gpu::api::Context;
use nobounce_memory::gpu::copy_engine::{CopyEngine, CopyError};
use nobounce_memory::gpu::dmabuf::DmaBuf;
use nobounce_memory::gpu::kernel::Stream;
use nobounce_memory::gpu::{Gone, Gpu, GpuBuffer, GpuMemory, GpuRange};

/// A context of our own, current on this thread, with registered memory in it.
fn own_context(cuda: &StandIn) -> (u64, GpuMemory) {
    let mut context = 0;
    assert_eq!(cuda.create_context(&mut context, 0, 0), 0);
    let memory = register(cuda.malloc(4 * MIB), 4 * MIB).unwrap();
    assert!(memory.window().is_some(), "{memory}");
    (context, memory)
}

/// The engine's parts are in the memory's context, all of them used once and one copy in flight
/// when it is destroyed.
#[test]
fn a_destroyed_context_is_not_used_again() {
    alone("gpu_standin_contexts::a_destroyed_context_is_not_used_again", &[], || {
        let cuda = StandIn::load();
        assert_eq!(cuda.init(0), 0);
        cuda.crash_on_dead_handles(1);
        let gpu = Gpu::list().unwrap().remove(0);
        for round in 0..3u8 {
            let (context, memory) = own_context(cuda);
            cuda.poke(memory.addr(), &[round; 64]);
            let handle = memory.context();
            let engine = CopyEngine::in_context(&gpu, handle, 3, 4096).unwrap();
            let held = engine.take_chunk().unwrap();
            let copy = engine.start_read(&memory, 0, 64, engine.take_chunk().unwrap()).unwrap();
            eventually("the copy", || engine.poll(&copy).unwrap());
            assert_eq!(copy.into_chunk().unwrap()[..64], [round; 64]);
            cuda.set_copy_delay_us(20_000);
            let flying = engine.start_read(&memory, 0, 64, engine.take_chunk().unwrap()).unwrap();

            assert_eq!(cuda.destroy_context(context), 0);
            cuda.set_copy_delay_us(5);
            let gone = memory.check_alive().unwrap_err();
            assert!(
                matches!(gone, Gone::Context { .. }),
                "another error than for memory that was freed: {gone}"
            );
            assert!(memory.range().context_now().is_err());
            assert!(DmaBuf::export(memory.range()).is_err());
            assert!(register(memory.addr(), 64).is_err());
            let error = engine.poll(&flying).unwrap_err();
            assert!(matches!(&error, CopyError::Cuda { error } if error.context_is_gone()), "{error}");
            assert!(error.to_string().contains("register the memory again"), "{error}");
            drop(flying);
            assert!(engine.start_read(&memory, 0, 64, held).is_err());
            while engine.take_chunk().is_some_and(|chunk| chunk.len() != 4096) {}
            drop((engine, memory));
        }
        // The next engine scans idle parts of the destroyed contexts, and the next registration the
        // samplers.
        let cuda = StandIn::program();
        let (addr, len) = Made::Malloc.make(cuda);
        let fresh = register(addr, len).unwrap();
        assert!(fresh.window().is_some(), "{fresh}");
        let engine = CopyEngine::new(&gpu, 3, 4096).unwrap();
        let copy = engine.start_read(&fresh, 0, 64, engine.take_chunk().unwrap()).unwrap();
        eventually("the copy", || engine.poll(&copy).unwrap());
    });
}

/// The memory is alive, in the primary context, but the engine's context is not.
#[test]
fn an_engine_of_a_destroyed_context() {
    alone("gpu_standin_contexts::an_engine_of_a_destroyed_context", &[], || {
        let cuda = StandIn::program();
        cuda.crash_on_dead_handles(1);
        let (addr, len) = Made::Malloc.make(cuda);
        let memory = register(addr, len).unwrap();
        let mut context = 0;
        assert_eq!(cuda.create_context(&mut context, 0, 0), 0);
        let range = GpuRange::of(cuda.malloc(4096), 4096).unwrap();
        assert_ne!(range.context(), memory.context());
        let engine = CopyEngine::in_context(memory.gpu(), range.context(), 2, 4096).unwrap();
        let chunk = engine.take_chunk().unwrap();
        assert_eq!(cuda.destroy_context(context), 0);
        memory.check_alive().unwrap();
        let error = engine.start_read(&memory, 0, 64, chunk).unwrap_err();
        assert!(matches!(&error, CopyError::Cuda { error } if error.context_is_gone()), "{error}");
        assert!(engine.take_chunk().is_some(), "a copy that was not started keeps no chunk");
    });
}

/// VMM memory outlives the context it was registered in: another one is found for it.
#[test]
fn vmm_memory_registered_in_a_destroyed_context() {
    alone("gpu_standin_contexts::vmm_memory_registered_in_a_destroyed_context", &[], || {
        let cuda = StandIn::load();
        assert_eq!(cuda.init(0), 0);
        cuda.crash_on_dead_handles(1);
        let mut context = 0;
        assert_eq!(cuda.create_context(&mut context, 0, 0), 0);
        let vmm = cuda.vmm(1, 2 * MIB, true);
        let memory = register(vmm.addr, vmm.len).unwrap();
        assert!(memory.window().is_some(), "{memory}");
        let before: Context = memory.context();
        assert_eq!(cuda.destroy_context(context), 0);
        memory.check_alive().unwrap();
        assert_ne!(memory.range().context_now().unwrap(), before);
        assert!(DmaBuf::export(memory.range()).is_ok());
        assert!(register(vmm.addr, vmm.len).unwrap().window().is_some());
    });
}

/// A reset ends the primary context: our own memory goes with it, and its handle is not pushed
/// before it is retained again.
#[test]
fn memory_of_our_own_after_a_reset() {
    alone("gpu_standin_contexts::memory_of_our_own_after_a_reset", &[], || {
        let cuda = StandIn::program();
        cuda.crash_on_dead_handles(1);
        let gpu = Gpu::list().unwrap().remove(0);
        let buffer = GpuBuffer::new(&gpu, MIB).unwrap();
        let memory = register(buffer.addr(), buffer.len()).unwrap();
        let engine = CopyEngine::new(&gpu, 2, 4096).unwrap();
        let copy = engine.start_read(&memory, 0, 64, engine.take_chunk().unwrap()).unwrap();
        eventually("the copy", || engine.poll(&copy).unwrap());
        let stream = Stream::new(&gpu).unwrap();
        cuda.device_reset();
        assert!(memory.check_alive().is_err());
        assert!(engine.start_read(&memory, 0, 64, copy.into_chunk().unwrap()).is_err());
        // Retained again by the program, it has the same handle; a stream of the old one is gone
        // all the same.
        assert_eq!(cuda.retain_primary(&mut 0, 0), 0);
        assert!(stream.is_idle().is_err());
        drop((memory, buffer, engine, stream));
        let buffer = GpuBuffer::new(&gpu, MIB).unwrap();
        let memory = register(buffer.addr(), buffer.len()).unwrap();
        assert!(memory.window().is_some(), "{memory}");
        let engine = CopyEngine::new(&gpu, 2, 4096).unwrap();
        let copy = engine.start_read(&memory, 0, 64, engine.take_chunk().unwrap()).unwrap();
        eventually("the copy", || engine.poll(&copy).unwrap());
    });
}

/// The test of the test: a careless program does not survive it.
#[test]
#[should_panic(expected = "was passed to the driver")]
fn a_careless_use_ends_the_process() {
    alone("gpu_standin_contexts::a_careless_use_ends_the_process", &[], || {
        let cuda = StandIn::program();
        cuda.crash_on_dead_handles(1);
        let mut context = 0;
        assert_eq!(cuda.create_context(&mut context, 0, 0), 0);
        assert_eq!(cuda.destroy_context(context), 0);
        cuda.push(context);
    });
}
