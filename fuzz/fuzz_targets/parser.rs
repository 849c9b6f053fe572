//! Arbitrary bytes parse to a packet or an error. The target is in
//! `nobounce_protocol::sim::fuzzing`, shared with the tests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_protocol::sim::fuzzing::parser(data));
