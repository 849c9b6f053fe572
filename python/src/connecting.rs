//! Connecting in a thread of its own, so that Ctrl-C and cancelled tasks end it.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use nobounce_transfer::{AgentError, Attempt};
use pyo3::prelude::*;

use crate::failure::{check_process, of_agent};
use crate::peer::Peer;
use crate::transfer::{EVER, wait};

type Found = Result<nobounce_transfer::Peer, AgentError>;

/// An attempt to connect.
#[pyclass(frozen, module = "nobounce")]
#[derive(Debug)]
pub(crate) struct Connecting {
    attempt: Arc<Attempt>,
    found: Arc<(Mutex<Option<Found>>, Condvar)>,
    process: u32,
}

impl Connecting {
    pub(crate) fn start(
        process: u32,
        connect: impl FnOnce(&Attempt) -> Found + Send + 'static,
    ) -> PyResult<Self> {
        let (attempt, found) =
            (Arc::new(Attempt::default()), Arc::<(Mutex<Option<Found>>, Condvar)>::default());
        let (of_thread, place) = (attempt.clone(), found.clone());
        let run = move || {
            let made = connect(&of_thread);
            *place.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(made);
            place.1.notify_all();
        };
        let started = std::thread::Builder::new().name("nb-connect".to_owned()).spawn(run);
        started.map_err(|error| of_agent(&error.into()))?;
        Ok(Self { attempt, found, process })
    }
}

#[pymethods]
impl Connecting {
    /// The peer. A signal handler that raises gives the attempt up.
    fn wait(&self, py: Python<'_>) -> PyResult<Peer> {
        check_process(self.process)?;
        let found = wait(py, EVER, |slice| {
            let found = self.found.0.lock().unwrap_or_else(PoisonError::into_inner);
            let waited = self.found.1.wait_timeout_while(found, slice, |found| found.is_none());
            waited.unwrap_or_else(PoisonError::into_inner).0.take()
        });
        let found = found.inspect_err(|_| self.attempt.abort())?;
        let found = found.unwrap_or(Err(AgentError::Aborted));
        found.map(|inner| Peer { inner, process: self.process }).map_err(|error| of_agent(&error))
    }

    /// Gives it up: it fails soon, or the connection that it made is closed.
    fn abort(&self) -> PyResult<()> {
        check_process(self.process)?;
        self.attempt.abort();
        Ok(())
    }
}
