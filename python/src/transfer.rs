//! Transfers, and waiting for them.

use std::time::{Duration, Instant};

use nobounce_transfer::TransferError;
use pyo3::prelude::*;

use crate::failure::{check_process, of_transfer};

/// How often a waiting thread looks for signals such as Ctrl-C.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// No timeout.
pub(crate) const EVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

pub(crate) fn duration(seconds: Option<f64>) -> Duration {
    seconds.map_or(EVER, |seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(EVER).min(EVER))
}

/// Calls `wait` with short timeouts, without the GIL, until it gives something or the time is over.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    timeout: Duration,
    wait: impl Fn(Duration) -> Option<T> + Sync,
) -> PyResult<Option<T>> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if let Some(found) = py.detach(|| wait(left.min(LOOK_EVERY))) {
            return Ok(Some(found));
        }
        py.check_signals()?;
        if left.is_zero() {
            return Ok(None);
        }
    }
}

#[pyclass(frozen, module = "nobounce")]
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) inner: nobounce_transfer::Transfer,
    pub(crate) process: u32,
}

#[pymethods]
impl Transfer {
    #[getter]
    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn done(&self) -> bool {
        self.inner.result().is_some()
    }

    /// Bytes moved; `None` while it is in flight.
    fn result(&self) -> PyResult<Option<u64>> {
        match self.inner.result() {
            None => Ok(None),
            Some(Ok(summary)) => Ok(Some(summary.bytes)),
            Some(Err(error)) => Err(of_transfer(&error)),
        }
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<u64> {
        check_process(self.process)?;
        let timeout = duration(timeout);
        let ended = wait(py, timeout, |slice| match self.inner.wait(slice) {
            Err(TransferError::Timeout(_)) => None,
            ended => Some(ended),
        })?;
        match ended {
            Some(Ok(summary)) => Ok(summary.bytes),
            Some(Err(error)) => Err(of_transfer(&error)),
            None => Err(of_transfer(&TransferError::Timeout(timeout))),
        }
    }

    fn cancel(&self) -> PyResult<()> {
        check_process(self.process)?;
        self.inner.cancel();
        Ok(())
    }

    /// Makes its end an event of the agent; false if it has ended already.
    fn watch(&self) -> PyResult<bool> {
        check_process(self.process)?;
        Ok(self.inner.watch())
    }
}
