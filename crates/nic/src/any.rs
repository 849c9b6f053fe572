//! Either NIC: the software one or a hardware one, behind the same objects, requests and
//! completions.
//!
//! Each object is an enum of two, chosen once when the device is opened; a call costs one
//! comparison more. Nothing here is on the data path.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use nobounce_memory::gpu::{GpuMemory, GpuOptions};
use nobounce_memory::path::Paths;
use nobounce_protocol::qp::{Access, MAX_MESSAGE, Mtu, QpAttr};
use nobounce_protocol::wire::Qpn;

use crate::hard;
use crate::soft;
use crate::tally::PathCounters;
use crate::work::{self, QpLimits, RecvRequest, SendRequest, WorkCompletion};

/// A NIC. Clones share it.
#[derive(Clone, Debug)]
pub enum Device {
    /// The software NIC.
    Soft(soft::Device),
    /// A hardware NIC.
    Hard(hard::Device),
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The software NIC.
    #[error(transparent)]
    Soft(#[from] soft::OpenError),
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] soft::ConfigError),
    /// A hardware NIC.
    #[error(transparent)]
    Hard(#[from] hard::OpenError),
    /// The choice was left to us, and there is nothing to choose.
    #[error("no hardware device to use: {why} ({adapters}); nb0 is the software NIC")]
    NoneUsable {
        /// Why none.
        why: String,
        /// What there is.
        adapters: String,
    },
    /// Nothing can be made on a hardware NIC.
    #[error(transparent)]
    Create(#[from] hard::CreateError),
}

/// Why an object could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// On the software NIC.
    #[error(transparent)]
    Soft(#[from] soft::CreateError),
    /// A queue pair of the software NIC.
    #[error(transparent)]
    SoftQp(#[from] soft::CreateQpError),
    /// A channel of the software NIC.
    #[error("cannot make a completion channel: {0}")]
    Channel(#[from] io::Error),
    /// On a hardware NIC.
    #[error(transparent)]
    Hard(#[from] hard::CreateError),
    /// Objects of different devices.
    #[error("a queue is not of the device that the queue pair is of")]
    OtherDevice,
}

/// Why memory could not be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// By the software NIC.
    #[error(transparent)]
    Soft(#[from] soft::RegisterError),
    /// By a hardware NIC.
    #[error(transparent)]
    Hard(#[from] hard::RegisterError),
}

impl RegisterError {
    /// Whether a direct path was required, and there is none.
    #[must_use]
    pub fn is_not_direct(&self) -> bool {
        use nobounce_memory::gpu::GpuRegisterError as Gpu;
        matches!(
            self,
            Self::Soft(soft::RegisterError::Gpu(Gpu::NotDirect { .. }))
                | Self::Hard(hard::RegisterError::NotDirect { .. })
        )
    }
}

/// Why a queue pair could not be modified.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModifyError {
    /// By the software NIC.
    #[error(transparent)]
    Soft(#[from] soft::ModifyError),
    /// By a hardware NIC.
    #[error(transparent)]
    Hard(#[from] hard::ModifyError),
}

/// Why a request was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// By the software NIC.
    #[error(transparent)]
    Soft(#[from] work::PostError),
    /// By a hardware NIC.
    #[error(transparent)]
    Hard(#[from] hard::PostError),
}

impl PostError {
    /// Whether the queue is full: it helps to poll completions and try again.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Soft(work::PostError::QueueFull(_)) | Self::Hard(hard::PostError::QueueFull(_)))
    }
}

/// Why completions cannot be polled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CqError {
    /// On the software NIC.
    #[error(transparent)]
    Soft(#[from] soft::CqError),
    /// On a hardware NIC.
    #[error(transparent)]
    Hard(#[from] hard::CqError),
}

impl Device {
    /// Opens a software NIC.
    ///
    /// # Errors
    /// As for [`soft::Device::open`].
    pub fn open(config: &soft::Config) -> Result<Self, OpenError> {
        Ok(Self::Soft(soft::Device::open(config)?))
    }

    /// Its name: `nb0` is the software NIC.
    pub fn name(&self) -> &str {
        match self {
            Self::Soft(_) => "nb0",
            Self::Hard(hard) => hard.name(),
        }
    }

    /// The software NIC, if it is.
    pub fn soft(&self) -> Option<&soft::Device> {
        match self {
            Self::Soft(soft) => Some(soft),
            Self::Hard(_) => None,
        }
    }

    /// The hardware NIC, if it is.
    pub fn hard(&self) -> Option<&hard::Device> {
        match self {
            Self::Soft(_) => None,
            Self::Hard(hard) => Some(hard),
        }
    }

    /// Where peers reach it.
    pub fn local(&self) -> IpAddr {
        match self {
            Self::Soft(soft) => soft.local(),
            Self::Hard(hard) => hard.local(),
        }
    }

    /// Its local identifier on an InfiniBand subnet; 0 elsewhere.
    pub fn lid(&self) -> u16 {
        match self {
            Self::Soft(_) => 0,
            Self::Hard(hard) => hard.port().lid,
        }
    }

    /// The largest path MTU.
    pub fn max_mtu(&self) -> Mtu {
        match self {
            Self::Soft(soft) => soft.max_mtu(),
            Self::Hard(hard) => hard.port().mtu,
        }
    }

    /// The largest path MTU to that address, as far as this machine knows.
    pub fn max_mtu_to(&self, remote: IpAddr) -> Mtu {
        match self {
            Self::Soft(soft) => soft.max_mtu_to(remote),
            Self::Hard(hard) => hard.port().mtu,
        }
    }

    /// The longest message in bytes.
    pub fn max_message(&self) -> u32 {
        match self {
            Self::Soft(_) => MAX_MESSAGE,
            Self::Hard(hard) => hard.port().max_message,
        }
    }

    /// READs and atomics that a queue pair may have outstanding, either way.
    pub fn max_rd_atomic(&self) -> u8 {
        match self {
            Self::Soft(_) => QpAttr::MAX_RD_ATOMIC,
            Self::Hard(hard) => hard.max_rd_atomic(),
        }
    }

    /// Health of a hardware device; the software NIC is always healthy.
    pub fn health(&self) -> hard::Health {
        match self {
            Self::Soft(_) => hard::Health::default(),
            Self::Hard(hard) => hard.health(),
        }
    }

    /// As [`health`](Self::health), after a failure: the port itself is asked.
    pub fn examine(&self) -> hard::Health {
        match self {
            Self::Soft(_) => hard::Health::default(),
            Self::Hard(hard) => hard.examine(),
        }
    }

    /// Bytes and operations so far, by data path. A hardware NIC moves its bytes by itself,
    /// uncounted, except for staged ones.
    pub fn path_counters(&self) -> PathCounters {
        match self {
            Self::Soft(soft) => soft.path_counters(),
            Self::Hard(hard) => hard.staged_counters(),
        }
    }

    /// Counters of the link, by name; none on hardware.
    pub fn link_counters(&self) -> Vec<(&'static str, u64)> {
        self.soft().map(soft::Device::link_counters).unwrap_or_default()
    }

    /// Why packets to same-host peers take UDP instead of shared memory; empty on hardware.
    pub fn fallbacks(&self) -> Vec<String> {
        self.soft().map(soft::Device::fallbacks).unwrap_or_default()
    }

    #[allow(missing_docs)]
    pub fn alloc_pd(&self) -> Result<Pd, OpenError> {
        Ok(match self {
            Self::Soft(soft) => Pd::Soft(soft.alloc_pd().map_err(soft::OpenError::from)?),
            Self::Hard(hard) => Pd::Hard(hard.alloc_pd()?),
        })
    }

    #[allow(missing_docs)]
    pub fn create_channel(&self) -> Result<Channel, CreateError> {
        Ok(match self {
            Self::Soft(soft) => Channel::Soft(soft.create_channel()?),
            Self::Hard(hard) => Channel::Hard(hard.create_channel()?),
        })
    }

    /// A completion queue; `channel` must be of the same device.
    #[allow(missing_docs)]
    pub fn create_cq(&self, depth: usize, channel: Option<&Channel>) -> Result<Cq, CreateError> {
        match (self, channel) {
            (Self::Soft(soft), None) => Ok(Cq::Soft(soft.create_cq(depth, None)?)),
            (Self::Soft(soft), Some(Channel::Soft(channel))) => {
                Ok(Cq::Soft(soft.create_cq(depth, Some(channel))?))
            }
            (Self::Hard(hard), None) => Ok(Cq::Hard(hard.create_cq(depth, None)?)),
            (Self::Hard(hard), Some(Channel::Hard(channel))) => {
                Ok(Cq::Hard(hard.create_cq(depth, Some(channel))?))
            }
            _ => Err(CreateError::OtherDevice),
        }
    }
}

/// A protection domain.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Pd {
    Soft(soft::Pd),
    Hard(hard::Pd),
}

impl Pd {
    /// Registers host memory.
    ///
    /// # Safety
    /// Until the region is dropped, the device and peers read and, as `access` allows, write the
    /// memory: no Rust reference to it may be live meanwhile.
    #[allow(missing_docs)]
    pub unsafe fn register(&self, base: *mut u8, len: usize, access: Access) -> Result<Mr, RegisterError> {
        Ok(match self {
            // SAFETY: the caller's promise is the same.
            Self::Soft(soft) => Mr::Soft(unsafe { soft.register(base, len, access) }?),
            // SAFETY: as above.
            Self::Hard(hard) => Mr::Hard(unsafe { hard.register(base, len, access) }?),
        })
    }

    /// Registers memory whose pages the software NIC takes at each access, as of a mapped file. An
    /// adapter reads and pins all of them.
    ///
    /// # Safety
    /// As for [`register`](Self::register).
    #[allow(missing_docs)]
    pub unsafe fn register_on_demand(
        &self,
        base: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Mr, RegisterError> {
        Ok(match self {
            Self::Soft(soft) => {
                // SAFETY: the caller's promise is the same.
                Mr::Soft(unsafe { soft.register_on_demand(base, len, base.addr() as u64, access) }?)
            }
            // SAFETY: as above.
            Self::Hard(hard) => Mr::Hard(unsafe { hard.register(base, len, access) }?),
        })
    }

    /// Registers memory that CUDA knows.
    ///
    /// # Safety
    /// As for [`register`](Self::register); it must be freed after the region was dropped.
    #[allow(missing_docs)]
    pub unsafe fn register_gpu(
        &self,
        addr: u64,
        len: usize,
        access: Access,
        options: &GpuOptions,
    ) -> Result<Mr, RegisterError> {
        Ok(match self {
            // SAFETY: the caller's promise is the same.
            Self::Soft(soft) => Mr::Soft(unsafe { soft.register_gpu(addr, len, access, options) }?),
            // SAFETY: as above.
            Self::Hard(hard) => Mr::Hard(unsafe { hard.register_gpu(addr, len, access, options) }?),
        })
    }

    /// A queue pair of a reliable connection; the queues must be of the same device.
    #[allow(missing_docs)]
    pub fn create_qp(&self, send_cq: &Cq, recv_cq: &Cq, limits: QpLimits) -> Result<Qp, CreateError> {
        match (self, send_cq, recv_cq) {
            (Self::Soft(pd), Cq::Soft(send), Cq::Soft(recv)) => {
                Ok(Qp::Soft(pd.create_qp(send, recv, limits)?))
            }
            (Self::Hard(pd), Cq::Hard(send), Cq::Hard(recv)) => {
                Ok(Qp::Hard(pd.create_qp(send, recv, limits)?))
            }
            _ => Err(CreateError::OtherDevice),
        }
    }
}

/// Registered memory.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum Mr {
    Soft(soft::Mr),
    Hard(hard::Mr),
}

macro_rules! both {
    ($($(#[$doc:meta])* fn $name:ident(&self $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;)*) => {$(
        $(#[$doc])*
        #[inline]
        pub fn $name(&self $(, $argument: $type)*) $(-> $result)? {
            match self {
                Self::Soft(soft) => soft.$name($($argument),*),
                Self::Hard(hard) => hard.$name($($argument),*),
            }
        }
    )*};
}

#[allow(clippy::len_without_is_empty)] // a region is asked
impl Mr {
    both! {
        /// The key of local requests.
        fn lkey(&self) -> u32;
        /// The key of peers.
        fn rkey(&self) -> u32;
        /// The address of its first byte, here or on the GPU.
        fn addr(&self) -> u64;
        /// Its length in bytes.
        fn len(&self) -> u64;
        /// Its data path.
        fn paths(&self) -> &Paths;
        /// The GPU memory behind it, if it is.
        fn gpu_memory(&self) -> Option<&Arc<GpuMemory>>;
    }

    /// Whether any of `len` bytes at `offset` is known to have been freed or unmapped since it was
    /// registered. A hardware NIC has pinned host memory, and cannot know.
    pub fn is_gone_at(&self, offset: usize, len: usize) -> bool {
        match self {
            Self::Soft(soft) => soft.is_gone_at(offset, len),
            Self::Hard(hard) => {
                hard.gpu_memory().is_some_and(|memory| memory.check_alive_at(offset, len).is_err())
            }
        }
    }

    /// Whether peers may not use it, whatever its rights: GPU memory that a hardware NIC cannot
    /// reach and stages for its own requests.
    pub fn is_closed(&self) -> bool {
        match self {
            Self::Soft(_) => false,
            Self::Hard(hard) => hard.is_staged(),
        }
    }

    /// Why a hardware NIC refused the methods before the one in use, or all direct methods.
    pub fn refusals(&self) -> &[hard::Refusal] {
        match self {
            Self::Soft(_) => &[],
            Self::Hard(hard) => hard.refusals(),
        }
    }
}

/// A completion channel.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Channel {
    Soft(soft::Channel),
    Hard(hard::Channel),
}

impl Channel {
    both! {
        /// Takes all events there are; whether there were any.
        fn take(&self) -> bool;
        /// Waits for an event, at most `timeout`; whether one came.
        fn wait(&self, timeout: Duration) -> bool;
    }
}

impl AsRawFd for Channel {
    /// Readable while there are events; other loops may wait for it.
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Self::Soft(soft) => soft.as_raw_fd(),
            Self::Hard(hard) => hard.as_raw_fd(),
        }
    }
}

/// A completion queue.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum Cq {
    Soft(soft::Cq),
    Hard(hard::Cq),
}

impl Cq {
    both! {
        /// How many completions it holds.
        fn depth(&self) -> usize;
        /// The next completion is announced, once.
        fn request_notify(&self, solicited_only: bool);
    }

    /// Whether a hardware device said that completions of it are lost; the software NIC says so
    /// when it is polled.
    pub fn has_failed(&self) -> bool {
        match self {
            Self::Soft(_) => false,
            Self::Hard(hard) => hard.has_failed(),
        }
    }

    /// Takes at most `max` completions, appends them to `out`, and returns how many.
    ///
    /// # Errors
    /// Completions are lost, or the device is gone.
    #[inline]
    pub fn poll(&self, out: &mut Vec<WorkCompletion>, max: usize) -> Result<usize, CqError> {
        match self {
            Self::Soft(soft) => Ok(soft.poll(out, max)?),
            Self::Hard(hard) => Ok(hard.poll(out, max)?),
        }
    }
}

impl Cq {
    /// As [`poll`](Self::poll), for a thread that has more to watch than this queue: it never
    /// sleeps.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll).
    #[inline]
    pub fn poll_awake(&self, out: &mut Vec<WorkCompletion>, max: usize) -> Result<usize, CqError> {
        match self {
            Self::Soft(soft) => Ok(soft.poll_awake(out, max)?),
            Self::Hard(hard) => Ok(hard.poll(out, max)?),
        }
    }

    /// The caller polls again, and needs no event: an armed queue counts its polls as the last ones
    /// before a sleep. Hardware raises the event all the same.
    pub fn cancel_notify(&self) {
        if let Self::Soft(soft) = self {
            soft.cancel_notify();
        }
    }

    /// The caller will not poll for a while, and waits for no event.
    pub fn pause_polling(&self) {
        if let Self::Soft(soft) = self {
            soft.pause_polling();
        }
    }
}

/// A queue pair of a reliable connection.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum Qp {
    Soft(soft::Qp),
    Hard(hard::Qp),
}

impl Qp {
    both! {
        /// Its number.
        fn qpn(&self) -> Qpn;
        /// How deep its queues are.
        fn limits(&self) -> &QpLimits;
    }

    /// Modifies it. `lid` is where an InfiniBand peer is.
    ///
    /// # Errors
    /// The transition is wrong, or the device refused.
    pub fn modify(&self, attr: &QpAttr, lid: u16) -> Result<(), ModifyError> {
        match self {
            Self::Soft(soft) => Ok(soft.modify(attr)?),
            Self::Hard(hard) => Ok(hard.modify(attr, lid)?),
        }
    }

    /// Probes whether packets of its path MTU reach the peer; see [`path_mtu`](Self::path_mtu).
    /// Does nothing on hardware.
    pub fn probe_path(&self) {
        if let Self::Soft(soft) = self {
            soft.probe_path();
        }
    }

    /// What is known of the path to its peer; nothing on hardware.
    pub fn path_mtu(&self) -> soft::PathMtu {
        match self {
            Self::Soft(soft) => soft.path_mtu(),
            Self::Hard(_) => soft::PathMtu::Unknown,
        }
    }

    /// Posts one request.
    ///
    /// # Errors
    /// The queue is full, or the request makes no sense.
    #[inline]
    pub fn post_send(&self, request: &SendRequest<'_>) -> Result<(), PostError> {
        match self {
            Self::Soft(soft) => Ok(soft.post_send(request)?),
            Self::Hard(hard) => Ok(hard.post_send(request)?),
        }
    }

    /// Posts several, in order.
    ///
    /// # Errors
    /// How many were posted, and why the next was not.
    #[inline]
    pub fn post_sends(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, PostError)> {
        match self {
            Self::Soft(soft) => soft.post_sends(requests).map_err(|(posted, error)| (posted, error.into())),
            Self::Hard(hard) => hard.post_sends(requests).map_err(|(posted, error)| (posted, error.into())),
        }
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// The queue is full, or the request makes no sense.
    #[inline]
    pub fn post_recv(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        match self {
            Self::Soft(soft) => Ok(soft.post_recv(request)?),
            Self::Hard(hard) => Ok(hard.post_recv(request)?),
        }
    }
}
