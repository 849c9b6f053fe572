//! Arbitrary handovers, greetings and probes of another process of our user: for the fuzz target
//! `handover`, and for its corpus in the tests.

use super::handover::{self, GroBurst};
use super::slot;
use super::udp;

/// Decodes one message as a device does, and splits what it carries. The first byte is our slot.
///
/// # Panics
/// When packets are lost, invented or reordered on the way: that is the fuzzed property.
pub fn handover(data: &[u8]) {
    let Some((number, message)) = data.split_first() else { return };
    if let Some(slot) = slot::greeting(message) {
        assert_eq!(message.last(), Some(&slot));
        assert!(handover::decode(*number, message).is_none(), "a greeting is no handover");
    }
    let Some(burst) = handover::decode(*number, message) else { return };
    assert!(message.ends_with(burst.bytes) && burst.segment > 0);
    assert_eq!(handover::decode(number.wrapping_add(1), message), None);
    let again = handover::encode(*number, &burst).expect("it was decoded");
    assert_eq!(handover::decode(*number, &[&again[..], burst.bytes].concat()), Some(burst));
    let (mut parts, mut packets) = (Vec::new(), 0);
    udp::fuzz_split(burst, &mut |part: GroBurst<'_>| {
        assert_eq!(part.segment, burst.segment);
        packets += part.packets();
        parts.extend_from_slice(part.bytes);
    });
    assert!(parts == burst.bytes && packets == burst.packets());
    udp::fuzz_probe(&burst);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_and_chance_find_nothing() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/handover");
        let files = std::fs::read_dir(folder).expect("fuzz/corpus/handover must be there");
        let inputs: Vec<_> = files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
        assert!(!inputs.is_empty());
        let mut chance = 3_u64;
        for input in inputs.iter().cycle().take(20_000) {
            super::handover(input);
            let mut changed = input.clone();
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let [at, bit, ..] = chance.to_be_bytes();
            if let Some(byte) = changed.get_mut(usize::from(at)) {
                *byte ^= 1 << (bit % 8);
            }
            super::handover(&changed);
        }
    }
}
