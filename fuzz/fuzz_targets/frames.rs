//! Arbitrary bytes on the side channel of two agents, and as metadata. The target is in
//! `nobounce_transfer::fuzzing`, shared with the tests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_transfer::fuzzing::frames(data));
