//! A ring of packets in shared memory: one process writes, another reads.
//!
//! The peer is as untrusted as the wire: it may change every byte at any time. Each side therefore
//! keeps its own position private and validates the peer's on every load. Headers are copied out
//! before they are parsed. The memory cannot shrink under us: its file is sealed (`shared_file.rs`
//! of `nobounce-memory`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use nobounce_memory::Sink;

use super::mapping::SharedMapping;
use crate::links::batch::MAX_PACKET;

/// Bytes of the ring: several times the maximum in flight to one peer (`soft/engine/path.rs`), so
/// that it is practically never full.
pub(in crate::links) const CAPACITY: usize = 2 << 20;
/// Bytes before the ring: a page for both positions.
const HEADER: usize = 4096;
/// Bytes of the file.
pub(in crate::links) const FILE_LEN: usize = HEADER + CAPACITY;

/// Header offsets: the writer's position, the reader's position, and the reader's wake-up request.
/// Each has a pair of cache lines to itself, because CPUs prefetch lines in pairs.
pub(in crate::links) const TAIL_AT: usize = 0;
pub(in crate::links) const HEAD_AT: usize = 256;
const SLEEPS_AT: usize = 512;

/// Packets begin at multiples of this.
const UNIT: usize = 64;
/// Offset of a packet in its piece of the ring. Headers are 4 modulo 8 bytes long, so payload is
/// aligned to 16.
const LEAD: usize = 20;
/// Marks the rest of the ring as skipped: the packet did not fit before the end.
const SKIP: u32 = u32::MAX;
const HAS_ICRC: u16 = 1;
/// The payload is in an exported file; the upper byte is the file's index.
const ELSEWHERE: u16 = 2;

const _: () = assert!(CAPACITY.is_power_of_two() && LEAD >= 8 && LEAD % 16 == 4);

/// The memory of a ring.
#[derive(Debug)]
pub(in crate::links) struct RingMemory(SharedMapping);

impl RingMemory {
    /// Maps the file, whose length and seals the caller has checked.
    pub(in crate::links) fn map(file: &OwnedFd) -> io::Result<Self> {
        SharedMapping::new(file, FILE_LEN, libc::PROT_READ | libc::PROT_WRITE).map(Self)
    }

    pub(in crate::links) fn u64_at(&self, at: usize) -> &AtomicU64 {
        // SAFETY: inside the mapping, aligned, and only ever accessed as an atomic by us.
        unsafe { &*self.0.at(at).cast::<AtomicU64>() }
    }

    fn sleeps(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { &*self.0.at(SLEEPS_AT).cast::<AtomicU32>() }
    }

    /// Address of the ring byte at this position.
    pub(in crate::links) fn at(&self, position: u64) -> *mut u8 {
        let offset = usize::try_from(position % CAPACITY as u64).unwrap_or(0);
        self.0.at(HEADER + offset)
    }

    /// The position that the reader reports: it reads nothing before it.
    pub(in crate::links) fn read_up_to(&self) -> u64 {
        self.u64_at(HEAD_AT).load(Ordering::Acquire)
    }

    /// Requests a wake-up for the reader. Returns whether there is something to read already.
    pub(in crate::links) fn ask_to_be_woken(&self) -> bool {
        self.sleeps().store(1, Ordering::Relaxed);
        // The writer stores its position, then loads the request; we store the request, then load
        // the position. One side sees the other.
        fence(Ordering::SeqCst);
        self.u64_at(TAIL_AT).load(Ordering::Acquire) != self.u64_at(HEAD_AT).load(Ordering::Relaxed)
    }

    /// Withdraws the request: the reader polls.
    pub(in crate::links) fn need_not_be_woken(&self) {
        self.sleeps().store(0, Ordering::Relaxed);
    }
}

/// Metadata of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::links) struct Label {
    /// With an ICRC: the IPv4 identification that it covers. Without: the number of coalesced
    /// packets (see `Qp::handle_run`).
    pub(in crate::links) number: u16,
    pub(in crate::links) has_icrc: bool,
}

/// Location of a payload outside the ring, in a file that the writer has exported. Only the headers
/// are in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::links) struct Elsewhere {
    pub(in crate::links) file: u8,
    pub(in crate::links) offset: u32,
    /// Bytes behind the headers, ICRC included.
    pub(in crate::links) len: u32,
}

/// A packet that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::links) struct RingPacket {
    /// Its address, valid until [`RingReader::release`].
    pub(in crate::links) at: *const u8,
    /// Its bytes in the ring.
    pub(in crate::links) len: usize,
    pub(in crate::links) label: Label,
    pub(in crate::links) elsewhere: Option<Elsewhere>,
}

/// Why a packet was not written or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::links) enum RingError {
    /// The ring is full (for the writer) or empty (for the reader).
    Wait,
    /// The peer violates the protocol.
    Broken,
}

/// Bytes that a packet takes in the ring.
fn room_of(len: usize) -> usize {
    (LEAD + len).next_multiple_of(UNIT)
}

/// The writing end.
#[derive(Debug)]
pub(in crate::links) struct RingWriter {
    memory: Arc<RingMemory>,
    tail: u64,
    /// The position that the reader can see.
    exported: u64,
    /// The reader's position at the last load.
    head: u64,
}

impl RingWriter {
    pub(in crate::links) fn new(memory: Arc<RingMemory>) -> Self {
        Self { memory, tail: 0, exported: 0, head: 0 }
    }

    /// Writes one packet, given in pieces. The reader sees it after [`publish`](Self::publish).
    pub(in crate::links) fn push(&mut self, parts: [&[u8]; 3], label: Label) -> Result<(), RingError> {
        let len = parts.iter().map(|part| part.len()).sum();
        let mut to = self.reserve(len)?;
        for part in parts {
            // SAFETY: the room does not wrap around and is ours until it is published. The reader
            // must not read it before, and sees mere bytes if it does.
            unsafe { Sink::new(to, part.len()) }.put(0, part);
            to = to.wrapping_add(part.len());
        }
        self.commit(len, label);
        Ok(())
    }

    /// Reserves contiguous room for a packet of `len` bytes.
    #[inline]
    pub(in crate::links) fn reserve(&mut self, len: usize) -> Result<*mut u8, RingError> {
        debug_assert!(len <= MAX_PACKET);
        let room = room_of(len);
        let left = CAPACITY - usize::try_from(self.tail % CAPACITY as u64).unwrap_or(0);
        let skipped = if room > left { left } else { 0 };
        if self.free() < skipped + room {
            let head = self.memory.u64_at(HEAD_AT).load(Ordering::Acquire);
            // It moves forward only, and never past us.
            if head > self.tail || head < self.head || !head.is_multiple_of(UNIT as u64) {
                return Err(RingError::Broken);
            }
            self.head = head;
            if self.free() < skipped + room {
                return Err(RingError::Wait);
            }
        }
        if skipped > 0 {
            self.write_label(SKIP, 0, 0);
            self.tail += skipped as u64;
        }
        Ok(self.memory.at(self.tail).wrapping_add(LEAD))
    }

    /// The writer's position.
    pub(in crate::links) fn position(&self) -> u64 {
        self.tail
    }

    /// The position that the reader reports.
    pub(in crate::links) fn read_up_to(&self) -> u64 {
        self.memory.read_up_to()
    }

    pub(in crate::links) fn memory(&self) -> &Arc<RingMemory> {
        &self.memory
    }

    /// As [`commit`](Self::commit), where the ring holds only the headers.
    pub(in crate::links) fn commit_elsewhere(&mut self, len: usize, number: u16, elsewhere: Elsewhere) {
        let word = u64::from(elsewhere.offset) | u64::from(elsewhere.len) << 32;
        // SAFETY: behind the label, before the packet: a multiple of 8 inside the ring, ours until
        // it is published.
        unsafe { self.memory.at(self.tail).wrapping_add(8).cast::<u64>().write_volatile(word) };
        self.write_label(u32::try_from(len).unwrap_or(0), number, ELSEWHERE | u16::from(elsewhere.file) << 8);
        self.tail += room_of(len) as u64;
    }

    /// Commits the packet reserved last.
    #[inline]
    pub(in crate::links) fn commit(&mut self, len: usize, label: Label) {
        let flags = if label.has_icrc { HAS_ICRC } else { 0 };
        self.write_label(u32::try_from(len).unwrap_or(0), label.number, flags);
        self.tail += room_of(len) as u64;
    }

    fn free(&self) -> usize {
        CAPACITY - usize::try_from(self.tail - self.head).unwrap_or(CAPACITY)
    }

    fn write_label(&mut self, len: u32, ip_id: u16, flags: u16) {
        let word = u64::from(len) | u64::from(ip_id) << 32 | u64::from(flags) << 48;
        // SAFETY: at a multiple of UNIT inside the ring, ours until it is published.
        unsafe { self.memory.at(self.tail).cast::<u64>().write_volatile(word) };
    }

    /// Makes committed packets visible to a polling reader.
    #[inline]
    pub(in crate::links) fn show(&mut self) {
        // A polling reader owns the line: do not take it away without need.
        if self.exported != self.tail {
            self.exported = self.tail;
            self.memory.u64_at(TAIL_AT).store(self.tail, Ordering::Release);
        }
    }

    /// Makes committed packets visible. Returns whether the reader needs a wake-up.
    pub(in crate::links) fn publish(&mut self) -> bool {
        self.show();
        fence(Ordering::SeqCst);
        let sleeps = self.memory.sleeps();
        sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::Relaxed) != 0
    }

    /// Address of the next packet, if it fits before the end.
    pub(in crate::links) fn next(&self) -> *mut u8 {
        self.memory.at(self.tail)
    }
}

/// Prefetches two lines for writing: a label and the headers behind it, or two short packets.
#[inline]
pub(in crate::links) fn fetch_to_write(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    for line in [at, at.wrapping_add(UNIT)] {
        // SAFETY: a hint, which faults nowhere, and does nothing on processors that do not know it.
        unsafe { std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Prefetches two lines for reading: a label and the headers behind it.
#[inline]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    for line in [at, at.wrapping_add(UNIT)] {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: part of every x86_64 processor; a hint, which faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The reading end.
#[derive(Debug)]
pub(in crate::links) struct RingReader {
    memory: Arc<RingMemory>,
    head: u64,
    /// The position that the writer was given.
    released: u64,
    /// The writer's position at the last load.
    tail: u64,
}

impl RingReader {
    pub(in crate::links) fn new(memory: Arc<RingMemory>) -> Self {
        Self { memory, head: 0, released: 0, tail: 0 }
    }

    pub(in crate::links) fn memory(&self) -> &Arc<RingMemory> {
        &self.memory
    }

    /// The next packet.
    #[inline]
    pub(in crate::links) fn pop(&mut self) -> Result<RingPacket, RingError> {
        loop {
            if self.head == self.tail && !self.poll_tail()? {
                return Err(RingError::Wait);
            }
            // SAFETY: at a multiple of UNIT inside the ring.
            let word = unsafe { self.memory.at(self.head).cast::<u64>().read_volatile() };
            let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
            let written = self.tail - self.head;
            let left = CAPACITY as u64 - self.head % CAPACITY as u64;
            let len = u32::from_le_bytes([a, b, c, d]);
            if len == SKIP {
                if left > written {
                    return Err(RingError::Broken);
                }
                self.head += left;
                continue;
            }
            let len = usize::try_from(len).map_err(|_| RingError::Broken)?;
            if len > MAX_PACKET || room_of(len) as u64 > written.min(left) {
                return Err(RingError::Broken);
            }
            let begin = self.memory.at(self.head);
            self.head += room_of(len) as u64;
            if self.head < self.tail {
                // Prefetch the next headers, still in the writer's cache, while this packet is
                // placed.
                prefetch(self.memory.at(self.head));
            }
            let elsewhere = (u16::from(g) & ELSEWHERE != 0).then(|| {
                // SAFETY: behind the label, at a multiple of 8 inside the ring.
                let word = unsafe { begin.wrapping_add(8).cast::<u64>().read_volatile() };
                let [low, high] =
                    [word & u64::from(u32::MAX), word >> 32].map(|half| u32::try_from(half).unwrap_or(0));
                Elsewhere { file: h, offset: low, len: high }
            });
            let label = Label { number: u16::from_le_bytes([e, f]), has_icrc: u16::from(g) & HAS_ICRC != 0 };
            return Ok(RingPacket { at: begin.wrapping_add(LEAD), len, label, elsewhere });
        }
    }

    /// Whether the writer has written more.
    #[inline]
    fn poll_tail(&mut self) -> Result<bool, RingError> {
        let tail = self.memory.u64_at(TAIL_AT).load(Ordering::Acquire);
        if tail == self.tail {
            return Ok(false);
        }
        if tail < self.tail || tail - self.head > CAPACITY as u64 || !tail.is_multiple_of(UNIT as u64) {
            return Err(RingError::Broken);
        }
        self.tail = tail;
        Ok(true)
    }

    /// Whether there is something to read, sound or not.
    pub(in crate::links) fn has_more(&mut self) -> bool {
        self.head != self.tail || self.poll_tail() != Ok(false)
    }

    #[cfg(test)]
    pub(in crate::links) fn position(&self) -> u64 {
        self.head
    }

    /// Frees the room of the packets read, including a skipped ring end.
    #[inline]
    pub(in crate::links) fn release(&mut self) {
        if self.released != self.head {
            self.released = self.head;
            self.memory.u64_at(HEAD_AT).store(self.head, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use nobounce_memory::shared_file;

    use super::*;

    fn ends() -> (RingWriter, RingReader) {
        let file = shared_file::create(FILE_LEN).unwrap();
        let (a, b) = (RingMemory::map(&file).unwrap(), RingMemory::map(&file).unwrap());
        (RingWriter::new(Arc::new(a)), RingReader::new(Arc::new(b)))
    }

    fn packet(number: usize) -> Vec<u8> {
        let len = 16 + (number * 131) % 4100;
        (0..len).map(|at| u8::try_from((number + at) % 251).unwrap()).collect()
    }

    #[test]
    fn packets_come_out_as_they_went_in_round_and_round() {
        let (mut writer, mut reader) = ends();
        let (mut written, mut read) = (0, 0);
        while read < 5000 {
            while written < 5000 {
                let bytes = packet(written);
                let label =
                    Label { number: u16::try_from(written % 60_000).unwrap(), has_icrc: written % 3 == 0 };
                let (head, tail) = bytes.split_at(bytes.len() / 3);
                match writer.push([head, tail, &[]], label) {
                    Ok(()) => written += 1,
                    Err(trouble) => {
                        assert_eq!(trouble, RingError::Wait);
                        break;
                    }
                }
            }
            writer.publish();
            for _ in 0..7 {
                match reader.pop() {
                    Ok(RingPacket { at, len, label, elsewhere: None }) => {
                        // SAFETY: it lies in the ring, and no other thread writes there now.
                        let bytes = unsafe { std::slice::from_raw_parts(at, len) };
                        assert_eq!(bytes, packet(read), "packet {read}");
                        assert_eq!(
                            (usize::from(label.number), label.has_icrc),
                            (read % 60_000, read % 3 == 0)
                        );
                        read += 1;
                    }
                    Ok(other) => panic!("{other:?}"),
                    Err(trouble) => assert_eq!(trouble, RingError::Wait),
                }
            }
            reader.release();
        }
        assert_eq!(reader.pop(), Err(RingError::Wait));
    }

    #[test]
    fn where_a_payload_lies_is_read_as_it_was_written() {
        let (mut writer, mut reader) = ends();
        let elsewhere = Elsewhere { file: 200, offset: 0xfedc_ba98, len: 60_000 };
        // SAFETY: that many bytes were reserved.
        unsafe { writer.reserve(28).unwrap().write_bytes(7, 28) };
        writer.commit_elsewhere(28, 9, elsewhere);
        writer.push([&[1; 40], &[], &[]], Label { number: 3, has_icrc: true }).unwrap();
        writer.publish();
        let RingPacket { len, label, elsewhere: said, .. } = reader.pop().unwrap();
        assert_eq!((len, label, said), (28, Label { number: 9, has_icrc: false }, Some(elsewhere)));
        assert_eq!(writer.read_up_to(), 0, "it is not released yet");
        let RingPacket { len, label, elsewhere: said, .. } = reader.pop().unwrap();
        assert_eq!((len, label, said), (40, Label { number: 3, has_icrc: true }, None));
        reader.release();
        assert_eq!(writer.read_up_to(), writer.position());
    }

    #[test]
    fn the_reader_is_woken_once_when_it_asked() {
        let (mut writer, mut reader) = ends();
        let label = Label { number: 0, has_icrc: true };
        writer.push([&[1; 40], &[], &[]], label).unwrap();
        assert!(!writer.publish(), "no wake-up was requested");
        assert!(reader.memory().ask_to_be_woken(), "there is something already");
        reader.pop().unwrap();
        reader.release();
        assert!(!reader.memory().ask_to_be_woken());
        writer.push([&[1; 40], &[], &[]], label).unwrap();
        assert!(writer.publish());
        assert!(!writer.publish(), "once is enough");
        reader.memory().ask_to_be_woken();
        reader.memory().need_not_be_woken();
        assert!(!writer.publish());
    }

    /// Arbitrary positions and labels give an error or bytes, never an access outside the ring.
    #[test]
    fn the_other_end_may_write_anything() {
        for tail in [1, 63, CAPACITY as u64 + 64, u64::MAX, u64::MAX - 63] {
            let (writer, mut reader) = ends();
            writer.memory.u64_at(TAIL_AT).store(tail, Ordering::Relaxed);
            assert_eq!(reader.pop(), Err(RingError::Broken), "{tail}");
        }
        for head in [1, 63, u64::MAX, u64::MAX - 63] {
            let (mut writer, reader) = ends();
            reader.memory.u64_at(HEAD_AT).store(head, Ordering::Relaxed);
            let label = Label { number: 0, has_icrc: true };
            let bytes = [0; 60_000];
            let last = (0..100).map(|_| writer.push([&bytes, &[], &[]], label)).find(Result::is_err);
            assert_eq!(last, Some(Err(RingError::Broken)), "{head}");
        }
        let mut chance = 1_u64;
        for _ in 0..2000 {
            let (writer, mut reader) = ends();
            for at in (0..4096).step_by(UNIT) {
                chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // SAFETY: inside the mapping.
                unsafe { writer.memory.at(at).cast::<u64>().write_volatile(chance >> (chance % 60)) };
            }
            writer.memory.u64_at(TAIL_AT).store(4096, Ordering::Release);
            let begin = reader.memory.at(0).cast_const();
            for _ in 0..200 {
                match reader.pop() {
                    Ok(RingPacket { at, len, .. }) => {
                        assert!(len <= MAX_PACKET && (at.addr() - begin.addr()) + len <= CAPACITY);
                    }
                    Err(_) => break,
                }
            }
            assert!(reader.head <= 4096 + CAPACITY as u64);
        }
    }
}
