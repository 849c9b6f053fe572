//! Lists of pieces: what a transfer moves, page by page.

/// Longest piece. Longer ones are split, so that lanes share them and other transfers get their
/// turn.
pub(crate) const MAX_PIECE: u64 = 1 << 20;

/// Most pages of one list, times their repetitions.
const MAX_PIECES: u64 = 1 << 25;

/// Bytes of one piece: from an offset of one region to an offset of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the local view.
    pub local: u64,
    /// Offset in the remote region.
    pub remote: u64,
    /// Number of bytes.
    pub len: u64,
}

/// Why a list is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ListError {
    /// Both sides need one page each.
    #[error("{local} local pages and {remote} remote pages: the lists must have the same length")]
    Count {
        /// Local pages.
        local: usize,
        /// Remote pages.
        remote: usize,
    },
    /// A piece is not inside the local memory.
    #[error("piece {index}: {len} bytes at offset {offset} are not inside the local memory of {size} bytes")]
    Local {
        /// Its place in the list.
        index: usize,
        /// Offset of its first byte.
        offset: u64,
        /// Its bytes.
        len: u64,
        /// Bytes of the local memory.
        size: u64,
    },
    /// A piece is not inside the peer's region.
    #[error("piece {index}: {len} bytes at offset {offset} are not inside the peer's region of {size} bytes")]
    Remote {
        /// Its place in the list.
        index: usize,
        /// Offset of its first byte.
        offset: u64,
        /// Its bytes.
        len: u64,
        /// Bytes of the peer's region.
        size: u64,
    },
    /// There are too many pieces.
    #[error("{pages} pages, repeated, are more than {MAX_PIECES} pieces: submit several lists")]
    TooMany {
        /// Pages in the list.
        pages: usize,
    },
    /// The bytes of all pieces overflow.
    #[error("the bytes of all pieces exceed 64 bits")]
    TooLong,
    /// Offsets overflow.
    #[error("page {index}: its offset exceeds 64 bits")]
    Overflow {
        /// Its place in the list.
        index: usize,
    },
}

/// One more dimension of a strided list: the pieces repeat `count` times, each time that much
/// further. Layers of one allocation are such a dimension; so are the tokens of a page, when only
/// some heads of each token move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repeat {
    /// How often.
    pub count: u64,
    /// Bytes from one repetition to the next, in the local memory.
    pub local_step: u64,
    /// The same in the peer's region.
    pub remote_step: u64,
}

/// Pages of two block tables. Page `n` begins at `n * stride + offset`.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// Page numbers in the local memory.
    pub local: &'a [u64],
    /// Page numbers in the peer's region, one for each local page.
    pub remote: &'a [u64],
    /// Bytes that move of each page.
    pub len: u64,
    /// Bytes from one local page to the next.
    pub local_stride: u64,
    /// Bytes from one remote page to the next.
    pub remote_stride: u64,
    /// Offset of the first byte within the local memory.
    pub local_offset: u64,
    /// Offset of the first byte within the peer's region.
    pub remote_offset: u64,
    /// Further dimensions, the outermost first. Each page is moved once for every combination.
    pub repeats: &'a [Repeat],
}

impl<'a> Pages<'a> {
    /// Whole pages of `len` bytes that follow each other on both sides.
    pub fn whole(local: &'a [u64], remote: &'a [u64], len: u64) -> Self {
        Self {
            local,
            remote,
            len,
            local_stride: len,
            remote_stride: len,
            local_offset: 0,
            remote_offset: 0,
            repeats: &[],
        }
    }

    /// The pieces of all pages, adjacent ones merged.
    ///
    /// # Errors
    /// The lists differ in length, or an offset overflows.
    pub fn pieces(&self) -> Result<Vec<Piece>, ListError> {
        if self.local.len() != self.remote.len() {
            return Err(ListError::Count { local: self.local.len(), remote: self.remote.len() });
        }
        let mut counts = self.repeats.iter().map(|repeat| repeat.count);
        let pieces = counts.try_fold(self.local.len() as u64, u64::checked_mul);
        // Without pages, or with a count of 0, nothing is repeated.
        if pieces == Some(0) || self.repeats.iter().any(|repeat| repeat.count == 0) {
            return Ok(Vec::new());
        }
        if pieces.is_none_or(|pieces| pieces > MAX_PIECES) {
            return Err(ListError::TooMany { pages: self.local.len() });
        }
        let (outer, inner) = self.split_repeats();
        let mut list = Merged::with_capacity(self.local.len());
        for_each_step(outer, (self.local_offset, self.remote_offset), &mut |(local_base, remote_base)| {
            for (index, (&local, &remote)) in self.local.iter().zip(self.remote).enumerate() {
                let at = |page: u64, stride: u64, base: u64| page.checked_mul(stride)?.checked_add(base);
                let start = at(local, self.local_stride, local_base)
                    .zip(at(remote, self.remote_stride, remote_base))
                    .ok_or(ListError::Overflow { index })?;
                for_each_step(inner, start, &mut |(local, remote)| {
                    list.push(Piece { local, remote, len: self.len });
                    Ok(())
                })
                .map_err(|_| ListError::Overflow { index })?;
            }
            Ok(())
        })?;
        Ok(list.pieces)
    }

    /// Repetitions that reach beyond a page come before the pages, the others within each page. So
    /// the pieces of a page are neighbours in the list, and merge where their memory is adjacent.
    fn split_repeats(&self) -> (&'a [Repeat], &'a [Repeat]) {
        let is_outer = |repeat: &&Repeat| repeat.local_step >= self.local_stride;
        let outer = self.repeats.iter().take_while(is_outer).count();
        self.repeats.split_at(outer)
    }
}

/// Calls `each` for every combination of the repetitions.
fn for_each_step(
    repeats: &[Repeat],
    (local, remote): (u64, u64),
    each: &mut dyn FnMut((u64, u64)) -> Result<(), ListError>,
) -> Result<(), ListError> {
    let Some((first, rest)) = repeats.split_first() else { return each((local, remote)) };
    for step in 0..first.count {
        let at = |base: u64, by: u64| step.checked_mul(by)?.checked_add(base);
        let next = at(local, first.local_step).zip(at(remote, first.remote_step));
        for_each_step(rest, next.ok_or(ListError::Overflow { index: 0 })?, each)?;
    }
    Ok(())
}

/// A list under construction.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    pub(crate) pieces: Vec<Piece>,
}

impl Merged {
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self { pieces: Vec::with_capacity(count) }
    }

    /// Appends a piece, or extends the last one that it continues on both sides.
    pub(crate) fn push(&mut self, piece: Piece) {
        if piece.len == 0 {
            return;
        }
        if let Some(last) = self.pieces.last_mut()
            && last.local.checked_add(last.len) == Some(piece.local)
            && last.remote.checked_add(last.len) == Some(piece.remote)
            && let Some(len) = last.len.checked_add(piece.len)
        {
            last.len = len;
        } else {
            self.pieces.push(piece);
        }
    }
}

/// The list with adjacent pieces merged.
pub(crate) fn merged(list: &[Piece]) -> Vec<Piece> {
    let mut merged = Merged::with_capacity(list.len());
    list.iter().for_each(|piece| merged.push(*piece));
    merged.pieces
}

/// Checks that every piece is inside both memories; returns their bytes.
pub(crate) fn check(pieces: &[Piece], local_size: u64, remote_size: u64) -> Result<u64, ListError> {
    let inside = |offset: u64, len: u64, size: u64| offset.checked_add(len).is_some_and(|end| end <= size);
    let mut bytes = 0_u64;
    for (index, &Piece { local, remote, len }) in pieces.iter().enumerate() {
        if !inside(local, len, local_size) {
            return Err(ListError::Local { index, offset: local, len, size: local_size });
        }
        if !inside(remote, len, remote_size) {
            return Err(ListError::Remote { index, offset: remote, len, size: remote_size });
        }
        bytes = bytes.checked_add(len).ok_or(ListError::TooLong)?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn piece(local: u64, remote: u64, len: u64) -> Piece {
        Piece { local, remote, len }
    }

    #[test]
    fn adjacent_pages_are_merged() {
        let pages = Pages::whole(&[3, 4, 5, 9], &[0, 1, 2, 3], 10);
        assert_eq!(pages.pieces().unwrap(), [piece(30, 0, 30), piece(90, 30, 10)]);
        assert_eq!(
            merged(&[piece(0, 8, 8), piece(8, 0, 8), piece(16, 8, 0), piece(16, 8, 8)]),
            [piece(0, 8, 8), piece(8, 0, 16)]
        );
    }

    #[test]
    fn layers_and_head_slices_are_dimensions() {
        // Two layers of 100 bytes here and 50 there; pages of 20 bytes: 2 tokens, of which half the
        // heads move.
        let layers = Repeat { count: 2, local_step: 100, remote_step: 50 };
        let tokens = Repeat { count: 2, local_step: 10, remote_step: 5 };
        let pages = Pages {
            len: 5,
            local_stride: 20,
            remote_stride: 10,
            local_offset: 5,
            repeats: &[layers, tokens],
            ..Pages::whole(&[4, 0], &[1, 0], 0)
        };
        let found = pages.pieces().unwrap();
        let expected = [
            (85, 10),
            (95, 15),
            (5, 0),
            (15, 5), // layer 0
            (185, 60),
            (195, 65),
            (105, 50),
            (115, 55), // layer 1
        ];
        assert_eq!(found, expected.map(|(local, remote)| piece(local, remote, 5)));
    }

    #[test]
    fn a_wrong_list_is_refused() {
        assert_eq!(Pages::whole(&[1], &[], 1).pieces(), Err(ListError::Count { local: 1, remote: 0 }));
        assert_eq!(Pages::whole(&[0, u64::MAX], &[0, 0], 2).pieces(), Err(ListError::Overflow { index: 1 }));
        let many = |count| Repeat { count, local_step: 0, remote_step: 0 };
        let repeated = |repeats: &[Repeat]| Pages { repeats, ..Pages::whole(&[0, 0], &[0, 0], 0) }.pieces();
        assert_eq!(repeated(&[many(u64::MAX)]), Err(ListError::TooMany { pages: 2 }));
        assert_eq!(repeated(&[many(1 << 24), many(3)]), Err(ListError::TooMany { pages: 2 }));
        assert_eq!(repeated(&[many(u64::MAX), many(0)]), Ok(Vec::new()));
        assert_eq!(
            check(&[piece(0, 0, u64::MAX), piece(0, 0, 1)], u64::MAX, u64::MAX),
            Err(ListError::TooLong)
        );
        let far = Repeat { count: 2, local_step: u64::MAX, remote_step: 1 };
        let pages = Pages { local_offset: 1, repeats: &[far], ..Pages::whole(&[0], &[0], 1) };
        assert!(matches!(pages.pieces(), Err(ListError::Overflow { .. })));
        assert!(matches!(
            check(&[piece(0, 0, 4), piece(1, 0, 4)], 4, 9),
            Err(ListError::Local { index: 1, .. })
        ));
        assert!(matches!(check(&[piece(0, u64::MAX, 4)], 4, 9), Err(ListError::Remote { index: 0, .. })));
        assert_eq!(check(&[piece(0, 5, 4)], 4, 9), Ok(4));
    }

    proptest! {
        #[test]
        fn merging_moves_the_same_bytes(list in prop::collection::vec((0_u64..40, 0_u64..40, 0_u64..4), 0..60)) {
            let list: Vec<_> = list.into_iter().map(|(local, remote, len)| piece(local, remote, len)).collect();
            let bytes = |list: &[Piece]| -> Vec<(u64, u64)> {
                list.iter().flat_map(|p| (0..p.len).map(|at| (p.local + at, p.remote + at))).collect()
            };
            prop_assert_eq!(bytes(&merged(&list)), bytes(&list));
        }
    }
}
