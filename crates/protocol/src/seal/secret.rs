//! The shared secret as its file has it.

use std::sync::Arc;

use super::keys::Master;

/// Hex digits of a secret.
const DIGITS: usize = 64;
/// Secrets in a file.
const MOST: usize = 2;

/// The secrets of a device: packets are sent under the first, and taken under both.
#[derive(Clone, Debug)]
pub struct KeyRing {
    pub(super) keys: Vec<Arc<Master>>,
}

/// A file with secrets is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// There is no secret.
    #[error("it has no key. Write one with `openssl rand -hex 32`, and give the same to all devices")]
    Empty,
    /// A line is no secret.
    #[error("line {line} is not a key of {DIGITS} hex digits. `openssl rand -hex 32` writes one")]
    Line {
        /// Counted from 1.
        line: usize,
    },
    /// There are too many.
    #[error(
        "it has {count} keys; at most {MOST} are used: the one to send with, and the one before or after it"
    )]
    TooMany {
        /// How many.
        count: usize,
    },
    /// Both secrets have the same identifier.
    #[error(
        "its two keys have the same identifier {id:#04x} (or are the same). Write another one with `openssl rand -hex 32`"
    )]
    SameId {
        /// The identifier.
        id: u8,
    },
}

impl KeyRing {
    /// Reads a file: one secret a line in hex, the first one to send with. Empty lines, and what
    /// follows a `#`, are ignored.
    ///
    /// # Errors
    /// The text is something else.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let mut keys: Vec<Arc<Master>> = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let master = from_hex(line).and_then(|secret| Master::new(&secret));
            keys.push(Arc::new(master.ok_or(KeyError::Line { line: at + 1 })?));
        }
        match keys.as_slice() {
            [] => Err(KeyError::Empty),
            [first, second] if first.id == second.id => Err(KeyError::SameId { id: first.id }),
            some if some.len() > MOST => Err(KeyError::TooMany { count: some.len() }),
            _ => Ok(Self { keys }),
        }
    }

    /// The identifiers of its secrets, which tell nothing about them.
    pub fn ids(&self) -> Vec<u8> {
        self.keys.iter().map(|key| key.id).collect()
    }

    /// Whether it has this secret.
    pub(super) fn has(&self, master: &Master) -> bool {
        self.keys.iter().any(|key| key.is_same(master))
    }

    pub(super) fn find(&self, id: u8) -> Option<&Arc<Master>> {
        self.keys.iter().find(|key| key.id == id)
    }

    /// The secret to send with.
    pub(super) fn first(&self) -> Option<&Arc<Master>> {
        self.keys.first()
    }
}

fn from_hex(text: &str) -> Option<[u8; DIGITS / 2]> {
    let digits: Vec<u32> = text.chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>()?;
    let bytes: Vec<u8> =
        digits.chunks(2).filter_map(|pair| u8::try_from(pair.first()? * 16 + pair.get(1)?).ok()).collect();
    (digits.len() == DIGITS).then(|| bytes.try_into().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_or_two_secrets_with_comments() {
        let one = "0123456789abcdef".repeat(4);
        let other = "fedcba9876543210".repeat(4);
        let ring = KeyRing::parse(&format!("# ours\n\n{one} # of May\n{}\n", other.to_uppercase())).unwrap();
        assert_eq!(ring.ids().len(), 2);
        assert_eq!(KeyRing::parse(&one).unwrap().ids(), &ring.ids()[..1]);
        assert!(!format!("{ring:?}").contains("0123"), "secrets are not printed");
    }

    #[test]
    fn errors_say_what_is_wrong_and_never_the_secret() {
        let one = "0123456789abcdef".repeat(4);
        let other = "fedcba9876543210".repeat(4);
        let third = "0f1e2d3c4b5a6978".repeat(4);
        for (text, want) in [
            (String::new(), "no key"),
            (format!("\n{one}0"), "line 2"),
            (one.replace('a', "g"), "line 1"),
            (format!("{one}\n{one}"), "same identifier"),
            (format!("{one}\n{other}\n{third}"), "3 keys"),
        ] {
            let error = KeyRing::parse(&text).unwrap_err().to_string();
            assert!(error.contains(want) && !error.contains("0123"), "{error}");
        }
    }
}
