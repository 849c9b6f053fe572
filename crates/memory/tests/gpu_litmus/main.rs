//! Litmus tests: one for each rule of docs/visibility.md, on a real GPU.
//!
//! Each plays the rule as the product does, and counts what an observer finds old, torn or lost: there must be none. Then it plays
//! it once more with the fence (or the read-back, the wait, the lock) taken out of a copy of the sequence that these tests keep for
//! themselves. What that shows is printed; a machine may hide it. With `litmus` in `REQUIRE`, a violation that is known to show on
//! an H200 must show.
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
