//! A same-host peer that sends, passes and writes arbitrary data. The target is in
//! `nobounce_nic::links::shm::hostile`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_nic::links::shm::hostile::neighbour(data));
