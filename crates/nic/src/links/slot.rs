//! Slots: how several devices share one address.
//!
//! A device's slot is the high byte of all its queue pair numbers. A device claims it by listening
//! under an abstract name of the address and the slot. A slot is therefore free again the moment
//! its process is gone. The kernel steers packets by that byte to the n-th socket of the port. That
//! is the slot's own socket as long as devices close in reverse order of opening. Otherwise a
//! packet may reach the wrong device, which hands it to its owner. The owner then corrects the
//! steering (`udp/steering.rs`).
//!
//! The devices of one user on one address are connected to each other. A connection carries
//! handovers, and its end tells the other device that the steering may have changed.
//!
//! A device with a socket of the port therefore receives for others too, and must poll it. It joins
//! the port when it gets its first queue pair, and with it a thread that polls.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use nobounce_protocol::wire::Qpn;

use super::handover::{self, GroBurst, Handover};
use super::inbox::{Inbox, Taken, connect_ours};
use super::unix;
use crate::process::fork::NotInherited;

/// How long a joining device may block others from joining. It takes microseconds.
const LONGEST_TURN: Duration = Duration::from_millis(50);
/// First message on a connection between slots; the sender's slot follows.
const GREETING: [u8; 4] = *b"nbg1";

/// A device among the peers: its address and slot.
pub type PeerName = (IpAddr, u8);

/// The device that has the queue pair of this number at that address.
#[inline]
pub(crate) const fn peer_name(addr: IpAddr, qpn: Qpn) -> PeerName {
    (addr, slot_of(qpn))
}

/// The slot of the device that has the queue pair of this number.
#[inline]
pub(crate) const fn slot_of(qpn: Qpn) -> u8 {
    let [_, slot, ..] = qpn.get().to_be_bytes();
    slot
}

/// The owner that a handover is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SlotOwner {
    /// The device with this slot.
    Slot(u8),
    /// The device that offers this service of the connection manager.
    Service(u64),
}

/// The socket name of a service at an address, and its handovers.
#[derive(Debug)]
pub(super) struct ServiceName {
    inbox: Inbox,
    pub(super) service: u64,
}

impl ServiceName {
    /// Claims the name; `None` if it is taken.
    pub(super) fn bind(addr: IpAddr, service: u64) -> io::Result<Option<Self>> {
        let mut inbox = Inbox::new()?;
        Ok(inbox.bind(&service_name(addr, service))?.then_some(Self { inbox, service }))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.inbox.fd()
    }

    /// As [`Slot::take`].
    pub(super) fn take<'b>(&mut self, buffer: &'b mut [u8]) -> Option<Option<GroBurst<'b>>> {
        loop {
            return match self.inbox.take(buffer)? {
                Taken::Message(len, _) => {
                    Some(buffer.get(..len).and_then(|bytes| handover::decode(0, bytes)))
                }
                Taken::Refused => Some(None),
                Taken::Gone => continue,
            };
        }
    }
}

/// Prefix of the names by which slots publish the kernel's index of their sockets.
pub(super) const PLACES: &str = "nobounce/place";

/// The name by which a slot publishes its socket's index, while that is valid.
#[derive(Debug)]
pub(super) struct SlotPlace {
    _name: NotInherited,
    pub(super) number: u8,
}

impl SlotPlace {
    pub(super) fn publish(addr: IpAddr, slot: u8, number: u8) -> io::Result<Self> {
        let name = NotInherited::open(|| {
            let fd = unix::socket(libc::SOCK_DGRAM)?;
            unix::bind(&fd, &format!("{PLACES}/{addr}/{slot}/{number}"))?;
            Ok(fd)
        })?;
        Ok(Self { _name: name, number })
    }
}

/// A slot of an address, or the socket to claim one with.
#[derive(Debug)]
pub(super) struct Slot {
    inbox: Inbox,
    addr: IpAddr,
    number: u8,
    /// A device of this address was closed since this was last asked.
    departure: bool,
}

impl Slot {
    /// The socket alone; its number is not claimed yet.
    pub(super) fn new(addr: IpAddr) -> io::Result<Self> {
        Ok(Self { inbox: Inbox::new()?, addr, number: 0, departure: false })
    }

    /// Claims the lowest free slot of the address and greets the others; false when all are taken.
    pub(super) fn claim(&mut self) -> io::Result<bool> {
        for number in 0..=u8::MAX {
            if self.inbox.bind(&slot_name(self.addr, number))? {
                self.number = number;
                // Accepted connections have the listener's name, too: each device is greeted once.
                let names = unix::names_after(&slot_name(self.addr, ""));
                let others: BTreeSet<u8> = names.iter().filter_map(|name| name.parse().ok()).collect();
                for other in others.into_iter().filter(|other| *other != number) {
                    // A device that is not greeted now is greeted at the first handover to it.
                    let _ = self.greet(other);
                }
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn number(&self) -> u8 {
        self.number
    }

    pub(super) fn addr(&self) -> IpAddr {
        self.addr
    }

    /// The descriptor that becomes readable on a handover or a departure.
    pub(super) fn fd(&self) -> RawFd {
        self.inbox.fd()
    }

    /// Whether a device of this address was closed since the last call.
    pub(super) fn take_departure(&mut self) -> bool {
        std::mem::take(&mut self.departure)
    }

    /// Connects to the device of another slot; returns the index of the connection.
    fn greet(&mut self, slot: u8) -> io::Result<usize> {
        let at = self.inbox.connect(&slot_name(self.addr, slot), Some(slot))?;
        let mut greeting = [0; GREETING.len() + 1];
        greeting[..GREETING.len()].copy_from_slice(&GREETING);
        greeting[GREETING.len()] = self.number;
        let fd = self.inbox.connections[at].fd.as_raw_fd();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: live bytes.
        if unsafe { libc::send(fd, greeting.as_ptr().cast(), greeting.len(), flags) } < 0 {
            let error = io::Error::last_os_error();
            self.inbox.remove(at);
            return Err(error);
        }
        Ok(at)
    }

    /// Hands packets to their owner, a process of our user.
    pub(super) fn hand_over(&mut self, owner: SlotOwner, run: &GroBurst<'_>) -> Handover {
        let slot = match owner {
            SlotOwner::Slot(slot) => slot,
            SlotOwner::Service(service) => {
                return match connect_ours(&service_name(self.addr, service)) {
                    Ok(connection) => handover::send(&connection, 0, run),
                    Err(error) => Handover::of_error(&error),
                };
            }
        };
        while let Some(at) = self.inbox.connections.iter().position(|one| one.slot == Some(slot)) {
            match handover::send(&self.inbox.connections[at].fd, slot, run) {
                Handover::NoOwner => self.lose(at),
                other => return other,
            }
        }
        match self.greet(slot) {
            Ok(at) => handover::send(&self.inbox.connections[at].fd, slot, run),
            Err(error) => Handover::of_error(&error),
        }
    }

    fn lose(&mut self, at: usize) {
        self.inbox.remove(at);
        self.departure = true;
    }

    /// Receives one handover into `buffer`, if there is one. Inner `None`: it was not for us and is
    /// dropped.
    pub(super) fn take<'b>(&mut self, buffer: &'b mut [u8]) -> Option<Option<GroBurst<'b>>> {
        let len = loop {
            match self.inbox.take(buffer)? {
                Taken::Gone => self.departure = true,
                Taken::Refused => return Some(None),
                Taken::Message(len, at) => match greeting(buffer.get(..len).unwrap_or(&[])) {
                    Some(slot) => self.inbox.connections[at].slot = Some(slot),
                    None => break len,
                },
            }
        };
        Some(buffer.get(..len).and_then(|bytes| handover::decode(self.number, bytes)))
    }
}

/// The slot of a device that greets.
pub(super) fn greeting(message: &[u8]) -> Option<u8> {
    match message.strip_prefix(&GREETING)? {
        [slot] => Some(*slot),
        _ => None,
    }
}

/// The socket name of a slot of an address.
fn slot_name(addr: IpAddr, slot: impl std::fmt::Display) -> String {
    format!("nobounce/slot/{addr}/{slot}")
}

/// How many slots of an address are taken.
pub(super) fn count(addr: IpAddr) -> usize {
    // Accepted connections have the listener's name, too.
    let names = unix::names_after(&slot_name(addr, ""));
    names.iter().filter_map(|name| name.parse::<u8>().ok()).collect::<BTreeSet<_>>().len()
}

/// The socket name of a service at an address.
fn service_name(addr: IpAddr, service: u64) -> String {
    format!("nobounce/service/{addr}/{service:x}")
}

/// Lock for joining an address. Slots and sockets of the port must be taken in the same order, or
/// the kernel steers wrongly from the start. Released on drop or process exit.
#[derive(Debug)]
pub(super) struct JoinLock {
    _name: Option<NotInherited>,
}

impl JoinLock {
    /// Acquires it with a timeout: a process stopped while it holds the lock must not block others.
    pub(super) fn wait(addr: IpAddr) -> io::Result<Self> {
        let fd = NotInherited::open(|| unix::socket(libc::SOCK_DGRAM))?;
        let end = Instant::now() + LONGEST_TURN;
        while !unix::bind(&fd, &format!("nobounce/join/{addr}"))? {
            if Instant::now() > end {
                return Ok(Self { _name: None });
            }
            std::thread::sleep(LONGEST_TURN / 500);
        }
        Ok(Self { _name: Some(fd) })
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::super::handover::TAKE_BUFFER;
    use super::*;

    fn addr(last: u8) -> IpAddr {
        Ipv4Addr::new(127, 77, 0, last).into()
    }

    fn claimed(last: u8) -> Slot {
        let mut slot = Slot::new(addr(last)).unwrap();
        assert!(slot.claim().unwrap());
        slot
    }

    fn run(bytes: &[u8]) -> GroBurst<'_> {
        GroBurst { src: addr(9), src_port: 4791, ip_id: 3, segment: 40, marked: false, bytes }
    }

    #[test]
    fn the_lowest_free_slot_is_claimed_and_freed_on_drop() {
        let claim = || claimed(1);
        let (a, b, c) = (claim(), claim(), claim());
        assert_eq!((a.number(), b.number(), c.number()), (0, 1, 2));
        drop(b);
        assert_eq!(claim().number(), 1);
    }

    #[test]
    fn after_256_claims_no_slot_is_free() {
        let names = |n: u16| Inbox::new().and_then(|mut one| one.bind(&slot_name(addr(2), n)).map(|_| one));
        let _all: Vec<_> = (0..255).map(|n| names(n).unwrap()).collect();
        let last = claimed(2);
        assert_eq!(last.number(), 255);
        assert!(!Slot::new(addr(2)).unwrap().claim().unwrap());
    }

    #[test]
    fn a_handover_arrives_as_it_was_given() {
        let (mut a, mut b) = (claimed(3), claimed(3));
        let mut buffer = vec![0; TAKE_BUFFER];
        assert!(b.take(&mut buffer).is_none());
        let packets = vec![0xa5; 100];
        let v6 = GroBurst { src: "fe80::1".parse().unwrap(), ..run(&packets) };
        for run in [run(&packets), v6] {
            assert_eq!(a.hand_over(SlotOwner::Slot(1), &run), Handover::Done);
            assert_eq!(b.take(&mut buffer), Some(Some(run)));
            assert_eq!(b.hand_over(SlotOwner::Slot(0), &run), Handover::Done);
            assert_eq!(a.take(&mut buffer), Some(Some(run)));
            assert_eq!(run.packets(), 3);
        }
        assert_eq!(a.hand_over(SlotOwner::Slot(7), &run(&packets)), Handover::NoOwner);
        let mut service = ServiceName::bind(addr(3), 9).unwrap().unwrap();
        assert_eq!(a.hand_over(SlotOwner::Service(9), &run(&packets)), Handover::Done);
        assert_eq!(service.take(&mut buffer), Some(Some(run(&packets))));
        assert_eq!(a.hand_over(SlotOwner::Service(8), &run(&packets)), Handover::NoOwner);
    }

    /// The table of names has a line for every accepted connection, too.
    #[test]
    fn each_pair_of_devices_has_one_connection() {
        let mut slots: Vec<Slot> = (0..8).map(|_| claimed(6)).collect();
        let mut buffer = vec![0; TAKE_BUFFER];
        for slot in &mut slots {
            assert!(slot.take(&mut buffer).is_none());
            assert_eq!(slot.inbox.connections.len(), 7, "slot {}", slot.number);
        }
    }

    #[test]
    fn a_departure_is_seen_at_once_and_the_slot_serves_again() {
        let (mut a, b) = (claimed(5), claimed(5));
        let mut buffer = vec![0; TAKE_BUFFER];
        assert!(a.take(&mut buffer).is_none() && !a.take_departure());
        drop(b);
        assert!(a.take(&mut buffer).is_none() && a.take_departure() && !a.take_departure());
        assert_eq!(a.hand_over(SlotOwner::Slot(1), &run(&[1])), Handover::NoOwner);
        let mut again = claimed(5);
        assert_eq!(a.hand_over(SlotOwner::Slot(1), &run(&[1])), Handover::Done);
        assert_eq!(again.take(&mut buffer), Some(Some(run(&[1]))));
        // One that goes before it is looked at is found out by the next handover.
        drop(again);
        assert_eq!(a.hand_over(SlotOwner::Slot(1), &run(&[1])), Handover::NoOwner);
        assert!(a.take_departure());
    }

    #[test]
    fn a_full_queue_says_so_and_never_blocks() {
        let (mut a, mut b) = (claimed(4), claimed(4));
        let packets = vec![1; 60_000];
        let outcomes: Vec<_> = (0..2000).map(|_| a.hand_over(SlotOwner::Slot(1), &run(&packets))).collect();
        assert_eq!(outcomes[0], Handover::Done);
        assert_eq!(outcomes.last(), Some(&Handover::Full));
        let mut buffer = vec![0; TAKE_BUFFER];
        let taken = std::iter::from_fn(|| b.take(&mut buffer).map(|r| r.is_some())).filter(|x| *x).count();
        assert_eq!(taken, outcomes.iter().filter(|o| **o == Handover::Done).count());
    }
}
