//! Traffic between regions of memory on a real GPU: right bytes and known paths, whatever other people's kernels, captures and
//! streams do meanwhile, and errors instead of crashes where memory or its context goes away.
//!
//! The stand-in driver runs most of it too (`NOBOUNCE_CUDA=.../libfake_cuda.so`): bytes are then filled and checked by copies instead
//! of kernels, and nothing is said about a GPU.
#![allow(clippy::cast_possible_truncation)] // sizes and counts of tests

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../memory/tests/gpu_common/mod.rs"]
mod gpu_common;
// Allocates as other people's programs do.
#[path = "../../../memory/examples/gpu_facts/memory.rs"]
#[allow(dead_code, reason = "the example uses more of it")]
mod memory;

mod atomics;
mod capture;
mod contexts;
mod cycles;
mod default_stream;
mod flush;
mod fork;
mod freed;
mod imported;
mod itself;
mod kinds;
mod occupancy;
mod occupied;
mod registrations;
mod rig;
mod sizes;
mod spinning;
mod traffic;
