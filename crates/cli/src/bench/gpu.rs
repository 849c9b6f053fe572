//! The GPU of a bench: whether there is one, what it is, and the kernels that fill and check its
//! memory.

use std::sync::OnceLock;

use anyhow::Context;
use nobounce::memory::gpu::calibration::Calibration;
use nobounce::memory::gpu::kernel::{FlagKernel, KernelError, Patterns};
use nobounce::memory::gpu::{Driver, GpuBuffer, GpuMemory, GpuOptions};
use nobounce::{Device, Path, Region};

use super::case::{Case, CaseKind, Op, Place};
use super::gpu_choice::{chosen, ordinal};
use super::gpu_mps::Mps;
use super::machine::GpuFacts;
use super::plan::{Ends, Plan};

/// Size of the allocation that probes the path before the measurement.
const PROBE: usize = 1 << 20;

/// What a run on GPU memory needs, and its notes.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) facts: GpuFacts,
    /// One line each.
    pub(super) notes: Vec<String>,
    /// Lives as long as the run.
    _mps: Option<Mps>,
}

/// Why there is no run on GPU memory.
#[derive(Debug, thiserror::Error)]
pub(super) enum GpuError {
    /// No GPU.
    #[error("no GPU to measure: {0}; for host memory: nobounce bench")]
    None(String),
    /// Nothing is left of the plan.
    #[error("nothing to measure: {0}")]
    Nothing(String),
}

impl Setup {
    /// Finds the GPU, determines its path, and removes cases from the plan that cannot be measured
    /// on it.
    pub(super) fn prepare(plan: &mut Plan, device: &Device) -> anyhow::Result<Self> {
        // Before the first CUDA call: a process joins MPS when it creates its first context.
        let two_processes = plan.ends == Ends::Here;
        let (mps, shared_by) = if two_processes { Mps::start() } else { (None, "one process".to_owned()) };
        let gpu = chosen().map_err(GpuError::None)?;
        let stand_in = gpu.driver().is_stand_in();
        let mut notes = Vec::new();
        if stand_in {
            notes.push(
                "STAND-IN: no GPU; host memory stands in for it, and the figures say nothing about a GPU"
                    .to_owned(),
            );
        }
        let buffer = GpuBuffer::new(&gpu, PROBE).context("cannot allocate GPU memory")?;
        // Apply the environment's windows and requirements: fail now rather than after a minute.
        let memory = match device.nic().hard() {
            Some(_) => GpuMemory::reach(buffer.addr(), PROBE, &GpuOptions::default())?,
            None => GpuMemory::register(buffer.addr(), PROBE, &GpuOptions::default())?,
        };
        let (paths, refusals) = match device.nic().hard() {
            Some(_) => {
                let region = device.register_gpu_on(ordinal(), PROBE, GpuOptions::default())?;
                (region.paths().clone(), passed_over(&region))
            }
            None => (memory.paths().clone(), Vec::new()),
        };
        let calibration = Calibration::of(&gpu).context("cannot calibrate the access to GPU memory")?;
        let kernels = kernels();
        let mut leave_out = LeaveOut { plan, notes: &mut notes };
        if let Err(error) = kernels {
            leave_out.cases(|case| case.kind == CaseKind::GpuVisible, &format!("gpu-visible: {error}"));
        }
        if requires_direct() {
            let staged = |case: &Case| matches!(case.place, Place::Staged | Place::Naive);
            leave_out.cases(staged, "staged and naive: a direct path is required (NOBOUNCE_REQUIRE=direct)");
        }
        if let (Some(hard), Path::Staged(reason)) = (device.nic().hard(), &paths.inbound) {
            leave_out.notes.push(format!(
                "{} cannot access GPU memory, which is therefore staged: {reason}",
                hard.name()
            ));
        }
        if device.nic().hard().is_some() {
            // A hardware device writes into the shadow buffer of staged memory. A kernel that polls
            // GPU memory never sees those bytes.
            let staged = |case: &Case| {
                case.place == Place::Staged || (case.place == Place::Direct && !paths.are_direct())
            };
            let reached =
                |case: &Case| staged(case) && (case.op != Op::Send || case.kind == CaseKind::GpuVisible);
            leave_out.cases(
                reached,
                "writes and reads of staged memory: a hardware device accesses only registered memory",
            );
        }
        if plan.cases.is_empty() {
            return Err(GpuError::Nothing(notes.join("; ")).into());
        }
        if let (Err(error), false) = (kernels, stand_in) {
            notes.push(format!("bytes are verified on the host after a copy: {error}"));
        }
        if two_processes && !stand_in {
            notes.push(format!("two processes, one GPU: {shared_by}"));
        }
        let version = gpu.driver().version();
        let facts = GpuFacts {
            name: gpu.name().to_owned(),
            stand_in,
            pci_address: gpu.pci_address().to_owned(),
            cuda: format!("{}.{}", version / 1000, version % 1000 / 10),
            bar1_bytes: gpu.bar1_size(),
            window: memory.method().map(|method| method.to_string()),
            paths: paths.to_string(),
            refusals,
            calibration: calibration.to_string(),
            shared_by: if stand_in { "not shared".to_owned() } else { shared_by },
            checked_on: if kernels.is_ok() { "gpu" } else { "host" }.to_owned(),
        };
        Ok(Self { facts, notes, _mps: mps })
    }
}

/// The direct methods that a region's device skipped for another one. The path of staged memory
/// names them itself.
pub(super) fn passed_over(region: &Region) -> Vec<String> {
    let refusals = if region.paths().are_direct() { region.refusals() } else { &[] };
    refusals.iter().map(ToString::to_string).collect()
}

/// Takes cases out of a plan, and says so.
struct LeaveOut<'a> {
    plan: &'a mut Plan,
    notes: &'a mut Vec<String>,
}

impl LeaveOut<'_> {
    fn cases(&mut self, which: impl Fn(&Case) -> bool, why: &str) {
        let before = self.plan.cases.len();
        self.plan.cases.retain(|case| !which(case));
        if self.plan.cases.len() < before {
            self.notes.push(format!("skipped: {why}"));
        }
    }
}

/// Whether only direct paths are allowed: then there is nothing staged to compare with.
fn requires_direct() -> bool {
    std::env::var_os("NOBOUNCE_REQUIRE").is_some_and(|word| word.eq_ignore_ascii_case("direct"))
}

/// What results say about where bytes lie.
pub(super) fn memory_name(place: Place) -> &'static str {
    match place {
        Place::Host => "host",
        _ if Driver::get().is_ok_and(Driver::is_stand_in) => "stand-in",
        _ => "gpu",
    }
}

/// Kernels of this process, on its GPU.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) patterns: Patterns,
    pub(super) flag: FlagKernel,
}

/// The kernels; loaded at the first call, before anything spins on the GPU.
pub(super) fn kernels() -> Result<&'static Kernels, &'static KernelError> {
    static KERNELS: OnceLock<Result<Kernels, KernelError>> = OnceLock::new();
    let load = || {
        // The caller has registered memory on the GPU, or is about to fail anyway.
        let none = |_| {
            KernelError::Cuda(nobounce::memory::gpu::CudaError {
                call: "cuDeviceGetCount",
                code: 100,
                name: "CUDA_ERROR_NO_DEVICE",
            })
        };
        let gpu = chosen().map_err(none)?;
        Ok(Kernels { patterns: Patterns::load(&gpu)?, flag: FlagKernel::load(&gpu)? })
    };
    KERNELS.get_or_init(load).as_ref()
}

/// The fill and check kernels for a region, if it is GPU memory and its GPU runs kernels.
pub(super) fn patterns_for(region: &Region) -> Option<(&GpuBuffer, &'static Patterns)> {
    let buffer = region.gpu_buffer()?;
    Some((buffer, &kernels().ok()?.patterns))
}
