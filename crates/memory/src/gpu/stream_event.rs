//! Waiting for work that an application has put into a stream.

use super::api::{Context, Event, Stream, consts};
use super::context::KeptContext;
use super::driver::Driver;
use super::error::{CudaError, DriverError};

/// Why a stream cannot be waited for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// There is no CUDA driver, or it does not work.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The thread has no CUDA context.
    #[error("this thread has no CUDA context: call from a thread that uses the stream's GPU")]
    NoContext,
    /// The driver refused.
    #[error("cannot record an event in the stream: {0}")]
    Refused(#[from] CudaError),
}

/// An event behind all work that a stream holds at one moment.
#[derive(Debug)]
pub struct StreamEvent {
    driver: &'static Driver,
    context: KeptContext,
    event: Event,
}

impl StreamEvent {
    /// Records an event in a stream of this thread's current context; 0 is the default stream.
    ///
    /// # Errors
    /// There is no context, or the driver refuses: the stream is of another context, or captures.
    ///
    /// # Safety
    /// `stream` is the handle of a live stream.
    pub unsafe fn record(stream: u64) -> Result<Self, StreamError> {
        let driver = Driver::get()?;
        let mut current = Context::NULL;
        // SAFETY: the call writes one handle.
        driver.relaxed(|api| unsafe { api.ctx_current(&raw mut current) })?;
        if current.is_null() {
            return Err(StreamError::NoContext);
        }
        let context = KeptContext::new(driver, current, None)?;
        let event = driver.relaxed(|api| {
            let mut event = Event::NULL;
            // SAFETY: the call writes one handle.
            unsafe { api.event_create(&raw mut event, consts::EVENT_DISABLE_TIMING) }?;
            // SAFETY: a new event, and the stream that the caller vouches for.
            unsafe { api.event_record(event, Stream::from_number(stream)) }.inspect_err(|_| {
                // SAFETY: the event was made above and is used no more.
                let _ = unsafe { api.event_destroy(event) };
            })?;
            Ok::<_, CudaError>(event)
        })?;
        Ok(Self { driver, context, event })
    }

    /// Whether the work is done. Does not wait.
    ///
    /// # Errors
    /// The work failed, or the context is gone.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        // SAFETY: the event lives as long as the context, which is checked first.
        match self.context.run(self.driver, |api| unsafe { api.event_query(self.event) }) {
            Ok(()) => Ok(true),
            Err(error) if error.code == CudaError::NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        // SAFETY: the event is used no more; a context that is gone has taken it along.
        let _: Result<(), CudaError> =
            self.context.run(self.driver, |api| unsafe { api.event_destroy(self.event) });
    }
}
