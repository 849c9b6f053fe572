//! Memory that another process allocated and shares by CUDA IPC, as both ends of traffic: what
//! arrives for it is seen by its owner.

use std::env;

use crate::common::{child, patterns};
use crate::kinds::{self, go_the_way_that_was_said};
use crate::memory;
use crate::rig::{self, Rig};

const LEN: usize = 4 << 20;
const HANDLE: &str = "NOBOUNCE_TEST_IPC_HANDLE";
const NAME: &str = "imported::bytes_reach_their_owner";

#[test]
fn bytes_reach_their_owner() {
    let Some(rig) = Rig::new(NAME) else { return };
    if let Ok(handle) = env::var(HANDLE) {
        let memory = memory::imported(&rig.gpu, rig.primary(), &handle).unwrap();
        go_the_way_that_was_said("imported by IPC", "127.85.89.1", memory.addr, memory.len);
        return;
    }
    let memory = memory::cuda_malloc(&rig.gpu, rig.primary(), LEN).unwrap();
    let words = memory::ipc_words(&memory).expect("an IPC handle of cudaMalloc memory");
    let handle: String = words.iter().map(|word| format!("{word:08x}")).collect();
    // It has a watchdog of its own.
    let importer = child(NAME, "importer").env(HANDLE, handle).output().unwrap();
    let told = String::from_utf8_lossy(&importer.stdout);
    told.lines()
        .filter_map(|line| line.find("figure: ").map(|at| &line[at..]))
        .for_each(|line| println!("{line}"));
    assert!(importer.status.success(), "{told}\n{}", String::from_utf8_lossy(&importer.stderr));
    assert!(told.contains("imported by IPC: "), "the other process did not register: {told}");
    let (seed, len) = kinds::LAST;
    let seen = rig::get(&rig.gpu, rig.primary(), memory.addr, len);
    assert!(seen == patterns(seed, 0, len), "its owner sees other bytes than were written to it");
}
