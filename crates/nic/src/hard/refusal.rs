//! Why a method of access to GPU memory was refused. Kept with the registration, also where a later
//! method worked; logged once.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use nobounce_memory::path::Mechanism;

/// A refused method of access to GPU memory, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The method.
    pub method: Mechanism,
    /// The error of the device, its driver or CUDA, or the result of the proof.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.method.name(), self.reason)
    }
}

/// Methods of a device already logged as refused: a program registers memory thousands of times.
#[derive(Debug, Default)]
pub(crate) struct LoggedOnce(Mutex<HashSet<Mechanism>>);

impl LoggedOnce {
    /// Logs a refusal once per method.
    pub(crate) fn warn(&self, device: &str, refusals: &[Refusal]) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for refusal in refusals {
            if told.insert(refusal.method) {
                tracing::warn!("{device}: GPU memory is not registered by {refusal}");
            }
        }
    }
}
