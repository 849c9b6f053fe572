//! A ring with a hostile other end: for the fuzz target of that name, and for its corpus in the
//! tests.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nobounce_memory::shared_file;

use super::rendezvous::RingHello;
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    /// Replays the fuzzer's corpus, then as many random inputs.
    #[test]
    fn the_corpus_and_chance_find_nothing() {
        let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/ring");
        let mut inputs = 0;
        for file in std::fs::read_dir(corpus).expect("fuzz/corpus/ring must be there") {
            super::ring(&std::fs::read(file.unwrap().path()).unwrap());
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
