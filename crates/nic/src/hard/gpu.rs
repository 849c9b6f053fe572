//! GPU memory on a hardware device, by the first method that works: dma-buf, then peer memory, then
//! staging in host memory. Each is tried in turn, and its refusal is kept.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use nobounce_memory::gpu::dmabuf::DmaBuf;
use nobounce_memory::gpu::{GpuMemory, GpuOptions};
use nobounce_memory::path::{Mechanism, Path, Paths, Reason, Require};
use nobounce_protocol::qp::Access;
use nobounce_verbs as verbs;

use super::error::RegisterError;
use super::memory::{Mr, Pd, pointer};
use super::proof::{self, ProofResult};
use super::refusal::Refusal;
use super::stage::Shadow;

/// The direct methods, in fallback order.
pub(crate) const METHODS: [Mechanism; 2] = [Mechanism::DmaBuf, Mechanism::Peermem];

pub(crate) fn register(
    pd: &Pd,
    addr: u64,
    len: usize,
    access: Access,
    options: &GpuOptions,
) -> Result<Mr, RegisterError> {
    let options = options.with_environment();
    let memory = Arc::new(GpuMemory::reach(addr, len, &options)?);
    if let Some(host) = memory.range().host_addr() {
        // Pinned host memory that CUDA allocated is host memory.
        let raw =
            pd.register_range(pointer(host), len, access).map_err(|source| pd.refused(host, len, source))?;
        let paths = Paths::both(Path::Direct(Mechanism::Cpu));
        return Ok(pd.region(raw, host, len, paths, Some(memory), None));
    }
    if options.staged {
        let why = "staging was asked for".to_owned();
        if options.require == Require::Direct {
            return Err(not_direct(pd, addr, len, why));
        }
        return staged(pd, memory, access, why);
    }
    let (reached, refusals) = climb(pd, &memory, access);
    pd.device().inner.told.warn(pd.device().name(), &refusals);
    if let Some((raw, path)) = reached {
        let mr = pd.region(raw, addr, len, Paths::both(path), Some(memory), None);
        return Ok(mr.with_refusals(refusals));
    }
    let why = refusals.iter().map(Refusal::to_string).collect::<Vec<_>>().join("; ");
    if options.require == Require::Direct {
        return Err(not_direct(pd, addr, len, why));
    }
    Ok(staged(pd, memory, access, why)?.with_refusals(refusals))
}

fn not_direct(pd: &Pd, addr: u64, len: usize, why: String) -> RegisterError {
    RegisterError::NotDirect { device: pd.device().name().to_owned(), addr, len, why }
}

/// The first method that works, if any, and the refusals before it.
fn climb(
    pd: &Pd,
    memory: &Arc<GpuMemory>,
    access: Access,
) -> (Option<(NonNull<verbs::Mr>, Path)>, Vec<Refusal>) {
    let mut refusals = Vec::new();
    for method in METHODS {
        match step(pd, memory, access, method) {
            Ok(reached) => return (Some(reached), refusals),
            Err(reason) => refusals.push(Refusal { method, reason }),
        }
    }
    (None, refusals)
}

/// Tries one method, proved with a test allocation before it is trusted with the application's
/// memory.
fn step(
    pd: &Pd,
    memory: &Arc<GpuMemory>,
    access: Access,
    method: Mechanism,
) -> Result<(NonNull<verbs::Mr>, Path), String> {
    let raw = try_method(pd, memory, access, method)?;
    match proof::of(pd, memory.gpu(), method) {
        ProofResult::Proved => Ok((raw, Path::Direct(method))),
        ProofResult::Untried(why) => Ok((raw, Path::Believed(method, Reason::new(why)))),
        ProofResult::Lied(why) => {
            // SAFETY: just registered; no other reference exists.
            unsafe { (pd.device().inner.context.library.api.dereg_mr)(raw.as_ptr()) };
            Err(why)
        }
    }
}

/// Registers the memory by one method, or returns the reason for the failure.
pub(crate) fn try_method(
    pd: &Pd,
    memory: &GpuMemory,
    access: Access,
    method: Mechanism,
) -> Result<NonNull<verbs::Mr>, String> {
    let (addr, len) = (memory.addr(), memory.len());
    match method {
        Mechanism::DmaBuf => {
            if pd.device().inner.context.library.api.reg_dmabuf_mr.is_none() {
                let path = pd.device().library().path().display();
                return Err(format!("{path} has no ibv_reg_dmabuf_mr (rdma-core 34 was the first that had)"));
            }
            let exported = DmaBuf::export(memory.range())
                .map_err(|error| format!("CUDA does not export the memory: {error}"))?;
            // The export is page-aligned, so that offset and address agree modulo the page size, as
            // the kernel requires.
            let offset = addr - exported.start();
            pd.register_dmabuf(offset, len, addr, exported.as_fd().as_raw_fd(), access)
                .unwrap_or_else(|| Err(std::io::Error::from_raw_os_error(libc::EOPNOTSUPP)))
                .map_err(|error| dmabuf_reason(&error))
        }
        _ => pd.register_range(pointer(addr), len, access).map_err(|error| peermem_reason(&error)),
    }
}

fn dmabuf_reason(error: &std::io::Error) -> String {
    let hint = match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS) => {
            " (the device's driver or the kernel does not take dma-bufs: Linux 5.12 and mlx5, irdma, bnxt_re or efa do)"
        }
        Some(libc::EINVAL) => {
            " (the driver refuses this dma-buf; with an IOMMU or ACS, peer-to-peer DMA may be impossible)"
        }
        Some(libc::ENOMEM) => " (the device or BAR1 has no room for it)",
        _ => "",
    };
    format!("ibv_reg_dmabuf_mr: {error}{hint}")
}

fn peermem_reason(error: &std::io::Error) -> String {
    let hint = match error.raw_os_error() {
        Some(libc::EFAULT | libc::EINVAL) => {
            " (probably the kernel does not know the GPU's address: nvidia-peermem is not loaded, or the device's driver does not ask it)"
        }
        _ => "",
    };
    format!("ibv_reg_mr: {error}{hint}")
}

/// A staging buffer (shadow) in host memory. Peers have no access rights: their writes would not
/// reach the GPU.
fn staged(pd: &Pd, memory: Arc<GpuMemory>, access: Access, why: String) -> Result<Mr, RegisterError> {
    let (addr, len) = (memory.addr(), memory.len());
    let shadow =
        Shadow::new(Arc::clone(&memory)).map_err(|source| RegisterError::Shadow { len, os: source })?;
    let shadow = Arc::new(shadow);
    let base = shadow.buffer.as_mut_ptr();
    let local = access & Access::LOCAL_WRITE;
    let raw = pd
        .register_range(base.cast(), len, local)
        .map_err(|source| pd.refused(base.addr() as u64, len, source))?;
    let paths = Paths::both(Path::Staged(Reason::new(why)));
    Ok(pd.region(raw, addr, len, paths, Some(memory), Some(shadow)))
}
