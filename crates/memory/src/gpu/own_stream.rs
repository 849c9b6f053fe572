//! Streams for our own copies.

use super::CudaError;
use super::api::{Api, Stream, consts};

/// A stream, in the current context, that does not wait for the default stream, nor makes it wait.
///
/// It may still share a hardware queue with streams of the application, and stand behind what waits there: CUDA has 8 queues by default
/// (`CUDA_DEVICE_MAX_CONNECTIONS`). A greater priority, another context, a graph or a kernel instead of a copy do not get around it (H200,
/// driver 580); more queues than streams that wait do.
pub(super) fn own_stream(api: &Api) -> Result<Stream, CudaError> {
    let mut stream = Stream::NULL;
    // SAFETY: the call writes one handle.
    unsafe { api.stream_create(&raw mut stream, consts::STREAM_NON_BLOCKING) }?;
    Ok(stream)
}
