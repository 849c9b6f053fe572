//! What the files that do without a lock here and there (`bell.rs`, `completions.rs`, `notices.rs`) take from the standard library.
//! `tests/loom.rs` builds the same files with loom's in their place, and tries every order of events.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError};
