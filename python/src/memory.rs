//! Registered memory of Python objects.

use nobounce::Require;
use nobounce_transfer::View;
use pyo3::prelude::*;

use crate::failure::raise;

/// What an argument `require` says: "direct" or nothing.
pub(crate) fn required(require: Option<&str>) -> PyResult<Option<Require>> {
    match require {
        None => Ok(None),
        Some("direct") => Ok(Some(Require::Direct)),
        Some(other) => Err(raise("Error", format!("require={other:?}: expected \"direct\" or None"))),
    }
}

#[pyclass(frozen, module = "nobounce")]
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) view: View,
}

#[pymethods]
impl Memory {
    #[getter]
    fn nbytes(&self) -> u64 {
        self.view.len()
    }

    #[getter]
    fn address(&self) -> u64 {
        self.view.addr()
    }

    #[getter]
    fn is_gpu(&self) -> bool {
        self.view.region().is_gpu()
    }

    #[getter]
    fn is_read_only(&self) -> bool {
        self.view.is_read_only()
    }

    #[getter]
    fn paths(&self) -> String {
        self.view.region().paths().to_string()
    }

    #[getter]
    fn refusals(&self) -> Vec<String> {
        self.view.region().refusals().iter().map(ToString::to_string).collect()
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.view.len()).unwrap_or(usize::MAX)
    }

    fn part(&self, offset: u64, nbytes: u64) -> PyResult<Self> {
        let size = self.view.len();
        let out =
            || raise("ListError", format!("{nbytes} bytes at offset {offset} are not inside {size} bytes"));
        Ok(Self { view: self.view.part(offset, nbytes).ok_or_else(out)? })
    }

    fn __repr__(&self) -> String {
        format!(
            "Memory({} bytes at {:#x}: {})",
            self.view.len(),
            self.view.addr(),
            self.view.region().paths()
        )
    }
}
