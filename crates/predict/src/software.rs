//! What libraries add: calls, copies of short messages, and questions before long ones.

use super::constants as c;
use super::factor::{Factor, Share};
use super::parts::{Memory, Op, Parts, Software};
use super::route::{self, float};
use super::soft;

/// What a library does with one message.
#[derive(Debug)]
pub(super) struct Protocol {
    /// Time that it adds to the message's.
    pub(super) shares: Vec<Share>,
    /// Microseconds between two messages of a stream.
    pub(super) gap: f64,
    /// Whether the next message is worked on while this one flows.
    pub(super) overlaps: bool,
    /// Whether there is one flow only on each rail.
    pub(super) lone: bool,
    /// Rails that one message of this size takes.
    pub(super) rails: u32,
}

pub(super) fn protocol(parts: &Parts, size: u64) -> Protocol {
    let share = |factor, microseconds| Share { factor, microseconds };
    let fitted = &parts.fitted;
    let mut shares = Vec::new();
    let (mut gap, mut overlaps, mut rails) = (fitted.verbs_gap, true, parts.rails);
    let bytes = float(size);
    match parts.software {
        Software::Verbs => {
            shares.push(share(Factor::Software, 2.0 * c::VERBS_CALL));
            if parts.operation == Op::Read && parts.queue_pairs > 0 {
                // The responder answers the reads of a queue pair in order, one PCIe read after the
                // other.
                gap = gap.max(route::read_round_trip(parts) / f64::from(parts.queue_pairs));
            }
        }
        Software::Mpi => {
            let device = if parts.memory == Memory::Gpu { fitted.device_call } else { 0.0 };
            shares.push(share(Factor::Software, 2.0 * (c::VERBS_CALL + fitted.mpi_call + device)));
            gap = fitted.mpi_gap + device;
            overlaps = false;
            rails = split(parts.rails, bytes);
            // Three short messages more: word that there is something, the receiver's request to
            // read it, word that it is done. Shorter messages, which are copied, have no basis.
            let pass = parts.link.base_latency() + f64::from(parts.hops) * c::SWITCH_HOP;
            shares.push(share(Factor::Handshake, 3.0 * (pass + 2.0 * (c::VERBS_CALL + fitted.mpi_call))));
            gap += fitted.mpi_gap;
        }
        Software::Nixl => {
            shares.push(share(Factor::Software, fitted.nixl_call));
            gap = fitted.nixl_call;
            overlaps = false;
        }
        Software::Nccl => {
            shares.push(share(Factor::Software, c::NCCL_BASE + c::NCCL_NET));
            gap = c::NCCL_NET;
            overlaps = false;
        }
        Software::GpuInitiated => {}
        Software::Nobounce => {
            gap = soft::gap(parts, size);
            overlaps = false;
        }
    }
    let lone = parts.queue_pairs == 1 || parts.software == Software::Mpi;
    Protocol { shares, gap, overlaps, lone, rails }
}

/// Rails that a message is worth being cut for.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded by the rails there are")]
fn split(rails: u32, bytes: f64) -> u32 {
    let worth = (bytes / c::MIN_RAIL_SHARE).min(f64::from(rails)) as u32;
    worth.max(1)
}
