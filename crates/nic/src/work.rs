//! Attributes, requests and completions of queue pairs, whichever kind of NIC carries them out.

pub use nobounce_protocol::qp::{
    Access, AttrMask, Datagram, DatagramSource, GRH_LEN, IpOptions, LocalWork, Mtu, Operation, PostError,
    QpAttr, QpCounters, QpEvent, QpState, Remote, Service, Status, TransitionError, WorkKind,
};
pub use nobounce_protocol::wire::{Psn, Qpn};

/// How deep a queue pair's queues are.
#[derive(Clone, Copy, Debug)]
pub struct QpLimits {
    /// Send requests outstanding.
    pub send_depth: usize,
    /// Receives outstanding.
    pub recv_depth: usize,
    /// Elements of a send's gather list.
    pub send_sges: usize,
    /// Elements of a receive's scatter list.
    pub recv_sges: usize,
    /// Bytes that may be copied into a send request.
    pub inline: usize,
    /// Report every success, whatever the request says.
    pub signal_all: bool,
}

impl QpLimits {
    /// The largest limits.
    pub const MAX: Self = Self {
        send_depth: 1 << 15,
        recv_depth: 1 << 15,
        send_sges: 30,
        recv_sges: 30,
        inline: 1024,
        signal_all: false,
    };
}

impl Default for QpLimits {
    fn default() -> Self {
        Self { send_depth: 128, recv_depth: 128, send_sges: 4, recv_sges: 4, inline: 256, signal_all: false }
    }
}

/// One element of a scatter/gather list, laid out as in the verbs interface, so that a program's
/// own list can be used in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Address of its first byte.
    pub addr: u64,
    /// Its bytes.
    pub len: u32,
    /// The key of the region it lies in.
    pub lkey: u32,
}

/// One send request.
#[derive(Clone, Copy, Debug)]
pub struct SendRequest<'a> {
    /// The caller's number for it.
    pub wr_id: u64,
    /// What to do.
    pub op: Operation,
    /// Where the bytes are, or go to.
    pub sges: &'a [Sge],
    /// Report success.
    pub signaled: bool,
    /// Ask the peer for an event.
    pub solicited: bool,
    /// Wait for earlier READs and atomics.
    pub fence: bool,
    /// The bytes themselves, instead of `sges`: copied now, so that they may be reused at once, and
    /// need not be registered. READs and atomics have none.
    pub inline: Option<&'a [u8]>,
    /// Where a datagram goes; others go to the peer.
    pub to: Option<Datagram>,
    /// On XRC: the number of the peer's shared receive queue.
    pub xrc_srq: u32,
}

impl<'a> SendRequest<'a> {
    /// A signalled request.
    pub fn new(wr_id: u64, op: Operation, sges: &'a [Sge]) -> Self {
        Self {
            wr_id,
            op,
            sges,
            signaled: true,
            solicited: false,
            fence: false,
            inline: None,
            to: None,
            xrc_srq: 0,
        }
    }

    /// The same, as a UD datagram to this destination.
    pub fn to(self, to: Datagram) -> Self {
        Self { to: Some(to), ..self }
    }

    /// A signalled request that carries its bytes with it.
    pub fn inline(wr_id: u64, op: Operation, bytes: &'a [u8]) -> Self {
        Self { inline: Some(bytes), ..Self::new(wr_id, op, &[]) }
    }
}

/// One receive.
#[derive(Clone, Copy, Debug)]
pub struct RecvRequest<'a> {
    /// The caller's number for it.
    pub wr_id: u64,
    /// Where the bytes go to.
    pub sges: &'a [Sge],
}

/// A completion as the application sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// The application's number for the request.
    pub wr_id: u64,
    /// How it ended.
    pub status: Status,
    /// What it was.
    pub kind: WorkKind,
    /// Bytes received, read or fetched.
    pub byte_len: u32,
    /// Immediate data, as a number.
    pub immediate: Option<u32>,
    /// The key the peer invalidated.
    pub invalidated: Option<u32>,
    /// The queue pair it belongs to.
    pub qpn: Qpn,
    /// Of a received datagram: where it came from.
    pub source: Option<DatagramSource>,
    /// When it completed, in nanoseconds of the monotonic clock; 0 unless the queue records it.
    pub timestamp: u64,
}
