//! Identifiers: what a program holds of a connection, or of a listener.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use nobounce_nic::soft::{BindError, CmChannel, CmNotice, Told};
use nobounce_protocol::cm::{CommId, Event, ip};
use nobounce_protocol::wire::{Psn, Qpn};
use nobounce_verbs as verbs;

use crate::calls::calls;
use crate::device::{self, Device};
use crate::entry::{self, Errno};
use crate::layout::{CmId, EventChannel, PS_IB, PS_IPOIB, PS_TCP, PS_UDP};
use crate::multicast::Join;
use crate::{address, channel, event, log};

/// Ephemeral ports: the system's usual range.
const FIRST_PORT: u16 = 32_768;
const PORTS: u16 = 28_232;
/// Number of ports tried.
const PORT_TRIES: u16 = 4096;

/// An identifier.
pub(crate) struct Id {
    raw: Box<UnsafeCell<CmId>>,
    state: Mutex<State>,
    /// Events delivered to the program and not yet acknowledged.
    unacknowledged: Mutex<u32>,
    acknowledged: Condvar,
}

// SAFETY: the C part changes only where C expects it, in calls on this identifier; the rest is
// behind locks.
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}

/// State of an identifier.
pub(crate) struct State {
    pub(crate) channel: CmChannel,
    pub(crate) channel_raw: *mut EventChannel,
    /// Calls wait for what they begin; the channel is the identifier's own.
    pub(crate) sync: bool,
    pub(crate) device: Option<&'static Device>,
    /// Services whose names it has taken.
    pub(crate) bound: Vec<(&'static Device, u64)>,
    pub(crate) src: Option<SocketAddr>,
    pub(crate) dst: Option<SocketAddr>,
    pub(crate) listening: bool,
    pub(crate) comm: Option<CommId>,
    pub(crate) link: Link,
    pub(crate) reuse_addr: bool,
    pub(crate) v6_only: bool,
    /// The connection attempt failed, and the program was notified.
    pub(crate) failed: bool,
    /// Queue pair attributes for `rdma_get_request`.
    pub(crate) endpoint: Option<(*mut verbs::Pd, verbs::QpInitAttr)>,
    /// Default private data of `rdma_connect`.
    pub(crate) connect_data: Vec<u8>,
    /// Multicast groups.
    pub(crate) joins: Vec<Join>,
}

/// Negotiated parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) remote: Option<IpAddr>,
    pub(crate) remote_qpn: Qpn,
    /// Announced starting PSNs, by us and by the remote side; each is for the other one's sends.
    pub(crate) local_psn: Psn,
    pub(crate) remote_psn: Psn,
    pub(crate) mtu: u8,
    pub(crate) ack_timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) traffic_class: u8,
}

/// The default ack timeout: 0.54 s, as in the kernel.
pub(crate) const ACK_TIMEOUT: u8 = 17;

impl Default for Link {
    fn default() -> Self {
        Self {
            remote: None,
            remote_qpn: Qpn::new(0),
            local_psn: Psn::new(random()),
            remote_psn: Psn::new(0),
            mtu: 1,
            ack_timeout: ACK_TIMEOUT,
            retry_count: 7,
            rnr_retry_count: 7,
            responder_resources: 0,
            initiator_depth: 0,
            traffic_class: 0,
        }
    }
}

/// A number that the last connection did not have.
fn random() -> u32 {
    let mut bytes = [0_u8; 4];
    // SAFETY: four bytes that can be written; what it does not fill stays zero.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    u32::from_ne_bytes(bytes)
}

/// All identifiers by address; and those of communications that remote sides began, by
/// communication.
#[derive(Default)]
struct Table {
    ids: HashMap<usize, Arc<Id>>,
    comms: HashMap<(IpAddr, CommId), usize>,
}

static TABLE: Mutex<Option<Table>> = Mutex::new(None);

fn with<T>(what: impl FnOnce(&mut Table) -> T) -> T {
    what(TABLE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

impl Id {
    /// Makes an identifier for a port space.
    pub(crate) fn create(
        channel_raw: *mut EventChannel,
        sync: bool,
        context: *mut c_void,
        ps: u32,
        qp_type: u32,
    ) -> Result<Arc<Self>, Errno> {
        let channel = channel::find(channel_raw)?;
        // SAFETY: pointers and numbers, for which zeroes are valid.
        let mut raw: CmId = unsafe { std::mem::zeroed() };
        raw.channel = channel_raw;
        raw.context = context;
        raw.ps = ps;
        raw.qp_type = qp_type;
        let id = Arc::new(Self {
            raw: Box::new(UnsafeCell::new(raw)),
            state: Mutex::new(State {
                channel,
                channel_raw,
                sync,
                device: None,
                bound: Vec::new(),
                src: None,
                dst: None,
                listening: false,
                comm: None,
                link: Link::default(),
                reuse_addr: false,
                v6_only: false,
                failed: false,
                endpoint: None,
                connect_data: Vec::new(),
                joins: Vec::new(),
            }),
            unacknowledged: Mutex::new(0),
            acknowledged: Condvar::new(),
        });
        with(|table| table.ids.insert(id.raw().expose_provenance(), id.clone()));
        Ok(id)
    }

    /// Our identifier behind a pointer of C's.
    pub(crate) fn find(raw: *mut CmId) -> Result<Arc<Self>, Errno> {
        with(|table| table.ids.get(&raw.addr()).cloned()).ok_or(Errno::EINVAL)
    }

    pub(crate) fn find_tag(tag: u64) -> Option<Arc<Self>> {
        let address = usize::try_from(tag).ok()?;
        with(|table| table.ids.get(&address).cloned())
    }

    pub(crate) fn find_comm(local: IpAddr, comm: CommId) -> Option<Arc<Self>> {
        with(|table| table.comms.get(&(local, comm)).and_then(|address| table.ids.get(address)).cloned())
    }

    /// Binds it to a communication that the remote side began.
    pub(crate) fn stand_for(&self, local: IpAddr, comm: CommId) {
        let address = self.raw().addr();
        with(|table| table.comms.insert((local, comm), address));
    }

    pub(crate) fn raw(&self) -> *mut CmId {
        self.raw.get()
    }

    /// Its tag in notices.
    pub(crate) fn tag(&self) -> u64 {
        self.raw().addr() as u64
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_ud(&self) -> bool {
        // SAFETY: our own structure.
        unsafe { (*self.raw()).qp_type == verbs::IBV_QPT_UD }
    }

    pub(crate) fn port_space(&self) -> u16 {
        // SAFETY: our own structure.
        u16::try_from(unsafe { (*self.raw()).ps }).unwrap_or(0)
    }

    pub(crate) fn qp(&self) -> *mut verbs::Qp {
        // SAFETY: our own structure.
        unsafe { (*self.raw()).qp }
    }

    /// It is on this device from now on.
    pub(crate) fn take_device(&self, state: &mut State, device: &'static Device) {
        state.device = Some(device);
        // SAFETY: our own structure, in a call about it.
        unsafe {
            let raw = self.raw();
            (*raw).verbs = device.context;
            (*raw).port_num = 1;
            if (*raw).pd.is_null() {
                (*raw).pd = device.pd;
            }
        }
    }

    /// Shows C the addresses.
    pub(crate) fn show_addresses(&self, state: &State) {
        // SAFETY: our own structure, in a call about it.
        let addr = unsafe { &mut (*self.raw()).route.addr };
        if let Some(src) = state.src {
            addr.src = address::storage(src);
            addr.ib.sgid = address::gid(src.ip());
        }
        if let Some(dst) = state.dst {
            addr.dst = address::storage(dst);
            addr.ib.dgid = address::gid(dst.ip());
        }
        addr.ib.pkey = 0xffff;
    }

    /// Takes the name of a port, any if it is 0, on all devices that the address is of.
    pub(crate) fn bind(&self, state: &mut State, to: SocketAddr) -> Result<(), Errno> {
        if state.src.is_some() {
            return Err(Errno::EINVAL);
        }
        let to = SocketAddr::new(device::local_addr(to.ip()), to.port());
        let devices = if to.ip().is_unspecified() {
            let both = to.is_ipv6() && !state.v6_only;
            device::devices(|addr| both || addr.is_ipv4() == to.is_ipv4())?
        } else {
            let device = device::device_at(to.ip())
                .map_err(|Errno(e)| Errno(if e == libc::ENODEV { libc::EADDRNOTAVAIL } else { e }))?;
            self.take_device(state, device);
            vec![device]
        };
        if devices.is_empty() {
            return Err(Errno(libc::ENODEV));
        }
        let port = match to.port() {
            0 => (0..PORT_TRIES)
                .map(|_| next_port())
                .find_map(|port| self.bind_port(state, &devices, port).ok().map(|()| port))
                .ok_or(Errno::EADDRINUSE)?,
            // With SO_REUSEADDR semantics a port may be shared until it listens, but not with an
            // identifier that lacks the option.
            port if state.reuse_addr => {
                self.bind_port(state, &devices, port)?;
                unbind(state);
                port
            }
            port => {
                self.bind_port(state, &devices, port)?;
                port
            }
        };
        state.src = Some(SocketAddr::new(to.ip(), port));
        self.show_addresses(state);
        Ok(())
    }

    /// Takes the name of one port on all these devices, or on none.
    pub(crate) fn bind_port(
        &self,
        state: &mut State,
        devices: &[&'static Device],
        port: u16,
    ) -> Result<(), Errno> {
        let service = ip::service_id(self.port_space(), port);
        for device in devices {
            if let Err(error) = device.cm()?.bind(service) {
                unbind(state);
                log::info(|| format!("librdmacm: port {port}: {error}"));
                return Err(match error {
                    BindError::InUse { .. } => Errno::EADDRINUSE,
                    BindError::Os { source, .. } => source.into(),
                    _ => Errno::EIO,
                });
            }
            state.bound.push((*device, service));
        }
        Ok(())
    }

    /// Counts an event delivered to the program.
    pub(crate) fn give_event(&self) {
        *self.unacknowledged.lock().unwrap_or_else(PoisonError::into_inner) += 1;
    }

    pub(crate) fn acknowledge(&self) {
        let mut count = self.unacknowledged.lock().unwrap_or_else(PoisonError::into_inner);
        *count = count.saturating_sub(1);
        self.acknowledged.notify_all();
    }

    fn wait_for_acknowledgements(&self) {
        let mut count = self.unacknowledged.lock().unwrap_or_else(PoisonError::into_inner);
        while *count > 0 {
            count = self.acknowledged.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether a notice belongs to this identifier alone.
    fn is_own(&self, local: Option<IpAddr>, comm: Option<CommId>, notice: &CmNotice) -> bool {
        match &notice.told {
            Told::Own { .. } => notice.tag == self.tag(),
            Told::Event { event: Event::Request { .. } | Event::SidrRequest { .. }, .. } => {
                notice.tag == self.tag()
            }
            Told::Event { local: at, event } => Some(*at) == local && Some(event.id()) == comm,
        }
    }

    /// Ends it: no further event is delivered.
    pub(crate) fn end(&self) {
        let mut state = self.state();
        let cms: Vec<_> =
            state.bound.iter().filter_map(|(device, s)| Some((device.cm().ok()?, *s))).collect();
        for (cm, service) in &cms {
            cm.unlisten(*service);
        }
        unbind(&mut state);
        let local = state.device.map(|device| device.addr);
        let comm = state.comm.take();
        if let (Some(device), Some(comm)) = (state.device, comm)
            && let Ok(cm) = device.cm()
        {
            cm.release(comm);
        }
        // Reject pending requests to a listener that is gone.
        let refused = std::cell::RefCell::new(Vec::new());
        state.channel.forget(|notice| {
            let own = self.is_own(local, comm, notice);
            if let Told::Event { local, event } = &notice.told
                && own
                && matches!(event, Event::Request { .. } | Event::SidrRequest { .. })
            {
                refused.borrow_mut().push((*local, event.id()));
            }
            own
        });
        let (sync, raw_channel) = (state.sync, state.channel_raw);
        drop(state);
        for (local, comm) in refused.into_inner() {
            if let Some(cm) = device::device_at(local).ok().and_then(|device| device.cm().ok()) {
                cm.release(comm);
            }
        }
        with(|table| {
            table.ids.remove(&self.raw().addr());
            if let (Some(local), Some(comm)) = (local, comm) {
                table.comms.remove(&(local, comm));
            }
        });
        // SAFETY: our own structure; its last event is the program's no more.
        unsafe {
            let raw = self.raw();
            let last = std::mem::replace(&mut (*raw).event, ptr::null_mut());
            if !last.is_null() {
                event::acknowledge(last);
            }
            libc::free(std::mem::replace(&mut (*raw).route.path_rec, ptr::null_mut()).cast());
        }
        self.wait_for_acknowledgements();
        if sync {
            channel::destroy(raw_channel);
        }
    }

    /// Moves it to another channel, with its undelivered events.
    fn migrate(&self, to_raw: *mut EventChannel, sync: bool) -> Result<(), Errno> {
        let to = channel::find(to_raw)?;
        let mut state = self.state();
        let local = state.device.map(|device| device.addr);
        let comm = state.comm;
        if let (Some(device), Some(comm)) = (state.device, comm) {
            device.cm()?.adopt(comm, &to, self.tag());
        }
        if state.listening {
            for (device, service) in &state.bound {
                device.cm()?.adopt_service(*service, &to, self.tag());
            }
        }
        state.channel.give(&to, |notice| self.is_own(local, comm, notice));
        let old = (state.sync, state.channel_raw);
        state.channel = to;
        state.channel_raw = to_raw;
        state.sync = sync;
        drop(state);
        // SAFETY: our own structure, in a call about it.
        unsafe { (*self.raw()).channel = to_raw };
        if old.0 {
            channel::destroy(old.1);
        }
        Ok(())
    }

    /// Moves it to a channel of its own, where calls wait for what they begin.
    pub(crate) fn make_sync(&self) -> Result<(), Errno> {
        self.migrate(channel::create()?, true)
    }
}

/// Releases all bound services.
fn unbind(state: &mut State) {
    for (device, service) in state.bound.drain(..) {
        if let Ok(cm) = device.cm() {
            cm.unbind(service);
        }
    }
}

/// A candidate for an ephemeral port; the caller must still check that it is free.
pub(crate) fn next_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static START: std::sync::OnceLock<u16> = std::sync::OnceLock::new();
    let start = *START.get_or_init(|| u16::try_from(random() & 0x7fff).unwrap_or(0));
    let n = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add(start);
    FIRST_PORT + n % PORTS
}

/// The kind of queue pair that goes with a port space.
fn qp_type_of(ps: u32) -> Result<u32, Errno> {
    match ps {
        PS_TCP | PS_IB => Ok(verbs::IBV_QPT_RC),
        PS_UDP | PS_IPOIB => Ok(verbs::IBV_QPT_UD),
        _ => Err(Errno(libc::EPROTONOSUPPORT)),
    }
}

/// Makes an identifier, on a channel or synchronous without one.
pub(crate) fn create(
    channel_raw: *mut EventChannel,
    context: *mut c_void,
    ps: u32,
    qp_type: Option<u32>,
) -> Result<Arc<Id>, Errno> {
    let qp_type = match qp_type {
        Some(qp_type) => qp_type,
        None => qp_type_of(ps)?,
    };
    let sync = channel_raw.is_null();
    let channel_raw = if sync { channel::create()? } else { channel_raw };
    Id::create(channel_raw, sync, context, ps, qp_type)
}

/// `rdma_create_id`.
pub(crate) unsafe extern "C" fn rdma_create_id(
    channel: *mut EventChannel,
    id: *mut *mut CmId,
    context: *mut c_void,
    ps: u32,
) -> c_int {
    entry::minus_one(|| {
        let made = create(channel, context, ps, None)?;
        // SAFETY: the caller passes a place for the result.
        unsafe { *id = made.raw() };
        Ok(0)
    })
}

/// `rdma_destroy_id`.
pub(crate) unsafe extern "C" fn rdma_destroy_id(id: *mut CmId) -> c_int {
    entry::minus_one(|| {
        Id::find(id)?.end();
        Ok(0)
    })
}

/// `rdma_migrate_id`.
pub(crate) unsafe extern "C" fn rdma_migrate_id(id: *mut CmId, channel: *mut EventChannel) -> c_int {
    entry::minus_one(|| {
        let id = Id::find(id)?;
        if channel.is_null() {
            id.make_sync()?
        } else {
            id.migrate(channel, false)?
        }
        Ok(0)
    })
}

/// `rdma_get_src_port`.
pub(crate) unsafe extern "C" fn rdma_get_src_port(id: *mut CmId) -> u16 {
    entry::guarded(|| Ok(Id::find(id)?.state().src.map_or(0, |src| src.port().to_be()))).unwrap_or(0)
}

/// `rdma_get_dst_port`.
pub(crate) unsafe extern "C" fn rdma_get_dst_port(id: *mut CmId) -> u16 {
    entry::guarded(|| Ok(Id::find(id)?.state().dst.map_or(0, |dst| dst.port().to_be()))).unwrap_or(0)
}

/// `rdma_destroy_qp`.
pub(crate) unsafe extern "C" fn rdma_destroy_qp(id: *mut CmId) {
    entry::silent(|| {
        let id = Id::find(id)?;
        crate::qp::destroy(&id, calls()?);
        Ok(())
    });
}
