//! A file of gzip's: `/proc/config.gz` is one.

use miniz_oxide::inflate::decompress_to_vec_with_limit;

/// Most bytes that are unpacked; the options of a kernel are 300 KiB.
const MAX: usize = 16 << 20;

/// The text in a file of gzip's; none where it is something else, damaged, or larger than any such
/// file.
pub fn unpack(bytes: &[u8]) -> Option<String> {
    let flags = match bytes.get(..10)? {
        [0x1f, 0x8b, 8, flags, ..] => *flags,
        _ => return None,
    };
    let mut rest = bytes.get(10..)?;
    // Parts of the header that may be there: extra bytes, a name, a comment, a checksum.
    if flags & 0x04 != 0 {
        let length = usize::from(u16::from_le_bytes([*rest.first()?, *rest.get(1)?]));
        rest = rest.get(2 + length..)?;
    }
    for flag in [0x08, 0x10] {
        if flags & flag != 0 {
            let end = rest.iter().position(|byte| *byte == 0)?;
            rest = rest.get(end + 1..)?;
        }
    }
    if flags & 0x02 != 0 {
        rest = rest.get(2..)?;
    }
    let text = decompress_to_vec_with_limit(rest, MAX).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `printf 'CONFIG_A=y\n' | gzip -n`, and the same with a name.
    const PLAIN: &[u8] = &[
        31, 139, 8, 0, 0, 0, 0, 0, 0, 3, 115, 246, 247, 115, 243, 116, 143, 119, 180, 173, 228, 2, 0, 142,
        177, 128, 218, 11, 0, 0, 0,
    ];

    #[test]
    fn a_packed_text_is_unpacked_and_nothing_else_is() {
        assert_eq!(unpack(PLAIN).as_deref(), Some("CONFIG_A=y\n"));
        let mut named = PLAIN.to_vec();
        named[3] = 0x08;
        named.splice(10..10, *b"config\0");
        assert_eq!(unpack(&named).as_deref(), Some("CONFIG_A=y\n"));
        for length in 0..PLAIN.len() - 8 {
            assert_eq!(unpack(&PLAIN[..length]), None, "{length}");
        }
        assert_eq!(unpack(b"CONFIG_A=y\n and no gzip at all"), None);
    }
}
