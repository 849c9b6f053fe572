//! Copies of rdma-core that are linked into programs.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// A message of libibverbs, which every copy has.
const SIGN: &[u8] = b"no userspace device-specific driver found";
/// Bytes read at a time.
const CHUNK: usize = 1 << 20;

/// Whether the file has a copy of libibverbs in it, and is not libibverbs.
pub(crate) fn has_rdma_core(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if name.starts_with("libibverbs.so") {
        return false;
    }
    let Ok(mut file) = File::open(path) else { return false };
    let (mut room, mut kept) = (vec![0; CHUNK], 0);
    while let Ok(len) = file.read(&mut room[kept..]) {
        if len == 0 {
            break;
        }
        let end = kept + len;
        if room[..end].windows(SIGN.len()).any(|window| window == SIGN) {
            return true;
        }
        // The sign may begin at the end of a chunk.
        kept = end.min(SIGN.len() - 1);
        room.copy_within(end - kept..end, 0);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_found_wherever_it_is() {
        let folder = std::env::temp_dir().join(format!("copies-test-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let at = |name: &str, before: usize, sign: &[u8]| {
            let path = folder.join(name);
            std::fs::write(&path, [&vec![b'n'; before][..], sign, b"rest"].concat()).unwrap();
            has_rdma_core(&path)
        };
        assert!(
            at("a.so", 0, SIGN) && at("b.so", CHUNK - 7, SIGN) && at("libibverbs-1de.so.1", 3 * CHUNK, SIGN)
        );
        assert!(
            !at("c.so", CHUNK, b"")
                && !at("libibverbs.so.1", 5, SIGN)
                && !has_rdma_core(Path::new("/no/such"))
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
