//! Range allocator, lowest first: addresses and offsets.

use std::collections::BTreeMap;

/// The free part of a range. Allocates last-in-first-out where it fits, so that addresses are
/// reused soon.
#[derive(Debug)]
pub(crate) struct Space {
    /// Start and length of every free piece; neighbours are joined.
    free: BTreeMap<usize, usize>,
}

impl Space {
    pub(crate) const fn empty() -> Self {
        Self { free: BTreeMap::new() }
    }

    /// The range from `start` on, all of it free.
    pub(crate) fn new(start: usize, len: usize) -> Self {
        Self { free: BTreeMap::from([(start, len)]) }
    }

    /// The lowest free range of `len` numbers that starts at a multiple of `align`.
    pub(crate) fn take(&mut self, len: usize, align: usize) -> Option<usize> {
        let (start, piece, piece_len) = self.free.iter().find_map(|(&piece, &piece_len)| {
            let start = piece.next_multiple_of(align);
            (start.checked_add(len)? <= piece + piece_len).then_some((start, piece, piece_len))
        })?;
        self.free.remove(&piece);
        if start > piece {
            self.free.insert(piece, start - piece);
        }
        if piece + piece_len > start + len {
            self.free.insert(start + len, piece + piece_len - start - len);
        }
        Some(start)
    }

    /// Takes a range back.
    pub(crate) fn give_back(&mut self, mut start: usize, mut len: usize) {
        if let Some((&before, &before_len)) = self.free.range(..start).next_back()
            && before + before_len == start
        {
            self.free.remove(&before);
            start = before;
            len += before_len;
        }
        if let Some(after_len) = self.free.remove(&(start + len)) {
            len += after_len;
        }
        self.free.insert(start, len);
    }

    /// True where none of its initial `len` numbers is allocated.
    pub(crate) fn is_whole(&self, len: usize) -> bool {
        self.free.values().sum::<usize>() == len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_joined_again() {
        let mut space = Space::new(100, 1000);
        let first = space.take(10, 64).unwrap();
        let second = space.take(10, 64).unwrap();
        let third = space.take(10, 1).unwrap();
        assert_eq!((first, second, third), (128, 192, 100));
        assert!(!space.is_whole(1000));
        for start in [second, first, third] {
            space.give_back(start, 10);
        }
        assert!(space.is_whole(1000));
        assert_eq!(space.free.len(), 1);
        assert_eq!(space.take(1001, 1), None);
        assert_eq!(space.take(1000, 1), Some(100));
    }
}
