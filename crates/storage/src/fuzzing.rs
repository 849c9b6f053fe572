//! Entry points for fuzzing.

use crate::request::Message;

/// A message of a client: it means the same when it is written again.
pub fn message(bytes: &[u8]) {
    if let Some(message) = Message::decode(bytes) {
        assert_eq!(Message::decode(&message.encode()), Some(message));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kinds of messages: there is an input for each.
    const KINDS: usize = 5;

    #[test]
    fn changed_messages_are_refused_or_mean_the_same() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/files");
        let files = std::fs::read_dir(folder).expect("fuzz/corpus/files must be there");
        let mut valid = 0;
        for file in files {
            let path = file.unwrap().path();
            let input = std::fs::read(&path).unwrap();
            valid += usize::from(Message::decode(&input).is_some());
            for at in 0..input.len() {
                for bit in 0..8 {
                    let mut changed = input.clone();
                    changed[at] ^= 1 << bit;
                    message(&changed);
                }
                message(&input[..at]);
            }
        }
        assert!(valid > KINDS, "only {valid} inputs are messages");
    }
}
