//! Contexts that are used again after the call that found them.

use super::api::{Api, Context};
use super::driver::Driver;
use super::error::CudaError;
use super::range;

/// A stored context handle, with the means to check that the context is still alive.
///
/// The rule: once a context may be gone, never pass its handle, or that of its streams and events,
/// to the driver again. CUDA leaves the result undefined; on an H200 with driver 580 it was a
/// segmentation fault. A context of the program can be destroyed at any time, so each use of a
/// stored handle first makes a short query:
///
/// * for a *witness*: memory that was allocated in the context and dies with it. The query passes
///   an address, which may be anything, and `BUFFER_ID` distinguishes the memory from a later
///   allocation at the same address;
/// * without a witness, for the context's identity (`cuCtxGetId`). That must suffice for our own
///   primary contexts: a device reset ends those, but the driver still knows their handle.
///
/// A memory range whose attributes were just read needs neither: the attributes name its context.
/// Between the query and the call another thread may still destroy the context. Doing that under a
/// copy in flight violates CUDA's own rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeptContext {
    handle: Context,
    id: u64,
    /// Address and `BUFFER_ID`.
    witness: Option<(u64, u64)>,
}

impl KeptContext {
    /// Stores a context that is alive now. `witness` is the address of memory that was allocated or
    /// pinned in it.
    pub(super) fn new(driver: &Driver, handle: Context, witness: Option<u64>) -> Result<Self, CudaError> {
        let id = driver.context_id(handle)?;
        // Memory without a buffer ID cannot serve as a witness.
        let witness = witness.and_then(|addr| {
            let id = driver.relaxed(|api| range::buffer_id(api, addr)).ok()?;
            (id != 0).then_some((addr, id))
        });
        Ok(Self { handle, id, witness })
    }

    /// Its handle, to be compared with others.
    pub(super) fn handle(&self) -> Context {
        self.handle
    }

    /// Whether it is still alive.
    pub(super) fn is_alive(&self, driver: &Driver) -> bool {
        driver.relaxed(|api| self.check(driver, api)).is_ok()
    }

    /// Whether it is known to be gone, and with it the driver's record of its witness. False where
    /// the driver could not answer.
    pub(super) fn is_gone(&self, driver: &Driver) -> bool {
        let answer = driver.relaxed(|api| match self.witness {
            Some(witness) => is_there(api, witness),
            None => self.check(driver, api),
        });
        answer.is_err_and(|error| error.code == CudaError::CONTEXT_IS_DESTROYED)
    }

    /// Runs `calls` in the context as [`Driver::in_context`] does, if it is still alive.
    pub(super) fn run<T, E: From<CudaError>>(
        &self,
        driver: &Driver,
        calls: impl FnOnce(&Api) -> Result<T, E>,
    ) -> Result<T, E> {
        driver.relaxed(|api| {
            self.check(driver, api)?;
            driver.with_current(self.handle, calls)
        })
    }

    fn check(&self, driver: &Driver, api: &Api) -> Result<(), CudaError> {
        if let Some(witness) = self.witness {
            return is_there(api, witness);
        }
        if driver.id_of(self.handle)? == self.id { Ok(()) } else { Err(gone()) }
    }
}

/// Whether memory is still the one with this number.
fn is_there(api: &Api, (addr, id): (u64, u64)) -> Result<(), CudaError> {
    match range::buffer_id(api, addr) {
        Ok(now) if now == id => Ok(()),
        Err(error) if error.code != CudaError::INVALID_VALUE => Err(error),
        _ => Err(gone()),
    }
}

#[cold]
fn gone() -> CudaError {
    CudaError {
        call: "the check that the context lives",
        code: CudaError::CONTEXT_IS_DESTROYED,
        name: "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    }
}
