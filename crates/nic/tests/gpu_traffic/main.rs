//! Traffic between regions of memory on a real GPU. Bytes and paths must be right beside any
//! application kernels, captures and streams. Memory or a context that goes away gives errors, not
//! crashes.
//!
//! The stand-in driver runs most of it too (`NOBOUNCE_CUDA=.../libfake_cuda.so`): copies instead of
//! kernels then fill and check the bytes, and the results say nothing about a GPU.
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
