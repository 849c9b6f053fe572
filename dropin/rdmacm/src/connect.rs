//! Connections: connect, accept, reject, disconnect.

use std::ffi::{c_int, c_void};

use nobounce_protocol::cm::{Accept, CommId, Connect, ip, private_len, reason, sidr_status};
use nobounce_protocol::wire::Qpn;

use crate::device::{self, Device};
use crate::entry::{self, Errno};
use crate::event::complete;
use crate::id::{Id, State};
use crate::layout::{CmId, ConnParam, MAX_RESOURCES, UDP_QKEY};
use crate::{log, qp};

/// Bounds of a listener's backlog: requests beyond it are dropped, and the peer retries a moment
/// later.
const MAX_BACKLOG: usize = 1024;
const MIN_BACKLOG: usize = 128;
/// Counters of retries have three bits.
const MAX_RETRIES: u8 = 7;
/// Something happened over a connection that was accepted; `IBV_EVENT_COMM_EST`.
const COMM_ESTABLISHED: c_int = 4;

/// The parameters that a program gave, or those that stand for none.
///
/// # Safety
/// A structure of C's, or null.
unsafe fn parameters(given: *const ConnParam) -> ConnParam {
    // SAFETY: as the caller says.
    unsafe { given.as_ref() }.copied().unwrap_or(ConnParam {
        private_data: std::ptr::null(),
        private_data_len: 0,
        responder_resources: MAX_RESOURCES,
        initiator_depth: MAX_RESOURCES,
        flow_control: 0,
        retry_count: MAX_RETRIES,
        rnr_retry_count: MAX_RETRIES,
        srq: 0,
        qp_num: 0,
    })
}

/// # Safety
/// As many bytes as it says.
unsafe fn bytes(data: *const c_void, len: u8, room: usize) -> Result<Vec<u8>, Errno> {
    let len = usize::from(len);
    if len > room || (data.is_null() && len > 0) {
        log::info(|| format!("librdmacm: {len} bytes of private data exceed the maximum of {room}"));
        return Err(Errno::EINVAL);
    }
    if len == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: as the caller says.
    Ok(unsafe { std::slice::from_raw_parts(data.cast(), len) }.to_vec())
}

/// The requested value; EINVAL above `max`. `MAX_RESOURCES` requests `max`.
fn granted(asked: u8, max: u8) -> Result<u8, Errno> {
    match asked {
        MAX_RESOURCES => Ok(max),
        asked if asked > max => Err(Errno::EINVAL),
        asked => Ok(asked),
    }
}

fn number_and_srq(id: &Id, given: &ConnParam) -> (Qpn, bool) {
    let qp = id.qp();
    if qp.is_null() {
        return (Qpn::new(given.qp_num), given.srq != 0);
    }
    // SAFETY: the identifier's own queue pair.
    unsafe { (Qpn::new((*qp).qp_num), !(*qp).srq.is_null()) }
}

fn standing(state: &State) -> Result<(&'static Device, CommId), Errno> {
    state.device.zip(state.comm).ok_or(Errno::EINVAL)
}

/// `rdma_connect`.
pub(crate) unsafe extern "C" fn rdma_connect(id: *mut CmId, given: *mut ConnParam) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        // SAFETY: the caller passes a valid structure, or null.
        let given = unsafe { parameters(given) };
        begin(&id, &given)?;
        complete(&id)?;
        Ok(0)
    })
}

fn begin(id: &Id, given: &ConnParam) -> Result<(), Errno> {
    let mut state = id.state();
    let (Some(device), Some(src), Some(dst)) = (state.device, state.src, state.dst) else {
        return Err(Errno::EINVAL);
    };
    if state.comm.is_some() {
        return Err(Errno(libc::EISCONN));
    }
    let room = if id.is_ud() { private_len::SIDR_REQ } else { private_len::REQ } - ip::IP_HEADER_LEN;
    // SAFETY: the program's own data, as long as it says.
    let mut user = unsafe { bytes(given.private_data, given.private_data_len, room)? };
    if user.is_empty() {
        user.clone_from(&state.connect_data);
        user.truncate(room);
    }
    let header = ip::IpHeader { port: src.port(), src: src.ip(), dst: dst.ip() };
    let private = header.prepend(&user);
    let service = ip::service_id(id.port_space(), dst.port());
    let cm = device.cm()?;
    if id.is_ud() {
        let comm = cm.ask_service(dst.ip(), service, private, &state.channel, id.tag())?;
        state.comm = Some(comm);
        id.stand_for(device.addr, comm);
        return Ok(());
    }
    let (qpn, srq) = number_and_srq(id, given);
    state.link.responder_resources = granted(given.responder_resources, device.max_responder_resources)?;
    state.link.initiator_depth = granted(given.initiator_depth, device.max_initiator_depth)?;
    state.link.retry_count = given.retry_count.min(MAX_RETRIES);
    state.link.rnr_retry_count = given.rnr_retry_count.min(MAX_RETRIES);
    let link = state.link;
    let connect = Connect {
        to: dst.ip(),
        service,
        qpn,
        transport: 0,
        starting_psn: link.local_psn,
        responder_resources: link.responder_resources,
        initiator_depth: link.initiator_depth,
        flow_control: given.flow_control != 0,
        retry_count: link.retry_count,
        rnr_retry_count: link.rnr_retry_count,
        srq,
        mtu: link.mtu,
        local_gid: ip::gid(src.ip()),
        remote_gid: ip::gid(dst.ip()),
        traffic_class: link.traffic_class,
        local_ack_timeout: link.ack_timeout,
        private,
    };
    let comm = cm.connect(connect, &state.channel, id.tag())?;
    state.comm = Some(comm);
    id.stand_for(device.addr, comm);
    Ok(())
}

/// `rdma_listen`.
pub(crate) unsafe extern "C" fn rdma_listen(id: *mut CmId, backlog: c_int) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        let mut state = id.state();
        if state.listening || state.comm.is_some() {
            return Err(Errno::EINVAL);
        }
        if state.src.is_none() {
            id.bind(&mut state, ([0, 0, 0, 0], 0).into())?;
        }
        if state.bound.is_empty()
            && let Some(src) = state.src
        {
            // It was willing to share its port, which ends here.
            let devices = match state.device {
                Some(device) => vec![device],
                None => device::devices(|addr| addr.is_ipv4() == src.is_ipv4())?,
            };
            id.bind_port(&mut state, &devices, src.port())?;
        }
        let asked = usize::try_from(backlog).ok().filter(|n| *n > 0).unwrap_or(MAX_BACKLOG);
        let backlog = asked.clamp(MIN_BACKLOG, MAX_BACKLOG);
        for (device, service) in &state.bound {
            device.cm()?.listen(*service, backlog, &state.channel, id.tag())?;
        }
        state.listening = true;
        Ok(0)
    })
}

/// `rdma_accept`.
pub(crate) unsafe extern "C" fn rdma_accept(id: *mut CmId, given: *mut ConnParam) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        // SAFETY: the caller passes a valid structure, or null.
        let given = unsafe { parameters(given) };
        let (qpn, srq) = number_and_srq(&id, &given);
        let (device, comm) = standing(&id.state())?;
        if id.is_ud() {
            // SAFETY: the program's own data, as long as it says.
            let private =
                unsafe { bytes(given.private_data, given.private_data_len, private_len::SIDR_REP)? };
            device.cm()?.answer_service(comm, sidr_status::SUCCESS, qpn, UDP_QKEY, private)?;
            return Ok(0);
        }
        // SAFETY: as above.
        let private = unsafe { bytes(given.private_data, given.private_data_len, private_len::REP)? };
        let mut state = id.state();
        let link = &mut state.link;
        // `MAX_RESOURCES` stands for what the remote side requested.
        let chosen = |asked: u8, offered: u8, max: u8| {
            if asked == MAX_RESOURCES { Ok(offered) } else { granted(asked, max) }
        };
        link.responder_resources =
            chosen(given.responder_resources, link.responder_resources, device.max_responder_resources)?;
        link.initiator_depth =
            chosen(given.initiator_depth, link.initiator_depth, device.max_initiator_depth)?;
        let accept = Accept {
            qpn,
            starting_psn: link.local_psn,
            responder_resources: link.responder_resources,
            initiator_depth: link.initiator_depth,
            flow_control: given.flow_control != 0,
            rnr_retry_count: given.rnr_retry_count.min(MAX_RETRIES),
            srq,
            private,
        };
        drop(state);
        // Before the reply, for requests may arrive right after it.
        qp::connect(&id)?;
        device.cm()?.accept(comm, accept)?;
        complete(&id)?;
        Ok(0)
    })
}

/// `rdma_reject`.
pub(crate) unsafe extern "C" fn rdma_reject(id: *mut CmId, data: *const c_void, len: u8) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        let (device, comm) = standing(&id.state())?;
        let room = if id.is_ud() { private_len::SIDR_REP } else { private_len::REJ };
        // SAFETY: the program's own data, as long as it says.
        let private = unsafe { bytes(data, len, room)? };
        if id.is_ud() {
            device.cm()?.answer_service(comm, sidr_status::REJECTED, Qpn::new(0), 0, private)?;
        } else {
            device.cm()?.reject(comm, reason::CONSUMER, private)?;
        }
        Ok(0)
    })
}

/// `rdma_establish`: the program has connected its own queue pair.
pub(crate) unsafe extern "C" fn rdma_establish(id: *mut CmId) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        if !id.qp().is_null() {
            return Err(Errno::EINVAL);
        }
        let (device, comm) = standing(&id.state())?;
        device.cm()?.establish(comm)?;
        Ok(0)
    })
}

/// `rdma_notify`: data arrived over the connection before the RTU.
pub(crate) unsafe extern "C" fn rdma_notify(id: *mut CmId, event: c_int) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        let (device, comm) = standing(&id.state())?;
        if event == COMM_ESTABLISHED {
            device.cm()?.note_traffic(comm)?;
        }
        Ok(0)
    })
}

/// `rdma_disconnect`.
pub(crate) unsafe extern "C" fn rdma_disconnect(id: *mut CmId) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        let (device, comm) = standing(&id.state())?;
        qp::stop(&id)?;
        device.cm()?.disconnect(comm)?;
        complete(&id)?;
        Ok(0)
    })
}
