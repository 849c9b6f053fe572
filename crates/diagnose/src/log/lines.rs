//! Lines of a log, each no longer than we can hold.

use std::io::{self, BufRead};

/// Longest line that is parsed, in bytes; longer ones are truncated.
pub const MAX_LINE: usize = 64 << 10;
/// Between two words about the progress, in bytes.
const PROGRESS: u64 = 1 << 20;

/// Calls `take` with each line, without its end. Bytes that are no text are replaced.
pub(super) fn each(
    mut log: impl BufRead,
    mut progress: impl FnMut(u64),
    mut take: impl FnMut(&str),
) -> io::Result<()> {
    let mut line: Vec<u8> = Vec::new();
    let (mut read, mut told) = (0_u64, 0_u64);
    loop {
        let buffer = match log.fill_buf() {
            Ok(buffer) => buffer,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if buffer.is_empty() {
            break;
        }
        let (part, used, ended) = match buffer.iter().position(|byte| *byte == b'\n') {
            Some(at) => (&buffer[..at], at + 1, true),
            None => (buffer, buffer.len(), false),
        };
        let room = MAX_LINE.saturating_sub(line.len());
        line.extend_from_slice(&part[..part.len().min(room)]);
        log.consume(used);
        read += used as u64;
        if ended {
            give(&line, &mut take);
            line.clear();
        }
        if read - told >= PROGRESS {
            told = read;
            progress(read);
        }
    }
    if !line.is_empty() {
        give(&line, &mut take);
    }
    progress(read);
    Ok(())
}

fn give(line: &[u8], take: &mut impl FnMut(&str)) {
    match std::str::from_utf8(line) {
        Ok(text) => take(text.trim_end_matches('\r')),
        Err(_) => take(&String::from_utf8_lossy(line)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_any_kind() {
        let mut seen = Vec::new();
        let long = "x".repeat(MAX_LINE * 2);
        let text = [b"one\r\n\n".as_slice(), b"\xff\xfe two\n", long.as_bytes(), b"\nlast"].concat();
        each(io::BufReader::with_capacity(7, &text[..]), |_| {}, |line| seen.push(line.to_owned())).unwrap();
        assert_eq!(seen.len(), 5);
        assert_eq!(
            (seen[0].as_str(), seen[1].as_str(), seen[3].len(), seen[4].as_str()),
            ("one", "", MAX_LINE, "last")
        );
    }
}
