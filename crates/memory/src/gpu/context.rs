//! Contexts that are used again after the call that found them.

use super::api::{Api, Context};
use super::driver::Driver;
use super::error::CudaError;
use super::range;

/// A context whose handle is kept, and what shows that it still lives.
///
/// The rule: once a context may be gone, neither its handle nor that of a stream or event made in it is passed to the driver again.
/// CUDA leaves open what happens then, and a program that did so on an H200 with driver 580 ended by a segmentation fault. A context
/// that others made can be destroyed at any time, so each use of a kept one asks first, by a short call:
///
/// * after a *witness*: memory that was allocated in the context and dies with it. The question passes an address, which may be
///   anything, and `BUFFER_ID` tells the memory from a later one at the same address;
/// * without a witness, after the context's identity (`cuCtxGetId`). That must do for primary contexts of ours: a reset of the device
///   ends those, but their handle stays one that the driver knows.
///
/// A range of memory needs neither where its attributes were just read: its context is the one they name. Between the question and
/// the call another thread may still destroy the context; whoever does that under a copy in flight breaks CUDA's own rule.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeptContext {
    handle: Context,
    id: u64,
    /// Address and `BUFFER_ID`.
    witness: Option<(u64, u64)>,
}

impl KeptContext {
    /// Keeps a context that lives now. `witness` is the address of memory that was allocated or pinned in it.
    pub(super) fn new(driver: &Driver, handle: Context, witness: Option<u64>) -> Result<Self, CudaError> {
        let id = driver.context_id(handle)?;
        // Memory without a number tells nothing.
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

    /// Whether it still lives.
    pub(super) fn is_alive(&self, driver: &Driver) -> bool {
        driver.relaxed(|api| self.check(driver, api)).is_ok()
    }

    /// Whether it is known to be gone, and with it what the driver knew of its witness. Not where the driver could not answer.
    pub(super) fn is_gone(&self, driver: &Driver) -> bool {
        let answer = driver.relaxed(|api| match self.witness {
            Some(witness) => is_there(api, witness),
            None => self.check(driver, api),
        });
        answer.is_err_and(|error| error.code == CudaError::CONTEXT_IS_DESTROYED)
    }

    /// Runs `calls` in the context as [`Driver::in_context`] does, if it still lives.
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
