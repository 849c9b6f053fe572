//! Whatever messages the connection manager gets, and whatever its user does. The work is in `nobounce_protocol::sim::fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_protocol::sim::fuzzing::management(data));
