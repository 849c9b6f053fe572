//! Arbitrary messages to the connection manager, and arbitrary calls of its user. The target is in
//! `nobounce_protocol::sim::fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_protocol::sim::fuzzing::management(data));
