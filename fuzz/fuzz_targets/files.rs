//! Arbitrary bytes as a request to a file server. The target is in `nobounce_storage::fuzzing`,
//! shared with the tests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_storage::fuzzing::message(data));
