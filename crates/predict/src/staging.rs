//! The staged way: out of the GPU, over the network, into the other GPU.

use super::basis::{self, NoBasis};
use super::constants as c;
use super::factor::{Factor, Share};
use super::model::{Estimate, Stream, finish, spread};
use super::parts::{Parts, Software};
use super::route::{self, float};
use super::software::protocol;
use nobounce_topology::tree::Distance;

/// GB/s of a copy on a coherent link.
const COHERENT_COPY: f64 = 360.0;

/// The staged way with chunks that overlap (`pipelined`), or each step after the other with the
/// whole message.
///
/// # Errors
/// Nothing is known of it, and why.
pub fn staged(parts: &Parts, size: u64, pipelined: bool) -> Result<Estimate, NoBasis> {
    basis::known(&parts.on_host(), size)?;
    let (network, network_factor) = network(parts, protocol(parts, size).rails);
    let copy = copy_rate(parts);
    let bytes = float(size);
    let chunk = if pipelined { float(parts.chunk).min(bytes) } else { bytes };
    let microseconds = |gbytes: f64| chunk / gbytes / 1000.0;
    let (through, out) = (microseconds(network), microseconds(copy));
    let mut shares = calls(parts, size);
    let copied_ends = if parts.host_end.is_some() { 1.0 } else { 2.0 };
    shares.push(Share { factor: Factor::GpuCopy, microseconds: copied_ends * out });
    shares.push(Share { factor: network_factor, microseconds: through });
    // The first chunk passes all stages; each one after it costs what the slowest stage costs.
    let rest = if chunk > 0.0 { (bytes - chunk) / chunk } else { 0.0 };
    let copies = out + c::COPY_HANDOVER;
    let (each, factor) =
        if copies >= through { (copies, Factor::GpuCopy) } else { (through, network_factor) };
    shares.push(Share { factor, microseconds: rest * each });
    let stream = if pipelined {
        let binds = if c::COPY_HANDOVER > each / 2.0 { Factor::CopyCalls } else { factor };
        (chunk / each.max(c::COPY_HANDOVER) / 1000.0, binds)
    } else {
        let total: f64 = shares.iter().map(|share| share.microseconds).sum();
        (bytes / total / 1000.0, factor)
    };
    let stream = Stream { gbytes_per_s: stream.0, binds: stream.1, most: copy.min(network), seen_us: 0.0 };
    Ok(finish(size, shares, stream, spread(parts, size, parts.staged_class(size))))
}

/// GB/s between the two host buffers.
fn network(parts: &Parts, rails: u32) -> (f64, Factor) {
    let host = parts.on_host();
    let mut stages = route::stages(&host, rails);
    for stage in &mut stages {
        match stage.factor {
            Factor::Dram => stage.gbytes_per_s /= c::DRAM_PASSES,
            // Its core starts the copies and looks after them, too.
            Factor::SoftNic => stage.gbytes_per_s *= c::SOFT_GPU_SHARE,
            _ => {}
        }
    }
    let binds = super::factor::slowest(&stages).map_or(Factor::Wire, |stage| stage.factor);
    (super::factor::in_series(&stages, parts.fitted.series_exponent) * parts.fitted.lone_flow, binds)
}

/// GB/s between a GPU and its host's memory.
pub(super) fn copy_rate(parts: &Parts) -> f64 {
    let Some(gpu) = parts.gpu else { return COHERENT_COPY * f64::from(parts.gpus) };
    let each = if parts.software == Software::Nccl { gpu.kernel_copy() } else { gpu.copy_engine() };
    let all = each * f64::from(parts.gpus);
    let sockets = (parts.distance == Distance::Sys).then(|| parts.platform.between_sockets()).flatten();
    let memory = parts.dram / c::DRAM_PASSES;
    all.min(sockets.unwrap_or(f64::INFINITY)).min(memory)
}

/// What is waited for apart from bytes.
fn calls(parts: &Parts, size: u64) -> Vec<Share> {
    let share = |factor, microseconds| Share { factor, microseconds };
    let mut shares = route::delays(&parts.on_host(), size);
    // The library is the same, whichever way its bytes take.
    shares.extend(protocol(parts, size).shares);
    if parts.software == Software::Nccl {
        // A kernel copies: no call, but word to the host's thread.
        shares.push(share(Factor::CopyCalls, c::COPY_FLAG));
        return shares;
    }
    let sender = c::COPY_LAUNCH + c::COPY_SHORT + c::COPY_HANDOVER;
    let receiver = c::COPY_LAUNCH + c::COPY_SHORT + c::COPY_FLAG;
    shares.push(share(Factor::CopyCalls, sender + receiver));
    shares
}
