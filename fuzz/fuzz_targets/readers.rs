//! Any bytes are facts, a log, a configuration space, or a reason why not. The work is in `nobounce_topology::fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_topology::fuzzing::readers(data));
