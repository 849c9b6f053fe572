//! Destroyed contexts: what goes with them, and how the driver treats stale handles.

use std::process::Command;
use std::sync::Arc;

use nobounce_memory::HostBuffer;
use nobounce_memory::gpu::api::{Context, Stream, consts};
use nobounce_memory::gpu::{CudaError, Gpu, GpuMemory, GpuOptions};

use crate::{Answer, describe, memory};

/// Uses of a destroyed context's handle, each in a process of its own, since the driver may crash.
const TRIALS: [&str; 5] = ["nothing", "id", "id-later", "push", "stream"];

/// Memory of a context that is not the primary one, before and after its end.
pub(crate) fn own_context(gpu: &Arc<Gpu>) -> Answer {
    let driver = gpu.driver();
    let context = create(gpu)?;
    println!("context {context:?}, id {}", driver.context_id(context)?);
    let memory = memory::cuda_malloc(gpu, context, 4 << 20)?;
    describe(&memory);
    let registered = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default())?;
    let pinned = memory::pinned(gpu, context)?;
    let host = HostBuffer::new(1 << 16)?;
    let host_addr = usize::try_from(host.addr())?;
    // SAFETY: pins pages of our own, which stay until after the context.
    driver.in_context(context, |api| unsafe {
        api.mem_host_register(std::ptr::with_exposed_provenance_mut(host_addr), 1 << 16, 1)
    })?;
    let numbers = || {
        let number = |addr| memory::buffer_id(gpu, addr).map_err(|error: CudaError| error.name);
        format!(
            "cudaMalloc {:?}, cudaHostAlloc {:?}, cudaHostRegister {:?}",
            number(memory.addr),
            number(pinned.addr),
            number(host.addr())
        )
    };
    println!("numbers of its memory: {}", numbers());
    destroy(gpu, context)?;
    println!("after its destruction: {}", numbers());
    println!("alive {:?}", registered.check_alive());
    println!(
        "register again: {:?}",
        GpuMemory::register(memory.addr, memory.len, &GpuOptions::default()).map(|_| ())
    );
    drop((registered, memory, pinned));
    for trial in TRIALS {
        let out = Command::new(std::env::current_exe()?).args(["dangling", trial]).output()?;
        let said = String::from_utf8_lossy(&out.stdout).trim().replace('\n', "; ");
        println!("a destroyed context's handle, {trial}: {said} ({})", out.status);
    }
    Ok(())
}

/// One trial.
pub(crate) fn dangling(trial: &str) -> Answer {
    let gpu = Gpu::list()?.into_iter().next().ok_or("no GPU")?;
    let driver = gpu.driver();
    let context = create(&gpu)?;
    let memory = memory::cuda_malloc(&gpu, context, 4 << 20)?;
    let registered = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default())?;
    let mut stream = Stream::NULL;
    // SAFETY: the call writes one handle.
    driver.in_context(context, |api| unsafe {
        api.stream_create(&raw mut stream, consts::STREAM_NON_BLOCKING)
    })?;
    destroy(&gpu, context)?;
    let answer = match trial {
        "id" => driver.context_id(context).map(|id| format!("id {id}")),
        "id-later" => {
            // Reallocates the memory that the context had.
            let others: Vec<Vec<u8>> =
                (6..26).flat_map(|bits| [vec![0xA5; 1 << bits], vec![0xA5; 3 << bits]]).collect();
            let another = create(&gpu)?;
            drop(others);
            driver
                .context_id(context)
                .map(|id| format!("id {id}; the same handle again {}", context == another))
        }
        "push" => driver.in_context(context, |_| Ok("pushed and popped".to_owned())),
        // SAFETY: not safe at all, which is what this process is for.
        "stream" => driver
            .in_context(gpu.primary()?, |api| unsafe { api.stream_query(stream) })
            .map(|()| "idle".to_owned()),
        _ => Ok("left alone".to_owned()),
    };
    println!("{}", answer.unwrap_or_else(|error: CudaError| error.to_string()));
    drop((registered, memory));
    println!("all given back");
    Ok(())
}

fn create(gpu: &Gpu) -> Result<Context, CudaError> {
    let mut context = Context::NULL;
    // SAFETY: the calls write one handle; the new context is popped again, so that this thread is
    // left as it was.
    gpu.driver().relaxed(|api| unsafe {
        api.ctx_create(&raw mut context, 0, gpu.ordinal())?;
        let mut popped = Context::NULL;
        api.ctx_pop(&raw mut popped)
    })?;
    Ok(context)
}

fn destroy(gpu: &Gpu, context: Context) -> Result<(), CudaError> {
    // SAFETY: nothing of ours runs in the context.
    gpu.driver().relaxed(|api| unsafe { api.ctx_destroy(context) })
}
