//! Whatever packets a peer forges, a queue pair of an unreliable service stays whole. The work is in `nobounce_protocol::sim::fuzzing`, where the tests find it too.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_protocol::sim::fuzzing::receiver(data));
