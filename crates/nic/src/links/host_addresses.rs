//! The addresses of this host.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use crate::interfaces;

/// The list that links share. Leaked when it changes: batches refer to it without a lock.
static KNOWN: Mutex<&[IpAddr]> = Mutex::new(&[]);

/// The addresses of this host besides loopback, as of now.
pub(super) fn read() -> &'static [IpAddr] {
    let mut now: Vec<IpAddr> = interfaces::addresses().into_iter().map(|here| here.addr).collect();
    now.retain(|addr| !addr.is_loopback());
    now.sort_unstable();
    now.dedup();
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if **known != *now {
        *known = now.leak();
    }
    *known
}
