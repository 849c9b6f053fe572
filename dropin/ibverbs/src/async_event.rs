//! Asynchronous events.

use std::ffi::c_int;

use nobounce_nic::soft::AsyncEvent;
use nobounce_protocol::qp::QpEvent;
use nobounce_verbs as verbs;

use crate::channel::{Step, settle, wait_or_again, wait_readable};
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

/// The next event of an object that still exists, counted as delivered.
fn next(context: &ContextObject) -> Option<verbs::AsyncEvent> {
    while let Some(event) = context.soft.next_event() {
        // Counted under the lock under which objects are removed: one is either found here or not waited for there.
        let objects = context.objects();
        match event {
            AsyncEvent::Qp { qpn, event } => {
                if let Some(qp) = objects.qps.get(&qpn.get()) {
                    qp.acks.delivered();
                    return Some(verbs::AsyncEvent { element: qp.raw().cast(), event_type: qp_event(event) });
                }
            }
            AsyncEvent::CqOverflow { cq } => {
                if let Some(cq) = objects.cqs.get(&cq) {
                    cq.async_acks.delivered();
                    let element = cq.raw().cast();
                    return Some(verbs::AsyncEvent { element, event_type: verbs::IBV_EVENT_CQ_ERR });
                }
            }
            AsyncEvent::SrqLimitReached { srq } => {
                if let Some(srq) = objects.srqs.get(&srq) {
                    srq.acks.delivered();
                    let element = srq.raw().cast();
                    return Some(verbs::AsyncEvent {
                        element,
                        event_type: verbs::IBV_EVENT_SRQ_LIMIT_REACHED,
                    });
                }
            }
            _ => {}
        }
    }
    None
}

/// `ibv_get_async_event`.
pub(crate) unsafe extern "C-unwind" fn get_async_event(
    context: *mut verbs::Context,
    event: *mut verbs::AsyncEvent,
) -> c_int {
    let step = || {
        settle(entry::guarded(|| {
            let context = ContextObject::find(context)?;
            context.alive()?;
            let Some(found) = next(context) else { return wait_or_again(context.soft.event_fd()) };
            // SAFETY: the caller hands in a valid place.
            unsafe { *event = found };
            Ok(Step::Return(0))
        }))
    };
    loop {
        match step() {
            Step::Return(code) => return code,
            Step::Wait(fd) => {
                if !wait_readable(fd) {
                    return -1;
                }
            }
        }
    }
}

/// `ibv_ack_async_event`.
pub(crate) unsafe extern "C" fn ack_async_event(event: *mut verbs::AsyncEvent) {
    entry::silent(|| {
        if system::forward_event(c"ibv_ack_async_event", event) {
            return Ok(());
        }
        // SAFETY: the caller hands in an event that it got from us.
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
