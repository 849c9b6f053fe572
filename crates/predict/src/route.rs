//! The direct path of a transfer: its stages, and the delays of one message.

use super::constants as c;
use super::factor::{Factor, Share, Stage};
use super::parts::{End, Memory, Op, Parts, Software};
use super::soft;
use nobounce_topology::platform::Platform;
use nobounce_topology::tree::Distance;

/// Why bytes cannot go the direct way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotDirect {
    /// BAR1 is too small.
    #[error(
        "messages of more than {0} bytes exceed the GPU's BAR1: they cannot be registered whole and are staged"
    )]
    Bar1(u64),
    /// The doctor found that the GPU's memory cannot be registered.
    #[error("GPUDirect is not available ({0}): transfers are staged; run `nobounce doctor`")]
    Unavailable(String),
    /// Desktop processors carry no reads between devices.
    #[error(
        "Intel desktop processors forward peer-to-peer writes but not reads: the adapter cannot read the sender's GPU"
    )]
    DesktopReads,
}

/// GB/s of NVLink-C2C for each direction.
const COHERENT: f64 = 450.0;

/// Whether these bytes can go the direct way at all.
///
/// # Errors
/// They cannot, and why.
pub(super) fn possible(parts: &Parts, size: u64) -> Result<(), NotDirect> {
    if !parts.gpu_over_pcie() {
        return Ok(());
    }
    if let Some(why) = &parts.unavailable {
        return Err(NotDirect::Unavailable(why.clone()));
    }
    match parts.bar1 {
        Some(bar1) if size > bar1 => return Err(NotDirect::Bar1(bar1)),
        _ => {}
    }
    if parts.platform == Platform::IntelClient && parts.through_processor() {
        return Err(NotDirect::DesktopReads);
    }
    Ok(())
}

/// Microseconds that a PCIe read of the source takes.
pub(super) fn read_round_trip(parts: &Parts) -> f64 {
    if !parts.gpu_over_pcie() || !parts.is_on_gpu(End::Source) {
        return c::READ_HOST;
    }
    match parts.distance {
        Distance::Pix | Distance::Pxb if parts.acs_redirect => c::READ_PROCESSOR,
        Distance::Pix | Distance::Pxb => c::READ_SWITCH,
        Distance::Phb | Distance::Node => c::READ_PROCESSOR,
        Distance::Sys => c::READ_PROCESSOR + c::READ_SOCKET,
    }
}

/// The stages of a stream over `rails` of the rails.
pub(super) fn stages(parts: &Parts, rails: u32) -> Vec<Stage> {
    let share = f64::from(rails) / f64::from(parts.sharers);
    let stage = |factor, gbytes_per_s, count| Stage { factor, gbytes_per_s, count };
    let nic = parts.nic.carries(parts.max_payload) * share;
    let mut stages =
        vec![stage(Factor::Wire, parts.link.goodput(parts.mtu) * share, 1), stage(Factor::NicSlot, nic, 2)];
    let window = c::READ_TAGS * f64::from(parts.max_read_request) / 1000.0 / read_round_trip(parts);
    stages.push(stage(Factor::ReadWindow, window * share, 1));
    match (parts.memory, parts.gpu) {
        (Memory::Host, _) => {
            stages.push(stage(Factor::Dram, parts.dram, 2));
            if let (false, Some(limit)) = (parts.relaxed_ordering, parts.platform.strict_order_of_host()) {
                stages.push(stage(Factor::StrictOrder, limit * share, 1));
            }
        }
        (Memory::Gpu, None) => stages.push(stage(Factor::GpuSlot, COHERENT * f64::from(parts.gpus), 2)),
        (Memory::Gpu, Some(gpu)) => {
            let gpus = f64::from(parts.gpus);
            let ends = if parts.host_end.is_some() { 1 } else { 2 };
            stages.push(stage(Factor::GpuSlot, gpu.carries(parts.max_payload) * gpus, ends));
            if parts.host_end.is_some() {
                stages.push(stage(Factor::Dram, parts.dram, 1));
            }
            if parts.through_processor() {
                stages.extend(processor(parts, gpus, share));
            }
        }
    }
    if let (1.., Some(limit)) = (parts.far_rails, parts.platform.between_sockets()) {
        // The near adapters do what they can; those on the other socket share its link.
        let each = parts.link.goodput(parts.mtu) / f64::from(parts.sharers);
        let near = f64::from(rails.saturating_sub(parts.far_rails)) * each;
        stages.push(stage(Factor::Sockets, near + limit, 1));
    }
    if parts.software == Software::Nobounce {
        stages.push(stage(Factor::SoftNic, soft::rate(parts), 1));
    }
    stages
}

/// What a CPU adds when it must forward packets between devices.
fn processor(parts: &Parts, gpus: f64, adapters: f64) -> Vec<Stage> {
    let mut stages = Vec::new();
    let mut stage = |factor, gbytes_per_s| stages.push(Stage { factor, gbytes_per_s, count: 1 });
    let intel = matches!(
        parts.platform,
        Platform::XeonOld | Platform::XeonSkylake | Platform::SapphireRapids | Platform::EmeraldRapids
    );
    let forwards = if parts.acs_redirect { Factor::AcsRedirect } else { Factor::RootComplex };
    match parts.gpu {
        Some(gpu) if intel => stage(forwards, gpu.carries(64) * gpus),
        // Up and down the port that leads to the CPU.
        Some(gpu) if parts.acs_redirect => stage(forwards, gpu.carries(parts.max_payload) * gpus),
        _ => {}
    }
    let ordered = if parts.is_on_gpu(End::Target) {
        parts.platform.strict_order()
    } else {
        parts.platform.strict_order_of_host()
    };
    if let (false, Some(limit)) = (parts.relaxed_ordering, ordered) {
        // Writes of one adapter wait for each other, not for another's.
        stage(Factor::StrictOrder, limit * adapters);
    }
    if let (Distance::Sys, Some(limit)) = (parts.distance, parts.platform.between_sockets()) {
        stage(Factor::Sockets, limit);
    }
    stages
}

/// What one message waits for before its bytes flow, and its first packet on the way.
pub(super) fn delays(parts: &Parts, size: u64) -> Vec<Share> {
    let share = |factor, microseconds| Share { factor, microseconds };
    let pass = parts.link.base_latency() + f64::from(parts.hops) * c::SWITCH_HOP;
    if parts.software == Software::Nobounce {
        let passes = if parts.operation == Op::Read { c::SOFT_READ } else { 1.0 };
        let mut shares = vec![share(Factor::Software, parts.soft.base_us * passes)];
        shares.extend(soft::fetch(parts, size));
        return shares;
    }
    let packet = float(size.min(u64::from(parts.mtu)));
    let first = share(Factor::NicSlot, 2.0 * packet / parts.nic.carries(parts.max_payload) / 1000.0);
    if parts.software == Software::Nccl {
        // NCCL's own figure for one pass has all the waiting in it.
        return vec![first];
    }
    let passes = if parts.operation == Op::Read { 2.0 } else { 1.0 };
    let mut shares = vec![share(Factor::Adapters, pass * passes), first];
    // What fits into the work request needs no read; GPU memory never does.
    let inline = !parts.is_on_gpu(End::Source) && float(size) <= c::INLINE && parts.operation == Op::Write;
    if size > 0 && !inline {
        shares.push(share(Factor::PcieRead, read_round_trip(parts)));
    }
    shares
}

/// Sizes as figures; what is lost beyond 2^53 is below any clock's resolution.
#[allow(clippy::cast_precision_loss)]
pub(super) fn float(size: u64) -> f64 {
    size as f64
}
