//! Files that become shorter while they are sent.

use std::fs::OpenOptions;
use std::time::Instant;

use nobounce_storage::ClientError;

use crate::{Folder, MIB, SOON, bytes_of, client, range};

/// The client learns which file failed; the server serves the next request of another client, and
/// the file as it is now.
#[test]
fn a_file_that_is_truncated_while_it_is_sent_is_an_error_that_names_it() {
    const LEN: usize = 16 * MIB;
    /// Times that the file is sent: it takes long enough to be truncated meanwhile.
    const TIMES: usize = 100;
    let folder = Folder::new("truncated");
    let other = folder.add("other", MIB);
    let server = folder.serve(|_| {});
    // Within a page and between two.
    for left in [MIB + 100, 2 * MIB, 0] {
        let bytes = folder.add("file", LEN);
        let client = client(&server);
        let memory = client.register(LEN).unwrap();
        let ranges = vec![range(0, LEN, 0); TIMES];
        let read = client.read(&memory, &[("file", &ranges)]).unwrap();
        let begun = Instant::now();
        while bytes_of(&memory, LEN - 8, 8) != bytes[LEN - 8..] {
            assert!(!read.is_done() && begun.elapsed() < SOON, "nothing arrives: {:?}", read.wait(SOON));
        }
        OpenOptions::new().write(true).open(folder.0.join("file")).unwrap().set_len(left as u64).unwrap();
        let error = match read.wait(SOON) {
            Err(error) => error.to_string(),
            Ok(moved) => panic!("{moved} bytes of a file of {left} bytes"),
        };
        assert!(error.contains("\"file\""), "{left}: {error}");
        // Every page that was there in whole has arrived before.
        assert!(bytes_of(&memory, 0, left.min(MIB)) == bytes[..left.min(MIB)], "{left}");

        let next = self::client(&server);
        let memory = next.register(LEN).unwrap();
        let read = |path, ranges: &[_]| next.read(&memory, &[(path, ranges)]).unwrap().wait(SOON);
        assert_eq!(read("other", &[range(0, MIB, 0)]).unwrap(), MIB as u64);
        assert!(bytes_of(&memory, 0, MIB) == other);
        let refused = read("file", &[range(0, LEN, 0)]);
        assert!(
            matches!(&refused, Err(ClientError::Refused(reason)) if reason.contains("not inside of \"file\"")),
            "{refused:?}"
        );
        if left > 0 {
            assert_eq!(read("file", &[range(0, left, 0)]).unwrap(), left as u64);
            assert!(bytes_of(&memory, 0, left) == bytes[..left]);
        }
    }
}
