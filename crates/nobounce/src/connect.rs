//! The connecting side, and the setup of queue pairs that both sides share.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use nobounce_nic::any::{Channel, Cq, Qp};
use nobounce_nic::work::{Access, Mtu, Psn, QpAttr, QpLimits, QpState, Qpn};

use crate::connection::Connection;
use crate::control::ControlChannel;
use crate::device::Device;
use crate::handshake::{self, HandshakeError, Hello, MAX_QPS, QpHalf};
use crate::path_mtu;

/// How to connect. The defaults suit most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Queue pairs, the connection's lanes: 1 to 4096. The listening side creates as many.
    pub qps: usize,
    /// The largest path MTU; `None` takes what the interface carries. The smaller of both ends
    /// applies.
    pub mtu: Option<Mtu>,
    /// Outstanding operations per lane: as many sends and as many receives.
    pub depth: usize,
    /// Total time to connect and complete the handshake, without name resolution.
    pub timeout: Duration,
    /// The local ACK timeout as the standard encodes it: 4.096 us times 2^code. 16 is 268 ms.
    pub ack_timeout: u8,
    /// Retransmission timeouts before an operation fails: 0 to 7. With the defaults a silent peer
    /// fails after 8 times 268 ms, 2.1 s.
    pub retries: u8,
    /// RNR retries: how often a SEND is repeated while the peer has no receive posted: 0 to 6; 7
    /// means without limit.
    pub rnr_retries: u8,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            qps: 1,
            mtu: None,
            depth: 128,
            timeout: Duration::from_secs(10),
            ack_timeout: 16,
            retries: 7,
            rnr_retries: 7,
        }
    }
}

/// Why the connection failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The number of queue pairs is out of range.
    #[error("invalid number of queue pairs {asked}: expected 1 to {MAX_QPS}")]
    Lanes {
        /// The requested number.
        asked: usize,
    },
    /// The name could not be resolved.
    #[error("cannot resolve the address: {0}; expected host:port")]
    Resolve(io::Error),
    /// The TCP connection failed.
    #[error(
        "cannot connect to {addr}: {source}; check that the peer listens there and that no firewall blocks TCP"
    )]
    Tcp {
        /// The address that was tried last.
        addr: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
    /// The handshake failed.
    #[error("handshake with {addr} failed: {source}")]
    Handshake {
        /// The peer's address.
        addr: SocketAddr,
        /// The cause.
        source: HandshakeError,
    },
}

impl Device {
    /// Connects to a peer that listens at a TCP address such as `"host:port"`.
    ///
    /// # Errors
    /// Nothing listens there, the listener is not nobounce or has another version, it refused, or
    /// the timeout expired.
    pub fn connect(
        &self,
        addr: impl ToSocketAddrs,
        options: &ConnectOptions,
    ) -> Result<Connection, ConnectError> {
        connect(self, addr, options)
    }

    /// The handshake over a TCP connection that the caller made. A caller that keeps a clone of the
    /// stream gives up by shutting it down.
    ///
    /// # Errors
    /// As for [`connect`](Self::connect).
    pub fn connect_over(
        &self,
        stream: TcpStream,
        options: &ConnectOptions,
    ) -> Result<Connection, ConnectError> {
        check_lanes(options)?;
        let addr = stream.peer_addr().unwrap_or_else(|_| ([0, 0, 0, 0], 0).into());
        let made = shake_hands(self, stream, options, deadline(options.timeout));
        made.map_err(|source| ConnectError::Handshake { addr, source })
    }
}

fn check_lanes(options: &ConnectOptions) -> Result<(), ConnectError> {
    let is_fine = (1..=MAX_QPS).contains(&options.qps);
    if is_fine { Ok(()) } else { Err(ConnectError::Lanes { asked: options.qps }) }
}

/// When a timeout ends; the longest ones in 100 years.
pub(crate) fn deadline(timeout: Duration) -> Instant {
    const EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    Instant::now() + timeout.min(EVER)
}

fn connect(
    device: &Device,
    addr: impl ToSocketAddrs,
    options: &ConnectOptions,
) -> Result<Connection, ConnectError> {
    check_lanes(options)?;
    let addrs = addr.to_socket_addrs().map_err(ConnectError::Resolve)?;
    let deadline = deadline(options.timeout);
    let mut failed = None;
    for addr in addrs {
        // The kernel's interface refuses zero; the shortest timeout fails as intended.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&addr, left) {
            Ok(stream) => {
                let source = match shake_hands(device, stream, options, deadline) {
                    Ok(connection) => return Ok(connection),
                    Err(source) => source,
                };
                return Err(ConnectError::Handshake { addr, source });
            }
            Err(source) => failed = Some(ConnectError::Tcp { addr, source }),
        }
    }
    let nothing =
        || ConnectError::Resolve(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    Err(failed.unwrap_or_else(nothing))
}

fn shake_hands(
    device: &Device,
    stream: TcpStream,
    options: &ConnectOptions,
    deadline: Instant,
) -> Result<Connection, HandshakeError> {
    let control = open_control(stream)?;
    let mut lanes = Lanes::make(device, options, options.qps)?;
    let ours = lanes.hello(device, options);
    handshake::send_hello(&control, &ours, deadline)?;
    let mut theirs = handshake::receive_answer(&control, deadline)?;
    theirs.check_reachable(device.nic(), &control)?;
    if theirs.qps.len() != lanes.qps.len() {
        return Err(HandshakeError::Malformed { what: "wrong number of queue pairs" });
    }
    if theirs.mtu > ours.mtu {
        return Err(HandshakeError::Malformed { what: "MTU larger than offered" });
    }
    let agreed = theirs.mtu;
    theirs.mtu = agreed.min(device.nic().max_mtu_to(theirs.addr).bytes());
    lanes.raise(options, &theirs)?;
    if let Some(mtu) = path_mtu::probe(&lanes, theirs.addr, deadline)? {
        theirs.mtu = mtu.bytes();
        lanes.lower(options, &theirs)?;
    }
    match Mtu::from_bytes(theirs.mtu) {
        Some(mtu) if mtu.bytes() < agreed => handshake::send_smaller_mtu(&control, mtu, deadline)?,
        _ => handshake::send_ready(&control, deadline)?,
    }
    Ok(Connection::new(device, lanes, control, &theirs))
}

pub(crate) fn open_control(stream: TcpStream) -> Result<ControlChannel, HandshakeError> {
    ControlChannel::new(stream).map_err(|source| HandshakeError::Io { step: "preparing it", source })
}

/// The queue pairs of a connection that is being set up.
#[derive(Debug)]
pub(crate) struct Lanes {
    pub(crate) qps: Vec<Qp>,
    pub(crate) cq: Cq,
    pub(crate) channel: Channel,
    halves: Vec<QpHalf>,
    /// Outstanding READs and atomics per queue pair, in each direction.
    rd_atomic: u8,
}

impl Lanes {
    pub(crate) fn make(
        device: &Device,
        options: &ConnectOptions,
        count: usize,
    ) -> Result<Self, HandshakeError> {
        let failed = |error: &dyn std::fmt::Display| HandshakeError::QueuePair(error.to_string());
        let limits = QpLimits { send_depth: options.depth, recv_depth: options.depth, ..QpLimits::default() };
        let channel = device.nic().create_channel().map_err(|error| failed(&error))?;
        let rd_atomic = Hello::of(device.nic(), None, Vec::new()).max_rd_atomic;
        // Room for everything that can be posted, so the queue cannot overflow.
        let depth = options.depth.saturating_mul(2).saturating_mul(count);
        let cq = device.nic().create_cq(depth, Some(&channel)).map_err(|error| failed(&error))?;
        let mut lanes = Self {
            qps: Vec::with_capacity(count),
            cq,
            channel,
            halves: Vec::with_capacity(count),
            rd_atomic,
        };
        for _ in 0..count {
            let qp = device.pd().create_qp(&lanes.cq, &lanes.cq, limits).map_err(|error| failed(&error))?;
            qp.modify(&QpAttr::to_init(Access::all()), 0).map_err(|error| failed(&error))?;
            lanes.halves.push(QpHalf::of(&qp));
            lanes.qps.push(qp);
        }
        Ok(lanes)
    }

    pub(crate) fn hello(&self, device: &Device, options: &ConnectOptions) -> Hello {
        Hello::of(device.nic(), options.mtu, self.halves.clone())
    }

    /// Moves them to RTR and RTS, each towards its counterpart. `theirs.mtu` is the agreed MTU.
    pub(crate) fn raise(&mut self, options: &ConnectOptions, theirs: &Hello) -> Result<(), HandshakeError> {
        for ((qp, ours), to) in self.qps.iter().zip(&self.halves).zip(&theirs.qps) {
            options.raise(qp, (*ours, self.rd_atomic), *to, theirs)?;
        }
        Ok(())
    }
}

impl Lanes {
    /// Moves them there once more, with a smaller MTU. Nothing was posted yet.
    pub(crate) fn lower(&mut self, options: &ConnectOptions, theirs: &Hello) -> Result<(), HandshakeError> {
        let failed = |error: &dyn std::fmt::Display| HandshakeError::QueuePair(error.to_string());
        for qp in &self.qps {
            qp.modify(&QpAttr::to_state(QpState::Reset), 0).map_err(|error| failed(&error))?;
            qp.modify(&QpAttr::to_init(Access::all()), 0).map_err(|error| failed(&error))?;
        }
        self.raise(options, theirs)
    }
}

impl ConnectOptions {
    /// Moves a queue pair to RTR and RTS, towards `to` of the device that said `theirs`.
    /// `theirs.mtu` is the agreed MTU. Ours has so many READs and atomics outstanding.
    ///
    /// # Errors
    /// The device refuses.
    pub fn raise(
        &self,
        qp: &Qp,
        (ours, rd_atomic): (QpHalf, u8),
        to: QpHalf,
        theirs: &Hello,
    ) -> Result<(), HandshakeError> {
        let failed = |error: &dyn std::fmt::Display| HandshakeError::QueuePair(error.to_string());
        let mtu = Mtu::from_bytes(theirs.mtu).ok_or(HandshakeError::Malformed { what: "invalid MTU" })?;
        let to_rtr = QpAttr::to_rtr(theirs.addr, Qpn::new(to.qpn), Psn::new(to.psn), mtu);
        let to_rtr = QpAttr { max_dest_rd_atomic: rd_atomic, ..to_rtr };
        qp.modify(&to_rtr, theirs.lid).map_err(|error| failed(&error))?;
        let to_rts = QpAttr {
            timeout: self.ack_timeout,
            retry_cnt: self.retries,
            rnr_retry: self.rnr_retries,
            max_rd_atomic: rd_atomic.min(theirs.max_rd_atomic),
            ..QpAttr::to_rts(Psn::new(ours.psn))
        };
        qp.modify(&to_rts, theirs.lid).map_err(|error| failed(&error))
    }
}
