//! Handovers, greetings and probes of another process. The target is in
//! `nobounce_nic::links::fuzzing`, shared with the tests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_nic::links::fuzzing::handover(data));
