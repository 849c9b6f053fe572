//! Bytes of a file into a buffer: from the page cache, or past it what is not there.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nobounce_memory::FileMapping;

use super::error::FileError;
use super::open::{Direct, File};
use super::pieces::Piece;

/// A file that a long read takes pieces of.
pub(super) struct Source<'a> {
    file: &'a File,
    /// To read past the page cache, and to ask what is in it: no page is mapped for that.
    direct: Option<(&'a Direct, Arc<FileMapping>)>,
}

impl<'a> Source<'a> {
    /// For pieces of `len` bytes at `at`.
    pub(super) fn of(file: &'a File, at: u64, len: usize) -> Self {
        let end = usize::try_from(at).unwrap_or(usize::MAX).saturating_add(len);
        Self { file, direct: file.direct().and_then(|direct| Some((direct, file.mapping(end).ok()?))) }
    }

    /// Of which all pieces count as cached.
    pub(super) const fn cached(file: &'a File) -> Self {
        Self { file, direct: None }
    }

    /// The descriptor for a piece that is not in the page cache, if it can be read past it.
    pub(super) fn cold(&self, piece: &Piece) -> Option<&'a Direct> {
        let (direct, cache) = self.direct.as_ref()?;
        let place = usize::try_from(piece.file).unwrap_or(usize::MAX);
        (!cache.is_resident(place..place.saturating_add(piece.wanted.end))).then_some(*direct)
    }

    /// A failure of this piece.
    pub(super) fn failed(&self, piece: &Piece, why: &'static str) -> FileError {
        self.file.failed("read", piece.file, io::Error::other(why))
    }

    /// Fills the wanted bytes of a buffer, which has room for whole units of the alignment: past
    /// the page cache, if [`cold`](Self::cold) says so.
    pub(super) fn load(
        &self,
        piece: &Piece,
        cold: Option<&Direct>,
        room: &mut [u8],
    ) -> Result<(), FileError> {
        let alignment = cold.map_or(1, |direct| direct.alignment);
        let start = piece.wanted.start - piece.wanted.start % alignment;
        let end = piece.aligned_len(alignment);
        let mut done = start;
        while done < piece.wanted.end {
            let at = piece.file + done as u64;
            let room = &mut room[done..end];
            let read = match cold {
                Some(direct) => direct.file.read_at(room, at),
                None => self.file.read_at(room, at),
            };
            match read {
                Ok(0) => return Err(self.file.failed("read", at, io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.file.failed("read", at, error)),
            }
        }
        Ok(())
    }
}
