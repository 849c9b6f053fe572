//! Messages of unreliable services over an arbitrary network arrive whole or not at all. The target
//! is in `nobounce_protocol::sim::fuzzing`, shared with the tests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_protocol::sim::fuzzing::unreliable(data));
