//! Arbitrary operations over an arbitrary network match the oracle. The target is in
//! `nobounce_protocol::sim::fuzzing`, shared with the tests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_protocol::sim::fuzzing::operations(data));
