//! Leased chunks whose reader reports arbitrary positions. The target is in
//! `nobounce_nic::links::shm::fuzzing`, shared with the tests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_nic::links::shm::fuzzing::leases(data));
