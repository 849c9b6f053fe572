//! The library, by theme; GPU memory on the stand-in driver.

#[path = "../common/mod.rs"]
mod common;

mod files;
mod forked;
mod gpu_standin_access;
mod gpu_standin_late_receive;
mod gpu_standin_operations;
mod gpu_standin_slow_copies;
mod handshake;
mod moods;
mod operations;
mod rails;
mod taken;
mod vanish;
