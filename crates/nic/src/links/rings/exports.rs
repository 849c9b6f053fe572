//! Files that a peer has exported, mapped for reading.

use std::os::fd::OwnedFd;

use nobounce_memory::shared_file;

use super::leases::MOST_FILES;
use super::mapping::SharedMapping;
use super::ring::Elsewhere;

/// Maximum length of an exported file. Ours have 17 MiB.
const MOST_BYTES: usize = 256 << 20;

/// All files of one peer, in order of export.
#[derive(Debug, Default)]
pub(in crate::links) struct ExportedFiles(Vec<SharedMapping>);

impl ExportedFiles {
    /// Maps one more file. Returns whether it is valid.
    pub(in crate::links) fn take(&mut self, file: &OwnedFd, len: usize) -> bool {
        let sound = self.0.len() < MOST_FILES && len <= MOST_BYTES && shared_file::is_sound(file, len);
        sound
            && SharedMapping::new(file, len, libc::PROT_READ).is_ok_and(|exported| {
                self.0.push(exported);
                true
            })
    }

    /// Whether that file was exported.
    pub(in crate::links) fn knows(&self, file: u8) -> bool {
        usize::from(file) < self.0.len()
    }

    /// Whether that byte range lies in one of the files.
    pub(in crate::links) fn have(&self, at: *const u8, len: usize) -> bool {
        let inside = |file: &SharedMapping| {
            let begin = file.at(0).addr();
            at.addr() >= begin && at.addr() + len <= begin + file.len()
        };
        self.0.iter().any(inside)
    }

    /// Virtual start of a packet whose payload is in a file: `head` bytes, the headers, before the
    /// payload. `None` if any of it lies outside the file.
    pub(in crate::links) fn find(&self, head: usize, elsewhere: Elsewhere) -> Option<*const u8> {
        let exported = self.0.get(usize::from(elsewhere.file))?;
        let start = usize::try_from(elsewhere.offset).ok()?.checked_sub(head)?;
        let end = start.checked_add(head)?.checked_add(usize::try_from(elsewhere.len).ok()?)?;
        (end <= exported.len()).then(|| exported.at(start).cast_const())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_a_file_is_found_and_no_file_that_could_end_us_is_taken() {
        let mut files = ExportedFiles::default();
        let file = shared_file::create(8192).unwrap();
        for len in [0, 4096, 8191, 8193, usize::MAX] {
            assert!(!files.take(&file, len), "{len}");
        }
        assert!(files.take(&file, 8192) && files.knows(0) && !files.knows(1));
        let at = |head, file, offset, len| files.find(head, Elsewhere { file, offset, len });
        let begin = at(64, 0, 64, 8192 - 64).expect("all of it");
        assert_eq!(at(28, 0, 100, 4), Some(begin.wrapping_add(72)));
        for (head, file, offset, len) in [
            (64, 0, 63, 10),
            (64, 0, 64, 8192 - 63),
            (64, 1, 64, 10),
            (64, 0, 8192, 1),
            (64, 0, u32::MAX, u32::MAX),
        ] {
            assert_eq!(at(head, file, offset, len), None, "{head} {file} {offset} {len}");
        }
        for _ in 1..MOST_FILES {
            assert!(files.take(&file, 8192));
        }
        assert!(!files.take(&file, 8192), "as many as there may be");
    }
}
