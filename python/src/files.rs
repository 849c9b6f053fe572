//! Files into memory of Python objects: of this machine, and of a file server.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use nobounce::file::{self, File, FileError, FileOptions, FileReport, LocalMemory, LocalMemoryError};
use nobounce::memory::gpu::GpuRegisterError;
use nobounce::memory::path::Path;
use nobounce::{Device, GpuOptions, Require};
use nobounce_storage::{ClientError, FileClient, FileRange, ServerOptions};
use nobounce_transfer::{AgentOptions, Foreign};
use pyo3::prelude::*;

use crate::failure::{check_process, of_register, raise};
use crate::memory::{Memory, required};
use crate::transfer::{duration, wait};

/// Bytes by path, and staged bytes by reason.
type Moved = (HashMap<&'static str, u64>, Vec<(String, u64)>);

fn moved(report: &FileReport) -> Moved {
    let used = report.paths.list().into_iter().filter(|(_, tally)| tally.bytes > 0);
    let reasons = report.staged.iter().map(|staged| (staged.reason.to_string(), staged.bytes));
    (used.map(|(path, tally)| (path, tally.bytes)).collect(), reasons.collect())
}

fn of_file(error: &FileError) -> PyErr {
    let name = match error {
        FileError::NotDirect { .. } => "NotDirect",
        FileError::Open { .. }
        | FileError::Io { .. }
        | FileError::NotAFile { .. }
        | FileError::OutOfBounds { .. }
        | FileError::Truncated { .. } => "FileError",
        _ => "Error",
    };
    raise(name, error.to_string())
}

fn of_client(error: &ClientError) -> PyErr {
    let name = match error {
        ClientError::Connect { .. } => "ConnectError",
        ClientError::Refused(_) => "FileError",
        ClientError::Timeout(_) => "Timeout",
        ClientError::Path(_) | ClientError::TooMany(_) | ClientError::OutOfBounds { .. } => "ListError",
        _ => "Error",
    };
    raise(name, error.to_string())
}

/// Memory of a Python object that the caller holds: address, bytes, whether it is of a GPU.
type Place = (u64, usize, bool);

/// Reads a file into memory, or writes memory into a file.
#[pyfunction]
pub(crate) fn move_file(
    py: Python<'_>,
    is_read: bool,
    path: &str,
    offset: u64,
    place: Place,
    require: Option<&str>,
) -> PyResult<Moved> {
    let require = required(require)?.unwrap_or(FileOptions::from_env().require);
    let (address, len, is_gpu) = place;
    let run = || -> Result<FileReport, PyErr> {
        let file = if is_read { File::open(path) } else { File::create(path) };
        let file = file.map_err(|error| of_file(&error))?;
        let memory = if is_gpu {
            let options = GpuOptions { require, ..GpuOptions::default() };
            // SAFETY: the package has the address and the length from an object that it holds.
            unsafe { LocalMemory::gpu(address, len, &options) }.map_err(|error| {
                let is_path = matches!(error, LocalMemoryError::Gpu(GpuRegisterError::NotDirect { .. }));
                raise(if is_path { "NotDirect" } else { "Error" }, error.to_string())
            })?
        } else {
            let base = std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
            // SAFETY: as above.
            unsafe { LocalMemory::host(base, len) }.map_err(|error| raise("Error", error.to_string()))?
        };
        let options = FileOptions { require };
        let done = if is_read {
            memory.read_file(&file, offset, 0..len, options)
        } else {
            memory.write_file(&file, offset, 0..len, options)
        };
        done.map_err(|error| of_file(&error))
    };
    py.detach(run).map(|report| moved(&report))
}

/// Counters of local files of this process: read, written.
#[pyfunction]
pub(crate) fn file_counters() -> (Moved, Moved) {
    let counters = file::file_counters();
    (moved(&counters.read), moved(&counters.written))
}

#[pyclass(frozen, module = "nobounce")]
#[derive(Debug)]
pub(crate) struct Files {
    inner: Mutex<Option<Arc<FileClient>>>,
    /// Of requests into memory with a staged path.
    staged: Mutex<Staged>,
    process: u32,
}

#[pyclass(frozen, module = "nobounce")]
#[derive(Debug)]
pub(crate) struct FileTicket {
    inner: nobounce_storage::FileTicket,
    process: u32,
}

/// Bytes by direction, then by reason.
type Staged = HashMap<&'static str, HashMap<String, u64>>;
/// Reasons of a direction that are remembered.
const MAX_REASONS: usize = 32;

/// Ranges (offset in the file, bytes, offset in the memory) by path.
type Lists = Vec<(String, Vec<(u64, u64, u64)>)>;

#[pymethods]
impl Files {
    #[new]
    fn new(
        py: Python<'_>,
        address: &str,
        device: Option<&str>,
        lanes: usize,
        silence: f64,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let options = AgentOptions { lanes, silence: duration(Some(silence)), ..AgentOptions::default() };
        let opened = py.detach(|| {
            let device = device.map_or_else(Device::open, Device::open_named);
            let device = device.map_err(|error| raise("Error", error.to_string()))?;
            let client = FileClient::connect_with(&device, address, options, duration(timeout));
            client.map_err(|error| of_client(&error))
        })?;
        let inner = Mutex::new(Some(Arc::new(opened)));
        Ok(Self { inner, staged: Mutex::default(), process: std::process::id() })
    }

    #[pyo3(signature = (path, timeout=None))]
    fn stat(&self, py: Python<'_>, path: &str, timeout: Option<f64>) -> PyResult<u64> {
        let client = self.client()?;
        let found = wait(py, duration(timeout), |slice| match client.stat(path, slice) {
            Err(ClientError::Timeout(_)) => None,
            found => Some(found),
        })?;
        found.unwrap_or(Err(ClientError::Timeout(duration(timeout)))).map_err(|error| of_client(&error))
    }

    /// Registers memory that `owner` keeps alive.
    #[expect(clippy::too_many_arguments, reason = "the arguments of a call from Python")]
    fn register(
        &self,
        py: Python<'_>,
        address: u64,
        nbytes: usize,
        is_gpu: bool,
        is_read_only: bool,
        owner: Py<PyAny>,
        require: Option<&str>,
    ) -> PyResult<Memory> {
        let client = self.client()?;
        let require = required(require)?;
        let memory = Foreign { addr: address, len: nbytes, is_gpu, is_read_only, is_on_demand: false };
        let owner: nobounce_transfer::Owner = Box::new(owner);
        // SAFETY: the package has taken address and length from the owner, which lives as long.
        let view = py.detach(|| unsafe { client.agent().register_raw(&memory, Some(owner)) });
        // Also where NOBOUNCE_REQUIRE=direct demands a path.
        let view = view.map_err(|error| of_register(&error))?;
        let paths = view.region().paths();
        if require == Some(Require::Direct) && !paths.inbound.is_direct() {
            return Err(raise("NotDirect", format!("bytes of the file would be {}", paths.inbound)));
        }
        Ok(Memory { view })
    }

    /// Bytes of the device by direction and path.
    fn stats(&self) -> PyResult<HashMap<&'static str, HashMap<&'static str, u64>>> {
        let counters = self.client()?.agent().device().nic().path_counters();
        let totals = [("in", counters.inbound), ("out", counters.outbound)];
        Ok(totals
            .map(|(direction, totals)| {
                let used = totals.list().into_iter().filter(|(_, tally)| tally.bytes > 0);
                (direction, used.map(|(path, tally)| (path, tally.bytes)).collect())
            })
            .into())
    }

    /// Bytes of requests by direction and the reason why they are staged.
    fn staged(&self) -> Staged {
        self.staged.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Begins a request; the ticket keeps the memory.
    fn begin(&self, py: Python<'_>, is_read: bool, memory: &Memory, lists: Lists) -> PyResult<FileTicket> {
        let client = self.client()?;
        let ranges = lists.iter().flat_map(|(_, ranges)| ranges);
        let bytes = ranges.fold(0_u64, |sum, (_, len, _)| sum.saturating_add(*len));
        let range = |(offset, len, memory): (u64, u64, u64)| FileRange { offset, len, memory };
        let lists: Vec<(String, Vec<FileRange>)> =
            lists.into_iter().map(|(path, ranges)| (path, ranges.into_iter().map(range).collect())).collect();
        let begun = py.detach(|| {
            let memory = client.export(&memory.view)?;
            let lists: Vec<_> =
                lists.iter().map(|(path, ranges)| (path.as_str(), ranges.as_slice())).collect();
            if is_read { client.read(&memory, &lists) } else { client.write(&memory, &lists) }
        });
        let inner = begun.map_err(|error| of_client(&error))?;
        self.count_staged(is_read, memory, bytes);
        Ok(FileTicket { inner, process: self.process })
    }

    fn close(&self, py: Python<'_>) {
        let client = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.release(py, client);
    }
}

impl Files {
    fn client(&self) -> PyResult<Arc<FileClient>> {
        check_process(self.process)?;
        let client = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        client.ok_or_else(|| raise("Error", "the connection with the file server is closed".to_owned()))
    }

    fn count_staged(&self, is_read: bool, memory: &Memory, bytes: u64) {
        let paths = memory.view.region().paths();
        let (direction, path) = if is_read { ("in", &paths.inbound) } else { ("out", &paths.outbound) };
        let Path::Staged(reason) = path else { return };
        let mut staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        let reasons = staged.entry(direction).or_default();
        let reason = reason.to_string();
        if bytes > 0 && (reasons.len() < MAX_REASONS || reasons.contains_key(&reason)) {
            *reasons.entry(reason).or_default() += bytes;
        }
    }

    fn release(&self, py: Python<'_>, client: Option<Arc<FileClient>>) {
        if std::process::id() == self.process {
            py.detach(|| drop(client));
        } else {
            // Its threads are the parent's.
            std::mem::forget(client);
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let client = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if client.is_some() {
            Python::attach(|py| self.release(py, client));
        }
    }
}

#[pymethods]
impl FileTicket {
    fn done(&self) -> bool {
        self.inner.is_done()
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<u64> {
        check_process(self.process)?;
        let timeout = duration(timeout);
        let ended = wait(py, timeout, |slice| match self.inner.wait(slice) {
            Err(ClientError::Timeout(_)) => None,
            ended => Some(ended),
        })?;
        ended.unwrap_or(Err(ClientError::Timeout(timeout))).map_err(|error| of_client(&error))
    }
}

/// Exports the files below a directory.
#[pyclass(frozen, module = "nobounce")]
#[derive(Debug)]
pub(crate) struct FileServer {
    inner: Mutex<Option<nobounce_storage::FileServer>>,
    address: String,
    process: u32,
}

#[pymethods]
impl FileServer {
    #[new]
    fn new(
        py: Python<'_>,
        root: &str,
        listen: &str,
        allow: Option<&str>,
        write: bool,
        device: Option<&str>,
    ) -> PyResult<Self> {
        let wrong = |message: String| raise("Error", message);
        let mut agent = AgentOptions::default();
        if let Some(allow) = allow {
            agent.allow = allow.parse().map_err(|error| wrong(format!("allow: {error}")))?;
        }
        let listen = listen.parse().map_err(|error| wrong(format!("listen={listen:?}: {error}")))?;
        let options = ServerOptions { listen, is_writable: write, agent, ..ServerOptions::default() };
        let started = py.detach(|| {
            let device = device.map_or_else(Device::open, Device::open_named);
            let device = device.map_err(|error| error.to_string())?;
            nobounce_storage::FileServer::start(&device, root.as_ref(), options)
                .map_err(|error| error.to_string())
        });
        let server = started.map_err(wrong)?;
        let address = server.local_addr().to_string();
        Ok(Self { inner: Mutex::new(Some(server)), address, process: std::process::id() })
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    fn close(&self, py: Python<'_>) {
        let server = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        if std::process::id() == self.process {
            py.detach(|| drop(server));
        } else {
            std::mem::forget(server);
        }
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        if self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).is_some() {
            Python::attach(|py| self.close(py));
        }
    }
}
