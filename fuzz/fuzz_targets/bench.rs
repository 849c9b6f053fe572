//! Arbitrary messages to the serving end of a bench. The target is in
//! `nobounce_cli::fuzzing`, shared with the tests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_cli::fuzzing::bench(data));
