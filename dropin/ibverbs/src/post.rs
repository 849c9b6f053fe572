//! Posting on the data path: send and receive work requests. They are read in place; nothing is
//! allocated for them here.

use std::ffi::c_int;
use std::mem::{MaybeUninit, offset_of};
use std::slice;

use nobounce_nic::soft::MwKind;
use nobounce_nic::work::{
    Datagram, LocalWork, Operation, PostError, QpLimits, Qpn, RecvRequest, Remote, SendRequest, Sge,
};
use nobounce_verbs as verbs;

use crate::ah::AhObject;
use crate::convert::post_errno;
use crate::entry::{self, Errno};
use crate::live::Object;
use crate::log;
use crate::mw;
use crate::qp::QpObject;
use crate::srq::SrqObject;

// A program's scatter/gather list is ours.
const _: () = assert!(size_of::<Sge>() == size_of::<verbs::Sge>());
const _: () = assert!(offset_of!(Sge, addr) == offset_of!(verbs::Sge, addr));
const _: () = assert!(offset_of!(Sge, len) == offset_of!(verbs::Sge, length));
const _: () = assert!(offset_of!(Sge, lkey) == offset_of!(verbs::Sge, lkey));

/// The function that posts one request.
type Post<'a> = &'a mut dyn FnMut(&SendRequest<'_>) -> Result<(), PostError>;

/// Buffer for inline data from several elements.
type Scratch = [MaybeUninit<u8>; QpLimits::MAX.inline];

/// # Safety
/// `list` has `count` elements.
#[inline]
unsafe fn sges<'a>(list: *const verbs::Sge, count: c_int) -> Result<&'a [Sge], Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::EINVAL)?;
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: as promised; both kinds of elements are laid out alike (above).
    Ok(unsafe { slice::from_raw_parts(list.cast(), count) })
}

#[inline]
fn operation(wr: &verbs::SendWr, binds: MwKind) -> Result<Operation, Errno> {
    // SAFETY: the opcode selects the part of the union; all are numbers, valid whatever they are.
    let remote = || unsafe { Remote { addr: wr.wr.rdma.remote_addr, rkey: wr.wr.rdma.rkey } };
    // SAFETY: as above.
    let atomic = || unsafe { wr.wr.atomic };
    let immediate = u32::from_be(wr.imm_data);
    Ok(match wr.opcode {
        verbs::IBV_WR_RDMA_WRITE => Operation::Write(remote()),
        verbs::IBV_WR_RDMA_WRITE_WITH_IMM => Operation::WriteImmediate(remote(), immediate),
        verbs::IBV_WR_SEND => Operation::Send,
        verbs::IBV_WR_SEND_WITH_IMM => Operation::SendImmediate(immediate),
        verbs::IBV_WR_SEND_WITH_INV => Operation::SendInvalidate(wr.imm_data),
        verbs::IBV_WR_RDMA_READ => Operation::Read(remote()),
        verbs::IBV_WR_ATOMIC_CMP_AND_SWP => {
            let atomic = atomic();
            let remote = Remote { addr: atomic.remote_addr, rkey: atomic.rkey };
            Operation::CompareSwap { remote, compare: atomic.compare_add, swap: atomic.swap }
        }
        verbs::IBV_WR_ATOMIC_FETCH_AND_ADD => {
            let atomic = atomic();
            let remote = Remote { addr: atomic.remote_addr, rkey: atomic.rkey };
            Operation::FetchAdd { remote, add: atomic.compare_add }
        }
        verbs::IBV_WR_ATOMIC_WRITE => Operation::AtomicWrite(remote()),
        verbs::IBV_WR_LOCAL_INV => Operation::Local(LocalWork::Invalidate(wr.imm_data)),
        verbs::IBV_WR_BIND_MW => {
            let verbs::BindMw { mw, rkey, ref bind_info } = wr.bind_mw;
            // SAFETY: the program names a window and a region of this device's.
            unsafe { mw::bind(mw, rkey, bind_info, binds) }?
        }
        _ => return Err(Errno::EOPNOTSUPP),
    })
}

/// The bytes that the list points to, in one piece.
///
/// # Safety
/// The program can read the memory its list points to.
unsafe fn inline<'a>(list: &[Sge], scratch: &'a mut Scratch) -> Result<&'a [u8], Errno> {
    if let [one] = list {
        let len = usize::try_from(one.len).map_err(|_| Errno::EINVAL)?;
        let start = std::ptr::with_exposed_provenance(usize::try_from(one.addr).map_err(|_| Errno::EINVAL)?);
        // SAFETY: as promised. (The pointer of an empty piece may be anything.)
        return Ok(if len == 0 { &[] } else { unsafe { slice::from_raw_parts(start, len) } });
    }
    let mut filled = 0;
    for sge in list {
        let len = usize::try_from(sge.len).map_err(|_| Errno::EINVAL)?;
        let to = scratch.get_mut(filled..).and_then(|rest| rest.get_mut(..len)).ok_or(Errno::EINVAL)?;
        let start: *const u8 =
            std::ptr::with_exposed_provenance(usize::try_from(sge.addr).map_err(|_| Errno::EINVAL)?);
        if len > 0 {
            // SAFETY: as promised; `to` has `len` bytes.
            unsafe { std::ptr::copy_nonoverlapping(start, to.as_mut_ptr().cast(), len) };
        }
        filled += len;
    }
    // SAFETY: the first `filled` bytes were written just now.
    Ok(unsafe { slice::from_raw_parts(scratch.as_ptr().cast(), filled) })
}

/// `ibv_post_send`, by the table.
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut verbs::Qp,
    first: *mut verbs::SendWr,
    bad: *mut *mut verbs::SendWr,
) -> c_int {
    // SAFETY: the table this function is in belongs to our contexts, so the queue pair is ours.
    let qp = unsafe { QpObject::trust(qp) };
    let mut at = first;
    let code = entry::code(|| {
        let posted = qp.soft.post_list(|post| {
            // SAFETY: the program's list is valid, and ends in null.
            while let Some(wr) = unsafe { at.as_ref() } {
                // SAFETY: the program's list has as many elements as it says, in memory that it can
                // read.
                unsafe { post_one(qp, wr, MwKind::Two, post) }?;
                at = wr.next;
            }
            Ok(())
        });
        posted.map_err(|_| Errno::EIO)?
    });
    if code != 0 && !bad.is_null() {
        // SAFETY: the caller passes a valid place.
        unsafe { *bad = at };
    }
    code
}

/// Posts the one request behind `ibv_bind_mw`.
///
/// # Safety
/// As for [`post_one`]; the queue pair is one of ours.
pub(crate) unsafe fn post_bind(qp: *mut verbs::Qp, wr: &verbs::SendWr, kind: MwKind) -> Result<(), Errno> {
    // SAFETY: as promised.
    let qp = unsafe { QpObject::trust(qp) };
    // SAFETY: as promised.
    qp.soft.post_list(|post| unsafe { post_one(qp, wr, kind, post) }).map_err(|_| Errno::EIO)?
}

/// Refuses a flag for which a program must first see a capability that no device of ours has.
#[inline]
pub(crate) fn check_flags(flags: u32) -> Result<(), Errno> {
    if flags & verbs::IBV_SEND_IP_CSUM == 0 { Ok(()) } else { Err(Errno::EINVAL) }
}

/// # Safety
/// The list of `wr` has as many elements as it says, inline data can be read, and its address
/// handle is one.
#[inline]
unsafe fn post_one(qp: &QpObject, wr: &verbs::SendWr, binds: MwKind, post: Post<'_>) -> Result<(), Errno> {
    // SAFETY: as promised.
    let list = unsafe { sges(wr.sg_list, wr.num_sge) }?;
    let flags = wr.send_flags;
    check_flags(flags)?;
    let to = if qp.init.qp_type == verbs::IBV_QPT_UD {
        // SAFETY: of a datagram, this part of the union counts.
        let ud = unsafe { wr.wr.ud };
        // SAFETY: as promised.
        Some(unsafe { datagram(ud.ah, ud.remote_qpn, ud.remote_qkey) }?)
    } else {
        None
    };
    let mut request = SendRequest {
        wr_id: wr.wr_id,
        op: operation(wr, binds)?,
        sges: list,
        signaled: flags & verbs::IBV_SEND_SIGNALED != 0,
        solicited: flags & verbs::IBV_SEND_SOLICITED != 0,
        fence: flags & verbs::IBV_SEND_FENCE != 0,
        inline: None,
        to,
        xrc_srq: wr.qp_type,
    };
    let posted = if flags & verbs::IBV_SEND_INLINE == 0 {
        post(&request)
    } else {
        if list.len() > qp.soft.limits().send_sges {
            return Err(Errno::EINVAL);
        }
        let mut scratch = [MaybeUninit::uninit(); _];
        request.sges = &[];
        // SAFETY: as promised.
        request.inline = Some(unsafe { inline(list, &mut scratch) }?);
        post(&request)
    };
    posted.map_err(|error| {
        log::debug(|| format!("ibv_post_send: {error}"));
        post_errno(error)
    })
}

/// Where a datagram goes.
///
/// # Safety
/// `ah` is null or an address handle.
#[inline]
pub(crate) unsafe fn datagram(ah: *mut verbs::Ah, qpn: u32, qkey: u32) -> Result<Datagram, Errno> {
    if ah.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: as promised.
    let AhObject { remote, ip_options, .. } = *unsafe { AhObject::trust(ah) };
    Ok(Datagram { remote, dest_qpn: Qpn::new(qpn), qkey, ip_options })
}

/// `ibv_post_recv`, by the table.
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut verbs::Qp,
    first: *mut verbs::RecvWr,
    bad: *mut *mut verbs::RecvWr,
) -> c_int {
    // SAFETY: the table this function is in belongs to our contexts, so the queue pair is ours.
    let qp = unsafe { QpObject::trust(qp) };
    // SAFETY: the program's list is valid.
    unsafe { post_receives(first, bad, |request| qp.soft.post_recv(request)) }
}

/// `ibv_post_srq_recv`, by the table.
pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut verbs::Srq,
    first: *mut verbs::RecvWr,
    bad: *mut *mut verbs::RecvWr,
) -> c_int {
    // SAFETY: the table this function is in belongs to our contexts, so the queue is ours.
    let srq = unsafe { SrqObject::trust(srq) };
    // SAFETY: the program's list is valid.
    unsafe { post_receives(first, bad, |request| srq.soft.post_recv(request)) }
}

/// # Safety
/// The list is valid, ends in null, and its lists have as many elements as they say.
unsafe fn post_receives(
    first: *mut verbs::RecvWr,
    bad: *mut *mut verbs::RecvWr,
    post: impl Fn(&RecvRequest<'_>) -> Result<(), PostError>,
) -> c_int {
    let mut at = first;
    let code = entry::code(|| {
        // SAFETY: as promised.
        while let Some(wr) = unsafe { at.as_ref() } {
            // SAFETY: as promised.
            let list = unsafe { sges(wr.sg_list, wr.num_sge) }?;
            post(&RecvRequest { wr_id: wr.wr_id, sges: list }).map_err(|error| {
                log::debug(|| format!("ibv_post_recv: {error}"));
                post_errno(error)
            })?;
            at = wr.next;
        }
        Ok(())
    });
    if code != 0 && !bad.is_null() {
        // SAFETY: the caller passes a valid place.
        unsafe { *bad = at };
    }
    code
}
