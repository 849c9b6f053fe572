//! Arbitrary bytes parse to facts, a log, a configuration space, or an error. The target is in
//! `nobounce_diagnose::fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_diagnose::fuzzing::readers(data));
