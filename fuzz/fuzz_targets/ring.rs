//! A ring in shared memory whose other end does anything. The work is in `nobounce_nic::links::shm::fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_nic::links::shm::fuzzing::ring(data));
