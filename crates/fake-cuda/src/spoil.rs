//! Silent copy corruption for processes that cannot call the knobs: a check of the bytes must
//! detect it.
//!
//! `FAKE_CUDA_SPOIL=lose:e220a8397b1dcdaf:1` drops the second copy to the device (it lets one pass)
//! whose first 8 bytes are that little-endian word. `flip` in place of `lose` changes the byte in
//! its middle.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::memory::Place;

const VARIABLE: &str = "FAKE_CUDA_SPOIL";

/// Fate of a copy to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Good,
    Lost,
    Flipped,
}

#[derive(Debug, PartialEq, Eq)]
struct Asked {
    fate: Fate,
    word: u64,
    let_pass: u64,
}

/// Fate of a copy with these bytes.
pub(crate) fn fate(from: &Place, len: usize) -> Fate {
    static ASKED: OnceLock<Option<Asked>> = OnceLock::new();
    static SEEN: AtomicU64 = AtomicU64::new(0);
    let asked = ASKED.get_or_init(|| std::env::var(VARIABLE).ok().map(|text| parse(&text)));
    let Some(asked) = asked.as_ref().filter(|_| len >= size_of::<u64>()) else { return Fate::Good };
    let mut first = [0; size_of::<u64>()];
    from.read(first.as_mut_ptr(), first.len());
    if u64::from_le_bytes(first) != asked.word {
        return Fate::Good;
    }
    if SEEN.fetch_add(1, Ordering::SeqCst) == asked.let_pass { asked.fate } else { Fate::Good }
}

fn parse(text: &str) -> Asked {
    let mut parts = text.split(':');
    let mut next = || parts.next().unwrap_or_default();
    let fate = match next() {
        "lose" => Fate::Lost,
        "flip" => Fate::Flipped,
        // A test that spoils nothing would say that all is well.
        other => panic!("{VARIABLE}: `{other}` is neither lose nor flip"),
    };
    let word = u64::from_str_radix(next(), 16).expect("FAKE_CUDA_SPOIL: the second part is 16 hex digits");
    let let_pass = next().parse().expect("FAKE_CUDA_SPOIL: the third part is a number");
    Asked { fate, word, let_pass }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_understood() {
        let asked = parse("flip:e220a8397b1dcdaf:1");
        assert_eq!(asked, Asked { fate: Fate::Flipped, word: 0xe220_a839_7b1d_cdaf, let_pass: 1 });
        assert_eq!(parse("lose:0:0").fate, Fate::Lost);
    }
}
