//! Messages of unreliable services over any network are whole or absent. The work is in `nobounce_protocol::sim::fuzzing`, where the tests find it too.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_protocol::sim::fuzzing::unreliable(data));
