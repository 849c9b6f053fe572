//! Events: what became of connections, as C has it.

use std::ffi::{c_char, c_int, c_void};
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::Arc;

use nobounce_dropin::notice::NoticeFds;
use nobounce_nic::soft::{CmNotice, Told};
use nobounce_protocol::cm::{CommId, Event, Rep, Req, SidrRep, SidrReq, ip, reason, sidr_status};

use crate::channel::{self, linger_if_ended};
use crate::device;
use crate::entry::{self, Errno};
use crate::id::Id;
use crate::layout::{
    CmEvent, CmId, ConnParam, EVENT_CONNECT_ERROR, EVENT_CONNECT_REQUEST, EVENT_CONNECT_RESPONSE,
    EVENT_DISCONNECTED, EVENT_ESTABLISHED, EVENT_MULTICAST_ERROR, EVENT_MULTICAST_JOIN, EVENT_REJECTED,
    EVENT_TIMEWAIT_EXIT, EVENT_UNREACHABLE, EventChannel, Param, UdParam,
};
use crate::multicast;
use crate::qp;

/// The path MTU does not fit our interface; the standard's number.
const INVALID_MTU: u16 = 26;

/// An event in the hands of the program.
#[repr(C)]
struct EventObject {
    raw: CmEvent,
    private: Vec<u8>,
    /// The identifier, which must stay alive until the event is acknowledged.
    of: Arc<Id>,
}

/// The contents of an event, before its delivery to the program.
struct Draft {
    id: Arc<Id>,
    listener: Option<Arc<Id>>,
    kind: u32,
    status: c_int,
    param: Param,
    private: Vec<u8>,
    /// The program's pointer, in place of private data.
    context: *const c_void,
}

impl Draft {
    fn new(id: Arc<Id>, kind: u32, status: c_int) -> Self {
        // SAFETY: pointers and numbers, for which zeroes are valid.
        let param = unsafe { std::mem::zeroed() };
        Self { id, listener: None, kind, status, param, private: Vec::new(), context: ptr::null() }
    }

    fn conn(mut self, conn: ConnParam, private: Vec<u8>) -> Self {
        self.param.conn = conn;
        self.private = private;
        self
    }

    fn ud(mut self, ud: UdParam, private: Vec<u8>) -> Self {
        self.param.ud = ud;
        self.private = private;
        self
    }

    fn give(self) -> *mut CmEvent {
        let Self { id, listener, kind, status, mut param, private, context } = self;
        let data = if private.is_empty() { context } else { private.as_ptr().cast::<c_void>() };
        let len = u8::try_from(private.len()).unwrap_or(u8::MAX);
        // Both kinds of parameters begin with the private data.
        param.conn.private_data = data;
        param.conn.private_data_len = len;
        let raw = CmEvent {
            id: id.raw(),
            listen_id: listener.as_ref().map_or(ptr::null_mut(), |listener| listener.raw()),
            event: kind,
            status,
            param,
        };
        let of = listener.unwrap_or(id);
        of.give_event();
        Box::into_raw(Box::new(EventObject { raw, private, of })).cast()
    }
}

fn no_conn() -> ConnParam {
    // SAFETY: pointers and numbers, for which zeroes are valid.
    unsafe { std::mem::zeroed() }
}

/// The event for a notice; `None` if it is no longer relevant.
fn draft(notice: CmNotice) -> Result<Option<Draft>, Errno> {
    let CmNotice { tag, told } = notice;
    let (local, event) = match told {
        Told::Own { kind: EVENT_MULTICAST_JOIN, status: number } => return Ok(multicast_join(tag, number)),
        Told::Own { kind, status } => return Ok(Id::find_tag(tag).map(|id| Draft::new(id, kind, status))),
        Told::Event { local, event } => (local, event),
    };
    match event {
        Event::Request { id, req, .. } => return request(tag, local, id, &req),
        Event::SidrRequest { id, from, req } => return sidr_request(tag, local, id, from, &req),
        _ => {}
    }
    let comm = event.id();
    let found = Id::find_comm(local, comm).or_else(|| Id::find_tag(tag).filter(|id| !id.state().listening));
    let Some(id) = found else { return Ok(None) };
    Ok(Some(match event {
        Event::Reply { rep, .. } => reply(id, comm, rep),
        Event::SidrReply { rep, .. } => sidr_reply(id, rep)?,
        Event::Established { .. } => Draft::new(id, EVENT_ESTABLISHED, 0),
        Event::Rejected { reason, private, .. } => {
            let _ = qp::stop(&id); // the program hears of the refusal, which is worse
            id.state().failed = true;
            Draft::new(id, EVENT_REJECTED, c_int::from(reason)).conn(no_conn(), private)
        }
        Event::Unreachable { .. } => Draft::new(id, EVENT_UNREACHABLE, -libc::ETIMEDOUT),
        Event::Disconnected { silent, .. } => {
            if id.state().failed {
                return Ok(None);
            }
            Draft::new(id, EVENT_DISCONNECTED, if silent { -libc::ETIMEDOUT } else { 0 })
        }
        Event::TimewaitExit { .. } => Draft::new(id, EVENT_TIMEWAIT_EXIT, 0),
        Event::Request { .. } | Event::SidrRequest { .. } => return Ok(None),
    }))
}

/// A multicast group was joined, if the program has not left it meanwhile.
fn multicast_join(tag: u64, number: c_int) -> Option<Draft> {
    let id = Id::find_tag(tag)?;
    let (joined, ud, attached) = multicast::joined(&id, number)?;
    let (kind, status) = match attached {
        Ok(()) => (EVENT_MULTICAST_JOIN, 0),
        Err(Errno(errno)) => (EVENT_MULTICAST_ERROR, -errno),
    };
    let draft = Draft::new(id, kind, status).ud(ud, Vec::new());
    Some(Draft { context: joined.context(), ..draft })
}

/// A connection request: the new identifier for the program, and the listener that it came to.
struct Asked {
    id: Arc<Id>,
    listener: Arc<Id>,
}

/// Creates the identifier for a connection request to a listener.
fn asked(
    tag: u64,
    local: IpAddr,
    comm: CommId,
    (port, header): (u16, ip::IpHeader),
) -> Result<Option<Asked>, Errno> {
    let device = device::device_at(local)?;
    let cm = device.cm()?;
    let Some(listener) = Id::find_tag(tag) else {
        cm.release(comm);
        return Ok(None);
    };
    // SAFETY: our own structure.
    let (channel, context, ps, qp_type) = unsafe {
        let raw = &*listener.raw();
        (raw.channel, raw.context, raw.ps, raw.qp_type)
    };
    let id = Id::create(channel, false, context, ps, qp_type)?;
    id.stand_for(local, comm);
    let mut state = id.state();
    id.take_device(&mut state, device);
    state.src = Some(SocketAddr::new(local, port));
    state.dst = Some(SocketAddr::new(header.src, header.port));
    state.comm = Some(comm);
    id.show_addresses(&state);
    cm.adopt(comm, &state.channel, id.tag());
    drop(state);
    if listener.state().sync {
        id.make_sync()?;
    }
    Ok(Some(Asked { id, listener }))
}

fn request(tag: u64, local: IpAddr, comm: CommId, req: &Req) -> Result<Option<Draft>, Errno> {
    let device = device::device_at(local)?;
    let Some((header, user)) = ip::IpHeader::parse(&req.private) else {
        let _ = device.cm()?.reject(comm, reason::UNSUPPORTED, Vec::new());
        device.cm()?.release(comm);
        return Ok(None);
    };
    if req.mtu > device.mtu() {
        let _ = device.cm()?.reject(comm, INVALID_MTU, Vec::new());
        device.cm()?.release(comm);
        return Ok(None);
    }
    let Some(Asked { id, listener }) = asked(tag, local, comm, (ip::service_port(req.service), header))?
    else {
        return Ok(None);
    };
    let mut state = id.state();
    let link = &mut state.link;
    link.remote = Some(ip::address_of(req.local_gid));
    link.remote_qpn = req.qpn;
    link.remote_psn = req.starting_psn;
    link.mtu = req.mtu.max(1);
    if req.local_ack_timeout > 0 {
        link.ack_timeout = req.local_ack_timeout;
    }
    link.retry_count = req.retry_count;
    link.rnr_retry_count = req.rnr_retry_count;
    // The remote side's initiator depth bounds our responder resources, and vice versa.
    link.responder_resources = req.initiator_depth.min(device.max_responder_resources);
    link.initiator_depth = req.responder_resources.min(device.max_initiator_depth);
    link.traffic_class = req.traffic_class;
    drop(state);
    let conn = ConnParam {
        responder_resources: req.initiator_depth,
        initiator_depth: req.responder_resources,
        flow_control: req.flow_control.into(),
        retry_count: req.retry_count,
        rnr_retry_count: req.rnr_retry_count,
        srq: req.srq.into(),
        qp_num: req.qpn.get(),
        ..no_conn()
    };
    let draft = Draft::new(id, EVENT_CONNECT_REQUEST, 0).conn(conn, user.to_vec());
    Ok(Some(Draft { listener: Some(listener), ..draft }))
}

fn sidr_request(
    tag: u64,
    local: IpAddr,
    comm: CommId,
    from: IpAddr,
    req: &SidrReq,
) -> Result<Option<Draft>, Errno> {
    let Some((header, user)) = ip::IpHeader::parse(&req.private) else {
        device::device_at(local)?.cm()?.release(comm);
        return Ok(None);
    };
    let Some(Asked { id, listener }) = asked(tag, local, comm, (ip::service_port(req.service), header))?
    else {
        return Ok(None);
    };
    id.state().link.remote = Some(from);
    let draft = Draft::new(id, EVENT_CONNECT_REQUEST, 0).conn(no_conn(), user.to_vec());
    Ok(Some(Draft { listener: Some(listener), ..draft }))
}

/// The remote side accepts: the queue pair, if we have it, is connected before the program gets the
/// event.
fn reply(id: Arc<Id>, comm: CommId, rep: Rep) -> Draft {
    let mut state = id.state();
    let device = state.device;
    let limit = |n: u8, most: Option<u8>| most.map_or(n, |most| n.min(most));
    state.link.remote_qpn = rep.qpn;
    state.link.remote_psn = rep.starting_psn;
    state.link.responder_resources = limit(rep.initiator_depth, device.map(|d| d.max_responder_resources));
    state.link.initiator_depth = limit(rep.responder_resources, device.map(|d| d.max_initiator_depth));
    state.link.rnr_retry_count = rep.rnr_retry_count;
    drop(state);
    let conn = ConnParam {
        responder_resources: rep.initiator_depth,
        initiator_depth: rep.responder_resources,
        flow_control: rep.flow_control.into(),
        rnr_retry_count: rep.rnr_retry_count,
        srq: rep.srq.into(),
        qp_num: rep.qpn.get(),
        ..no_conn()
    };
    if id.qp().is_null() {
        return Draft::new(id, EVENT_CONNECT_RESPONSE, 0).conn(conn, rep.private);
    }
    let cm = device.ok_or(Errno::EINVAL).and_then(|device| device.cm());
    let connected = cm.and_then(|cm| {
        qp::connect(&id).inspect_err(|_| {
            // the program hears of the worse thing
            let _ = cm.reject(comm, reason::CONSUMER, Vec::new());
        })?;
        cm.establish(comm).map_err(|_| Errno::EINVAL)
    });
    match connected {
        Ok(()) => Draft::new(id, EVENT_ESTABLISHED, 0).conn(conn, rep.private),
        Err(Errno(errno)) => {
            id.state().failed = true;
            Draft::new(id, EVENT_CONNECT_ERROR, -errno).conn(conn, rep.private)
        }
    }
}

fn sidr_reply(id: Arc<Id>, rep: SidrRep) -> Result<Draft, Errno> {
    if rep.status != sidr_status::SUCCESS {
        return Ok(Draft::new(id, EVENT_UNREACHABLE, c_int::from(rep.status)).conn(no_conn(), rep.private));
    }
    let ah_attr = qp::route(&id.state())?;
    let ud = UdParam {
        private_data: ptr::null(),
        private_data_len: 0,
        ah_attr,
        qp_num: rep.qpn.get(),
        qkey: rep.qkey,
    };
    Ok(Draft::new(id, EVENT_ESTABLISHED, 0).ud(ud, rep.private))
}

/// Takes what was read for from a channel.
fn take(channel: *mut EventChannel) -> Result<Option<*mut CmEvent>, Errno> {
    let Some(notice) = channel::find(channel)?.claim() else { return Ok(None) };
    Ok(draft(notice)?.map(Draft::give))
}

/// `rdma_get_cm_event`.
pub(crate) unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut EventChannel,
    event: *mut *mut CmEvent,
) -> c_int {
    loop {
        let mut fds = None;
        let failed = entry::minus_one(|| {
            fds = Some(channel::fds(&channel::find(channel)?));
            Ok(0)
        });
        if failed != 0 || !fds.is_some_and(NoticeFds::take) {
            linger_if_ended(channel);
            return -1;
        }
        let found = entry::minus_one(|| {
            let Some(found) = take(channel)? else { return Ok(0) };
            // SAFETY: the caller passes a place for the event.
            unsafe { *event = found };
            Ok(1)
        });
        match found {
            0 => {}
            1 => return 0,
            _ => {
                linger_if_ended(channel);
                return -1;
            }
        }
    }
}

/// The program has seen an event.
pub(crate) fn acknowledge(event: *mut CmEvent) {
    // SAFETY: the program passes back a pointer from `give`, once.
    let object = unsafe { Box::from_raw(event.cast::<EventObject>()) };
    object.of.acknowledge();
}

/// `rdma_ack_cm_event`.
pub(crate) unsafe extern "C" fn rdma_ack_cm_event(event: *mut CmEvent) -> c_int {
    entry::minus_one(|| {
        if event.is_null() {
            return Err(Errno::EINVAL);
        }
        acknowledge(event);
        Ok(0)
    })
}

/// Waits for the next event of a synchronous identifier; an error if the operation failed.
pub(crate) fn complete(id: &Id) -> Result<(), Errno> {
    let (sync, channel) = {
        let state = id.state();
        (state.sync, state.channel_raw)
    };
    if !sync {
        return Ok(());
    }
    // SAFETY: our own structure, in a call about it.
    let last = unsafe { &mut (*id.raw()).event };
    if !last.is_null() {
        acknowledge(std::mem::replace(last, ptr::null_mut()));
    }
    let event = wait(channel)?;
    *last = event;
    // SAFETY: we have just received it.
    let (kind, status) = unsafe { ((*event).event, (*event).status) };
    match (kind, status) {
        (_, 0) => Ok(()),
        (EVENT_REJECTED, _) => Err(Errno(libc::ECONNREFUSED)),
        (_, status) => Err(Errno(status.abs())),
    }
}

/// Waits for the next event of a channel.
pub(crate) fn wait(channel: *mut EventChannel) -> Result<*mut CmEvent, Errno> {
    loop {
        let fds = channel::fds(&channel::find(channel)?);
        if !fds.take() {
            return Err(std::io::Error::last_os_error().into());
        }
        if let Some(event) = take(channel)? {
            return Ok(event);
        }
    }
}

/// `rdma_event_str`: programs print these whether or not one ever came.
pub(crate) extern "C" fn rdma_event_str(event: u32) -> *const c_char {
    let names = [
        c"RDMA_CM_EVENT_ADDR_RESOLVED",
        c"RDMA_CM_EVENT_ADDR_ERROR",
        c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        c"RDMA_CM_EVENT_ROUTE_ERROR",
        c"RDMA_CM_EVENT_CONNECT_REQUEST",
        c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        c"RDMA_CM_EVENT_CONNECT_ERROR",
        c"RDMA_CM_EVENT_UNREACHABLE",
        c"RDMA_CM_EVENT_REJECTED",
        c"RDMA_CM_EVENT_ESTABLISHED",
        c"RDMA_CM_EVENT_DISCONNECTED",
        c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        c"RDMA_CM_EVENT_MULTICAST_JOIN",
        c"RDMA_CM_EVENT_MULTICAST_ERROR",
        c"RDMA_CM_EVENT_ADDR_CHANGE",
        c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
        c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
        c"RDMA_CM_EVENT_ADDRINFO_ERROR",
    ];
    let name = usize::try_from(event).ok().and_then(|at| names.get(at).copied());
    name.unwrap_or(c"UNKNOWN EVENT").as_ptr()
}

/// `rdma_get_request`: the next request of a listener whose calls wait.
pub(crate) unsafe extern "C" fn rdma_get_request(listener: *mut CmId, id: *mut *mut CmId) -> c_int {
    entry::minus_one(|| {
        let listener = Id::find(listener)?;
        let (sync, channel, endpoint) = {
            let state = listener.state();
            (state.sync, state.channel_raw, state.endpoint)
        };
        if !sync {
            return Err(Errno::EINVAL);
        }
        let event = wait(channel)?;
        // SAFETY: we have just received it.
        let (kind, status, new) = unsafe { ((*event).event, (*event).status, (*event).id) };
        if status != 0 || kind != EVENT_CONNECT_REQUEST {
            acknowledge(event);
            return Err(Errno(if status == 0 { libc::EINVAL } else { status.abs() }));
        }
        if let Some((pd, mut attr)) = endpoint {
            let made = Id::find(new).and_then(|new| {
                let create_qp = crate::calls::calls()?.create_qp;
                // SAFETY: our own copy of the structure that the endpoint was made with.
                unsafe { qp::create(&new, pd, &mut attr, |pd, attr| create_qp(pd, attr)) }
            });
            if let Err(errno) = made {
                acknowledge(event);
                Id::find(new)?.end();
                return Err(errno);
            }
        }
        // SAFETY: the new identifier, and the caller's place for it.
        unsafe {
            (*new).event = event;
            *id = new;
        }
        Ok(0)
    })
}
