//! Flows of TCP, with a congestion control by name.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, bail};

use super::flow::{FlowFigures, Flows, TCP_PORT, TIMEOUT, address};

const STREAM: u8 = b's';
const PING: u8 = b'p';
const BLOCK: usize = 256 << 10;
/// Offsets in the kernel's `tcp_info`: segments sent again, and bytes acknowledged.
const TOTAL_RETRANS: usize = 100;
const BYTES_ACKED: usize = 120;

/// Connections to the receiving process.
pub(super) struct TcpFlows {
    streams: Vec<TcpStream>,
    senders: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

impl TcpFlows {
    pub(super) fn connect(algorithm: &str, flows: usize, ping: bool) -> anyhow::Result<Self> {
        let mut streams = Vec::new();
        for _ in 0..flows {
            let mut stream = connect(algorithm).context("cannot connect by TCP")?;
            stream.write_all(&[if ping { PING } else { STREAM }])?;
            streams.push(stream);
        }
        Ok(Self { streams, senders: Vec::new(), stop: Arc::default() })
    }
}

impl Flows for TcpFlows {
    fn acknowledged(&self) -> anyhow::Result<Vec<u64>> {
        if !self.stop.load(Ordering::Relaxed) && self.senders.iter().any(JoinHandle::is_finished) {
            bail!("a TCP connection has failed");
        }
        self.streams.iter().map(|stream| Ok(info(stream)?.acked)).collect()
    }

    fn start(&mut self) -> anyhow::Result<()> {
        for stream in &self.streams {
            let (mut stream, stop) = (stream.try_clone()?, Arc::clone(&self.stop));
            self.senders.push(std::thread::spawn(move || {
                let block = vec![0x5a; BLOCK];
                while !stop.load(Ordering::Relaxed) && stream.write_all(&block).is_ok() {}
            }));
        }
        Ok(())
    }

    fn stop(&mut self, figures: &mut FlowFigures) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for stream in &self.streams {
            figures.retransmitted += u64::from(info(stream)?.retransmitted);
            // Frees a sender that waits for room.
            _ = stream.shutdown(Shutdown::Both);
        }
        for sender in self.senders.drain(..) {
            _ = sender.join();
        }
        Ok(())
    }

    fn round_trip(&mut self) -> anyhow::Result<()> {
        let (stream, mut message) = (self.streams.first_mut().context("no flow")?, [0; 8]);
        stream.write_all(&message)?;
        Ok(stream.read_exact(&mut message)?)
    }
}

/// Connects with that congestion control, which has to be set before.
fn connect(algorithm: &str) -> io::Result<TcpStream> {
    // SAFETY: socket takes numbers only.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was returned just now, so nothing else owns it.
    let stream = TcpStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
    set_algorithm(&stream, algorithm)?;
    let SocketAddr::V4(to) = address(TCP_PORT) else { return Err(ErrorKind::Unsupported.into()) };
    let name = libc::sockaddr_in {
        sin_family: libc::sa_family_t::try_from(libc::AF_INET).unwrap_or(0),
        sin_port: to.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(to.ip().octets()) },
        sin_zero: [0; 8],
    };
    let len = libc::socklen_t::try_from(size_of::<libc::sockaddr_in>()).unwrap_or(0);
    // SAFETY: the address is a sockaddr_in of that length, and lives until the call ends.
    if unsafe { libc::connect(fd, (&raw const name).cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    set_up(&stream)?;
    Ok(stream)
}

/// Sets the congestion control of a socket; an error if the kernel does not have it.
pub(super) fn set_algorithm(socket: &impl AsRawFd, algorithm: &str) -> io::Result<()> {
    let len = libc::socklen_t::try_from(algorithm.len()).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open, and the name has that length.
    let failed = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_CONGESTION,
            algorithm.as_ptr().cast(),
            len,
        )
    };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))
}

struct Info {
    acked: u64,
    retransmitted: u32,
}

fn info(stream: &TcpStream) -> anyhow::Result<Info> {
    let mut bytes = [0_u8; 256];
    let mut len = libc::socklen_t::try_from(bytes.len())?;
    // SAFETY: the kernel writes at most `len` bytes, which the buffer has.
    let failed = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            bytes.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if failed != 0 {
        return Err(io::Error::last_os_error()).context("TCP_INFO");
    }
    let retransmitted = bytes[TOTAL_RETRANS..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
    let acked = bytes[BYTES_ACKED..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
    Ok(Info { acked, retransmitted })
}

/// Receives streams and answers round trips, on threads of its own.
pub(super) fn listen(addr: SocketAddr) -> anyhow::Result<()> {
    let listener = TcpListener::bind(addr).context("cannot listen for TCP")?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A connection that fails is reported by its sender.
            std::thread::spawn(move || _ = receive(stream));
        }
    });
    Ok(())
}

fn receive(mut stream: TcpStream) -> io::Result<()> {
    set_up(&stream)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    if kind[0] == PING {
        let mut message = [0; 8];
        while stream.read_exact(&mut message).is_ok() {
            stream.write_all(&message)?;
        }
        return Ok(());
    }
    let mut block = vec![0; BLOCK];
    while stream.read(&mut block)? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_acknowledged_is_read_from_the_kernel() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let before = info(&near).unwrap().acked;
        near.write_all(&[7; 5000]).unwrap();
        far.read_exact(&mut [0; 5000]).unwrap();
        far.write_all(&[1]).unwrap();
        near.read_exact(&mut [0]).unwrap();
        assert_eq!(info(&near).unwrap().acked - before, 5000);
        assert_eq!(info(&near).unwrap().retransmitted, 0);
    }

    #[test]
    fn an_unknown_congestion_control_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(set_algorithm(&listener, "reno").is_ok());
        let error = set_algorithm(&listener, "no-such-one").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }
}
