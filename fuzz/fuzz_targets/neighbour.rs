//! A peer on this machine that says, hands over and writes anything. The work is in `nobounce_nic::links::shm::hostile`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_nic::links::shm::hostile::neighbour(data));
