//! Arbitrary bytes on the side channel: for the fuzz target `handshake`, and for its corpus in the
//! tests.

use crate::control::fuzz_frames;
use crate::handshake;
use crate::region::RemoteRegion;

/// Reads the bytes as the peer's half of a handshake, in pieces of the length in the first byte,
/// and as the descriptor of a region.
///
/// # Panics
/// When an offer passes the checks that must not: that is the fuzzed property.
pub fn handshake(data: &[u8]) {
    let Some((piece, rest)) = data.split_first() else { return };
    fuzz_frames(rest, usize::from(*piece).max(1), |frame| {
        handshake::fuzz_frame(frame);
        let _ = postcard::from_bytes::<RemoteRegion>(frame).map(|region| format!("{region:?}"));
    });
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_and_chance_find_nothing() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/handshake");
        let files = std::fs::read_dir(folder).expect("fuzz/corpus/handshake must be there");
        let inputs: Vec<_> = files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
        assert!(!inputs.is_empty());
        let mut chance = 5_u64;
        for input in inputs.iter().cycle().take(20_000) {
            super::handshake(input);
            let mut changed = input.clone();
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let [at, bit, ..] = chance.to_be_bytes();
            if let Some(byte) = changed.get_mut(usize::from(at)) {
                *byte ^= 1 << (bit % 8);
            }
            super::handshake(&changed);
        }
    }

    /// Recreates the initial corpus: a hello, an answer, a refusal and the descriptor of a region.
    #[test]
    #[ignore = "writes into fuzz/corpus"]
    fn write_the_corpus() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/handshake");
        std::fs::create_dir_all(&folder).unwrap();
        for (name, frame) in crate::handshake::fuzz_examples() {
            let len = u32::try_from(frame.len()).unwrap().to_le_bytes();
            std::fs::write(folder.join(name), [&[64][..], &len, &frame].concat()).unwrap();
        }
    }
}
