//! Asynchronous events.

use std::ffi::c_int;

use nobounce_dropin::notice::NoticeFds;
use nobounce_nic::soft::AsyncEvent;
use nobounce_protocol::qp::QpEvent;
use nobounce_verbs as verbs;

use crate::channel::wait_for;
use crate::context::ContextObject;
use crate::cq::CqObject;
use crate::entry;
use crate::live::Object;
use crate::qp::QpObject;
use crate::srq::SrqObject;
use crate::system;

fn qp_event(event: QpEvent) -> u32 {
    match event {
        QpEvent::RequestError => verbs::IBV_EVENT_QP_REQ_ERR,
        QpEvent::AccessError => verbs::IBV_EVENT_QP_ACCESS_ERR,
        QpEvent::Fatal => verbs::IBV_EVENT_QP_FATAL,
        QpEvent::CommunicationEstablished => verbs::IBV_EVENT_COMM_EST,
        QpEvent::SendQueueDrained => verbs::IBV_EVENT_SQ_DRAINED,
        QpEvent::LastWqeReached => verbs::IBV_EVENT_QP_LAST_WQE_REACHED,
    }
}

/// The event of a notice, counted as delivered, if its object still exists.
fn claim(context: &ContextObject) -> Option<verbs::AsyncEvent> {
    let event = context.soft.claim_event()?;
    // Counted under the lock that also guards removal: an object is either found here or not waited
    // for there.
    let objects = context.objects();
    let (element, event_type) = match event {
        AsyncEvent::Qp { qpn, event } => {
            let qp = objects.qps.get(&qpn.get())?.first()?;
            qp.acks.delivered();
            (qp.raw().cast(), qp_event(event))
        }
        AsyncEvent::CqOverflow { cq } => {
            let cq = objects.cqs.get(&cq)?;
            cq.async_acks.delivered();
            (cq.raw().cast(), verbs::IBV_EVENT_CQ_ERR)
        }
        AsyncEvent::SrqLimitReached { srq } => {
            let srq = objects.srqs.get(&srq)?;
            srq.acks.delivered();
            (srq.raw().cast(), verbs::IBV_EVENT_SRQ_LIMIT_REACHED)
        }
        AsyncEvent::DeviceFatal => (std::ptr::null_mut(), verbs::IBV_EVENT_DEVICE_FATAL),
        _ => return None,
    };
    Some(verbs::AsyncEvent { element, event_type })
}

/// `ibv_get_async_event`.
pub(crate) unsafe extern "C-unwind" fn get_async_event(
    context: *mut verbs::Context,
    event: *mut verbs::AsyncEvent,
) -> c_int {
    let fds = || {
        let context = ContextObject::find(context)?;
        context.alive()?;
        Ok(NoticeFds::new(context.soft.event_fd(), context.soft.event_counter_fd()))
    };
    wait_for(fds, || {
        let Some(found) = claim(ContextObject::find(context)?) else { return Ok(false) };
        // SAFETY: the caller passes a valid place.
        unsafe { *event = found };
        Ok(true)
    })
}

/// `ibv_ack_async_event`.
pub(crate) unsafe extern "C" fn ack_async_event(event: *mut verbs::AsyncEvent) {
    entry::silent(|| {
        if system::forward_event(c"ibv_ack_async_event", event) {
            return Ok(());
        }
        // SAFETY: the caller passes an event that it got from us.
        let event = unsafe { *event };
        match event.event_type {
            verbs::IBV_EVENT_CQ_ERR => CqObject::find(event.element.cast())?.async_acks.acknowledge(1),
            verbs::IBV_EVENT_SRQ_LIMIT_REACHED => SrqObject::find(event.element.cast())?.acks.acknowledge(1),
            verbs::IBV_EVENT_QP_FATAL
            | verbs::IBV_EVENT_QP_REQ_ERR
            | verbs::IBV_EVENT_QP_ACCESS_ERR
            | verbs::IBV_EVENT_COMM_EST
            | verbs::IBV_EVENT_SQ_DRAINED
            | verbs::IBV_EVENT_QP_LAST_WQE_REACHED => {
                QpObject::find(event.element.cast())?.acks.acknowledge(1)
            }
            _ => {}
        }
        Ok(())
    });
}
