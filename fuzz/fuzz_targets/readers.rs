//! Any bytes are facts, a log, a configuration space, or a reason why not. The work is in `nobounce_diagnose::fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_diagnose::fuzzing::readers(data));
