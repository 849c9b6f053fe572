//! The host of a queue pair, as the protocol sees it: memory and receives.

use super::attr::Access;
use super::completion::Nak;

/// Local memory could not be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalFault;

/// A posted receive, as the protocol sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receive {
    /// The application's number for it.
    pub wr_id: u64,
    /// Bytes of its scatter list.
    pub capacity: u64,
}

/// The memory and the receive queue of a queue pair's host.
///
/// `place_*` place the payload of the current packet; `last` marks the end of the message.
pub trait Host {
    /// Whether the peer may do `access` with `len` bytes at `addr` by this key.
    ///
    /// # Errors
    /// The refusal to send.
    fn check(&mut self, rkey: u32, addr: u64, len: u64, access: Access) -> Result<(), Nak>;

    /// The payload belongs at `addr` of the region behind `rkey` (checked again: the region may be
    /// gone by now).
    ///
    /// # Errors
    /// The refusal to send.
    fn place_remote(&mut self, rkey: u32, addr: u64, len: usize, last: bool) -> Result<(), Nak>;

    /// Copies the payload, to be placed when the packets before this one have arrived.
    ///
    /// # Errors
    /// It cannot be kept; the peer sends it again.
    fn copy_payload(&mut self, _into: &mut [u8]) -> Result<(), LocalFault> {
        Err(LocalFault)
    }

    /// The message that begins goes to this shared receive queue, whose domain its memory belongs
    /// to, too (XRC).
    ///
    /// # Errors
    /// The refusal to send: there is no such queue.
    fn select_receives(&mut self, _srq: u32) -> Result<(), Nak> {
        Ok(())
    }

    /// Takes the next posted receive, which then is the current one.
    fn take_receive(&mut self) -> Option<Receive>;

    /// The payload belongs `offset` bytes into the current receive.
    ///
    /// # Errors
    /// The receive's memory could not be written.
    fn place_receive(&mut self, offset: u64, len: usize, last: bool) -> Result<(), LocalFault>;

    /// The IP header of the packet belongs into the first [`GRH_LEN`](super::GRH_LEN) bytes of the
    /// current receive: it is a datagram.
    ///
    /// # Errors
    /// The receive's memory could not be written.
    fn place_grh(&mut self) -> Result<(), LocalFault>;

    /// The payload belongs `offset` bytes into the local list of READ request `serial`.
    ///
    /// # Errors
    /// The request's memory could not be written.
    fn place_response(&mut self, serial: u64, offset: u64, len: usize, last: bool) -> Result<(), LocalFault>;

    /// `original` belongs into the local list of atomic request `serial`.
    ///
    /// # Errors
    /// The request's memory could not be written.
    fn place_atomic(&mut self, serial: u64, original: u64) -> Result<(), LocalFault>;

    /// Compares and swaps 8 bytes of a region and returns the value before. It may return any value
    /// and report the real one later ([`Qp::handle_changed`](super::Qp::handle_changed)); the
    /// response is held back until then.
    ///
    /// # Errors
    /// The refusal to send.
    fn compare_swap(&mut self, rkey: u32, addr: u64, compare: u64, swap: u64) -> Result<u64, Nak>;

    /// Adds to 8 bytes of a region; returns the value before, or any as above.
    ///
    /// # Errors
    /// The refusal to send.
    fn fetch_add(&mut self, rkey: u32, addr: u64, add: u64) -> Result<u64, Nak>;

    /// What the peer wrote before, to this range of the region or to all of it, is visible to all
    /// who can access it.
    ///
    /// # Errors
    /// The refusal to send.
    fn flush(&mut self, rkey: u32, range: Option<(u64, u64)>) -> Result<(), Nak>;

    /// The peer no longer needs this key.
    ///
    /// # Errors
    /// The refusal to send.
    fn invalidate(&mut self, rkey: u32) -> Result<(), Nak>;
}
