//! Both ends of InfiniBand links, by management datagrams: requests that only read, in bounded
//! time.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use nobounce_topology::facts::{Facts, LinkEnd, Read};
use nobounce_topology::mad::{self, Attribute, MadRoute, Node};
use nobounce_topology::sysfs::{self, Root};

/// The header of the kernel's interface before a datagram, with its partition key.
const HEADER: usize = 64;
/// `IB_USER_MAD_REGISTER_AGENT` and `IB_USER_MAD_ENABLE_PKEY`.
const REGISTER_AGENT: libc::c_ulong = 0xc01c_1b01;
const ENABLE_PKEY: libc::c_ulong = 0x1b03;
/// How long one device may take for one answer. They take microseconds.
const TIMEOUT: Duration = Duration::from_millis(100);
/// How long all of them may take together: links without an answer must not hold the command up.
const BUDGET: Duration = Duration::from_secs(2);

/// `struct ib_user_mad_reg_req`.
#[repr(C)]
struct Agent {
    id: u32,
    methods: [u32; 4],
    qpn: u8,
    class: u8,
    class_version: u8,
    oui: [u8; 3],
    rmpp_version: u8,
}

/// Fills in both ends of every active InfiniBand port of an adapter.
pub(super) fn fill(facts: &mut Facts, root: &Root) {
    let until = Instant::now() + BUDGET;
    for nic in facts.nics.iter_mut().filter(|nic| !nic.is_software()) {
        let ports = nic.ports.iter_mut().filter(|port| port.is_active());
        for port in ports.filter(|port| port.link_layer.eq_ignore_ascii_case("infiniband")) {
            let Ok(number) = u8::try_from(port.number) else { continue };
            let Some(path) = sysfs::umad(root, &nic.name, port.number) else {
                let why = "there is no /dev/infiniband/umad* of this port (module ib_umad)";
                (port.own_end, port.peer_end) = (Read::no(why), Read::no(why));
                continue;
            };
            match UmadPort::open(&path, until) {
                Ok(mut device) => {
                    port.own_end = device.end(MadRoute::Own).into();
                    port.peer_end = device.end(MadRoute::Peer(number)).into();
                }
                Err(error) => {
                    let why = format!("{path}: {error}");
                    (port.own_end, port.peer_end) = (Read::no(why.clone()), Read::no(why));
                }
            }
        }
    }
}

/// The file of a port, with an agent of the class of directed routes.
struct UmadPort {
    file: File,
    agent: u32,
    transaction: u32,
    until: Instant,
}

impl UmadPort {
    fn open(path: &str, until: Instant) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        // SAFETY: the call takes no memory.
        if unsafe { libc::ioctl(file.as_raw_fd(), ENABLE_PKEY) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut agent = Agent {
            id: 0,
            methods: [0; 4],
            qpn: 0,
            class: 0x81,
            class_version: 1,
            oui: [0; 3],
            rmpp_version: 0,
        };
        // SAFETY: the structure is the kernel's, of the size that the request names, and lives
        // during the call.
        if unsafe { libc::ioctl(file.as_raw_fd(), REGISTER_AGENT, &raw mut agent) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { file, agent: agent.id, transaction: 1, until })
    }

    /// The port at the end of the route.
    fn end(&mut self, route: MadRoute) -> io::Result<LinkEnd> {
        let (answer, transaction) = self.ask(Attribute::NodeInfo, route)?;
        let node: Node = mad::node(&answer, transaction).map_err(io::Error::other)?;
        let (answer, transaction) = self.ask(Attribute::PortInfo(node.port), route)?;
        mad::link_end(&answer, node, transaction).map_err(io::Error::other)
    }

    /// One request and its answer.
    fn ask(&mut self, attribute: Attribute, route: MadRoute) -> io::Result<(Vec<u8>, u32)> {
        let transaction = self.transaction;
        self.transaction += 1;
        let timeout = u32::try_from(TIMEOUT.as_millis()).map_err(io::Error::other)?;
        let mut message = vec![0_u8; HEADER];
        message[..4].copy_from_slice(&self.agent.to_ne_bytes());
        message[8..12].copy_from_slice(&timeout.to_ne_bytes());
        // Directed routes have no LID.
        message[28..30].copy_from_slice(&[0xff, 0xff]);
        message.extend(mad::request(attribute, route, transaction));
        self.file.write_all(&message)?;
        loop {
            self.wait()?;
            let mut answer = vec![0_u8; HEADER + mad::SIZE];
            let length = self.file.read(&mut answer)?;
            answer.truncate(length);
            let status =
                answer.get(4..8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes);
            if status != 0 {
                // The kernel gives the request back, with an error number.
                return Err(io::Error::from_raw_os_error(i32::try_from(status).unwrap_or(libc::EIO)));
            }
            let answer = answer.split_off(HEADER.min(length));
            // Late answers to earlier requests.
            if answer.get(12..16) == Some(&transaction.to_be_bytes()) {
                return Ok((answer, transaction));
            }
        }
    }

    /// Waits until there is something to read. The kernel gives up first.
    fn wait(&self) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now()).min(TIMEOUT * 2);
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut poll = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let left = libc::c_int::try_from(left.as_millis().max(1)).map_err(io::Error::other)?;
        // SAFETY: one descriptor, which lives during the call.
        match unsafe { libc::poll(&raw mut poll, 1, left) } {
            0 => Err(io::ErrorKind::TimedOut.into()),
            count if count < 0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_has_the_size_that_its_request_names() {
        assert_eq!(size_of::<Agent>() as libc::c_ulong, REGISTER_AGENT >> 16 & 0x3fff);
    }

    #[test]
    fn a_file_that_is_no_device_is_an_error() {
        let until = Instant::now() + BUDGET;
        assert!(UmadPort::open("/dev/null", until).is_err());
        assert!(UmadPort::open("/dev/infiniband/umad-none", until).is_err());
    }
}
