//! Every kind of memory gets its expected path, with the reason where that is not direct. One test
//! covers each cell of the table memory kind x driver, as far as the stand-in driver goes.

use crate::common::{MIB, Made, alone, register};
use fake_cuda::client::StandIn;
use nobounce_memory::gpu::{GPU_PAGE, GpuMemory, GpuOptions, GpuRegisterError, MemoryKind, Method};
use nobounce_memory::path::{Mechanism, Path, Require};

fn kind_of(made: Made) -> MemoryKind {
    match made {
        Made::Malloc | Made::Small => MemoryKind::CudaMalloc,
        Made::Vmm => MemoryKind::VmmExportable,
        Made::VmmPrivate => MemoryKind::VmmPrivate,
        Made::VmmSeveral => MemoryKind::VmmSeveral,
        Made::Pool => MemoryKind::Pool,
        Made::Imported => MemoryKind::IpcImported,
        Made::Managed => MemoryKind::Managed,
        Made::Pinned => MemoryKind::PinnedHost,
    }
}

/// The words of a staged path.
fn reason(path: &Path) -> &str {
    match path {
        Path::Staged(reason) => reason.as_str(),
        Path::Direct(_) | Path::Believed(..) => panic!("the path is direct"),
    }
}

/// A driver that lets the CPU map dma-bufs.
#[test]
fn with_dmabuf_mmap() {
    alone("gpu_standin_kinds::with_dmabuf_mmap", &[], || {
        let cuda = StandIn::program();
        for made in Made::ALL {
            let (addr, len) = made.make(cuda);
            let memory = register(addr, len).unwrap_or_else(|error| panic!("{made:?}: {error}"));
            assert_eq!(memory.range().kind(), kind_of(made), "{made:?}");
            // It must not be mistaken for a GPU.
            assert!(memory.gpu().driver().is_stand_in());
            assert!(memory.to_string().contains("stand-in GPU (host memory)"), "{memory}");
            assert_eq!((memory.addr(), memory.len()), (addr, len));
            let inbound = &memory.paths().inbound;
            match made {
                Made::Pinned => {
                    assert!(memory.paths().are_direct());
                    assert_eq!(*inbound, Path::Direct(Mechanism::Cpu));
                    assert!(memory.window().is_none() && memory.host().is_some());
                }
                // The driver exports neither.
                Made::Imported | Made::Managed => {
                    assert!(memory.window().is_none(), "{made:?}");
                    let wanted =
                        if made == Made::Managed { "managed memory moves" } else { "imported by IPC" };
                    assert!(reason(inbound).contains(wanted), "{made:?}: {inbound}");
                    assert_eq!(memory.refusals().len(), Method::ALL.len());
                }
                _ => {
                    assert_eq!(*inbound, Path::Direct(Mechanism::Window), "{made:?}: {inbound}");
                    assert_eq!(memory.method(), Some(Method::DmaBufMmap));
                    assert!(memory.paths().are_direct());
                    assert!(memory.refusals().is_empty());
                }
            }
        }
    });
}

/// A driver of the 580 series, without another window method: the copy engine serves, and the
/// reason names each method.
#[test]
fn without_dmabuf_mmap() {
    alone("gpu_standin_kinds::without_dmabuf_mmap", &[], || {
        let cuda = StandIn::program();
        cuda.refuse_dmabuf_mmap(1);
        for made in Made::ALL.into_iter().filter(|&made| made != Made::Pinned) {
            let (addr, len) = made.make(cuda);
            let memory = register(addr, len).unwrap_or_else(|error| panic!("{made:?}: {error}"));
            assert_eq!(memory.range().kind(), kind_of(made));
            assert!(memory.window().is_none());
            assert_eq!(memory.method(), None);
            let words = reason(&memory.paths().inbound);
            assert!(words.contains(kind_of(made).name()), "{made:?}: {words}");
            let methods: Vec<Method> = memory.refusals().iter().map(|refusal| refusal.method).collect();
            assert_eq!(methods, Method::ALL, "{made:?}");
            assert!(memory.refusals().iter().all(|refusal| !refusal.reason.is_empty()));
            if made != Made::Managed && made != Made::Imported {
                assert!(words.contains("mmap of the dma-buf failed"), "{made:?}: {words}");
            }
            // With a direct path required there is no registration, and the error has the reason.
            let options = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
            let error = GpuMemory::register(addr, len, &options).unwrap_err();
            assert!(
                matches!(&error, GpuRegisterError::NotDirect { refusals, .. } if refusals.len() == 3),
                "{error}"
            );
            assert!(error.to_string().contains(words), "{error}");
        }
    });
}

/// The same driver with GDRCopy's module: that gives a window onto all device memory with a
/// physical location. The module is a stand-in, a preloaded library that implements `/dev/gdrdrv`.
#[test]
fn by_gdrdrv() {
    let module = fake_gdrdrv();
    alone("gpu_standin_kinds::by_gdrdrv", &[("LD_PRELOAD", &module)], || {
        let cuda = StandIn::program();
        cuda.refuse_dmabuf_mmap(1);
        let mut pinned = 0;
        for made in Made::ALL {
            let (addr, len) = made.make(cuda);
            cuda.poke(addr, &vec![0x77; len]);
            let memory = register(addr, len).unwrap_or_else(|error| panic!("{made:?}: {error}"));
            match made {
                Made::Pinned => assert_eq!(memory.paths().inbound, Path::Direct(Mechanism::Cpu)),
                Made::Managed => assert!(reason(&memory.paths().inbound).contains("managed memory moves")),
                _ => {
                    assert_eq!(memory.method(), Some(Method::Gdrdrv), "{made:?}: {memory}");
                    assert_eq!(memory.paths().inbound, Path::Direct(Mechanism::Window), "{made:?}");
                    let window = memory.window().unwrap();
                    window.store_last(100, &[0x42; 500]).unwrap();
                    window.complete().unwrap();
                    assert_eq!(cuda.peek(addr + 100, 500), [0x42; 500], "{made:?}");
                    pinned += 1;
                }
            }
        }
        assert_eq!(pinned, 7);
    });
}

/// BAR1 is full: registration falls back to the copy engine, reports why, and fails where direct is
/// required.
#[test]
fn by_gdrdrv_with_bar1_full() {
    let module = fake_gdrdrv();
    let room = (16 * MIB).to_string();
    let environment = [("LD_PRELOAD", module.as_str()), ("FAKE_GDRDRV_ROOM", &room)];
    alone("gpu_standin_kinds::by_gdrdrv_with_bar1_full", &environment, || {
        let cuda = StandIn::program();
        cuda.refuse_dmabuf_mmap(1);
        let small = cuda.malloc(MIB);
        let fits = register(small, MIB).unwrap();
        assert_eq!(fits.method(), Some(Method::Gdrdrv), "{fits}");
        let large = cuda.malloc(32 * MIB);
        let memory = register(large, 32 * MIB).unwrap();
        assert!(memory.window().is_none());
        let words = reason(&memory.paths().inbound);
        assert!(words.contains("gdrdrv cannot pin the memory (Cannot allocate memory"), "{words}");
        assert!(
            words.contains("no room for 32768 KiB in the BAR1 of") && words.contains("register less"),
            "{words}"
        );
        let options = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
        let refused = GpuMemory::register(large, 32 * MIB, &options).unwrap_err();
        assert!(matches!(refused, GpuRegisterError::NotDirect { .. }), "{refused}");
        drop(fits);
        // Its space was freed.
        for _ in 0..40 {
            assert_eq!(register(cuda.malloc(2 * MIB), 2 * MIB).unwrap().method(), Some(Method::Gdrdrv));
        }
    });
}

/// The same with a driver that lets the CPU map dma-bufs. Memory that does not fit uses the copy
/// engine, with the sizes and the remedy in the reason. Of an allocation that does not fit, the
/// requested part is mapped.
#[test]
fn with_dmabuf_mmap_and_bar1_full() {
    let module = fake_gdrdrv();
    let room = (16 * MIB).to_string();
    let environment =
        [("LD_PRELOAD", module.as_str()), ("FAKE_DMABUF_ROOM", &room), ("FAKE_GDRDRV_ROOM", &room)];
    alone("gpu_standin_kinds::with_dmabuf_mmap_and_bar1_full", &environment, || {
        let cuda = StandIn::program();
        let large = cuda.malloc(32 * MIB);
        let memory = register(large, 32 * MIB).unwrap();
        assert!(memory.window().is_none());
        let words = reason(&memory.paths().inbound);
        let full = format!("no room for 32768 KiB in the BAR1 of {}, of unknown size", memory.gpu());
        let said = format!(
            "{full} (mmap of the dma-buf failed: Cannot allocate memory (os error 12)); register less"
        );
        assert!(words.contains(&said), "{words}");
        assert!(memory.refusals()[0].may_pass);
        let options = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
        let refused = GpuMemory::register(large, 32 * MIB, &options).unwrap_err();
        assert!(matches!(refused, GpuRegisterError::NotDirect { .. }), "{refused}");
        let part = GpuMemory::register(large + 4096, MIB, &options).unwrap();
        assert_eq!(part.method(), Some(Method::DmaBufMmap), "{part}");
        part.window().unwrap().store(0, b"a part").unwrap();
        assert_eq!(cuda.peek(large + 4096, 6), b"a part");
    });
}

/// The environment's switch also applies where gdrdrv would provide a window.
#[test]
fn by_gdrdrv_switched_off() {
    let module = fake_gdrdrv();
    let environment = [("LD_PRELOAD", module.as_str()), ("NOBOUNCE_WINDOW", "off")];
    alone("gpu_standin_kinds::by_gdrdrv_switched_off", &environment, || {
        let cuda = StandIn::program();
        cuda.refuse_dmabuf_mmap(1);
        let (addr, len) = Made::Malloc.make(cuda);
        let memory = register(addr, len).unwrap();
        assert!(memory.window().is_none());
        for path in [&memory.paths().inbound, &memory.paths().outbound] {
            assert!(reason(path).contains("NOBOUNCE_WINDOW=off"), "{memory}");
        }
    });
}

/// Builds the stand-in of GDRCopy's module.
pub(crate) fn fake_gdrdrv() -> String {
    let folder = env!("CARGO_TARGET_TMPDIR");
    let library = format!("{folder}/fake-gdrdrv-{}.so", std::process::id());
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/memory/fake_gdrdrv.c");
    let cc = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", &library, source, "-ldl"])
        .output()
        .expect("cc");
    assert!(cc.status.success(), "{}", String::from_utf8_lossy(&cc.stderr));
    library
}

/// The GPU sees stores through the window, up to the ends of the range and not beyond them.
#[test]
fn the_window_shows_the_memory() {
    alone("gpu_standin_kinds::the_window_shows_the_memory", &[], || {
        let cuda = StandIn::program();
        for made in [Made::Malloc, Made::Small, Made::Vmm, Made::VmmPrivate, Made::VmmSeveral, Made::Pool] {
            let (base, size) = made.make(cuda);
            cuda.poke(base, &vec![0xEE; size]);
            // Inside the allocation, so that there are neighbours; across the seam of several
            // handles.
            for (offset, len) in [(0, size), (8, 64), (1000, 1), (4093, 5001), (size / 2 - 100, 200)] {
                let addr = base + offset as u64;
                let memory = register(addr, len).unwrap_or_else(|error| panic!("{made:?}: {error}"));
                let window = memory.window().unwrap_or_else(|| panic!("{made:?}: {memory}"));
                assert_eq!(window.len(), len);
                let bytes: Vec<u8> = (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect();
                window.store_last(0, &bytes).unwrap();
                window.complete().unwrap();
                assert!(cuda.peek(addr, len) == bytes, "{made:?}: stores at {offset}, {len} bytes");
                if offset > 0 {
                    assert_eq!(cuda.peek(addr - 1, 1), [0xEE], "{made:?}: the byte before {offset}");
                    assert_eq!(
                        cuda.peek(addr + len as u64, 1),
                        [0xEE],
                        "{made:?}: the byte after {offset}+{len}"
                    );
                }
                let bytes: Vec<u8> = bytes.iter().map(|byte| byte ^ 0x5A).collect();
                cuda.poke(addr, &bytes);
                let mut seen = vec![0; len];
                window.load(0, &mut seen).unwrap();
                assert!(seen == bytes, "{made:?}: loads at {offset}, {len} bytes");
                assert!(window.store(1, &bytes).is_err(), "one byte too far");
                cuda.poke(base, &vec![0xEE; size]);
            }
        }
    });
}

/// Registration reads live tensors: it must not write a byte of them.
#[test]
fn registering_writes_nothing() {
    alone("gpu_standin_kinds::registering_writes_nothing", &[], || {
        let cuda = StandIn::program();
        for made in Made::ALL {
            let (addr, len) = made.make(cuda);
            let bytes: Vec<u8> = (0..len).map(|at| u8::try_from(at * 7 % 253).unwrap()).collect();
            cuda.poke(addr, &bytes);
            for _ in 0..3 {
                drop(register(addr, len).unwrap());
            }
            drop(register(addr + 100, len - 200).unwrap());
            assert!(cuda.peek(addr, len) == bytes, "{made:?}");
        }
    });
}

/// A driver whose dma-buf maps the wrong memory is detected, and the window is not used.
#[test]
fn a_window_onto_other_memory_is_found_out() {
    alone("gpu_standin_kinds::a_window_onto_other_memory_is_found_out", &[], || {
        let cuda = StandIn::program();
        cuda.export_wrong_memory(1);
        // The other memory is zero as well: this memory alone does not show the difference.
        let addr = cuda.malloc(4 * MIB);
        cuda.poke(addr, &vec![0; 4 * MIB]);
        let memory = register(addr, 4 * MIB).unwrap();
        assert!(memory.window().is_none(), "{memory}");
        assert_eq!(memory.refusals()[0].method, Method::DmaBufMmap);
        assert!(!memory.paths().inbound.is_direct());
    });
}

/// The same, where the driver misbehaves only after its method was verified: each window is
/// compared for itself.
#[test]
fn a_later_window_onto_other_memory_is_found_out() {
    alone("gpu_standin_kinds::a_later_window_onto_other_memory_is_found_out", &[], || {
        let cuda = StandIn::program();
        let first = cuda.malloc(4 * MIB);
        assert!(register(first, 4 * MIB).unwrap().window().is_some());
        cuda.export_wrong_memory(1);
        let second = cuda.malloc(4 * MIB);
        cuda.poke(second, &vec![0x11; 4 * MIB]);
        let memory = register(second, 4 * MIB).unwrap();
        assert!(memory.window().is_none(), "{memory}");
    });
}

/// Staging on request, for comparison.
#[test]
fn staged_on_request() {
    alone("gpu_standin_kinds::staged_on_request", &[], || {
        let cuda = StandIn::program();
        let addr = cuda.malloc(MIB);
        let memory =
            GpuMemory::register(addr, MIB, &GpuOptions { staged: true, ..GpuOptions::default() }).unwrap();
        assert!(memory.window().is_none());
        for path in [&memory.paths().inbound, &memory.paths().outbound] {
            assert!(reason(path).contains("asked for"), "{path}");
        }
    });
}

/// The switch of the environment: staged in all reports.
#[test]
fn window_switched_off() {
    alone("gpu_standin_kinds::window_switched_off", &[("NOBOUNCE_WINDOW", "off")], || {
        let cuda = StandIn::program();
        for made in Made::ALL.into_iter().filter(|&made| made != Made::Pinned) {
            let (addr, len) = made.make(cuda);
            let memory = register(addr, len).unwrap();
            assert!(memory.window().is_none());
            for path in [&memory.paths().inbound, &memory.paths().outbound] {
                assert!(reason(path).contains("NOBOUNCE_WINDOW=off"), "{memory}");
            }
        }
    });
}

/// Direct required by the environment: it fails closed, with the reason, and only where it must.
#[test]
fn direct_required_by_the_environment() {
    alone("gpu_standin_kinds::direct_required_by_the_environment", &[("NOBOUNCE_REQUIRE", "direct")], || {
        let cuda = StandIn::program();
        let (addr, len) = Made::Malloc.make(cuda);
        assert!(register(addr, len).unwrap().paths().are_direct());
        let (managed, len) = Made::Managed.make(cuda);
        let error = register(managed, len).unwrap_err();
        assert!(error.to_string().contains("managed memory moves"), "{error}");
        let off = GpuOptions { window: false, ..GpuOptions::default() };
        let error = GpuMemory::register(addr, 64, &off).unwrap_err();
        assert!(matches!(error, GpuRegisterError::NotDirect { .. }), "{error}");
        assert!(error.to_string().contains("switched off"), "{error}");
    });
}

/// Both at once: off and required.
#[test]
fn off_and_required_fails_closed() {
    let environment = [("NOBOUNCE_WINDOW", "off"), ("NOBOUNCE_REQUIRE", "direct")];
    alone("gpu_standin_kinds::off_and_required_fails_closed", &environment, || {
        let cuda = StandIn::program();
        let (addr, len) = Made::Malloc.make(cuda);
        let error = register(addr, len).unwrap_err();
        assert!(matches!(error, GpuRegisterError::NotDirect { kind: MemoryKind::CudaMalloc, .. }), "{error}");
    });
}

/// Small allocations share GPU pages. A request by page covers the whole page, though it begins
/// before the allocation or with unused memory. It stands for the allocation that holds the
/// address, or the next one.
#[test]
fn whole_gpu_pages() {
    alone("gpu_standin_kinds::whole_gpu_pages", &[], || {
        let cuda = StandIn::program();
        let options = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
        let mut small = [0; 4];
        for addr in &mut small {
            assert_eq!(cuda.alloc(addr, 512), 0);
        }
        let page = small[1] / GPU_PAGE * GPU_PAGE;
        assert_ne!(small[1], page);
        for (addr, len) in [(small[1], 512), (page, 65536), (small[1] + 100, 1)] {
            let memory = GpuMemory::register_gpu_pages(addr, len, &options).unwrap();
            assert_eq!((memory.addr(), memory.len()), (page, 65536));
            let offset = usize::try_from(small[1] - page).unwrap();
            memory.window().unwrap().store(offset, b"a neighbour does not notice").unwrap();
            assert_eq!(cuda.peek(small[1], 27), b"a neighbour does not notice");
        }
        // The first one's bytes, requested by an address that is no longer allocated.
        assert_eq!(cuda.free(small[0]), 0);
        let memory = GpuMemory::register_gpu_pages(small[0], 65536, &options).unwrap();
        assert_eq!(memory.range().base(), small[1]);
        assert!(memory.check_alive().is_ok());
        // A page without any allocation.
        assert!(GpuMemory::register_gpu_pages(page + 4 * GPU_PAGE, 512, &options).is_err());
        let large = Made::Malloc.make(cuda);
        let memory = GpuMemory::register_gpu_pages(large.0, large.1, &options).unwrap();
        assert_eq!(memory.len() % 65536, 0);
        assert!(memory.len() >= large.1);
    });
}

/// Each window of whole GPU pages belongs to one registration: hiding it hides no other window onto
/// the same bytes.
#[test]
fn a_window_of_its_own_is_hidden_alone() {
    alone("gpu_standin_kinds::a_window_of_its_own_is_hidden_alone", &[], || {
        let cuda = StandIn::program();
        let options = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
        let mut addr = 0;
        assert_eq!(cuda.alloc(&mut addr, 4 << 20), 0);
        let shared = GpuMemory::register(addr, 4 << 20, &options).unwrap();
        let whole = GpuMemory::register_gpu_pages(addr, 4 << 20, &options).unwrap();
        let half = GpuMemory::register_gpu_pages(addr + (2 << 20), 2 << 20, &options).unwrap();
        let [in_shared, in_whole, in_half] = [&shared, &whole, &half].map(|memory| memory.window().unwrap());
        whole.hide();
        let fault = in_whole.store(2 << 20, b"not this").unwrap_err();
        assert!(fault.is_fault(), "{fault}");
        in_half.store(0, b"but this").unwrap();
        assert_eq!(cuda.peek(addr + (2 << 20), 8), b"but this");
        in_shared.store(2 << 20, b"and this").unwrap();
        assert_eq!(cuda.peek(addr + (2 << 20), 8), b"and this");
        // The first half of it, and nothing behind that.
        whole.show(2 << 20).unwrap();
        in_whole.store((2 << 20) - 8, b"the last").unwrap();
        assert!(in_whole.store(2 << 20, b"not this").is_err());
        assert_eq!(cuda.peek(addr + (2 << 20) - 8, 16), b"the lastand this");
        whole.show(4 << 20).unwrap();
        in_whole.store(2 << 20, b"now this").unwrap();
        assert_eq!(cuda.peek(addr + (2 << 20), 8), b"now this");
        assert!(whole.show((4 << 20) + 4096).is_err());
        // A shared window cannot be hidden.
        shared.hide();
        assert!(shared.show(4096).is_err() && in_shared.store(0, b"seen").is_ok());
    });
}
