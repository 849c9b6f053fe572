//! Extended completion queues: completions read one by one, in place.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use nobounce_verbs as verbs;

use crate::context::ContextObject;
use crate::cq::{self, CqObject, CqRequest};
use crate::entry::{self, Errno};
use crate::live::Object;
use crate::pd::PdObject;
use crate::poll::wc_of;

/// A lock that one call of the program takes and another releases.
#[derive(Debug, Default)]
pub(crate) struct CallLock(AtomicBool);

impl CallLock {
    pub(crate) fn acquire(&self) {
        while self.0.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::thread::yield_now();
        }
    }

    pub(crate) fn release(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The completion that the program reads, between `start_poll` and `end_poll`.
pub(crate) struct Polling {
    lock: CallLock,
    wc: UnsafeCell<verbs::Wc>,
    timestamp: UnsafeCell<u64>,
}

impl Default for Polling {
    fn default() -> Self {
        // SAFETY: plain numbers, for which zeroes are valid.
        let wc = UnsafeCell::new(unsafe { std::mem::zeroed() });
        Self { lock: CallLock::default(), wc, timestamp: UnsafeCell::new(0) }
    }
}

/// `ibv_create_cq_ex`, by the table.
pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut verbs::Context,
    attr: *mut verbs::CqInitAttrEx,
) -> *mut verbs::CqEx {
    entry::pointer(|| {
        let context = ContextObject::find(context)?;
        // SAFETY: the caller passes a valid structure.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::EINVAL)?;
        let has_flags = attr.comp_mask & verbs::IBV_CQ_INIT_ATTR_MASK_FLAGS != 0;
        let has_domain = attr.comp_mask & verbs::IBV_CQ_INIT_ATTR_MASK_PD != 0;
        let known = verbs::IBV_CQ_INIT_ATTR_MASK_FLAGS | verbs::IBV_CQ_INIT_ATTR_MASK_PD;
        let times =
            verbs::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | verbs::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
        let unknown = attr.comp_mask & !known != 0
            || attr.wc_flags & !(verbs::IBV_WC_STANDARD_FLAGS | times) != 0
            || (has_flags && attr.flags & !verbs::IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0);
        if unknown {
            return Err(Errno::EOPNOTSUPP);
        }
        if has_domain {
            PdObject::find(attr.parent_domain)?;
        }
        let (depth, cq_context) = (attr.cqe, attr.cq_context);
        let request = CqRequest { depth, cq_context, channel: attr.channel, vector: attr.comp_vector };
        let made = cq::create(context, &request)?;
        if attr.wc_flags & times != 0 {
            made.soft.record_time();
        }
        let raw = made.raw_ex();
        // SAFETY: just made, and not yet shared.
        let ex = unsafe { &mut *raw };
        ex.start_poll = Some(start_poll);
        ex.next_poll = Some(next_poll);
        ex.end_poll = Some(end_poll);
        ex.read_opcode = Some(read_opcode);
        ex.read_vendor_err = Some(read_vendor_err);
        ex.read_byte_len = Some(read_byte_len);
        ex.read_imm_data = Some(read_imm_data);
        ex.read_qp_num = Some(read_qp_num);
        ex.read_src_qp = Some(read_src_qp);
        ex.read_wc_flags = Some(read_wc_flags);
        ex.read_slid = Some(read_slid);
        ex.read_sl = Some(read_sl);
        ex.read_dlid_path_bits = Some(read_dlid_path_bits);
        ex.read_completion_ts = Some(read_completion_ts);
        ex.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
        Ok(raw)
    })
}

/// Takes the next completion: 0, ENOENT if there is none, or EIO.
///
/// # Safety
/// `cq` is a queue of ours, and the caller holds its lock.
unsafe fn advance(cq: *mut verbs::CqEx) -> c_int {
    // SAFETY: as promised.
    let ours = unsafe { CqObject::trust(cq.cast()) };
    let taken = entry::guarded(|| {
        let taken = ours.soft.poll_each(1, |completion| {
            let wc = wc_of(ours, &completion);
            // SAFETY: the lock is held, so these have no other reader.
            unsafe {
                *ours.polling.wc.get() = wc;
                *ours.polling.timestamp.get() = completion.timestamp;
                (*cq).status = wc.status;
                (*cq).wr_id = wc.wr_id;
            }
        });
        taken.map_err(|_| Errno::EIO)
    });
    match taken {
        Ok(0) => libc::ENOENT,
        Ok(_) => 0,
        Err(errno) => errno.0,
    }
}

unsafe extern "C" fn start_poll(cq: *mut verbs::CqEx, attr: *mut verbs::PollCqAttr) -> c_int {
    // SAFETY: null, or valid.
    if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
        return libc::EINVAL;
    }
    // SAFETY: this function is only in queues of ours.
    let lock = unsafe { &CqObject::trust(cq.cast()).polling.lock };
    lock.acquire();
    // SAFETY: as above, and we hold the lock.
    let code = unsafe { advance(cq) };
    if code != 0 {
        // Then the program does not call `end_poll`.
        lock.release();
    }
    code
}

unsafe extern "C" fn next_poll(cq: *mut verbs::CqEx) -> c_int {
    // SAFETY: this function is only in queues of ours, and `start_poll` took the lock.
    unsafe { advance(cq) }
}

unsafe extern "C" fn end_poll(cq: *mut verbs::CqEx) {
    // SAFETY: this function is only in queues of ours.
    unsafe { CqObject::trust(cq.cast()) }.polling.lock.release();
}

unsafe extern "C" fn read_completion_ts(cq: *mut verbs::CqEx) -> u64 {
    // SAFETY: this function is only in queues of ours, and `start_poll` took the lock.
    unsafe { *CqObject::trust(cq.cast()).polling.timestamp.get() }
}

/// The time on the system's clock, as far as that was not set since.
unsafe extern "C" fn read_completion_wallclock_ns(cq: *mut verbs::CqEx) -> u64 {
    // SAFETY: as for our caller.
    let ago = nobounce_nic::links::now_ns().saturating_sub(unsafe { read_completion_ts(cq) });
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).saturating_sub(ago)
}

macro_rules! readers {
    ($($name:ident: $field:ident -> $result:ty),* $(,)?) => {$(
        unsafe extern "C" fn $name(cq: *mut verbs::CqEx) -> $result {
            // SAFETY: this function is only in queues of ours, and `start_poll` took the lock.
            unsafe { (*CqObject::trust(cq.cast()).polling.wc.get()).$field.into() }
        }
    )*};
}

readers!(
    read_opcode: opcode -> u32,
    read_vendor_err: vendor_err -> u32,
    read_byte_len: byte_len -> u32,
    read_imm_data: imm_data -> u32,
    read_qp_num: qp_num -> u32,
    read_src_qp: src_qp -> u32,
    read_wc_flags: wc_flags -> u32,
    read_slid: slid -> u32,
    read_sl: sl -> u8,
    read_dlid_path_bits: dlid_path_bits -> u8,
);
