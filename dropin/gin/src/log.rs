//! NCCL's log.

use std::ffi::CString;
use std::sync::{Mutex, PoisonError};

use crate::abi::{LOG_WARN, Logger, SUBSYSTEMS};

static LOGGER: Mutex<Option<Logger>> = Mutex::new(None);

/// NCCL's function for log lines.
pub fn set(logger: Option<Logger>) {
    if logger.is_some() {
        *LOGGER.lock().unwrap_or_else(PoisonError::into_inner) = logger;
    }
}

/// A warning, which NCCL prints at `NCCL_DEBUG=WARN`.
pub fn warn(text: &str) {
    nobounce_dropin::log::warn(|| format!("libnccl-gin: {text}"));
    let logger = *LOGGER.lock().unwrap_or_else(PoisonError::into_inner);
    if let (Some(logger), Ok(text)) = (logger, CString::new(format!("nobounce: {text}"))) {
        // SAFETY: NCCL's function, with the arguments that the format names.
        unsafe {
            logger(LOG_WARN, SUBSYSTEMS, c"libnccl-gin".as_ptr(), 0, c"%s".as_ptr(), text.as_ptr());
        }
    }
}
