//! Each kind of memory on a real GPU: the path it gets, and bytes that arrive both ways where there is a window. The cells of
//! docs/paths.md, for the driver at hand.

// Allocates as other people's programs do; `gpu_facts` prints more about the same memory.
#[path = "../examples/gpu_facts/memory.rs"]
#[allow(dead_code, reason = "the example uses more of it")]
mod memory;

mod gpu_common;

use nobounce_memory::gpu::{GpuMemory, GpuOptions, Rung};
use nobounce_memory::path::{Mechanism, Path, Require};

/// What is expected of a kind, by the name it has in the list.
#[derive(Debug, PartialEq, Eq)]
enum Expected {
    /// A window, with any driver.
    Window,
    /// A window only where the driver lets the CPU map dma-bufs, or gdrdrv is there.
    WindowByNewerDriver,
    /// Either; what counts is that a window, if there is one, is right.
    Either,
    /// No window, ever.
    Staged,
    /// Host memory.
    Cpu,
    /// Not registered at all.
    Refused,
}

fn expected(name: &str) -> Expected {
    match name {
        _ if name.starts_with("cudaMalloc, ") || name.starts_with("VMM, exportable") => Expected::Window,
        "VMM, three handles" => Expected::Window,
        "VMM, not exportable" | "cudaMallocAsync pool" => Expected::WindowByNewerDriver,
        "managed" => Expected::Staged,
        "pinned host" => Expected::Cpu,
        _ if name.starts_with("not CUDA's") => Expected::Refused,
        _ => Expected::Either,
    }
}

#[test]
fn every_kind_of_memory_has_the_path_of_the_table() {
    let Some((gpu, _alone)) = gpu_common::gpu(true) else { return };
    let context = gpu.primary().unwrap();
    let (mut wrong, mut newer) = (Vec::new(), false);
    for (name, make) in memory::KINDS {
        let memory = make(&gpu, context).unwrap_or_else(|error| panic!("{name}: {error}"));
        let registered = match GpuMemory::register(memory.addr, memory.len, &GpuOptions::default()) {
            Ok(registered) => registered,
            Err(error) => {
                println!("figure: {name}: {error}");
                if expected(name) != Expected::Refused {
                    wrong.push(name);
                }
                continue;
            }
        };
        newer |= matches!(registered.rung(), Some(Rung::DmaBufMmap | Rung::Gdrdrv));
        let rung = registered.rung().map_or_else(String::new, |rung| format!(", by {rung}"));
        println!("figure: {name}: {}{rung}", registered.paths());
        let window = registered.window().is_some();
        let right = match expected(name) {
            Expected::Window => window,
            Expected::WindowByNewerDriver => window == newer,
            Expected::Either => true,
            Expected::Staged => !window && !registered.paths().inbound.is_direct(),
            Expected::Cpu => registered.paths().inbound == Path::Direct(Mechanism::Cpu),
            Expected::Refused => false,
        };
        if !right {
            wrong.push(name);
        }
        if window {
            assert_eq!(memory::check_both_ways(&memory, &registered), "right", "{name}");
        }
        let direct = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
        let required = GpuMemory::register(memory.addr, memory.len, &direct);
        assert_eq!(required.is_ok(), registered.paths().are_direct(), "{name}: {required:?}");
    }
    assert!(wrong.is_empty(), "not as docs/paths.md says: {wrong:?}");
}
