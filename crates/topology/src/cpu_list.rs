//! Lists of CPUs as the kernel writes them: `0-31,64-95`.

use std::collections::BTreeSet;

/// Most CPUs that a list may name: the kernel's own limit.
const MAX: u32 = 8192;

/// The CPUs of a list; none where it is no list.
#[must_use]
pub fn parse(text: &str) -> Option<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX {
            return None;
        }
        found.extend(first..=last);
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(parse("0-2,5").unwrap().into_iter().collect::<Vec<_>>(), [0, 1, 2, 5]);
        assert_eq!(parse("").unwrap().len(), 0);
        for wrong in ["a", "3-1", "0-4000000000", "1-"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
