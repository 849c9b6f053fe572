//! Streams for our own copies.

use super::CudaError;
use super::api::{Api, Stream, consts};

/// A stream, in the current context, that does not wait for the default stream, nor makes it wait.
///
/// It has the greatest priority there is. Streams of one priority may share a hardware queue (CUDA promises them no progress beside each
/// other, and has few queues under MPS or with `CUDA_DEVICE_MAX_CONNECTIONS`), where a copy stands behind whatever else is queued; and that may
/// be work behind a kernel which waits for the very bytes that we copy.
pub(super) fn own_stream(api: &Api) -> Result<Stream, CudaError> {
    let (mut least, mut greatest) = (0, 0);
    let mut stream = Stream::NULL;
    // SAFETY: the calls write two numbers and a handle.
    unsafe {
        api.stream_priorities(&raw mut least, &raw mut greatest)?;
        api.stream_create_with_priority(&raw mut stream, consts::STREAM_NON_BLOCKING, greatest)?;
    }
    Ok(stream)
}
