//! Errors as the package's exceptions.

use nobounce::RegisterError;
use nobounce_transfer::{AgentError, TransferError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// An exception of `nobounce.errors` with that name.
pub(crate) fn raise(name: &str, message: String) -> PyErr {
    Python::attach(|py| {
        let made = py
            .import("nobounce.errors")
            .and_then(|errors| errors.getattr(name))
            .and_then(|class| class.call1((message.clone(),)));
        match made {
            Ok(exception) => PyErr::from_value(exception),
            Err(_) => PyRuntimeError::new_err(message),
        }
    })
}

/// Objects of a parent process cannot be used: its threads are not here.
pub(crate) fn check_process(process: u32) -> PyResult<()> {
    if std::process::id() == process {
        return Ok(());
    }
    let message =
        "this object belongs to the parent process: open an agent after the fork, or start workers by spawn";
    Err(raise("Error", message.to_owned()))
}

pub(crate) fn of_transfer(error: &TransferError) -> PyErr {
    let name = match error {
        TransferError::PeerGone { .. } => "PeerGone",
        TransferError::Timeout(_) | TransferError::NoRegion { .. } => "Timeout",
        TransferError::RemoteAccess { .. }
        | TransferError::Withdrawn { .. }
        | TransferError::Stale { .. }
        | TransferError::RemoteClosed(_) => "RemoteAccessError",
        TransferError::Cancelled => "Cancelled",
        TransferError::List(_)
        | TransferError::Tag(_)
        | TransferError::ReadOnly
        | TransferError::OtherAgent => "ListError",
        _ => "Error",
    };
    raise(name, error.to_string())
}

pub(crate) fn of_agent(error: &AgentError) -> PyErr {
    let name = match error {
        AgentError::NoPeer(_) => "Timeout",
        AgentError::Connect(_) | AgentError::NoAgent { .. } | AgentError::Aborted => "ConnectError",
        AgentError::Register(error) if error.is_not_direct() => "NotDirect",
        AgentError::Stale { .. } => "RemoteAccessError",
        _ => "Error",
    };
    raise(name, error.to_string())
}

/// A registration failed.
pub(crate) fn of_register(error: &RegisterError) -> PyErr {
    raise(if error.is_not_direct() { "NotDirect" } else { "Error" }, error.to_string())
}
