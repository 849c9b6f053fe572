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

    fn inputs() -> Vec<Vec<u8>> {
        let frames = [
            Frame::Hello { version: 1, name: "prefill".to_owned(), generation: 7 },
            Frame::Withdraw { name: "cache".to_owned(), version: 3 },
            Frame::Version { version: 4 },
            Frame::Announce { id: 5, tag: b"request 5".to_vec() },
            Frame::Done { id: 5, bytes: 1 << 20 },
            Frame::Failed { id: 6, is_aborted: true, reason: "the peer is gone".to_owned() },
            Frame::KeepAlive,
            Frame::Bye,
        ];
        let mut all = Vec::new();
        frames.iter().for_each(|frame| frame.append(&mut all));
        let single = frames.iter().map(|frame| {
            let mut bytes = Vec::new();
            frame.append(&mut bytes);
            bytes
        });
        single.chain([all.clone()]).collect()
    }

    #[test]
    fn changed_frames_are_refused_or_mean_the_same() {
        for input in inputs() {
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
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/frames");
        for file in std::fs::read_dir(folder).expect("fuzz/corpus/frames must be there") {
            super::frames(&std::fs::read(file.unwrap().path()).unwrap());
        }
    }
}
