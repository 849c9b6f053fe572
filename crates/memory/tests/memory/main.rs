//! Host memory, and GPU memory on the stand-in driver, by theme. The tests that need a GPU are
//! programs of their own.

#[path = "../common/mod.rs"]
mod common;

mod chaining;
mod copy_crc;
mod copy_engine;
mod faults;
mod gpu_standin_contexts;
mod gpu_standin_ended;
mod gpu_standin_errors;
mod gpu_standin_kinds;
mod gpu_standin_manners;
mod probe;
mod wc_window;
mod window;
