//! The GPU of this process.

use std::sync::{Arc, OnceLock};

use nobounce::memory::gpu::Gpu;

/// The GPU of this process, as CUDA counts them.
static ORDINAL: OnceLock<i32> = OnceLock::new();

/// Selects the GPU of this process, before it uses any. The default is the first.
pub(super) fn choose(ordinal: i32) {
    let _ = ORDINAL.set(ordinal); // the first word counts
}

/// The number of the GPU of this process.
pub(super) fn ordinal() -> i32 {
    *ORDINAL.get_or_init(|| 0)
}

/// The GPU of this process, or why there is none.
pub(super) fn chosen() -> Result<Arc<Gpu>, String> {
    let gpus = Gpu::list().map_err(|error| error.to_string())?;
    let count = gpus.len();
    let found = gpus.into_iter().find(|gpu| gpu.ordinal() == ordinal());
    found.ok_or_else(|| match count {
        0 => "CUDA shows no GPU to this process (see CUDA_VISIBLE_DEVICES)".to_owned(),
        _ => format!(
            "--gpu {}: CUDA shows {count} GPUs to this process, counted from 0 (see CUDA_VISIBLE_DEVICES)",
            ordinal()
        ),
    })
}
