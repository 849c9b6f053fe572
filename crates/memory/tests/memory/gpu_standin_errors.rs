//! Memory that is absent, freed or replaced; a driver that is absent or refuses. Each returns an
//! error with the remedy, and none ends the process.

use crate::common::{MIB, Made, alone, eventually, register};
use crate::gpu_standin_kinds::fake_gdrdrv;
use fake_cuda::client::{StandIn, VARIABLE};
use nobounce_memory::HostBuffer;
use nobounce_memory::gpu::copy_engine::CopyEngine;
use nobounce_memory::gpu::{Driver, DriverError, Gone, Gpu, GpuRangeError, GpuRegisterError};

/// Registration that must fail for its range.
fn range_error(addr: u64, len: usize) -> GpuRangeError {
    match register(addr, len) {
        Err(GpuRegisterError::Range(error)) => error,
        other => panic!("{len} bytes at {addr:#x}: {other:?}"),
    }
}

#[test]
fn memory_that_is_not_the_gpus() {
    alone("gpu_standin_errors::memory_that_is_not_the_gpus", &[], || {
        let cuda = StandIn::program();
        let host = HostBuffer::new(8192).unwrap();
        let gpu = cuda.malloc(MIB);
        let error = range_error(host.addr(), 4096);
        assert!(matches!(error, GpuRangeError::HostMemory { addr } if addr == host.addr()), "{error}");
        assert!(error.to_string().contains("register it as host memory"), "{error}");
        for addr in [0, 8, u64::MAX - 100_000, gpu + 64 * MIB as u64] {
            let error = range_error(addr, 4096);
            assert!(
                matches!(error, GpuRangeError::Nothing { addr: named } if named == addr),
                "{addr:#x}: {error}"
            );
            assert!(error.to_string().contains("freed"), "{error}");
        }
        for (addr, len) in [(gpu, 0), (gpu, usize::MAX), (u64::MAX, 2)] {
            assert!(
                matches!(range_error(addr, len), GpuRangeError::Empty { .. }),
                "{len} bytes at {addr:#x}"
            );
        }
    });
}

/// UCX rounds registrations up to 16 bytes: a region may include the unused bytes between an
/// allocation and the next possible one.
#[test]
fn a_range_that_is_rounded_up() {
    alone("gpu_standin_errors::a_range_that_is_rounded_up", &[], || {
        let cuda = StandIn::program();
        for odd in [4104, MIB + 8, 1] {
            let mut addr = 0;
            assert_eq!(cuda.alloc(&mut addr, odd), 0);
            let memory = register(addr, odd.next_multiple_of(16)).unwrap();
            assert_eq!(memory.len(), odd.next_multiple_of(16));
            memory.window().unwrap().store(odd - 1, b"!").unwrap();
            assert_eq!(cuda.peek(addr + odd as u64 - 1, 1), b"!");
            assert!(memory.check_alive().is_ok());
            assert!(register(addr, odd.next_multiple_of(256)).is_ok());
            assert!(matches!(
                range_error(addr, odd.next_multiple_of(256) + 1),
                GpuRangeError::Crosses { .. }
            ));
        }
    });
}

#[test]
fn a_range_that_leaves_its_allocation() {
    alone("gpu_standin_errors::a_range_that_leaves_its_allocation", &[], || {
        let cuda = StandIn::program();
        for made in Made::ALL {
            let (addr, len) = made.make(cuda);
            // The bytes up to the next possible allocation are unused: the test above.
            let room = len.next_multiple_of(256);
            for (offset, wanted) in [(0, room + 1), (len - 1, room - len + 2), (1, room), (len / 2, 64 << 30)]
            {
                let error = range_error(addr + offset as u64, wanted);
                assert!(matches!(error, GpuRangeError::Crosses { .. }), "{made:?}: {error}");
                let words = error.to_string();
                assert!(words.contains(&format!("at most {} bytes", len - offset)), "{made:?}: {words}");
            }
            assert!(register(addr + len as u64 - 1, 1).is_ok(), "{made:?}: the last byte");
        }
        // Two allocations side by side are not one.
        let (first, second) = (cuda.malloc(2 * MIB), cuda.malloc(2 * MIB));
        assert_eq!(second, first + 2 * MIB as u64, "the stand-in gives out addresses in order");
        assert!(matches!(range_error(first, 4 * MIB), GpuRangeError::Crosses { .. }));
    });
}

#[test]
fn memory_freed_and_its_address_used_again() {
    alone("gpu_standin_errors::memory_freed_and_its_address_used_again", &[], || {
        let cuda = StandIn::program();
        let addr = cuda.malloc(4 * MIB);
        let old = register(addr, 4 * MIB).unwrap();
        let engine = CopyEngine::new(old.gpu(), 2, 4096).unwrap();
        old.check_alive().unwrap();

        assert_eq!(cuda.free(addr), 0);
        assert!(matches!(old.check_alive(), Err(Gone::Freed { .. })), "{:?}", old.check_alive());
        assert!(matches!(range_error(addr, 4 * MIB), GpuRangeError::Nothing { .. }));
        let chunk = engine.take_chunk().unwrap();
        assert!(engine.start_read(&old, 0, 64, chunk).unwrap_err().to_string().contains("was freed"));

        let again = cuda.malloc(4 * MIB);
        assert_eq!(again, addr, "the stand-in uses addresses again");
        cuda.poke(again, &[0x33; 4096]);
        let gone = old.check_alive().unwrap_err();
        assert!(matches!(gone, Gone::Reused { was, now, .. } if was != now), "{gone}");
        assert!(gone.to_string().contains("deregister memory before it is freed"), "{gone}");
        let chunk = engine.take_chunk().unwrap();
        assert!(engine.start_write(&old, 0, chunk, 64).is_err(), "a copy by address would hit the new owner");

        // The old window still shows the old bytes after the address was reallocated: the new
        // allocation is not touched.
        let window = old.window().unwrap();
        window.store(0, &[0x44; 4096]).unwrap();
        assert_eq!(cuda.peek(again, 4096), [0x33; 4096]);
        let new = register(again, 4 * MIB).unwrap();
        let mut bytes = [0; 64];
        new.window().unwrap().load(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0x33; 64], "the new registration has a window of its own");
        window.load(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0x44; 64]);
    });
}

/// Stores through one window are settled before a copy through another one of the same memory.
#[test]
fn stores_through_another_window_are_settled_too() {
    alone("gpu_standin_errors::stores_through_another_window_are_settled_too", &[], || {
        let cuda = StandIn::program();
        let addr = cuda.malloc(4 * MIB);
        let (one, other) = (register(addr, 4 * MIB).unwrap(), register(addr, 4 * MIB).unwrap());
        let engine = CopyEngine::new(one.gpu(), 2, 4096).unwrap();
        one.window().unwrap().store_last(0, &[5; 64]).unwrap();
        one.window().unwrap().complete().unwrap();
        let window = other.window().unwrap();
        assert!(window.is_dirty());
        let _copy = engine.start_read(&other, 0, 64, engine.take_chunk().unwrap()).unwrap();
        assert!(!window.is_dirty());
    });
}

/// Part of a VMM range is mapped anew: what was registered is not there any more.
#[test]
fn a_vmm_range_remapped_in_part() {
    alone("gpu_standin_errors::a_vmm_range_remapped_in_part", &[], || {
        let cuda = StandIn::program();
        let each = 2 * MIB;
        let range = cuda.vmm(3, each, true);
        let memory = register(range.addr, range.len).unwrap();
        memory.check_alive().unwrap();
        let middle = range.addr + each as u64;
        assert_eq!(cuda.unmap(middle, each), 0);
        assert!(matches!(memory.check_alive(), Err(Gone::Freed { addr, .. }) if addr == middle));
        memory.check_alive_at(0, each).unwrap();
        memory.check_alive_at(2 * each, 1).unwrap();
        let mut handle = 0;
        assert_eq!(cuda.create(&mut handle, each, &[1, 1, 1, 0, 0, 0, 1 << 8, 0], 0), 0);
        assert_eq!(cuda.map(middle, each, 0, handle, 0), 0);
        assert!(matches!(memory.check_alive(), Err(Gone::Reused { addr, .. }) if addr == middle));
    });
}

#[test]
fn a_device_that_was_reset() {
    alone("gpu_standin_errors::a_device_that_was_reset", &[], || {
        let cuda = StandIn::program();
        let (addr, len) = Made::Malloc.make(cuda);
        let memory = register(addr, len).unwrap();
        let vmm = cuda.vmm(1, 2 * MIB, true);
        let other = register(vmm.addr, vmm.len).unwrap();
        let engine = CopyEngine::new(memory.gpu(), 2, 4096).unwrap();
        let held = engine.take_chunk().unwrap();
        cuda.set_copy_delay_us(20_000);
        let copy = engine.start_read(&memory, 0, 64, engine.take_chunk().unwrap()).unwrap();

        cuda.device_reset();
        for memory in [&memory, &other] {
            let gone = memory.check_alive().unwrap_err();
            assert!(!gone.to_string().is_empty());
            // The window may show old bytes or fault, but it does not end the process.
            let _ = memory.window().unwrap().store_last(0, &[1; 100]);
            let _ = memory.window().unwrap().load(0, &mut [0; 100]);
        }
        assert!(register(addr, len).is_err());
        assert!(engine.poll(&copy).is_err(), "the copy cannot be asked after any more");
        drop(copy);
        assert_eq!(held.len(), 4096);
        assert!(held.iter().all(|byte| *byte == held[0]), "a chunk that is held can still be read");
        assert!(engine.start_read(&memory, 0, 64, held).is_err());

        // The program uses the device again; so can we.
        cuda.set_copy_delay_us(5);
        let cuda = StandIn::program();
        let (addr, len) = Made::Malloc.make(cuda);
        cuda.poke(addr, &[9; 64]);
        let fresh = register(addr, len).unwrap();
        assert!(fresh.window().is_some(), "{fresh}");
        assert!(memory.check_alive().is_err());
        let engine = CopyEngine::new(fresh.gpu(), 2, 4096).unwrap();
        let copy = engine.start_read(&fresh, 0, 64, engine.take_chunk().unwrap()).unwrap();
        eventually("the copy", || engine.poll(&copy).unwrap());
        assert_eq!(copy.into_chunk().unwrap()[..64], [9; 64]);
    });
}

#[test]
fn a_context_that_was_destroyed() {
    alone("gpu_standin_errors::a_context_that_was_destroyed", &[], || {
        let cuda = StandIn::load();
        assert_eq!(cuda.init(0), 0);
        let mut context = 0;
        assert_eq!(cuda.create_context(&mut context, 0, 0), 0);
        let addr = cuda.malloc(4 * MIB);
        let memory = register(addr, 4 * MIB).unwrap();
        assert!(memory.window().is_some(), "{memory}");
        assert_eq!(cuda.destroy_context(context), 0);
        assert!(memory.check_alive().is_err());
        assert!(register(addr, 4 * MIB).is_err());
        drop(memory);
    });
}

#[test]
fn no_driver_library() {
    alone("gpu_standin_errors::no_driver_library", &[(VARIABLE, "/nonexistent/libcuda.so.1")], || {
        for _ in 0..2 {
            let error = Driver::get().unwrap_err();
            assert!(matches!(error, DriverError::Missing { .. }), "{error}");
            let words = error.to_string();
            assert!(words.contains("/nonexistent/libcuda.so.1") && words.contains("install"), "{words}");
        }
        assert!(Gpu::list().is_err());
        assert!(matches!(range_error(0x7000_0000, 64), GpuRangeError::Driver(DriverError::Missing { .. })));
    });
}

#[test]
fn a_library_that_is_not_cuda() {
    alone("gpu_standin_errors::a_library_that_is_not_cuda", &[(VARIABLE, "libc.so.6")], || {
        let error = Driver::get().unwrap_err();
        assert!(matches!(&error, DriverError::Symbol { symbol, .. } if symbol.starts_with("cu")), "{error}");
        assert!(error.to_string().contains("libc.so.6"), "{error}");
    });
}

/// The error names the variable that hides a GPU, and the node that cannot be opened, whatever else
/// there is.
fn no_device() {
    StandIn::load().set_device_count(0);
    let error = Driver::get().unwrap_err();
    assert!(error.to_string().contains("CUDA_VISIBLE_DEVICES is set to '9'"), "{error}");
    let node_is_named = error.to_string().contains("/dev/nvidiactl cannot be opened (");
    assert!(node_is_named || std::path::Path::new("/dev/nvidiactl").exists(), "{error}");
    assert!(matches!(range_error(0x7000_0000, 64), GpuRangeError::Driver(DriverError::Init { .. })));
}

#[test]
fn no_device_to_be_seen() {
    alone("gpu_standin_errors::no_device_to_be_seen", &[("CUDA_VISIBLE_DEVICES", "9")], no_device);
}

#[test]
fn no_device_to_be_seen_beside_gdrdrv() {
    let module = fake_gdrdrv();
    let environment = [("CUDA_VISIBLE_DEVICES", "9"), ("LD_PRELOAD", module.as_str())];
    alone("gpu_standin_errors::no_device_to_be_seen_beside_gdrdrv", &environment, no_device);
}

#[test]
fn a_driver_that_cannot_start() {
    alone("gpu_standin_errors::a_driver_that_cannot_start", &[], || {
        StandIn::load().fail_next(c"cuInit", 999);
        let error = Driver::get().unwrap_err();
        assert!(error.to_string().contains("CUDA_ERROR_UNKNOWN"), "{error}");
        assert!(error.to_string().contains("/dev/nvidiactl"), "{error}");
    });
}

/// Every call of a registration may fail. Then it fails, or continues without a window; the next
/// registration works.
#[test]
fn any_call_may_fail() {
    alone("gpu_standin_errors::any_call_may_fail", &[], || {
        let cuda = StandIn::program();
        let calls = [
            c"cuPointerGetAttributes",
            c"cuPointerGetAttribute",
            c"cuMemGetAddressRange_v2",
            c"cuMemRetainAllocationHandle",
            c"cuMemGetAllocationPropertiesFromHandle",
            c"cuMemRelease",
            c"cuMemGetHandleForAddressRange",
            c"cuMemcpyDtoHAsync_v2",
            c"cuStreamQuery",
            c"cuCtxGetId",
            c"cuCtxPushCurrent_v2",
            c"cuThreadExchangeStreamCaptureMode",
        ];
        for made in [Made::Malloc, Made::Vmm] {
            let (addr, len) = made.make(cuda);
            assert!(register(addr, len).unwrap().window().is_some(), "the way is proved");
            for call in calls {
                for code in [2, 201, 709, 999] {
                    cuda.fail_next(call, code);
                    let outcome = register(addr, len).map(|memory| memory.to_string());
                    // Where this kind of memory does not need the call, the failure is still
                    // pending.
                    cuda.forget_failures();
                    let mut mode = 0;
                    assert_eq!(cuda.exchange_mode(&mut mode), 0);
                    assert_eq!(mode, 0, "{call:?} failed with {code}: the capture mode was not put back");
                    let next =
                        register(addr, len).unwrap_or_else(|error| panic!("after {call:?} {code}: {error}"));
                    assert!(
                        next.window().is_some(),
                        "after {call:?} failed with {code} ({outcome:?}): {next}"
                    );
                }
            }
        }
    });
}

#[test]
fn a_forked_child_is_told_and_the_parent_goes_on() {
    alone("gpu_standin_errors::a_forked_child_is_told_and_the_parent_goes_on", &[], || {
        let cuda = StandIn::program();
        let addr = cuda.malloc(4 * MIB);
        let memory = register(addr, 4 * MIB).unwrap();
        let window = memory.window().unwrap();
        let engine = CopyEngine::new(memory.gpu(), 2, 4096).unwrap();
        let chunk = engine.take_chunk().unwrap();
        window.store(0, &[0x21; 64]).unwrap();
        // SAFETY: the child calls into the crate, which supports that, writes nothing, and ends
        // with _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let told = matches!(Driver::get(), Err(DriverError::Forked))
                && register(addr, 64).is_err()
                && memory.check_alive().is_err()
                && window.load(0, &mut [0; 64]).is_err_and(|error| error.is_fault())
                && window.store(0, &[0x66; 64]).is_err_and(|error| error.is_fault())
                && engine.start_read(&memory, 0, 64, chunk).is_err()
                && Gpu::list().is_err();
            drop((engine, memory));
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if told { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: the child made above; the call writes one int.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status), "the child ended by a signal: {status:#x}");
        assert_eq!(libc::WEXITSTATUS(status), 0, "the child was not told");
        assert_eq!(cuda.peek(addr, 64), [0x21; 64], "the child wrote nothing");
        window.store(0, &[0x22; 64]).unwrap();
        assert_eq!(cuda.peek(addr, 64), [0x22; 64]);
        memory.check_alive().unwrap();
        let copy = engine.start_read(&memory, 0, 64, chunk).unwrap();
        eventually("the copy", || engine.poll(&copy).unwrap());
        drop(register(addr, 4 * MIB).unwrap());
    });
}

/// Deregistering and freeing in any order.
#[test]
fn any_order_of_closing() {
    alone("gpu_standin_errors::any_order_of_closing", &[], || {
        let cuda = StandIn::program();
        for order in 0..6 {
            let addr = cuda.malloc(4 * MIB);
            let (first, second) = (register(addr, MIB).unwrap(), register(addr + 64, 4 * MIB - 64).unwrap());
            first.window().unwrap().store(64, &[5; 8]).unwrap();
            let mut seen = [0; 8];
            second.window().unwrap().load(0, &mut seen).unwrap();
            assert_eq!(seen, [5; 8], "two registrations of the same bytes");
            let mut engine = Some(CopyEngine::new(first.gpu(), 2, 4096).unwrap());
            let copy = engine.as_ref().unwrap().start_read(
                &first,
                0,
                64,
                engine.as_ref().unwrap().take_chunk().unwrap(),
            );
            let mut first = Some(first);
            let mut second = Some(second);
            let mut freed = false;
            for step in 0..4 {
                match (order + step * (1 + order % 2 * 2)) % 4 {
                    0 => drop(first.take()),
                    1 => drop(second.take()),
                    2 => drop(engine.take()),
                    _ => freed = cuda.free(addr) == 0,
                }
            }
            assert!(freed);
            drop(copy);
        }
    });
}

/// Every context is gone: registration fails until the program creates one, and the error says so.
#[test]
fn memory_after_a_reset() {
    alone("gpu_standin_errors::memory_after_a_reset", &[], || {
        let cuda = StandIn::program();
        let addr = cuda.malloc(4 * MIB);
        cuda.device_reset();
        let error = range_error(addr, 4 * MIB);
        assert!(matches!(error, GpuRangeError::NoContext { .. }), "{error:?}");
        assert!(error.to_string().contains("cudaDeviceReset"), "{error}");
    });
}
