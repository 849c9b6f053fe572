//! Common parts of the tests on a real GPU: the GPU, or the waiver where there is none.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard};

use nobounce_memory::gpu::Gpu;

/// One test at a time, also where they share a process: their kernels spin, and some occupy the
/// whole GPU.
static ALONE: Mutex<()> = Mutex::new(());

/// Keeps other tests of this process waiting.
pub(crate) struct Alone(#[allow(dead_code, reason = "held, not read")] MutexGuard<'static, ()>);

/// The first GPU; `None`, with the waiver printed, where there is none. With `kernels`, the
/// stand-in driver does not count.
pub(crate) fn gpu(kernels: bool) -> Option<(Arc<Gpu>, Alone)> {
    let alone = Alone(ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
    match Gpu::list() {
        Ok(list) if list.is_empty() => waive("CUDA shows no GPU"),
        Ok(list) if kernels && list[0].driver().is_stand_in() => waive("the stand-in driver runs no kernels"),
        Ok(list) => Some((Arc::clone(&list[0]), alone)),
        Err(error) => waive(&error.to_string()),
    }
}

/// Whether the environment requires it: `REQUIRE=gpu,litmus`.
pub(crate) fn required(name: &str) -> bool {
    std::env::var("REQUIRE").unwrap_or_default().split(',').any(|word| word == name)
}

/// Reports that the test cannot run here, and fails where a GPU is required.
pub(crate) fn waive<T>(reason: &str) -> Option<T> {
    waive_for("gpu", reason);
    None
}

/// The same for want of something else: `name`, as in `REQUIRE`.
pub(crate) fn waive_for(name: &str, reason: &str) {
    assert!(!required(name), "{name} is required, but {reason}");
    println!("waived: {name}: {reason}");
    if let Some(file) = std::env::var_os("NOBOUNCE_WAIVERS") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
        // One write: tests of other processes append to it too.
        file.unwrap().write_all(format!("{name}: {reason}\n").as_bytes()).unwrap();
    }
}
