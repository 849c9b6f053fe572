//! Peers and their regions.

use std::sync::{Arc, Mutex};

use nobounce_transfer::{Direction, Notify, Pages, Part, Piece, Repeat, TransferError, stream_gate};
use pyo3::prelude::*;

use crate::failure::{check_process, of_agent, of_transfer, raise};
use crate::memory::Memory;
use crate::transfer::{Transfer, duration, wait};

#[pyclass(frozen, module = "nobounce")]
#[derive(Debug)]
pub(crate) struct Remote {
    inner: nobounce_transfer::Remote,
}

#[pymethods]
impl Remote {
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.len()
    }

    fn part(&self, offset: u64, nbytes: u64) -> PyResult<Self> {
        let size = self.inner.len();
        let out =
            || raise("ListError", format!("{nbytes} bytes at offset {offset} are not inside {size} bytes"));
        Ok(Self { inner: self.inner.part(offset, nbytes).ok_or_else(out)? })
    }

    fn __repr__(&self) -> String {
        format!("Remote({:?}, {} bytes)", self.inner.name(), self.inner.len())
    }
}

#[pyclass(frozen, module = "nobounce")]
#[derive(Debug)]
pub(crate) struct Announcement {
    inner: Mutex<Option<nobounce_transfer::Announcement>>,
}

#[pymethods]
impl Announcement {
    fn complete(&self) -> PyResult<()> {
        self.take()?.complete();
        Ok(())
    }

    #[pyo3(signature = (reason="it was given up"))]
    fn abort(&self, reason: &str) -> PyResult<()> {
        self.take()?.abort(reason);
        Ok(())
    }
}

impl Announcement {
    fn take(&self) -> PyResult<nobounce_transfer::Announcement> {
        let taken = self.inner.lock().ok().and_then(|mut inner| inner.take());
        taken.ok_or_else(|| of_transfer(&TransferError::AnnouncementEnded))
    }
}

#[pyclass(frozen, module = "nobounce")]
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) inner: nobounce_transfer::Peer,
    pub(crate) process: u32,
}

/// A list of numbers that the caller holds: their address and how many.
type Numbers = (usize, usize);

/// # Safety
/// The caller holds that many numbers there, and the GIL.
unsafe fn numbers<'a>((address, count): Numbers) -> &'a [u64] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise; the package passes aligned addresses of numpy arrays and of
    // arrays.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), count) }
}

#[pymethods]
impl Peer {
    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    #[getter]
    fn generation(&self) -> u64 {
        self.inner.generation()
    }

    #[getter]
    fn address(&self) -> &str {
        self.inner.addr()
    }

    /// Why it is gone; `None` while it is not.
    #[getter]
    fn gone(&self) -> Option<String> {
        self.inner.gone().map(|reason| reason.to_string())
    }

    fn regions(&self) -> Vec<String> {
        self.inner.regions()
    }

    #[pyo3(signature = (name, timeout=None))]
    fn region(&self, py: Python<'_>, name: &str, timeout: Option<f64>) -> PyResult<Remote> {
        check_process(self.process)?;
        let timeout = duration(timeout);
        let found = wait(py, timeout, |slice| match self.inner.region(name, slice) {
            Err(TransferError::NoRegion { .. }) => None,
            found => Some(found),
        })?;
        let found = found.unwrap_or_else(|| match self.inner.region(name, std::time::Duration::ZERO) {
            Err(TransferError::NoRegion { peer, region, exported, .. }) => {
                Err(TransferError::NoRegion { peer, region, exported, timeout })
            }
            other => other,
        });
        found.map(|inner| Remote { inner }).map_err(|error| of_transfer(&error))
    }

    fn add_metadata(&self, metadata: &[u8]) -> PyResult<()> {
        self.inner.add_metadata(metadata).map_err(|error| of_agent(&error))
    }

    fn close(&self) -> PyResult<()> {
        check_process(self.process)?;
        self.inner.close();
        Ok(())
    }

    fn announce(&self, tag: &[u8]) -> PyResult<Announcement> {
        check_process(self.process)?;
        let inner = self.inner.announce(tag).map_err(|error| of_transfer(&error))?;
        Ok(Announcement { inner: Mutex::new(Some(inner)) })
    }

    /// Pages: numbers, bytes, strides and offsets of both sides; repetitions are (count, local
    /// step, remote step).
    #[allow(clippy::too_many_arguments)] // called by the package only
    fn submit_pages(
        &self,
        is_read: bool,
        memory: Vec<(Py<Memory>, Py<Remote>)>,
        pages: (Numbers, Numbers),
        nbytes: u64,
        strides: (u64, u64),
        offsets: (u64, u64),
        repeats: Vec<(u64, u64, u64)>,
        tag: Option<&[u8]>,
        announcement: Option<&Announcement>,
        after: Option<u64>,
    ) -> PyResult<Transfer> {
        let repeats: Vec<_> = repeats
            .into_iter()
            .map(|(count, local_step, remote_step)| Repeat { count, local_step, remote_step })
            .collect();
        // SAFETY: the package holds both lists during the call.
        let (local, remote) = unsafe { (numbers(pages.0), numbers(pages.1)) };
        let pages = Pages {
            local,
            remote,
            len: nbytes,
            local_stride: strides.0,
            remote_stride: strides.1,
            local_offset: offsets.0,
            remote_offset: offsets.1,
            repeats: &repeats,
        };
        let pieces = pages.pieces().map_err(|error| of_transfer(&error.into()))?;
        self.submit(is_read, &memory, pieces, tag, announcement, after)
    }

    /// Pieces: (local offset, remote offset, bytes) one after the other.
    fn submit_list(
        &self,
        is_read: bool,
        memory: Vec<(Py<Memory>, Py<Remote>)>,
        list: Numbers,
        tag: Option<&[u8]>,
        announcement: Option<&Announcement>,
        after: Option<u64>,
    ) -> PyResult<Transfer> {
        // SAFETY: the package holds the list during the call.
        let list = unsafe { numbers(list) };
        let pieces: Vec<_> = list
            .chunks_exact(3)
            .map(|piece| Piece { local: piece[0], remote: piece[1], len: piece[2] })
            .collect();
        self.submit(is_read, &memory, pieces, tag, announcement, after)
    }

    fn __repr__(&self) -> String {
        let state = self.inner.gone().map_or_else(String::new, |reason| format!(", gone: {reason}"));
        format!("Peer({:?} at {}{state})", self.inner.name(), self.inner.addr())
    }
}

impl Peer {
    fn submit(
        &self,
        is_read: bool,
        memory: &[(Py<Memory>, Py<Remote>)],
        pieces: Vec<Piece>,
        tag: Option<&[u8]>,
        announcement: Option<&Announcement>,
        after: Option<u64>,
    ) -> PyResult<Transfer> {
        check_process(self.process)?;
        // SAFETY: the package has the handle from a stream object that the caller holds.
        let gate = after.map(|stream| unsafe { stream_gate(stream) }).transpose();
        let gate = gate.map_err(|error| raise("Error", error.to_string()))?;
        let pieces = Arc::new(pieces);
        let direction = if is_read { Direction::Read } else { Direction::Write };
        let parts = memory
            .iter()
            .map(|(local, remote)| Part {
                local: &local.get().view,
                remote: &remote.get().inner,
                pieces: pieces.clone(),
            })
            .collect();
        let held = announcement.map(|announcement| announcement.inner.lock());
        if tag.is_some() && announcement.is_some() {
            let message = "tag= and announcement= exclude each other: the announcement has a tag already";
            return Err(raise("ListError", message.to_owned()));
        }
        let notify = match (&held, tag) {
            (Some(Ok(inner)), _) => match &**inner {
                Some(inner) => Notify::With(inner),
                None => return Err(of_transfer(&TransferError::AnnouncementEnded)),
            },
            (Some(Err(_)), _) => return Err(of_transfer(&TransferError::AnnouncementEnded)),
            (None, Some(tag)) => Notify::Tag(tag),
            (None, None) => Notify::Nothing,
        };
        let submitted = self.inner.submit_after(direction, parts, notify, gate);
        submitted.map(|inner| Transfer { inner, process: self.process }).map_err(|error| of_transfer(&error))
    }
}
