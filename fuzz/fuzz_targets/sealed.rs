//! Two ends that share a secret, and an attacker between them. The target is in
//! `nobounce_protocol::seal::fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nobounce_protocol::seal::fuzzing::sealed(data));
