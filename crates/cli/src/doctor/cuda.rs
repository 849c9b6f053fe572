//! GPU facts from CUDA, and the results of exporting and mapping GPU memory.

use std::os::fd::AsFd;
use std::sync::Arc;

use nobounce::memory::gpu::dmabuf::DmaBuf;
use nobounce::memory::gpu::{Driver, Gpu, GpuBuffer, GpuMemory, GpuOptions, GpuRange};
use nobounce_topology::facts::{ATTRIBUTE_UNKNOWN, Facts, Library, Probe, Read};

use super::verbs;

/// Bytes that are exported, mapped and registered on each GPU.
const LEN: usize = 2 << 20;
/// A larger registration, where the GPU has the memory: some limits show only there.
const LARGE: usize = 64 << 20;

/// Adds CUDA's facts and runs the probes; then probes the adapters with the memory of all GPUs.
pub(super) fn fill(facts: &mut Facts, probe: bool) {
    let gpus = match Driver::get().and_then(|driver| Ok((driver, Gpu::list()?))) {
        Ok((driver, gpus)) => {
            let version = driver.version();
            let version = Some(format!("{}.{}", version / 1000, version % 1000 / 10));
            facts.libraries.cuda = Read::Yes(Some(Library { version, ..Library::default() }));
            gpus
        }
        Err(error) => {
            let none = facts.gpus.is_empty();
            facts.libraries.cuda = if none { Read::Yes(None) } else { Read::no(error.to_string()) };
            for gpu in &mut facts.gpus {
                gpu.gpudirect_rdma = Read::no(error.to_string());
            }
            Vec::new()
        }
    };
    let mut tried = Vec::new();
    for cuda in &gpus {
        // A stand-in, or a GPU missing from the PCI tree, is a fact too.
        if !facts.gpus.iter().any(|gpu| gpu.address == cuda.pci_address()) {
            let gpu = nobounce_topology::facts::Gpu {
                address: cuda.pci_address().to_owned(),
                ..Default::default()
            };
            facts.gpus.push(gpu);
        }
        let Some(gpu) = facts.gpus.iter_mut().find(|gpu| gpu.address == cuda.pci_address()) else { continue };
        if gpu.name.known().is_none() {
            gpu.name = Read::Yes(cuda.name().to_owned());
        }
        if gpu.memory_bytes.known().is_none() {
            gpu.memory_bytes = Read::Yes(cuda.total_memory());
        }
        gpu.gpudirect_rdma = attribute(116, cuda.gpu_direct_rdma());
        gpu.gpudirect_rdma_vmm = attribute(110, cuda.gpu_direct_rdma_with_vmm());
        gpu.dma_buf = attribute(124, cuda.dma_buf());
        if probe {
            tried.push((cuda.pci_address().to_owned(), try_gpu(cuda, gpu)));
        }
    }
    if !probe {
        return;
    }
    let memory: Vec<verbs::GpuAllocation<'_>> = tried
        .iter()
        .filter_map(|(address, tried)| {
            let tried = tried.as_ref()?;
            let dma_buf = tried
                .dma_buf
                .as_ref()
                .map(|exported| (exported.as_fd(), tried.buffer.addr().saturating_sub(exported.start())));
            Some(verbs::GpuAllocation {
                gpu: address,
                address: tried.buffer.addr(),
                sizes: [LEN, tried.len],
                dma_buf,
            })
        })
        .collect();
    verbs::fill(facts, &memory);
}

/// An attribute of CUDA's; old drivers do not know all of them.
fn attribute(number: u32, value: Option<bool>) -> Read<bool> {
    value.map_or_else(|| Read::no(format!("{ATTRIBUTE_UNKNOWN} {number}")), Read::Yes)
}

/// Memory that was allocated for trying, and its export.
struct Tried {
    buffer: GpuBuffer,
    len: usize,
    dma_buf: Option<DmaBuf>,
}

fn try_gpu(cuda: &Arc<Gpu>, gpu: &mut nobounce_topology::facts::Gpu) -> Option<Tried> {
    let large = GpuBuffer::new(cuda, LARGE).map(|buffer| (buffer, LARGE));
    let (buffer, len) = match large.or_else(|_| GpuBuffer::new(cuda, LEN).map(|buffer| (buffer, LEN))) {
        Ok(buffer) => buffer,
        Err(error) => {
            let why = format!("cannot allocate GPU memory: {error}");
            gpu.export_probe = Read::no(why.clone());
            gpu.window_probe = Read::no(why);
            return None;
        }
    };
    let exported = GpuRange::of(buffer.addr(), len)
        .map_err(|error| error.to_string())
        .and_then(|range| DmaBuf::export(&range).map_err(|error| error.to_string()));
    gpu.export_probe = Read::Yes(match &exported {
        Ok(_) => Probe::worked("cuMemGetHandleForAddressRange"),
        Err(error) => Probe::failed(None, error.clone()),
    });
    let options = GpuOptions { window: true, staged: false, ..GpuOptions::default() };
    gpu.window_probe = match GpuMemory::register(buffer.addr(), LEN, &options) {
        Ok(memory) => Read::Yes(match memory.method() {
            Some(method) => Probe::worked(method.name()),
            None => {
                let reasons: Vec<String> = memory
                    .refusals()
                    .iter()
                    .map(|refusal| format!("{}: {}", refusal.method.name(), refusal.reason))
                    .collect();
                Probe::failed(None, reasons.join("; "))
            }
        }),
        Err(error) => Read::no(error.to_string()),
    };
    Some(Tried { buffer, len, dma_buf: exported.ok() })
}
