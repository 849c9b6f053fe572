//! Hardware devices: the list, and one that is open.

use std::ffi::c_int;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use nobounce_protocol::qp::{MAX_MESSAGE, Mtu};
use nobounce_verbs as verbs;

use super::context::OpenContext;
use super::cq::{Channel, Cq};
use super::error::{CreateError, OpenError, last, returned};
use super::gid::{GidEntry, GidWish};
use super::gid_table;
use super::library::Library;
use super::list::List;
use super::memory::Pd;
use super::proof::RegistrationProofs;
use super::refusal::LoggedOnce;
use super::stage::HostStaging;
use crate::tally::PathCounters;

/// The variable that names an entry of the GID table.
const GID_INDEX: &str = "NOBOUNCE_GID_INDEX";
/// The variable that asks for relaxed ordering.
const RELAXED: &str = "NOBOUNCE_RELAXED_ORDERING";

/// How a device is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Which entry of the GID table.
    pub gid: GidWish,
    /// Relaxed PCIe ordering, where the device offers it. Received bytes may become visible in any
    /// order before their completion: programs must not poll memory for arrival.
    pub relaxed_ordering: bool,
}

impl Options {
    /// As `NOBOUNCE_GID_INDEX` and `NOBOUNCE_RELAXED_ORDERING=on` say.
    ///
    /// # Errors
    /// One of them makes no sense.
    pub fn from_env() -> Result<Self, OpenError> {
        if std::env::var_os("NOBOUNCE_KEY").is_some() {
            return Err(OpenError::Key);
        }
        let mut options = Self::default();
        if let Ok(value) = std::env::var(GID_INDEX) {
            let expected = "a number, as show_gids and /sys/class/infiniband/*/ports/*/gids have them,";
            let wrong = |_| OpenError::Variable { variable: GID_INDEX, value: value.clone(), expected };
            options.gid.index = Some(value.parse().map_err(wrong)?);
        }
        options.relaxed_ordering =
            std::env::var_os(RELAXED).is_some_and(|value| value.eq_ignore_ascii_case("on"));
        Ok(options)
    }
}

/// What carries packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// Addressed by LID, no global route header inside a subnet.
    InfiniBand,
    /// RoCE: addressed by GID.
    Ethernet,
}

/// The port that is used.
#[derive(Clone, Debug)]
pub struct Port {
    /// Its number, from 1 on.
    pub number: u8,
    /// What carries packets.
    pub link_layer: LinkLayer,
    /// The largest path MTU now.
    pub mtu: Mtu,
    /// The longest message that it carries, in bytes.
    pub max_message: u32,
    /// Its local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Megabits per second, as far as the port says.
    pub megabits: u64,
    /// Packets must bear a global route header, also on InfiniBand.
    pub needs_grh: bool,
    /// The entry of the GID table that is used.
    pub gid: GidEntry,
    /// Why that one: a line for each entry.
    pub why_gid: Vec<String>,
}

/// Health of a device, from its asynchronous events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// It is gone: nothing will complete any more.
    pub gone: bool,
    /// The port went down, and has not come back.
    pub port_down: bool,
    /// A completion queue that is still there failed: completions are lost. Which, it says itself
    /// ([`Cq::has_failed`]).
    pub queue_failed: bool,
    /// It was opened before a fork, and this is the child: it is the parent's.
    pub forked: bool,
}

impl Health {
    /// Whether nothing is wrong.
    pub fn is_well(&self) -> bool {
        *self == Self::default()
    }
}

pub(crate) struct Inner {
    pub(crate) attr: verbs::DeviceAttr,
    pub(crate) port: Port,
    pub(crate) options: Options,
    pub(crate) staging: HostStaging,
    pub(crate) proofs: RegistrationProofs,
    pub(crate) told: LoggedOnce,
    /// Its sysfs folder, if it existed at open. Some drivers (rxe) remove a device only after its
    /// last user closes it, without an event; the folder disappears first.
    folder: Option<PathBuf>,
    health: Mutex<Health>,
    /// Addresses of failed CQs that still exist.
    pub(crate) failed_queues: Mutex<Vec<usize>>,
    /// The device itself, which closes with this: after everything else.
    pub(crate) context: OpenContext<Arc<Library>>,
}

impl Inner {
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.context.is_forked()
    }
}

// SAFETY: the functions of libibverbs may be called from any thread, on any object; fields of ours
// have locks of their own.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// A hardware NIC that is open. Clones share it; it closes when the last object made from it is
/// gone.
#[derive(Clone)]
pub struct Device {
    pub(crate) inner: Arc<Inner>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name())
    }
}

impl Device {
    /// Opens a device of the system's libibverbs by its name: `mlx5_0`, or `mlx5_0:2` for its
    /// second port.
    ///
    /// # Errors
    /// There is no libibverbs, no such device, no active port, no usable GID, or no right to open
    /// it: the message says what to do.
    pub fn open(name: &str, options: &Options) -> Result<Self, OpenError> {
        Self::open_in(&Library::load()?, name, options)
    }

    /// The same of a libibverbs that was loaded.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_in(library: &Arc<Library>, name: &str, options: &Options) -> Result<Self, OpenError> {
        let (plain, port) = match name.split_once(':') {
            Some((plain, port)) => match port.parse() {
                Ok(port) => (plain, Some(port)),
                Err(_) => return Err(OpenError::NoSuchPort { name: name.to_owned(), ports: None }),
            },
            None => (name, None),
        };
        let list = List::of(library)?;
        let found = list.devices().find(|(found, _)| found == plain);
        let Some((_, device)) = found else {
            let there: Vec<String> = list.devices().map(|(name, _)| name).collect();
            return Err(if there.is_empty() {
                OpenError::None { library: library.path().display().to_string(), why: why_none() }
            } else {
                OpenError::NoSuch { name: name.to_owned(), there: there.join(", ") }
            });
        };
        let open = OpenContext::device(Arc::clone(library), plain.to_owned(), device)?;
        drop(list);
        let folder = Path::new("/sys/class/infiniband_verbs").join(&open.node);
        let attr = open.attr()?;
        let port = find_port(&open, attr.phys_port_cnt, port, options)?;
        // Events are polled, never waited for.
        // SAFETY: the device's own descriptor, which has no other user.
        unsafe { set_nonblocking((*open.as_ptr()).async_fd) };
        let inner = Inner {
            attr,
            port,
            options: options.clone(),
            staging: HostStaging::default(),
            proofs: RegistrationProofs::default(),
            told: LoggedOnce::default(),
            folder: folder.exists().then_some(folder),
            health: Mutex::default(),
            failed_queues: Mutex::default(),
            context: open,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.inner.context.name()
    }

    /// The port that is used.
    pub fn port(&self) -> &Port {
        &self.inner.port
    }

    /// What libibverbs says about it.
    pub fn attr(&self) -> &verbs::DeviceAttr {
        &self.inner.attr
    }

    /// The library that drives it.
    pub fn library(&self) -> &Library {
        &self.inner.context.library
    }

    /// The address of its GID, at which peers reach it.
    pub fn local(&self) -> IpAddr {
        self.inner.port.gid.addr()
    }

    /// Why the GID in use may be wrong for a peer that never replied; `None` without such evidence.
    /// Consults the kernel's routes and sends nothing.
    pub fn doubt_gid(&self, peer: IpAddr) -> Option<String> {
        let port = self.port();
        (port.link_layer == LinkLayer::Ethernet).then(|| gid_table::doubt(&port.gid, peer)).flatten()
    }

    /// READs and atomics that a queue pair may have outstanding, either way.
    pub fn max_rd_atomic(&self) -> u8 {
        let of = |most: c_int| u8::try_from(most).unwrap_or(if most > 0 { u8::MAX } else { 0 });
        of(self.inner.attr.max_qp_rd_atom).min(of(self.inner.attr.max_qp_init_rd_atom))
    }

    /// Whether it was opened before a fork, and this is the child: then it cannot be used here.
    pub fn is_forked(&self) -> bool {
        self.inner.is_forked()
    }

    /// Whether it operates atomically on memory.
    pub fn has_atomics(&self) -> bool {
        self.inner.attr.atomic_cap != verbs::IBV_ATOMIC_NONE
    }

    /// Bytes staged through host memory. The device moves all others by itself, uncounted.
    pub fn staged_counters(&self) -> PathCounters {
        self.inner.staging.counters()
    }

    /// A protection domain.
    ///
    /// # Errors
    /// The device has too many, or is gone.
    pub fn alloc_pd(&self) -> Result<Pd, CreateError> {
        Pd::alloc(self)
    }

    /// A completion channel.
    ///
    /// # Errors
    /// The process has too many descriptors, or the device is gone.
    pub fn create_channel(&self) -> Result<Channel, CreateError> {
        Channel::create(self)
    }

    /// A completion queue.
    ///
    /// # Errors
    /// The device refused.
    pub fn create_cq(&self, depth: usize, channel: Option<&Channel>) -> Result<Cq, CreateError> {
        Cq::create(self, depth, channel)
    }

    pub(crate) fn refused(&self, call: &'static str) -> CreateError {
        CreateError::Refused { call, device: self.name().to_owned(), os: last() }
    }

    /// The error for a forked child that uses its parent's device.
    pub(crate) fn check_process(&self) -> Result<(), CreateError> {
        if self.inner.is_forked() { Err(CreateError::Forked(self.name().to_owned())) } else { Ok(()) }
    }

    /// As [`health`](Self::health), and also queries the port: after a failure, because its event
    /// may come later. Costs a system call.
    pub fn examine(&self) -> Health {
        let mut health = self.health();
        if health.forked {
            return health;
        }
        match self.inner.context.port(self.inner.port.number) {
            Ok(attr) => {
                // The queried state overrides earlier events, and is kept for the next `health`.
                health.port_down = attr.state != verbs::IBV_PORT_ACTIVE;
                self.inner.health.lock().unwrap_or_else(PoisonError::into_inner).port_down = health.port_down;
            }
            Err(code) => health.gone |= matches!(code, libc::EIO | libc::ENODEV | libc::ENXIO),
        }
        health
    }

    /// Takes pending asynchronous events and returns the device's health. Never blocks.
    pub fn health(&self) -> Health {
        if self.inner.is_forked() {
            return Health { forked: true, ..Health::default() };
        }
        let mut health = self.inner.health.lock().unwrap_or_else(PoisonError::into_inner);
        health.gone |= self.inner.folder.as_ref().is_some_and(|folder| !folder.exists());
        if health.gone {
            return health.clone();
        }
        let mut failed = self.inner.failed_queues.lock().unwrap_or_else(PoisonError::into_inner);
        let api = &self.inner.context.library.api;
        for _ in 0..64 {
            let mut event = verbs::AsyncEvent { element: ptr::null_mut(), event_type: 0 };
            // SAFETY: an open device; its descriptor does not block.
            if unsafe { (api.get_async_event)(self.inner.context.as_ptr(), &raw mut event) } != 0 {
                break;
            }
            let port = event.element.addr() == usize::from(self.inner.port.number);
            match event.event_type {
                verbs::IBV_EVENT_DEVICE_FATAL => health.gone = true,
                verbs::IBV_EVENT_PORT_ERR if port => health.port_down = true,
                verbs::IBV_EVENT_PORT_ACTIVE if port => health.port_down = false,
                verbs::IBV_EVENT_CQ_ERR => failed.push(event.element.addr()),
                _ => {}
            }
            tracing::debug!("{}: asynchronous event {}", self.name(), event.event_type);
            // SAFETY: the event that was just given.
            unsafe { (api.ack_async_event)(&raw mut event) };
        }
        health.queue_failed = !failed.is_empty();
        health.clone()
    }
}

pub(crate) fn set_nonblocking(fd: c_int) {
    // SAFETY: the calls take numbers.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
    }
}

/// Why a libibverbs lists no device.
fn why_none() -> String {
    let there: Vec<String> = std::fs::read_dir("/sys/class/infiniband")
        .map(|entries| {
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        })
        .unwrap_or_default();
    if there.is_empty() {
        "the kernel has none either (/sys/class/infiniband): is there an adapter, and its driver loaded (mlx5_ib, irdma, bnxt_re, ...)? \
         Without one, nb0 is the software NIC"
            .to_owned()
    } else {
        format!(
            "the kernel has {}, but libibverbs has no provider for it, or /dev/infiniband is missing: install ibverbs-providers, \
             modprobe ib_uverbs",
            there.join(", ")
        )
    }
}

/// The requested port, or the first that is active.
fn find_port(
    open: &OpenContext<Arc<Library>>,
    ports: u8,
    wanted: Option<u8>,
    options: &Options,
) -> Result<Port, OpenError> {
    let name = open.name();
    if let Some(wanted) = wanted.filter(|wanted| !(1..=ports).contains(wanted)) {
        return Err(OpenError::NoSuchPort { name: format!("{name}:{wanted}"), ports: Some(ports) });
    }
    let mut states = Vec::new();
    for number in 1..=ports {
        let attr = match open.port(number) {
            Ok(attr) => attr,
            Err(code) => {
                states.push(format!("port {number}: {}", returned(code)));
                continue;
            }
        };
        states.push(format!("port {number}: {}", state_name(attr.state)));
        if wanted.is_some_and(|wanted| wanted != number) || attr.state != verbs::IBV_PORT_ACTIVE {
            continue;
        }
        let is_ib = is_infiniband(&attr);
        let choice = gid_table::choose(open, number, &attr, is_ib, options)?;
        return Ok(Port {
            number,
            link_layer: if is_ib { LinkLayer::InfiniBand } else { LinkLayer::Ethernet },
            mtu: mtu_of(attr.active_mtu),
            max_message: max_message(attr.max_msg_sz),
            lid: if is_ib { attr.lid } else { 0 },
            megabits: speed(name, number, &attr),
            needs_grh: !is_ib || attr.flags & verbs::IBV_QPF_GRH_REQUIRED != 0,
            gid: choice.entry,
            why_gid: choice.explanation,
        });
    }
    Err(OpenError::NoPort { device: name.to_owned(), states: states.join(", ") })
}

/// Whether a port is InfiniBand's; old drivers say neither.
pub(crate) fn is_infiniband(attr: &verbs::PortAttr) -> bool {
    attr.link_layer == verbs::IBV_LINK_LAYER_INFINIBAND || (attr.link_layer == 0 && attr.lid != 0)
}

pub(crate) fn state_name(state: u32) -> &'static str {
    match state {
        verbs::IBV_PORT_DOWN => "down",
        verbs::IBV_PORT_INIT => "initialising, without a subnet manager",
        verbs::IBV_PORT_ARMED => "armed",
        verbs::IBV_PORT_ACTIVE => "active",
        verbs::IBV_PORT_ACTIVE_DEFER => "active, deferred",
        _ => "in an unknown state",
    }
}

/// The path MTU of a code; the smallest where a driver says nonsense.
pub(crate) fn mtu_of(code: u32) -> Mtu {
    let index = usize::try_from(code.saturating_sub(1)).unwrap_or(0);
    Mtu::ALL.get(index).copied().unwrap_or(Mtu::Mtu256)
}

/// The longest message; the standard's 2 GiB where a driver does not say it.
fn max_message(said: u32) -> u32 {
    if said == 0 { MAX_MESSAGE } else { said.min(MAX_MESSAGE) }
}

/// Megabits per second, from sysfs: the verbs query knows no lanes above 100 Gb/s.
pub(crate) fn speed(name: &str, port: u8, attr: &verbs::PortAttr) -> u64 {
    let file = std::fs::read_to_string(format!("/sys/class/infiniband/{name}/ports/{port}/rate"));
    file.ok().and_then(|text| rate(&text)).unwrap_or_else(|| megabits(attr))
}

/// The number in `100 Gb/sec (4X EDR)` or `2.5 Gb/sec (1X SDR)`.
fn rate(text: &str) -> Option<u64> {
    let number = text.split_whitespace().next()?;
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let tenths: u64 = tenths.get(..1)?.parse().ok()?;
    Some(whole.parse::<u64>().ok()?.checked_mul(1000)? + tenths * 100).filter(|rate| *rate > 0)
}

/// Lanes times the speed of one, in megabits per second.
fn megabits(attr: &verbs::PortAttr) -> u64 {
    let lanes = match attr.active_width {
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 1,
    };
    let speed = match attr.active_speed {
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => 2_500,
    };
    lanes * speed
}

/// The GID of an address.
pub(crate) fn gid_of(addr: IpAddr) -> verbs::Gid {
    let v6: Ipv6Addr = match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    verbs::Gid { raw: v6.octets() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_and_sizes_of_a_port() {
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut attr: verbs::PortAttr = unsafe { std::mem::zeroed() };
        (attr.active_width, attr.active_speed) = (2, 128);
        assert_eq!(megabits(&attr), 400_000);
        (attr.active_width, attr.active_speed) = (1, 32);
        assert_eq!(megabits(&attr), 25_000);
        assert_eq!(rate("800 Gb/sec (4X XDR)\n"), Some(800_000));
        assert_eq!(rate("2.5 Gb/sec (1X SDR)\n"), Some(2500));
        for nonsense in ["", "0 Gb/sec", "fast", "4. Gb/sec", "99999999999999999999 Gb/sec"] {
            assert_eq!(rate(nonsense), None, "{nonsense}");
        }
        assert_eq!(mtu_of(verbs::IBV_MTU_4096), Mtu::Mtu4096);
        assert_eq!(mtu_of(77), Mtu::Mtu256);
    }
}
