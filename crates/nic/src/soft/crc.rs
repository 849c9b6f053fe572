//! CRC-32 over several pieces.

/// Extends a CRC over more bytes, if there is one.
pub(crate) fn extend_crc(crc: Option<u32>, bytes: &[u8]) -> Option<u32> {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc?);
    hasher.update(bytes);
    Some(hasher.finalize())
}
