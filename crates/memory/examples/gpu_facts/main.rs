//! Prints what this machine's GPUs and their driver allow. It lists devices, and for each kind of
//! memory its path, the refused window methods and the cost of registration. Everything is done on
//! memory of its own.
//!
//! `gpu_facts` prints all; with one word of `devices kinds ipc context capture spin reuse cycles
//! time reset` that part only.

mod contexts;
mod memory;
mod spinning;

use std::error::Error;
use std::fs;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use memory::Memory;
use nobounce_memory::gpu::api::{Stream, consts};
use nobounce_memory::gpu::{CudaError, Driver, Gpu, GpuMemory, GpuOptions};

type Answer = Result<(), Box<dyn Error>>;
type Part = fn(&Arc<Gpu>) -> Answer;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Answer {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // Roles in which this program starts itself.
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["import", handle] => return import(handle),
        ["dangling", trial] => return contexts::dangling(trial),
        ["spinning"] => return spinning::spinning(),
        _ => {}
    }
    let parts: [(&str, Part); 10] = [
        ("devices", devices),
        ("kinds", kinds),
        ("ipc", ipc),
        ("context", contexts::own_context),
        ("capture", capture),
        ("spin", spinning::spin),
        ("reuse", reuse),
        ("cycles", cycles),
        ("time", time),
        ("reset", reset),
    ];
    let Some(gpu) = Gpu::list()?.into_iter().next() else { return Err("CUDA shows no GPU".into()) };
    for (name, part) in parts {
        if arguments.is_empty() || arguments.iter().any(|argument| argument == name) {
            println!("\n== {name}");
            if let Err(error) = part(&gpu) {
                println!("FAILED: {error}");
            }
        }
    }
    Ok(())
}

fn devices(_: &Arc<Gpu>) -> Answer {
    let driver = Driver::get()?;
    println!("driver {} for CUDA {}, stand-in: {}", driver.library(), driver.version(), driver.is_stand_in());
    for gpu in Gpu::list()? {
        println!(
            "{gpu}: minor {:?}, BAR1 {}, memory {} MiB",
            gpu.minor(),
            gpu.bar1_size().map_or_else(|| "unknown".to_owned(), |size| format!("{} MiB", size >> 20)),
            gpu.total_memory() >> 20
        );
        println!(
            "  GPUDirect RDMA {:?}, with VMM {:?}, dma-buf {:?}, writes ordering {}, primary context active {}",
            gpu.gpu_direct_rdma(),
            gpu.gpu_direct_rdma_with_vmm(),
            gpu.dma_buf(),
            gpu.writes_ordering(),
            gpu.primary_is_active()?
        );
    }
    Ok(())
}

fn kinds(gpu: &Arc<Gpu>) -> Answer {
    let context = gpu.primary()?;
    for (name, make) in memory::KINDS {
        match make(gpu, context) {
            Ok(memory) => {
                println!("{name}:");
                describe(&memory);
            }
            Err(error) => println!("{name}: cannot be allocated: {error}"),
        }
    }
    Ok(())
}

/// Registers it twice, prints the result, and copies words in both directions.
fn describe(memory: &Memory) {
    let start = Instant::now();
    let first = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default());
    let (first, took) = match first {
        Ok(registered) => (registered, start.elapsed()),
        Err(error) => return println!("  refused: {error}"),
    };
    let start = Instant::now();
    let second = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default());
    println!("  {first}");
    println!(
        "  base {:#x}, size {}, segments {}, buffer {}, context {:?}; first {took:?}, again {:?} ({})",
        first.range().base(),
        first.range().size(),
        first.range().segments().len(),
        first.range().buffer_id(),
        first.range().context(),
        start.elapsed(),
        if second.is_ok() { "fine" } else { "REFUSED" }
    );
    for refusal in first.refusals() {
        println!("  refused {refusal}");
    }
    if let Some(words) = memory::ipc_words(memory) {
        println!("  IPC handle {words:x?}");
    }
    if first.window().is_some() {
        println!("  both ways: {}", memory::check_both_ways(memory, &first));
    }
}

/// Another process exports memory, this one imports it.
fn ipc(gpu: &Arc<Gpu>) -> Answer {
    let memory = memory::cuda_malloc(gpu, gpu.primary()?, 4 << 20)?;
    let words = memory::ipc_words(&memory).ok_or("the driver gives no IPC handle")?;
    let handle: String = words.iter().map(|word| format!("{word:08x}")).collect();
    let out = Command::new(std::env::current_exe()?).args(["import", &handle]).output()?;
    print!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    Ok(())
}

fn import(handle: &str) -> Answer {
    let gpu = Gpu::list()?.into_iter().next().ok_or("no GPU")?;
    let memory = memory::imported(&gpu, gpu.primary()?, handle)?;
    println!("imported:");
    describe(&memory);
    Ok(())
}

/// Registers while this thread captures a stream in global mode.
fn capture(gpu: &Arc<Gpu>) -> Answer {
    let context = gpu.primary()?;
    let memory = memory::cuda_malloc(gpu, context, 4 << 20)?;
    let driver = gpu.driver();
    let mut stream = Stream::NULL;
    // SAFETY: the calls write one handle and begin a capture on a stream of our own.
    driver.in_context(context, |api| unsafe {
        api.stream_create(&raw mut stream, consts::STREAM_NON_BLOCKING)?;
        api.stream_begin_capture(stream, consts::CAPTURE_MODE_GLOBAL)
    })?;
    let registered = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default()).map(|_| ());
    let mut graph = nobounce_memory::gpu::api::Graph::NULL;
    // SAFETY: the call writes one handle.
    let ended = driver.in_context(context, |api| unsafe { api.stream_end_capture(stream, &raw mut graph) });
    println!("registered: {registered:?}, capture: {ended:?}");
    Ok(())
}

/// Frees registered memory and allocates again, in the hope of the same address.
fn reuse(gpu: &Arc<Gpu>) -> Answer {
    let context = gpu.primary()?;
    for (name, make) in memory::KINDS.iter().take(3) {
        let memory = make(gpu, context)?;
        let registered = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default())?;
        let (addr, alive) = (memory.addr, registered.check_alive().is_ok());
        drop(memory);
        let freed = registered.check_alive();
        let again = make(gpu, context)?;
        let reused = registered.check_alive();
        println!(
            "{name}: alive {alive}; freed: {freed:?}; same address again {}: {reused:?}",
            again.addr == addr
        );
    }
    Ok(())
}

fn cycles(gpu: &Arc<Gpu>) -> Answer {
    let context = gpu.primary()?;
    for (name, make) in memory::KINDS.iter().take(4) {
        let memory = make(gpu, context)?;
        drop(GpuMemory::register(memory.addr, memory.len, &GpuOptions::default())?);
        let before = (count("/proc/self/fd"), mappings(), resident());
        let start = Instant::now();
        for _ in 0..10_000 {
            drop(GpuMemory::register(memory.addr, memory.len, &GpuOptions::default())?);
        }
        let each = start.elapsed() / 10_000;
        println!(
            "{name}: 10000 cycles, {each:?} each; fds, mappings, resident KiB: {before:?} -> {:?}",
            (count("/proc/self/fd"), mappings(), resident())
        );
    }
    Ok(())
}

fn time(gpu: &Arc<Gpu>) -> Answer {
    let context = gpu.primary()?;
    let makers: [(&str, memory::MakeSized); 2] = [("cudaMalloc", memory::cuda_malloc), ("VMM", memory::vmm)];
    for (name, make) in makers {
        for mib in [2, 64, 1024, 8192] {
            let memory = match make(gpu, context, mib << 20) {
                Ok(memory) => memory,
                Err(error) => {
                    println!("{name} {mib} MiB: {error}");
                    continue;
                }
            };
            let before = resident();
            let mut times: Vec<(Duration, Duration)> = Vec::new();
            let mut grown = 0;
            for _ in 0..7 {
                let start = Instant::now();
                let registered = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default())?;
                let took = start.elapsed();
                grown = resident().saturating_sub(before);
                let start = Instant::now();
                drop(registered);
                times.push((took, start.elapsed()));
            }
            times.sort();
            println!(
                "{name} {mib} MiB: register {:?} (worst {:?}), deregister {:?}, resident +{grown} KiB",
                times[3].0, times[6].0, times[3].1
            );
        }
    }
    Ok(())
}

/// Last, since it takes the device's memory from the whole process.
fn reset(gpu: &Arc<Gpu>) -> Answer {
    let context = gpu.primary()?;
    let driver = gpu.driver();
    let memory = memory::cuda_malloc(gpu, context, 4 << 20)?;
    let registered = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default())?;
    println!("id {:?}", driver.context_id(context));
    // SAFETY: nothing of ours runs on the device.
    driver.relaxed(|api| unsafe { api.primary_reset(gpu.ordinal()) }).map_err(|error: CudaError| error)?;
    println!("after a reset: id {:?}, alive {:?}", driver.context_id(context), registered.check_alive());
    println!(
        "register again: {:?}",
        GpuMemory::register(memory.addr, memory.len, &GpuOptions::default()).map(|_| ())
    );
    drop((registered, memory));
    let fresh = memory::cuda_malloc(gpu, gpu.primary()?, 4 << 20);
    println!("allocate again: {:?}", fresh.as_ref().map(|memory| memory.addr));
    if let Ok(fresh) = fresh {
        describe(&fresh);
    }
    Ok(())
}

fn count(folder: &str) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}

fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count())
}

/// Resident memory and page tables of this process, in KiB.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .filter(|line| line.starts_with("VmRSS:") || line.starts_with("VmPTE:"))
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok())
        .sum()
}
