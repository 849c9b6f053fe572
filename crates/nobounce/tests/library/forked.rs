//! A forked child: the device is its parent's, whatever sort it is.

use crate::common::{SOON, is_hardware, pair, pattern};
use nobounce::ConnectOptions;

/// The child gets an error and releases everything; its parent goes on undisturbed.
#[test]
fn a_child_is_told_and_its_parent_goes_on() {
    let (a, b) = pair("127.175.0.1", &ConnectOptions::default());
    let (local, target) = (a.device().register(100_000).unwrap(), b.device().register(100_000).unwrap());
    let under_way = a.recv(&local, 0..8).unwrap();
    // SAFETY: the child allocates, which the allocators of today's C libraries allow, and ends
    // without running anything of the parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let told = |words: String| words.contains("fork");
        let right = [
            // The software NIC says that the queue pair is in the wrong state, which it is there.
            a.write(&local, 0..8, &target.remote(), 0)
                .is_err_and(|error| !is_hardware() || told(error.to_string())),
            a.wait(under_way, SOON).is_err_and(|error| told(error.to_string())),
            a.device().register(4096).is_err_and(|error| told(error.to_string())),
        ];
        drop((local, target, a, b));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(right.iter().fold(0, |code, one| code * 2 + i32::from(!one))) };
    }
    let mut status = 0;
    // SAFETY: a child of ours, and a valid place.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child was not told, or ended otherwise");
    let bytes = pattern(100_000, 3);
    local.write_at(0, &bytes).unwrap();
    let write = a.write(&local, 0..100_000, &target.remote(), 0).unwrap();
    a.wait(write, SOON).unwrap();
    let mut found = vec![0; 100_000];
    target.read_at(0, &mut found).unwrap();
    assert!(found == bytes);
    let send = b.send(&target, 0..8).unwrap();
    assert_eq!(a.wait(under_way, SOON).unwrap().len, 8);
    b.wait(send, SOON).unwrap();
}
