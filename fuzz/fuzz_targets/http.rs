//! Arbitrary requests to the server of `nobounce ui`, without its token. The target is in
//! `nobounce_cli::fuzzing`, shared with the tests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_cli::fuzzing::http(data));
