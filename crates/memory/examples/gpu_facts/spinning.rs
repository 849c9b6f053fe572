//! Registration latency while another kernel occupies the whole GPU, and which of its steps take
//! long.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nobounce_memory::gpu::api::{Api, Context, Stream, consts};
use nobounce_memory::gpu::kernel::SpinKernel;
use nobounce_memory::gpu::{CudaError, Gpu, GpuBuffer, GpuMemory, GpuOptions, GpuRange};

use crate::Answer;
use crate::memory::{self, Memory};

/// Words that the comparison of a registration copies.
const WORDS: u64 = 16;
const SPIN_TIMEOUT: Duration = Duration::from_secs(1);

/// In a process of its own, so that the proof of the windows is made while the kernel spins.
pub(crate) fn spin(gpu: &Arc<Gpu>) -> Answer {
    println!("with nothing else on the GPU:");
    let memory = memory::cuda_malloc(gpu, gpu.primary()?, 4 << 20)?;
    steps(gpu, &memory)?;
    println!("while a kernel spins:");
    let out = Command::new(std::env::current_exe()?).arg("spinning").output()?;
    print!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    Ok(())
}

pub(crate) fn spinning() -> Answer {
    let gpu = Gpu::list()?.into_iter().next().ok_or("no GPU")?;
    let context = gpu.primary()?;
    let made: Vec<_> = memory::KINDS[..3].iter().map(|(name, make)| (name, make(&gpu, context))).collect();
    let mut kernel = SpinKernel::load(&gpu)?;
    let spin = kernel.start(Duration::from_secs(8))?;
    for (name, memory) in &made {
        let Ok(memory) = memory else { continue };
        for round in ["first", "again"] {
            let start = Instant::now();
            let registered = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default())?;
            let (took, has_window) = (start.elapsed(), registered.window().is_some());
            drop(registered);
            println!(
                "{name}, {round}: registered in {took:?} (window {has_window}), all given back by {:?}",
                start.elapsed()
            );
        }
    }
    if let Some((_, Ok(memory))) = made.first() {
        steps(&gpu, memory)?;
    }
    println!("{} blocks spinning all the while: {}", spin.started(), spin.goes_on()?);
    Ok(())
}

/// Times the steps of a registration one by one.
fn steps(gpu: &Arc<Gpu>, memory: &Memory) -> Answer {
    let context = gpu.primary()?;
    let say = |what: &str, start: Instant| println!("  {what}: {:?}", start.elapsed());
    let start = Instant::now();
    GpuRange::of(memory.addr, memory.len)?;
    say("what the pointer is", start);
    let start = Instant::now();
    let shared = memory::ipc_words(memory).is_some();
    say(&format!("IPC handle ({shared})"), start);
    let start = Instant::now();
    let buffer = GpuBuffer::new(gpu, 4 << 20)?;
    say("VMM memory made", start);
    let start = Instant::now();
    drop(buffer);
    say("VMM memory given back", start);
    let (mut stream, mut slab) = (Stream::NULL, std::ptr::null_mut());
    let start = Instant::now();
    // SAFETY: the calls write one handle and one address; neither is freed, which would wait.
    gpu.driver().in_context(context, |api| unsafe {
        api.stream_create(&raw mut stream, consts::STREAM_NON_BLOCKING)?;
        api.mem_host_alloc(&raw mut slab, 1 << 16, consts::MEMHOSTALLOC_PORTABLE)
    })?;
    say("a stream and pinned memory", start);
    for (what, count, len) in
        [("first copy of a word", 1, 8), ("one word", 1, 8), ("16 words", WORDS, 8), ("64 KiB", 1, 1 << 16)]
    {
        // SAFETY: the slab has 64 KiB, the memory more than that; copies are waited for.
        timed(gpu, context, stream, &format!("{what} from the GPU"), |api| unsafe {
            (0..count).try_for_each(|at| {
                let slot = slab.wrapping_byte_add(usize::try_from(at).unwrap_or(0) * 8);
                api.copy_from_device_async(slot, memory.addr + at * 4096, len, stream)
            })
        })?;
        // SAFETY: as above; the memory is ours.
        timed(gpu, context, stream, &format!("{what} to the GPU"), |api| unsafe {
            (0..count).try_for_each(|at| {
                let slot = slab.wrapping_byte_add(usize::try_from(at).unwrap_or(0) * 8);
                api.copy_to_device_async(memory.addr + at * 4096, slot, len, stream)
            })
        })?;
    }
    let start = Instant::now();
    let registered = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default())?;
    say("registered", start);
    let start = Instant::now();
    drop(GpuMemory::register(memory.addr, memory.len, &GpuOptions::default())?);
    say("registered twice, with the same mapping", start);
    if let Some(window) = registered.window() {
        let start = Instant::now();
        (0..16).try_for_each(|at| window.load_u64(at * 4096).map(|_| ()))?;
        say("16 words loaded through the window", start);
    }
    let start = Instant::now();
    drop(registered);
    say("deregistered", start);
    Ok(())
}

/// Measures how long copies take to submit, and to complete.
fn timed(
    gpu: &Gpu,
    context: Context,
    stream: Stream,
    what: &str,
    copies: impl FnOnce(&Api) -> Result<(), CudaError>,
) -> Answer {
    gpu.driver().in_context(context, |api| {
        let start = Instant::now();
        copies(api)?;
        let asked = start.elapsed();
        let mut looks = 0;
        // SAFETY: the stream is ours and live.
        while let Err(error) = unsafe { api.stream_query(stream) } {
            looks += 1;
            if error.code != CudaError::NOT_READY {
                return Err(error.into());
            }
            if start.elapsed() > SPIN_TIMEOUT {
                println!("  {what}: asked for in {asked:?}, not there after {SPIN_TIMEOUT:?}");
                return Ok(());
            }
            std::thread::yield_now();
        }
        println!("  {what}: asked for in {asked:?}, there after {:?}, {looks} looks", start.elapsed());
        Ok::<_, Box<dyn std::error::Error>>(())
    })
}
