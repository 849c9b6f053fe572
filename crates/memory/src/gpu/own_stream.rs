//! Streams for our own copies.

use super::CudaError;
use super::api::{Api, Stream, consts};

/// A non-blocking stream in the current context: it does not synchronise with the default stream.
///
/// It may still share a hardware queue with streams of the application, with head-of-line blocking:
/// CUDA has 8 queues by default (`CUDA_DEVICE_MAX_CONNECTIONS`). A higher priority, another
/// context, a graph or a kernel instead of a copy do not avoid it (H200, driver 580). More queues
/// than waiting streams do.
pub(super) fn own_stream(api: &Api) -> Result<Stream, CudaError> {
    let mut stream = Stream::NULL;
    // SAFETY: the call writes one handle.
    unsafe { api.stream_create(&raw mut stream, consts::STREAM_NON_BLOCKING) }?;
    Ok(stream)
}
