//! Litmus tests: one for each rule of docs/reference/visibility.md, on a real GPU.
//!
//! Each runs the rule's sequence as the product does, and counts stale, torn or lost words at an
//! observer: there must be none. Then it runs a test-only copy of the sequence without the fence
//! (or the read-back, the wait, the lock). The result is printed; a machine may hide the violation.
//! With `litmus` in `REQUIRE`, a violation that is known to show on an H200 must show.
//!
//! Lines that start with `litmus:` are the result; `tools/gpu-check` puts them into its table.
#![cfg(target_arch = "x86_64")]

mod atomics;
mod completion;
mod gather;
#[path = "../gpu_common/mod.rs"]
mod gpu_common;
mod launch;
mod loads;
mod order;
mod relay;
mod sequences;
mod stage;
mod torn;
