//! The receiver of the datagram service: every packet is a complete message.

use super::completion::{Completion, DatagramSource, Status};
use super::requester::Out;
use super::uc_receiver::Broken;
use super::{Host, Params};
use crate::wire::Header;

/// Bytes before the payload of a received datagram: the IP header it came with. An IPv6 header
/// fills them; an IPv4 header is their end, after 20 zeros.
pub const GRH_LEN: u64 = 40;

/// Takes a datagram, or drops it silently.
pub(crate) fn take_datagram(
    header: &Header,
    payload_len: usize,
    params: &Params,
    host: &mut dyn Host,
    out: &mut Out<'_>,
) -> Result<(), Broken> {
    if header.deth.qkey != params.qkey {
        out.counters.qkey_violations += 1;
        return Ok(());
    }
    if payload_len > params.mtu as usize {
        out.counters.dropped_messages += 1;
        return Ok(());
    }
    let Some(receive) = host.take_receive() else {
        out.counters.out_of_buffer += 1;
        return Ok(());
    };
    let total = GRH_LEN + payload_len as u64;
    let status = if total > receive.capacity {
        Status::LocalLength
    } else if host.place_grh().is_err()
        || (payload_len > 0 && host.place_receive(GRH_LEN, payload_len, true).is_err())
    {
        Status::LocalProtection
    } else {
        Status::Success
    };
    let success = status == Status::Success;
    let byte_len = if success { u32::try_from(total).unwrap_or(u32::MAX) } else { 0 };
    out.completions.push_back(Completion {
        source: Some(DatagramSource { qpn: header.deth.source }),
        ..Completion::received(receive.wr_id, status, header, byte_len)
    });
    if success { Ok(()) } else { Err(Broken) }
}
