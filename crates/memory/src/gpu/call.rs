//! CUDA calls inside the program's process: they invalidate none of its stream captures and
//! preserve its current context.

use std::cell::Cell;
use std::mem;

use super::api::{Api, Context, consts::CAPTURE_MODE_RELAXED};
use super::driver::Driver;
use super::error::CudaError;

thread_local! {
    /// This thread is ours, and its capture mode stays RELAXED until it ends.
    static STAYS_RELAXED: Cell<bool> = const { Cell::new(false) };
}

impl Driver {
    /// Runs `calls` with `context` current on this thread and the thread's capture mode exchanged
    /// to RELAXED. Restores both afterwards, also after an error or a panic.
    ///
    /// Without the exchange, a query or an allocation fails during any global-mode stream capture
    /// in the process *and invalidates that capture*.
    ///
    /// The context must be alive: just found by the attributes of memory, or just returned by
    /// [`Gpu::primary`](super::Gpu::primary). The driver does not survive every handle of a
    /// destroyed context. Contexts that are kept for later are checked at each use (`context.rs`).
    pub fn in_context<T, E: From<CudaError>>(
        &self,
        context: Context,
        calls: impl FnOnce(&Api) -> Result<T, E>,
    ) -> Result<T, E> {
        self.relaxed(|_| self.with_current(context, calls))
    }

    /// The same for a caller in RELAXED mode already.
    pub(super) fn with_current<T, E: From<CudaError>>(
        &self,
        context: Context,
        calls: impl FnOnce(&Api) -> Result<T, E>,
    ) -> Result<T, E> {
        let api = self.api();
        let _current = Current::push(api, context)?;
        calls(api)
    }

    /// Runs `calls` with this thread's capture mode exchanged to RELAXED, in whatever context is
    /// current: for calls that need none.
    pub fn relaxed<T, E: From<CudaError>>(&self, calls: impl FnOnce(&Api) -> Result<T, E>) -> Result<T, E> {
        if Self::is_forked() {
            return Err(forked().into());
        }
        let api = self.api();
        let _relaxed = if STAYS_RELAXED.get() { None } else { Some(Relaxed::exchange(api)?) };
        calls(api)
    }

    /// Exchanges this thread's capture mode to RELAXED permanently: for our own threads, which then
    /// skip the exchange around every call. If that fails, they continue as before.
    pub fn keep_relaxed(&self) {
        if !Self::is_forked()
            && let Ok(relaxed) = Relaxed::exchange(self.api())
        {
            mem::forget(relaxed);
            STAYS_RELAXED.set(true);
        }
    }

    /// The identity of a context: a number that is never reused, where the driver provides it (CUDA
    /// 12 and later; else 0).
    ///
    /// A context's handle may be reused after the context was destroyed. Its streams and events are
    /// then gone although the handle looks valid.
    pub fn context_id(&self, context: Context) -> Result<u64, CudaError> {
        self.relaxed(|_| self.id_of(context))
    }

    /// The same for a caller in RELAXED mode already.
    pub(super) fn id_of(&self, context: Context) -> Result<u64, CudaError> {
        let mut id = 0;
        // SAFETY: the call writes one number; an unknown handle returns an error.
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
        // SAFETY: the context is alive: see `in_context`.
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
