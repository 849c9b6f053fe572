//! Why a way into GPU memory was not taken. Kept with the registration, also where a later way worked; the log has it once.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use nobounce_memory::path::Mechanism;

/// A way into GPU memory that a hardware NIC did not take, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The way.
    pub rung: Mechanism,
    /// What the device, its driver or CUDA said; or what was found out when it was tried.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rung.name(), self.reason)
    }
}

/// Which ways of a device the log has named already: a program registers memory thousands of times.
#[derive(Debug, Default)]
pub(crate) struct Told(Mutex<HashSet<Mechanism>>);

impl Told {
    /// Says in the log, once for each way, that the device did not take it.
    pub(crate) fn warn(&self, device: &str, refusals: &[Refusal]) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for refusal in refusals {
            if told.insert(refusal.rung) {
                tracing::warn!("{device}: GPU memory is not registered by {refusal}");
            }
        }
    }
}
