//! How CUDA is called inside other people's processes: no capture of theirs is broken, and their current context is left alone.

use std::cell::Cell;
use std::mem;

use super::api::{Api, Context, consts::CAPTURE_MODE_RELAXED};
use super::driver::Driver;
use super::error::CudaError;

thread_local! {
    /// This thread is ours, and its capture mode RELAXED as long as it lives.
    static STAYS_RELAXED: Cell<bool> = const { Cell::new(false) };
}

impl Driver {
    /// Runs `calls` with `context` current on this thread and this thread's capture mode exchanged to RELAXED; both are put back
    /// afterwards, also after an error or a panic.
    ///
    /// Without the exchange, a query or an allocation fails during anybody's global-mode stream capture *and breaks that capture*.
    ///
    /// The context must live, as one does that was just found by the attributes of memory, or that [`Gpu::primary`](super::Gpu::primary)
    /// just gave: the driver does not survive every handle of a destroyed one. Contexts that are kept for later are asked after at
    /// each use (`context.rs`).
    pub fn in_context<T, E: From<CudaError>>(
        &self,
        context: Context,
        calls: impl FnOnce(&Api) -> Result<T, E>,
    ) -> Result<T, E> {
        self.relaxed(|_| self.with_current(context, calls))
    }

    /// The same for a caller who is relaxed already.
    pub(super) fn with_current<T, E: From<CudaError>>(
        &self,
        context: Context,
        calls: impl FnOnce(&Api) -> Result<T, E>,
    ) -> Result<T, E> {
        let api = self.api();
        let _current = Current::push(api, context)?;
        calls(api)
    }

    /// Runs `calls` with this thread's capture mode exchanged to RELAXED, in whatever context is current: for calls that need none.
    pub fn relaxed<T, E: From<CudaError>>(&self, calls: impl FnOnce(&Api) -> Result<T, E>) -> Result<T, E> {
        if Self::is_forked() {
            return Err(forked().into());
        }
        let api = self.api();
        let _relaxed = if STAYS_RELAXED.get() { None } else { Some(Relaxed::exchange(api)?) };
        calls(api)
    }

    /// Exchanges this thread's capture mode to RELAXED once and for all: for threads of our own, which then need not do so around every
    /// call. Where that fails, they go on as before.
    pub fn keep_relaxed(&self) {
        if !Self::is_forked()
            && let Ok(relaxed) = Relaxed::exchange(self.api())
        {
            mem::forget(relaxed);
            STAYS_RELAXED.set(true);
        }
    }

    /// The identity of a context: a number that is never used again, where the driver can tell (CUDA 12 and later; else 0).
    ///
    /// A context's handle may be reused after the context was destroyed; streams and events made in it are then gone though the
    /// handle looks alive.
    pub fn context_id(&self, context: Context) -> Result<u64, CudaError> {
        self.relaxed(|_| self.id_of(context))
    }

    /// The same for a caller who is relaxed already.
    pub(super) fn id_of(&self, context: Context) -> Result<u64, CudaError> {
        let mut id = 0;
        // SAFETY: the call writes one number; an unknown handle gives an error.
        match unsafe { self.api().ctx_id(context, &raw mut id) } {
            Ok(()) => Ok(id),
            Err(error) if error.code == CudaError::NOT_FOUND => Ok(0),
            Err(error) => Err(error),
        }
    }
}

#[cold]
fn forked() -> CudaError {
    CudaError {
        call: "a CUDA call in a forked child",
        code: CudaError::NOT_INITIALIZED,
        name: "CUDA_ERROR_NOT_INITIALIZED: CUDA does not survive a fork",
    }
}

/// This thread's capture mode while we call.
struct Relaxed<'a> {
    api: &'a Api,
    before: u32,
}

impl<'a> Relaxed<'a> {
    fn exchange(api: &'a Api) -> Result<Self, CudaError> {
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: the call reads and writes one word; it concerns this thread only.
        unsafe { api.exchange_capture_mode(&raw mut mode) }?;
        Ok(Self { api, before: mode })
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        // SAFETY: as in `exchange`. It succeeded once on this thread and does so again.
        let _ = unsafe { self.api.exchange_capture_mode(&raw mut self.before) };
    }
}

/// Our context on top of this thread's stack.
struct Current<'a>(&'a Api);

impl<'a> Current<'a> {
    fn push(api: &'a Api, context: Context) -> Result<Self, CudaError> {
        // SAFETY: the context lives: see `in_context`.
        unsafe { api.ctx_push(context) }?;
        Ok(Self(api))
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = Context::NULL;
        // SAFETY: pops what `push` pushed on this thread; the call writes one handle.
        let _ = unsafe { self.0.ctx_pop(&raw mut popped) };
    }
}
