//! Messages for GPU memory that come before their receive is posted; with the stand-in driver.

use std::time::Duration;

use crate::common::{SOON, pair, pattern};
use fake_cuda::client::StandIn;
use nobounce::{ConnectOptions, GpuOptions, WaitError};

/// The receiver says «not ready» and takes the message when it is sent again, whichever way it is
/// placed.
#[test]
fn a_message_that_comes_before_its_receive_is_taken_later() {
    let cuda = StandIn::load();
    let (a, b) = pair("127.76.0.1", &ConnectOptions::default());
    let direct = GpuOptions::default();
    for options in [direct, GpuOptions { staged: true, ..direct }, GpuOptions { window: false, ..direct }] {
        let ours = a.device().register_gpu_on(0, 1 << 20, options).unwrap();
        let theirs = b.device().register_gpu_on(0, 1 << 20, options).unwrap();
        if theirs.is_closed() {
            // Only its owner may use it: what hardware stages is the target of SENDs alone.
            let refused = a.write_imm(&ours, 0..8, &theirs.remote(), 0, 3).unwrap_err();
            assert!(refused.to_string().contains("hardware NIC cannot access"), "{refused}");
        }
        for (round, len) in (0..).zip([8, 4096, 200_000, 8, 4096]) {
            let bytes = pattern(len, round);
            ours.write_at(5, &bytes).unwrap();
            let what = format!("{len} bytes, {}", theirs.paths());
            if !theirs.is_closed() {
                let write = a.write_imm(&ours, 5..5 + len, &theirs.remote(), 9, 3).unwrap();
                let early = a.wait(write, Duration::from_millis(20));
                assert!(matches!(early, Err(WaitError::Timeout { .. })), "{early:?}");
                let receive = b.recv(&theirs, 0..0).unwrap();
                a.wait(write, SOON).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!(b.wait(receive, SOON).unwrap().immediate, Some(3), "{what}");
                assert!(cuda.peek(theirs.addr() + 9, len) == bytes, "{what}");
            }
            // A SEND finds nothing to put its bytes into at first.
            let send = a.send(&ours, 5..5 + len).unwrap();
            assert!(a.wait(send, Duration::from_millis(20)).is_err());
            let receive = b.recv(&theirs, 300_001..300_001 + len).unwrap();
            a.wait(send, SOON).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(b.wait(receive, SOON).unwrap().len as usize, len, "{what}");
            assert!(cuda.peek(theirs.addr() + 300_001, len) == bytes, "{what}");
        }
    }
}
