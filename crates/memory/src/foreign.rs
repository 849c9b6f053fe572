//! Bytes that another process may change at any time.
//!
//! A Rust reference guarantees that its target does not change, or changes through it alone. A
//! packet ring in shared memory cannot guarantee that. These types name its bytes, and the copy
//! routines of this crate, written in assembly, copy them without references.

use std::marker::PhantomData;
use std::ops::Range;

use crate::copy;

/// Bytes to be copied from. Two copies of the same bytes may differ.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    at: *const u8,
    len: usize,
    lives: PhantomData<&'a [u8]>,
}

impl<'a> Source<'a> {
    /// The `len` bytes from `at` on.
    ///
    /// # Safety
    /// They stay readable for as long as `'a`.
    #[inline]
    pub const unsafe fn new(at: *const u8, len: usize) -> Self {
        Self { at, len, lives: PhantomData }
    }

    /// Their number.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first of them.
    #[inline]
    pub const fn as_ptr(&self) -> *const u8 {
        self.at
    }

    /// A part of them.
    ///
    /// # Panics
    /// They are fewer.
    #[inline]
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        Self { at: self.at.wrapping_add(range.start), len: range.end - range.start, lives: PhantomData }
    }

    /// The bytes behind the first `count`.
    ///
    /// # Panics
    /// They are fewer.
    #[inline]
    #[must_use]
    pub fn skip(&self, count: usize) -> Self {
        self.slice(count..self.len)
    }

    /// Copies them.
    ///
    /// # Panics
    /// The destination has another length.
    #[inline]
    pub fn copy_to(&self, to: &mut [u8]) {
        assert_eq!(to.len(), self.len);
        // SAFETY: `to` is ours and long enough; the bytes are readable, as `new` was promised.
        let rest = unsafe { copy::load(to.as_mut_ptr(), self.at, self.len) };
        debug_assert_eq!(rest, 0);
    }

    /// A copy of them.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.copy_to(&mut bytes);
        bytes
    }
}

impl<'a> From<&'a [u8]> for Source<'a> {
    #[inline]
    fn from(bytes: &'a [u8]) -> Self {
        Self { at: bytes.as_ptr(), len: bytes.len(), lives: PhantomData }
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Source<'a> {
    #[inline]
    fn from(bytes: &'a [u8; N]) -> Self {
        bytes.as_slice().into()
    }
}

impl<'a> From<&'a Vec<u8>> for Source<'a> {
    #[inline]
    fn from(bytes: &'a Vec<u8>) -> Self {
        bytes.as_slice().into()
    }
}

/// Space to copy into. A later read may return other bytes.
#[derive(Debug)]
pub struct Sink<'a> {
    at: *mut u8,
    len: usize,
    lives: PhantomData<&'a mut [u8]>,
}

impl<'a> Sink<'a> {
    /// Writable space: the `len` bytes from `at` on.
    ///
    /// # Safety
    /// They stay writable for as long as `'a`, and nothing in this process refers to them
    /// meanwhile.
    #[inline]
    pub const unsafe fn new(at: *mut u8, len: usize) -> Self {
        Self { at, len, lives: PhantomData }
    }

    /// For how many bytes it is.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it is for none.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it begins.
    #[inline]
    pub const fn as_mut_ptr(&self) -> *mut u8 {
        self.at
    }

    /// A part of it, for a while.
    ///
    /// # Panics
    /// It is shorter.
    #[inline]
    pub fn slice(&mut self, range: Range<usize>) -> Sink<'_> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} bytes", self.len);
        Sink { at: self.at.wrapping_add(range.start), len: range.end - range.start, lives: PhantomData }
    }

    /// Copies bytes to `offset`.
    ///
    /// # Panics
    /// It is too short for them.
    #[inline]
    pub fn put(&mut self, offset: usize, bytes: &[u8]) {
        let room = self.slice(offset..offset + bytes.len());
        // SAFETY: the space is writable and unreferenced in this process, as `new` was promised.
        let rest = unsafe { copy::store(room.at, bytes.as_ptr(), bytes.len()) };
        debug_assert_eq!(rest, 0);
    }
}

impl<'a> From<&'a mut [u8]> for Sink<'a> {
    #[inline]
    fn from(bytes: &'a mut [u8]) -> Self {
        Self { at: bytes.as_mut_ptr(), len: bytes.len(), lives: PhantomData }
    }
}

impl<'a, const N: usize> From<&'a mut [u8; N]> for Sink<'a> {
    #[inline]
    fn from(bytes: &'a mut [u8; N]) -> Self {
        bytes.as_mut_slice().into()
    }
}

impl<'a> From<&'a mut Vec<u8>> for Sink<'a> {
    #[inline]
    fn from(bytes: &'a mut Vec<u8>) -> Self {
        bytes.as_mut_slice().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_copied_where_they_belong() {
        let bytes: Vec<u8> = (0..200).collect();
        let source = Source::from(&bytes);
        assert_eq!(source.slice(3..7).to_vec(), [3, 4, 5, 6]);
        assert_eq!(source.skip(198).to_vec(), [198, 199]);
        assert!(source.skip(200).is_empty());
        let mut room = [0; 8];
        let mut sink = Sink::from(&mut room);
        sink.put(1, &[1, 2]);
        sink.slice(4..8).put(2, &[9, 9]);
        assert_eq!(room, [0, 1, 2, 0, 0, 0, 9, 9]);
    }

    #[test]
    #[should_panic(expected = "of 3 bytes")]
    fn more_than_there_are_is_refused() {
        let _ = Source::from(&[1, 2, 3]).slice(2..4);
    }
}
