//! A shared-memory ring whose other end misbehaves arbitrarily. The target is in
//! `nobounce_nic::links::shm::fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_nic::links::shm::fuzzing::ring(data));
