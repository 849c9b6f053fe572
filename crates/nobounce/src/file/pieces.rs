//! Pieces of a read: aligned ranges of a file, and where their bytes go.

use std::ops::Range;

/// Bytes that are read at once, as by the raw reads of `nobounce bench --files`.
pub(super) const PIECE: usize = 1 << 20;

/// A part of a read. Its file range begins at a multiple of the alignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Offset in the file that the buffer's first byte has.
    pub(super) file: u64,
    /// The wanted bytes of the buffer.
    pub(super) wanted: Range<usize>,
    /// Offset in the memory of the first wanted byte.
    pub(super) memory: usize,
}

impl Piece {
    /// Bytes to read in whole units of the alignment.
    pub(super) fn aligned_len(&self, alignment: usize) -> usize {
        self.wanted.end.next_multiple_of(alignment)
    }
}

/// Cuts `len` bytes of a file at `at`, which go to `memory`, at multiples of [`PIECE`] in the file.
pub(super) fn pieces(at: u64, memory: usize, len: usize) -> impl Iterator<Item = Piece> {
    let lead = usize::try_from(at % PIECE as u64).unwrap_or(0);
    let (begin, end) = (at - lead as u64, lead + len);
    (0..end.div_ceil(PIECE)).filter(move |_| len > 0).map(move |number| {
        let start = number * PIECE;
        let from = lead.saturating_sub(start);
        let wanted = from..PIECE.min(end - start);
        Piece { file: begin + start as u64, memory: memory + start + from - lead, wanted }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_read_once() {
        for (at, len) in [(0, 1), (0, PIECE), (7, PIECE), (PIECE - 1, 2), (3 * PIECE + 5, 2 * PIECE), (9, 0)]
        {
            let (mut memory, mut file) = (100, at as u64);
            for piece in pieces(at as u64, 100, len) {
                assert_eq!(piece.file % PIECE as u64, 0);
                assert_eq!(piece.file + piece.wanted.start as u64, file);
                assert_eq!(piece.memory, memory);
                assert!(!piece.wanted.is_empty() && piece.wanted.end <= PIECE);
                memory += piece.wanted.len();
                file += piece.wanted.len() as u64;
            }
            assert_eq!(memory, 100 + len);
        }
        let piece = pieces(512, 0, 100).next().unwrap();
        assert_eq!((piece.file, piece.wanted.clone(), piece.aligned_len(512)), (0, 512..612, 1024));
    }
}
