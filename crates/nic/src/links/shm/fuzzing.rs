//! A ring and leased chunks with a hostile other end: for the fuzz targets of these names, and for
//! their corpora in the tests.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nobounce_memory::{ChunkPool, HostBuffer, SharedChunk, SharedPlace, shared_file};

use super::rendezvous::RingHello;
use crate::links::rings::leases::Leases;
use crate::links::rings::ring::{
    CAPACITY, FILE_LEN, HEAD_AT, Label, RingError, RingMemory, RingPacket, RingReader, RingWriter, TAIL_AT,
};

/// One step: operation, position and a number.
const STEP: usize = 11;

thread_local! {
    /// One mapping for all inputs; stale contents are valid test data.
    static MEMORY: RefCell<Option<Arc<RingMemory>>> = const { RefCell::new(None) };
}

/// Reads and writes one ring while both peers write the positions and labels of the input.
///
/// # Panics
/// When a packet lies outside the ring: that is the fuzzed property.
pub fn ring(data: &[u8]) {
    let _ = RingHello::decode(data);
    let memory = MEMORY.with_borrow_mut(|memory| {
        let make = || {
            Arc::new(RingMemory::map(&shared_file::create(FILE_LEN).expect("a memfd")).expect("a mapping"))
        };
        Arc::clone(memory.get_or_insert_with(make))
    });
    for at in [HEAD_AT, TAIL_AT] {
        memory.u64_at(at).store(0, Ordering::Relaxed);
    }
    let begin = memory.at(0).addr();
    let inside = |at: usize, len: usize| at >= begin && at + len <= begin + CAPACITY;
    let (mut reader, mut writer) =
        (Some(RingReader::new(Arc::clone(&memory))), Some(RingWriter::new(Arc::clone(&memory))));
    for step in data.chunks_exact(STEP) {
        let place = u64::from(u16::from_le_bytes([step[1], step[2]]));
        let number = step[3..].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let len = usize::try_from(number % 5000).unwrap_or(0);
        match step[0] % 8 {
            0 => memory.u64_at(TAIL_AT).store(number, Ordering::Relaxed),
            1 => memory.u64_at(HEAD_AT).store(number, Ordering::Relaxed),
            // SAFETY: a multiple of 64 inside the ring.
            2 => unsafe { memory.at(place * 64).cast::<u64>().write_volatile(number) },
            3 => memory.u64_at(TAIL_AT).store(place * 64, Ordering::Relaxed),
            4 | 5 => {
                if let Some(open) = &mut reader {
                    match open.pop() {
                        Ok(RingPacket { at, len, .. }) => {
                            assert!(inside(at.addr(), len), "{len} bytes at {at:?}")
                        }
                        Err(RingError::Wait) => open.release(),
                        Err(RingError::Broken) => reader = None,
                    }
                }
            }
            _ => {
                if let Some(open) = &mut writer {
                    match open.reserve(len) {
                        Ok(at) => assert!(inside(at.addr(), len), "{len} bytes at {at:?}"),
                        Err(RingError::Wait) => {}
                        Err(RingError::Broken) => writer = None,
                    }
                }
                if step[0] % 8 == 7
                    && let Some(open) = &mut writer
                    && open.push([&vec![7; len], &[], &[]], Label { number: 1, has_icrc: true }).is_ok()
                {
                    open.publish();
                }
            }
        }
    }
}

/// Chunks, and how many references each has.
#[derive(Debug)]
struct Pool {
    references: [AtomicUsize; POOL],
    file: OwnedFd,
}

const POOL: usize = 16;
const CHUNK: usize = 64;

// SAFETY: the bytes are a buffer of the caller's, which outlives all chunks; nothing writes them.
unsafe impl ChunkPool for Pool {
    fn hold(&self, index: usize) {
        self.references[index].fetch_add(1, Ordering::Relaxed);
    }

    fn release(&self, index: usize) {
        assert!(self.references[index].fetch_sub(1, Ordering::Relaxed) > 0, "released twice");
    }

    fn place(&self, index: usize) -> Option<SharedPlace<'_>> {
        // Every other chunk lies in a file of its own name.
        let name = if index.is_multiple_of(2) { 0 } else { index as u64 };
        Some(SharedPlace { file: self.file.as_fd(), name, file_len: POOL * CHUNK, offset: index * CHUNK })
    }
}

/// Leases chunks while the reader reports the positions of the input: a chunk stays leased until a
/// plausible position lies behind it.
///
/// # Panics
/// When a chunk comes back too early, or too many are leased: that are the fuzzed properties.
pub fn leases(data: &[u8]) {
    let name = format!("nobounce/fuzz/{}", std::process::id());
    let mut listener = crate::links::unix::Listener::bind(&name).expect("a socket").expect("a free name");
    let there = Arc::new(crate::links::unix::connect(&name).expect("a connection"));
    let here = listener.accept().expect("a connection");
    let memory =
        Arc::new(RingMemory::map(&shared_file::create(FILE_LEN).expect("a memfd")).expect("a mapping"));
    let buffer = HostBuffer::new(POOL * CHUNK).expect("memory");
    let references = std::array::from_fn(|_| AtomicUsize::new(0));
    let pool = Arc::new(Pool { references, file: shared_file::create(POOL * CHUNK).expect("a memfd") });
    let mut writer = RingWriter::new(Arc::clone(&memory));
    let mut leases = Leases::new(there);
    // Chunk and the position that ends its lease, in the order of leasing.
    let mut leased: VecDeque<(usize, u64)> = VecDeque::new();
    for step in data.chunks_exact(STEP) {
        let number = step[3..].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let index = usize::from(step[1]) % POOL;
        match step[0] % 4 {
            0 => memory.u64_at(HEAD_AT).store(number, Ordering::Relaxed),
            1 => {
                let before = leased.front().map_or(0, |(_, until)| *until);
                memory.u64_at(HEAD_AT).store(before + u64::from(step[2]), Ordering::Relaxed);
            }
            2 => {
                let _ = writer.push([&[7; 32], &[], &[]], Label { number: 1, has_icrc: true });
            }
            _ => {
                // SAFETY: a part of the buffer, which outlives the chunk.
                let chunk = unsafe {
                    let start = buffer.as_mut_ptr().add(index * CHUNK);
                    SharedChunk::new(pool.clone() as Arc<dyn ChunkPool>, index, start, CHUNK)
                };
                if let Some((_, offset)) = leases.show(&writer, &chunk, 0) {
                    assert_eq!(offset as usize, index * CHUNK);
                    let until = writer.position();
                    leases.hold(chunk, until);
                    match leased.back_mut().filter(|(last, _)| *last == index) {
                        Some(last) => last.1 = until,
                        None => leased.push_back((index, until)),
                    }
                }
            }
        }
        let read = memory.read_up_to();
        leases.take_back(&writer);
        while read <= writer.position() && leased.front().is_some_and(|(_, until)| *until <= read) {
            leased.pop_front();
        }
        for (index, count) in pool.references.iter().enumerate() {
            let expected = leased.iter().filter(|(leased, _)| *leased == index).count();
            assert_eq!(count.load(Ordering::Relaxed), expected, "chunk {index}");
        }
    }
    // The peer is gone: nothing stays leased.
    drop(here);
    leases.part(&writer);
    drop(leases);
    assert!(pool.references.iter().all(|count| count.load(Ordering::Relaxed) == 0), "a chunk stays leased");
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    fn corpus(name: &str) -> impl Iterator<Item = Vec<u8>> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
        let files = std::fs::read_dir(folder).unwrap_or_else(|_| panic!("no fuzz/corpus/{name}"));
        files.map(|file| std::fs::read(file.unwrap().path()).unwrap())
    }

    #[test]
    fn chunks_come_back_when_they_were_read() {
        assert!(corpus("leases").map(|input| super::leases(&input)).count() > 0);
        let mut chance = 7_u64;
        for len in 0..200 {
            let mut next = || {
                chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                chance.to_be_bytes()[0]
            };
            super::leases(&(0..len * 10).map(|_| next()).collect::<Vec<u8>>());
        }
    }

    /// Replays the fuzzer's corpus, then as many random inputs.
    #[test]
    fn the_corpus_and_chance_find_nothing() {
        let mut inputs = 0;
        for input in corpus("ring") {
            super::ring(&input);
            inputs += 1;
        }
        assert!(inputs > 0);
        let mut chance = 1_u64;
        for len in 0..3000 {
            let mut next = || {
                chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                chance.to_be_bytes()[0]
            };
            // Half-valid positions get furthest.
            let mut bytes: Vec<u8> = (0..len).map(|_| next()).collect();
            for step in bytes.chunks_exact_mut(super::STEP).step_by(2) {
                step[5..].fill(0);
                step[3] &= 0xc0;
            }
            super::ring(&bytes);
        }
    }
}
