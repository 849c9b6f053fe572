//! What the stand-in does with requests: it carries them out at once.

use std::ffi::c_int;
use std::ptr;

use fake_cuda::client::StandIn;
use nobounce_verbs as verbs;

use super::{Lie, Registered, world};

pub(super) unsafe extern "C" fn poll_cq(_: *mut verbs::Cq, count: c_int, wcs: *mut verbs::Wc) -> c_int {
    world(|world| world.polls.push(count));
    let mut taken = 0;
    while taken < count
        && let Some(wc) = world(|world| world.completions.pop_front())
    {
        // SAFETY: the caller has room for as many.
        unsafe { *wcs.offset(isize::try_from(taken).unwrap()) = wc };
        taken += 1;
    }
    taken
}

fn load(addr: u64, len: usize) -> Vec<u8> {
    if world(|world| (world.is_gpu)(addr)) {
        return StandIn::program().peek(addr, len);
    }
    let from: *const u8 = ptr::with_exposed_provenance(usize::try_from(addr).unwrap());
    // SAFETY: registered host memory of the test's, or of a shadow.
    unsafe { std::slice::from_raw_parts(from, len) }.to_vec()
}

fn store(addr: u64, bytes: &[u8]) {
    if world(|world| (world.is_gpu)(addr)) {
        return StandIn::program().poke(addr, bytes);
    }
    let to: *mut u8 = ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap());
    // SAFETY: as above.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}

/// Bytes for the next receive, as if a peer had sent them.
pub(crate) fn arrive(bytes: &[u8]) {
    let (wr_id, sges) = world(|world| world.receives.pop_front()).expect("a receive");
    let mut rest = bytes;
    for sge in sges {
        let (now, later) = rest.split_at(rest.len().min(sge.length as usize));
        store(sge.addr, now);
        rest = later;
    }
    complete(wr_id, verbs::IBV_WC_RECV, u32::try_from(bytes.len()).unwrap(), verbs::IBV_WC_SUCCESS);
}

fn complete(wr_id: u64, opcode: u32, len: u32, status: u32) {
    // SAFETY: plain numbers, for which zeroes are valid.
    let mut wc: verbs::Wc = unsafe { std::mem::zeroed() };
    (wc.wr_id, wc.opcode, wc.byte_len, wc.status) = (wr_id, opcode, len, status);
    world(|world| world.completions.push_back(wc));
}

pub(super) unsafe extern "C" fn post_send(
    _: *mut verbs::Qp,
    first: *mut verbs::SendWr,
    _: *mut *mut verbs::SendWr,
) -> c_int {
    let mut at = first;
    while !at.is_null() {
        // SAFETY: the caller's request and its list.
        let (wr, sges) = unsafe {
            let wr = &*at;
            (wr, std::slice::from_raw_parts(wr.sg_list, usize::try_from(wr.num_sge).unwrap()))
        };
        world(|world| world.flags.push(wr.send_flags));
        // SAFETY: read for requests that have it.
        let remote = unsafe { wr.wr.rdma };
        let (there, is_deaf) = world(|world| (world.regions.get(&remote.rkey).copied(), world.is_deaf));
        let there = there.filter(|known| known.is_dmabuf);
        let lie = world(|world| world.lie).filter(|_| there.is_some());
        let base = match (lie, there) {
            (Some(Lie::ForgetsOffset), Some(Registered { offset, .. })) => remote.remote_addr - offset,
            _ => remote.remote_addr,
        };
        let (mut offset, mut len) = (0, 0);
        for sge in sges {
            let size = sge.length as usize;
            match wr.opcode {
                _ if is_deaf => {}
                verbs::IBV_WR_RDMA_WRITE if lie != Some(Lie::Swallows) => {
                    store(base + offset, &load(sge.addr, size));
                }
                verbs::IBV_WR_RDMA_READ => store(sge.addr, &load(base + offset, size)),
                _ => {}
            }
            offset += u64::from(sge.length);
            len += sge.length;
        }
        let opcode = match wr.opcode {
            verbs::IBV_WR_RDMA_WRITE => verbs::IBV_WC_RDMA_WRITE,
            verbs::IBV_WR_RDMA_READ => verbs::IBV_WC_RDMA_READ,
            _ => verbs::IBV_WC_SEND,
        };
        if wr.send_flags & verbs::IBV_SEND_SIGNALED != 0 {
            let lie = world(|world| world.says_of_reads).filter(|_| wr.opcode == verbs::IBV_WR_RDMA_READ);
            let status = if is_deaf { verbs::IBV_WC_RETRY_EXC_ERR } else { verbs::IBV_WC_SUCCESS };
            complete(wr.wr_id, opcode, lie.unwrap_or(len), status);
        }
        at = wr.next;
    }
    0
}

pub(super) unsafe extern "C" fn post_recv(
    _: *mut verbs::Qp,
    wr: *mut verbs::RecvWr,
    _: *mut *mut verbs::RecvWr,
) -> c_int {
    // SAFETY: the caller's request and its list.
    let (wr_id, sges) = unsafe {
        let wr = &*wr;
        (wr.wr_id, std::slice::from_raw_parts(wr.sg_list, usize::try_from(wr.num_sge).unwrap()).to_vec())
    };
    world(|world| world.receives.push_back((wr_id, sges)));
    0
}
