//! Reasons why shared memory is not used with a peer: logged once and kept for reports.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use crate::links::PeerName;

/// Maximum number of reasons kept: bounds memory against made-up peers.
const MOST: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Fallbacks(BTreeSet<String>);

impl Fallbacks {
    /// No listener: all packets take UDP.
    pub(super) fn with_everybody(&mut self, error: &io::Error) {
        let reason = format!("no shared memory with any peer, all packets take UDP: {error}");
        tracing::warn!("{reason}");
        self.keep(reason);
    }

    /// One peer could not be reached. For a peer on another machine this is expected and not
    /// recorded.
    pub(super) fn with_one(&mut self, local: IpAddr, (remote, slot): PeerName, error: &io::Error) {
        let absent = matches!(error.raw_os_error(), Some(libc::ECONNREFUSED | libc::ENOENT));
        if !absent {
            let reason = format!("no shared memory with slot {slot} of {remote}, packets take UDP: {error}");
            tracing::warn!("{reason}");
            self.keep(reason);
        } else if remote == local || remote.is_loopback() {
            // Most often a device configured for UDP, which its owner knows.
            let reason = format!(
                "no shared memory with slot {slot} of {remote}, packets take UDP: it offers none, or lives in another network namespace"
            );
            tracing::debug!("{reason}");
            self.keep(reason);
        }
    }

    /// A peer lives, and does not read the ring that it was given.
    pub(super) fn refused_by(&mut self, (remote, slot): PeerName) {
        let reason = format!(
            "no shared memory with slot {slot} of {remote}, packets take UDP: it refused the ring (no descriptor left, or another version of nobounce)"
        );
        tracing::warn!("{reason}");
        self.keep(reason);
    }

    pub(super) fn reasons(&self) -> Vec<String> {
        self.0.iter().cloned().collect()
    }

    fn keep(&mut self, reason: String) {
        if self.0.len() < MOST {
            self.0.insert(reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_to_be_expected_is_not_kept_and_the_rest_once() {
        let [here, there] = ["10.0.0.1", "10.0.0.2"].map(|addr| addr.parse::<IpAddr>().unwrap());
        let [absent, refused] = [libc::ECONNREFUSED, libc::EMFILE].map(io::Error::from_raw_os_error);
        let mut fallbacks = Fallbacks::default();
        fallbacks.with_one(here, (there, 1), &absent);
        assert!(fallbacks.reasons().is_empty(), "another machine");
        for _ in 0..3 {
            fallbacks.with_one(here, (here, 1), &absent);
            fallbacks.with_one(here, (there, 2), &refused);
            fallbacks.with_everybody(&refused);
        }
        let reasons = fallbacks.reasons();
        assert_eq!(reasons.len(), 3, "{reasons:?}");
        assert!(reasons.iter().all(|reason| reason.contains("UDP: ")), "{reasons:?}");
        for slot in 0..100 {
            fallbacks.with_one(here, (here, slot), &absent);
        }
        assert_eq!(fallbacks.reasons().len(), MOST);
    }
}
