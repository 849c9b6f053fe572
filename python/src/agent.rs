//! Agents.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};

use nobounce::{Device, Require};
use nobounce_transfer::{AgentError, AgentOptions, Event, Foreign, Outcome};
use pyo3::prelude::*;

use crate::connecting::Connecting;
use crate::failure::{check_process, of_agent, of_register, raise};
use crate::memory::{Memory, required};
use crate::peer::Peer;
use crate::transfer::{duration, wait};

#[pyclass(frozen, module = "nobounce")]
#[derive(Debug)]
pub(crate) struct Agent {
    inner: Mutex<Option<Arc<nobounce_transfer::Agent>>>,
    require: Require,
    process: u32,
}

/// A notification for the package: peer, generation, tag, outcome, bytes, reason, whether the peer
/// is gone.
type Told = (String, u64, Vec<u8>, &'static str, u64, String, bool);

/// Bytes and operations of each path.
type ByPath = HashMap<&'static str, (u64, u64)>;

/// Counters by name, and paths by direction.
type Stats = (HashMap<&'static str, u64>, HashMap<&'static str, ByPath>);

#[pymethods]
impl Agent {
    #[new]
    fn new(
        py: Python<'_>,
        name: &str,
        listen: Option<&str>,
        device: Option<&str>,
        lanes: usize,
        silence: f64,
        require: Option<&str>,
    ) -> PyResult<Self> {
        let require = required(require)?.unwrap_or(Require::Any);
        let options = AgentOptions { lanes, silence: duration(Some(silence)), ..AgentOptions::default() };
        let opened = py.detach(|| -> Result<_, AgentError> {
            let device = match device {
                Some(name) => Device::open_named(name)?,
                None => Device::open()?,
            };
            match listen {
                Some(addr) => nobounce_transfer::Agent::listening(&device, name, addr, options),
                None => nobounce_transfer::Agent::new(&device, name, options),
            }
        });
        let inner = Mutex::new(Some(Arc::new(opened.map_err(|error| of_agent(&error))?)));
        Ok(Self { inner, require, process: std::process::id() })
    }

    #[getter]
    fn name(&self) -> PyResult<String> {
        self.with(|agent| agent.name().to_owned())
    }

    #[getter]
    fn generation(&self) -> PyResult<u64> {
        self.with(nobounce_transfer::Agent::generation)
    }

    #[getter]
    fn address(&self) -> PyResult<Option<String>> {
        self.with(|agent| agent.local_addr().map(|addr| addr.to_string()))
    }

    #[getter]
    fn device(&self) -> PyResult<String> {
        self.with(|agent| agent.device().nic().name().to_owned())
    }

    /// Registers memory that `owner` keeps alive.
    fn register(
        &self,
        py: Python<'_>,
        address: u64,
        nbytes: usize,
        is_gpu: bool,
        is_read_only: bool,
        owner: Py<PyAny>,
    ) -> PyResult<Memory> {
        let memory = Foreign { addr: address, len: nbytes, is_gpu, is_read_only, is_on_demand: false };
        let owner: nobounce_transfer::Owner = Box::new(owner);
        // SAFETY: the package has taken address and length from the owner, which lives as long.
        let register = || self.with(|agent| unsafe { agent.register_raw(&memory, Some(owner)) });
        let view = py.detach(register)?.map_err(|error| of_register(&error))?;
        if self.require == Require::Direct && !view.region().paths().are_direct() {
            let paths = view.region().paths();
            return Err(raise(
                "NotDirect",
                format!("the memory would be staged: {paths}; nobounce doctor finds the cause"),
            ));
        }
        Ok(Memory { view })
    }

    fn export(&self, py: Python<'_>, name: &str, memory: &Memory) -> PyResult<()> {
        let export = || self.with(|agent| agent.export(name, &memory.view));
        py.detach(export)?.map_err(|error| of_agent(&error))
    }

    fn withdraw(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        py.detach(|| self.with(|agent| agent.withdraw(name)))
    }

    /// Begins to connect to an address.
    #[pyo3(signature = (address, timeout=10.0))]
    fn connect(&self, address: String, timeout: Option<f64>) -> PyResult<Connecting> {
        let (agent, timeout) = (self.opened()?, duration(timeout));
        Connecting::start(self.process, move |attempt| agent.connect_with(address.as_str(), timeout, attempt))
    }

    /// Begins to connect to the agent that metadata are of.
    #[pyo3(signature = (metadata, timeout=10.0))]
    fn connect_to(&self, metadata: Vec<u8>, timeout: Option<f64>) -> PyResult<Connecting> {
        let (agent, timeout) = (self.opened()?, duration(timeout));
        Connecting::start(self.process, move |attempt| agent.connect_to_with(&metadata, timeout, attempt))
    }

    #[pyo3(signature = (timeout=None))]
    fn accept(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Peer> {
        let timeout = duration(timeout);
        let found = wait(py, timeout, |slice| match self.with(|agent| agent.accept(slice)) {
            Ok(Err(AgentError::NoPeer(_))) => None,
            found => Some(found),
        })?;
        match found {
            Some(found) => self.peer(found?),
            None => Err(of_agent(&AgentError::NoPeer(timeout))),
        }
    }

    #[pyo3(signature = (timeout=None))]
    fn notification(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Told>> {
        let found = wait(py, duration(timeout), |slice| {
            self.with(|agent| agent.notification(slice))
                .map_or_else(|error| Some(Err(error)), |found| found.map(Ok))
        })?;
        Ok(found.transpose()?.map(|found| {
            let (outcome, bytes, reason) = match found.outcome {
                Outcome::Complete { bytes } => ("complete", bytes, String::new()),
                Outcome::Failed { reason } => ("failed", 0, reason),
                Outcome::Aborted { reason } => ("aborted", 0, reason),
            };
            (found.peer, found.generation, found.tag, outcome, bytes, reason, found.gone.is_some())
        }))
    }

    #[pyo3(signature = (since=0))]
    fn metadata(&self, since: u64) -> PyResult<(Vec<u8>, u64)> {
        self.with(|agent| agent.metadata_since(since))
    }

    fn event_fd(&self) -> PyResult<RawFd> {
        self.with(nobounce_transfer::Agent::event_fd)
    }

    /// Numbers of transfers that ended, and whether anything else happened.
    fn take_events(&self) -> PyResult<(Vec<u64>, bool)> {
        let events = self.with(nobounce_transfer::Agent::take_events)?;
        let ended = events.iter().filter_map(|event| match event {
            Event::Transfer(id) => Some(*id),
            _ => None,
        });
        let ended: Vec<_> = ended.collect();
        let others = ended.len() < events.len();
        Ok((ended, others))
    }

    /// Counters, and bytes and operations by direction and path.
    fn stats(&self) -> PyResult<Stats> {
        self.with(|agent| {
            let counters = agent.counters();
            let counters = [
                ("transfers", counters.transfers),
                ("failed", counters.failed),
                ("bytes", counters.bytes),
                ("late_frames", counters.late_frames),
            ];
            let paths = agent.device().nic().path_counters();
            let paths = [("in", paths.inbound), ("out", paths.outbound)].map(|(direction, totals)| {
                let used = totals.list().into_iter().filter(|(_, tally)| tally.operations > 0);
                let used = used.map(|(path, tally)| (path, (tally.bytes, tally.operations)));
                (direction, used.collect())
            });
            (counters.into(), paths.into())
        })
    }

    /// Ends it: peers see that it closed, and transfers in flight fail.
    fn close(&self, py: Python<'_>) {
        let agent = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        if std::process::id() != self.process {
            // Its threads and descriptors are the parent's.
            std::mem::forget(agent);
            return;
        }
        // Other threads may wait for the interpreter while they use it.
        py.detach(|| {
            if let Some(agent) = agent {
                agent.close();
            }
        });
    }
}

impl Agent {
    fn peer(&self, found: Result<nobounce_transfer::Peer, AgentError>) -> PyResult<Peer> {
        let found = found.map(|inner| Peer { inner, process: self.process });
        found.map_err(|error| of_agent(&error))
    }

    fn with<T>(&self, run: impl FnOnce(&nobounce_transfer::Agent) -> T) -> PyResult<T> {
        Ok(run(&*self.opened()?))
    }

    fn opened(&self) -> PyResult<Arc<nobounce_transfer::Agent>> {
        check_process(self.process)?;
        // No lock is held while it is used, nor while an exception is made.
        let agent = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        agent.ok_or_else(closed)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let agent = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if std::process::id() != self.process {
            // Its threads are the parent's.
            std::mem::forget(agent);
        } else if let Some(agent) = agent {
            Python::attach(|py| py.detach(|| drop(agent)));
        }
    }
}

fn closed() -> PyErr {
    raise("Error", "the agent is closed".to_owned())
}
