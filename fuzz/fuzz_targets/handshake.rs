//! Arbitrary bytes on the side channel of the library. The target is in
//! `nobounce::fuzzing`, shared with the tests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce::fuzzing::handshake(data));
