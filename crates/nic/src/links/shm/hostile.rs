//! A hostile same-host peer: arbitrary Unix-socket messages, descriptors, ring contents and payload
//! locations. Used by the fuzz target `neighbour` and by its corpus in the tests. (`fuzzing.rs` has
//! the ring alone.)

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nobounce_memory::shared_file;
use nobounce_protocol::wire::Header;

use super::rendezvous::{self, RingHello};
use nobounce_memory::Source;

use super::{Counted, HEADERS, IncomingRing, MAX_PACKET};
use crate::links::rings::ring::{CAPACITY, FILE_LEN, RingError, RingMemory, TAIL_AT};
use crate::process::fork::NotInherited;

/// One step: operation, position and a number.
const STEP: usize = 11;
/// Length of the exported file.
const SHOWN_LEN: usize = 8192;

/// Descriptors that a peer might pass.
#[derive(Debug)]
struct HostileDescriptors {
    /// The file of the ring, and the peer's mapping of it: shared by all inputs, with stale
    /// contents.
    ring: OwnedFd,
    memory: Arc<RingMemory>,
    exported: OwnedFd,
    /// Each has one defect: seals, length, write access, file type.
    wrong: [OwnedFd; 5],
}

impl HostileDescriptors {
    fn new() -> io::Result<Self> {
        let ring = shared_file::create(FILE_LEN)?;
        let memory = Arc::new(RingMemory::map(&ring)?);
        // SAFETY: the name is a C string; the flags are the call's own.
        let fd = unsafe { libc::memfd_create(c"open".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that has no other owner.
        let unsealed: OwnedFd = unsafe { OwnedFd::from_raw_fd(fd) };
        File::from(unsealed.try_clone()?).set_len(FILE_LEN as u64)?;
        let read_only = File::open(format!("/proc/self/fd/{}", ring.as_raw_fd()))?.into();
        let nothing = File::open("/dev/null")?.into();
        let wrong = [unsealed, shared_file::create(FILE_LEN - 4096)?, read_only, nothing, pair()?.0];
        Ok(Self { ring, memory, exported: shared_file::create(SHOWN_LEN)?, wrong })
    }

    fn choose(&self, number: u8) -> &OwnedFd {
        match number {
            0..150 => &self.ring,
            150..220 => &self.exported,
            _ => &self.wrong[usize::from(number) % self.wrong.len()],
        }
    }
}

thread_local! {
    static DESCRIPTORS: RefCell<Option<HostileDescriptors>> = const { RefCell::new(None) };
}

/// Two ends of a connection as `rings/rendezvous.rs` makes them.
fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: room for two descriptors, which the call fills.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fresh descriptors that have no other owner.
    Ok(ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).into())
}

/// Receives from a peer that sends and writes what the input says.
///
/// # Panics
/// When a packet lies outside its ring and files, or exceeds the maximum length: that is the fuzzed
/// property.
pub fn neighbour(data: &[u8]) {
    DESCRIPTORS.with_borrow_mut(|made| {
        let made = made.get_or_insert_with(|| HostileDescriptors::new().expect("descriptors"));
        made.memory.u64_at(TAIL_AT).store(0, Ordering::Relaxed);
        let (ours, theirs) = pair().expect("a connection");
        let ours = NotInherited::open(|| Ok(ours)).expect("it was opened");
        let incoming = IncomingRing { connection: Some(ours), ..IncomingRing::default() };
        let mut play = Play { made, incoming, theirs: Some(theirs), counted: Counted::default() };
        data.chunks_exact(STEP).for_each(|step| play.step(step));
    });
}

struct Play<'a> {
    made: &'a HostileDescriptors,
    incoming: IncomingRing,
    theirs: Option<OwnedFd>,
    counted: Counted,
}

impl Play<'_> {
    fn step(&mut self, step: &[u8]) {
        let place = u64::from(u16::from_le_bytes([step[1], step[2]]));
        let number = step[3..].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let memory = &self.made.memory;
        match step[0] % 16 {
            0 => self.say(|made, theirs| {
                let src = std::net::Ipv4Addr::from_bits(u32::try_from(number >> 32).unwrap_or(0)).into();
                let _ = rendezvous::send_ring(
                    theirs,
                    RingHello { src, src_port: 4791 },
                    made.choose(step[1]).as_raw_fd(),
                );
            }),
            1 => self.say(|made, theirs| {
                let len = if step[2] < 128 { SHOWN_LEN } else { usize::try_from(number).unwrap_or(0) };
                let _ = rendezvous::send_file(theirs, len, made.choose(step[1]).as_raw_fd());
            }),
            2 => self.say(|_, theirs| rendezvous::ring_doorbell(theirs)),
            // Raw bytes of the input, with a descriptor or without.
            3 => self.say(|made, theirs| {
                let len = usize::from(step[1]) % 40;
                let mut bytes: Vec<u8> = step[3..].iter().copied().cycle().take(len).collect();
                if step[2] < 128 {
                    let _ = rendezvous::send_with(theirs, &mut bytes, made.choose(step[2] * 2).as_raw_fd());
                } else {
                    // SAFETY: live bytes.
                    unsafe { libc::send(theirs.as_raw_fd(), bytes.as_ptr().cast(), len, libc::MSG_NOSIGNAL) };
                }
            }),
            4 if step[1] == 0 => self.theirs = None,
            // Labels, and behind them the location of the payload.
            4..=6 => {
                // SAFETY: a multiple of 64 inside the ring.
                unsafe { memory.at(place * 64).cast::<u64>().write_volatile(number) };
            }
            7 | 8 => {
                // SAFETY: as above, and 8 bytes behind.
                unsafe { memory.at(place * 64).wrapping_add(8).cast::<u64>().write_volatile(number) };
            }
            9 => memory.u64_at(TAIL_AT).store(number, Ordering::Relaxed),
            10 => memory.u64_at(TAIL_AT).store(place * 64, Ordering::Relaxed),
            11 => {
                self.incoming.hear(&mut self.counted);
            }
            12 => {
                if let Some((_, reader)) = &mut self.incoming.ring {
                    reader.release();
                    reader.has_more();
                }
            }
            _ => self.read(),
        }
    }

    fn say(&self, what: impl FnOnce(&HostileDescriptors, &OwnedFd)) {
        if let Some(theirs) = &self.theirs {
            what(self.made, theirs);
        }
    }

    /// As `ShmLink::read` does it.
    fn read(&mut self) {
        let (incoming, mut heard) = (&mut self.incoming, false);
        match incoming.next(&mut self.counted, &mut heard) {
            Err(RingError::Wait) => {}
            Err(RingError::Broken) => *incoming = IncomingRing::default(),
            Ok(lying) => {
                let (_, reader) = incoming.ring.as_ref().expect("it came from a ring");
                let begin = reader.memory().at(0).addr();
                let in_ring = |at: usize, len: usize| at >= begin && at + len <= begin + CAPACITY;
                assert!(
                    lying.len <= MAX_PACKET && lying.head <= lying.len,
                    "{} of {}",
                    lying.head,
                    lying.len
                );
                assert!(in_ring(lying.at.addr(), lying.head));
                // The parser has a private copy of every byte that it reads.
                let mut bytes = vec![0; lying.len];
                // SAFETY: `head` bytes lie in the ring, as was just checked; a peer could change
                // them meanwhile, and does not here.
                unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(lying.at, lying.head) };
                if let Some(whole) = lying.whole {
                    assert!(lying.head <= HEADERS, "headers of {} bytes", lying.head);
                    let lies_well = in_ring(whole.addr(), lying.len) || incoming.files.have(whole, lying.len);
                    assert!(lies_well, "{} bytes at {whole:?}", lying.len);
                    // SAFETY: as above.
                    let payload = unsafe { Source::new(whole, lying.len) }.to_vec();
                    std::hint::black_box(payload.iter().fold(0, |sum, byte| sum ^ byte));
                } else {
                    assert_eq!(lying.head, lying.len);
                }
                std::hint::black_box(Header::parse(&bytes).is_ok());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn step(what: u8, place: u16, number: u64) -> Vec<u8> {
        [&[what][..], &place.to_le_bytes(), &number.to_le_bytes()].concat()
    }

    /// Seeds of the corpus: exchanges that get far, and inputs that must end them.
    fn conversations() -> Vec<(&'static str, Vec<Vec<u8>>)> {
        let (ring, hear, read) = (step(0, 0, 1 << 32), step(11, 0, 0), step(13, 0, 0));
        let exported = step(1, 160, 0);
        // One packet at the beginning of the ring: length, flags and payload location.
        let label = |word: u64| step(5, 0, word);
        let leased = |file: u64, head: u64, offset: u64, len: u64| {
            vec![label(head | 2 << 48 | file << 56), step(7, 0, offset | len << 32)]
        };
        let whole = |before: &[Vec<u8>], packet: Vec<Vec<u8>>, units: u16| {
            let after = vec![step(10, units, 0), hear.clone(), read.clone(), read.clone()];
            [vec![ring.clone()], before.to_vec(), packet, after].concat()
        };
        let file = [exported.clone()];
        vec![
            ("hello", vec![ring.clone(), hear.clone()]),
            ("plain", whole(&[], vec![label(44)], 1)),
            ("long", whole(&[], vec![label(60_000)], 1000)),
            ("sealed", whole(&[], vec![label(44 | 7 << 32 | 1 << 48)], 1)),
            ("too-long", whole(&[], vec![label(70_000)], 2000)),
            ("lent", whole(&file, leased(0, 28, 64, 4000), 1)),
            ("lent-file-not-heard-yet", {
                let mut steps = whole(&file, leased(0, 28, 64, 4000), 1);
                steps.insert(1, hear.clone());
                steps.retain({
                    let mut heard = 0;
                    move |step| {
                        heard += usize::from(step[0] == 11);
                        step[0] != 11 || heard == 1
                    }
                });
                steps
            }),
            ("lent-outside", whole(&file, leased(0, 28, 64, 9000), 1)),
            ("lent-before-begin", whole(&file, leased(0, 28, 8, 40), 1)),
            ("lent-no-such-file", whole(&file, leased(9, 28, 64, 40), 1)),
            ("lent-long-head", whole(&file, leased(0, 200, 300, 40), 4)),
            ("two-rings", vec![ring.clone(), ring.clone(), hear.clone(), read.clone()]),
            ("file-first", vec![exported.clone(), ring.clone(), hear.clone()]),
            ("many-files", [vec![ring.clone()], vec![exported; 40], vec![hear.clone()]].concat()),
            ("hang-up", {
                let steps = [label(44), step(10, 1, 0), step(4, 0, 0), hear.clone(), read.clone(), read];
                [vec![ring], steps.to_vec()].concat()
            }),
            ("nonsense", vec![step(3, 30, 0x6d73_626e), hear.clone(), step(3, 0x8000 | 24, 7), hear.clone()]),
            ("wrong-descriptors", (220..225).flat_map(|kind| [step(0, kind, 1), hear.clone()]).collect()),
        ]
    }

    #[test]
    fn conversations_go_as_far_as_they_should() {
        for (name, steps) in conversations() {
            DESCRIPTORS.with_borrow_mut(|made| {
                let made = made.get_or_insert_with(|| HostileDescriptors::new().unwrap());
                made.memory.u64_at(TAIL_AT).store(0, Ordering::Relaxed);
                let (ours, theirs) = pair().unwrap();
                let connection = Some(NotInherited::open(|| Ok(ours)).unwrap());
                let incoming = IncomingRing { connection, ..IncomingRing::default() };
                let mut play = Play { made, incoming, theirs: Some(theirs), counted: Counted::default() };
                steps.iter().for_each(|step| play.step(step));
                let (reads, refused) = (play.incoming.ring.is_some(), play.counted.refused);
                let kept = !matches!(
                    name,
                    "too-long"
                        | "lent-outside"
                        | "lent-before-begin"
                        | "lent-no-such-file"
                        | "lent-long-head"
                        | "file-first"
                        | "nonsense"
                        | "wrong-descriptors"
                );
                assert_eq!(reads, kept, "{name}, {refused} refused");
            });
        }
    }

    #[test]
    #[ignore = "writes into fuzz/corpus"]
    fn make_corpus() {
        let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/neighbour");
        std::fs::create_dir_all(&corpus).unwrap();
        for (name, steps) in conversations() {
            std::fs::write(corpus.join(name), steps.concat()).unwrap();
        }
    }

    /// Replays the fuzzer's corpus, then as many random inputs; no descriptor stays open.
    #[test]
    fn the_corpus_and_chance_find_nothing() {
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        neighbour(&[]);
        let before = open();
        let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/neighbour");
        let mut known = Vec::new();
        for file in std::fs::read_dir(corpus).expect("fuzz/corpus/neighbour must be there") {
            known.push(std::fs::read(file.unwrap().path()).unwrap());
        }
        assert!(known.len() >= 10, "only {} inputs", known.len());
        known.iter().for_each(|input| neighbour(input));
        let mut chance = 1_u64;
        let mut next = move || {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::from(chance.to_be_bytes()[0])
        };
        for _ in 0..2000 {
            // Splices of corpus inputs with a few bytes changed.
            let mut input = Vec::new();
            for _ in 0..1 + next() % 4 {
                let piece = &known[next() % known.len()];
                let from = next() % (piece.len() / STEP).max(1) * STEP;
                input.extend_from_slice(&piece[from..]);
            }
            for _ in 0..next() % 4 {
                let at = (next() << 8 | next()) % input.len().max(1);
                if at >= input.len() {
                    break; // the corpus has an empty input, too
                }
                input[at] = u8::try_from(next()).unwrap();
            }
            neighbour(&input);
        }
        assert_eq!(open(), before, "descriptors");
    }
}
