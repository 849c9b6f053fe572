//! The compiled part of the Python package `nobounce`. Its Python part finds addresses of memory
//! and speaks with event loops; this one holds agents, memory and transfers.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! agent                       Agent
//! connecting  files           connections, files
//! peer  memory                peers and regions, registered memory
//! transfer                    waiting for transfers
//! failure  log                exceptions, lines for logging
//! ```
//!
//! | room | what |
//! |---|---|
//! | `failure`, `log` | errors as the package's exceptions; log lines for `logging` |
//! | `memory`, `transfer` | registered memory of Python objects; transfers |
//! | `peer`, `connecting` | peers, and connecting in a thread of its own |
//! | `files` | files into memory: local ones, and those of a file server |
//! | `agent` | agents |

#![allow(missing_docs)] // the classes are documented in the package's Python files

mod agent;
mod connecting;
mod failure;
mod files;
mod log;
mod memory;
mod peer;
mod transfer;

use pyo3::prelude::*;

#[pymodule]
fn _nobounce(module: &Bound<'_, PyModule>) -> PyResult<()> {
    log::start();
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<agent::Agent>()?;
    module.add_class::<connecting::Connecting>()?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<peer::Peer>()?;
    module.add_class::<peer::Remote>()?;
    module.add_class::<peer::Announcement>()?;
    module.add_class::<transfer::Transfer>()?;
    module.add_class::<files::Files>()?;
    module.add_class::<files::FileTicket>()?;
    module.add_class::<files::FileServer>()?;
    module.add_function(wrap_pyfunction!(files::move_file, module)?)?;
    module.add_function(wrap_pyfunction!(files::file_counters, module)?)?;
    module.add_function(wrap_pyfunction!(log::take_log, module)?)
}
