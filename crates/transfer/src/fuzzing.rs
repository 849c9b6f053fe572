//! Arbitrary bytes on the side channel of two agents, and as metadata: for the fuzz target
//! `frames`, and for its corpus in the tests.

use crate::exports::Metadata;
use crate::frame::Frame;

/// Reads the bytes as frames and as metadata. What is accepted is written again, and must mean the
/// same.
///
/// # Panics
/// When it does not: that is the fuzzed property.
pub fn frames(data: &[u8]) {
    let mut rest = data;
    while let Ok(Some((frame, len))) = Frame::parse(rest) {
        assert!(len <= rest.len() && len > 0);
        let mut again = Vec::new();
        frame.append(&mut again);
        assert_eq!(Frame::parse(&again), Ok(Some((frame, again.len()))));
        rest = &rest[len..];
    }
    if let Some(found) = Metadata::decode(data) {
        assert!(Metadata::decode(&found.encode()).is_some());
    }
}

#[cfg(test)]
mod tests {
    use crate::frame::Frame;

    #[test]
    fn changed_frames_are_refused_or_mean_the_same() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/frames");
        let files = std::fs::read_dir(folder).expect("fuzz/corpus/frames must be there");
        let mut valid = 0;
        for file in files {
            let path = file.unwrap().path();
            let input = std::fs::read(&path).unwrap();
            valid += usize::from(matches!(Frame::parse(&input), Ok(Some(_))));
            super::frames(&input);
            for at in 0..input.len() {
                for bit in 0..8 {
                    let mut changed = input.clone();
                    changed[at] ^= 1 << bit;
                    super::frames(&changed);
                }
                super::frames(&input[..at]);
            }
        }
        assert!(valid > 9, "only {valid} inputs are frames: there is one of each kind");
    }
}
