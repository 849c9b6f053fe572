//! Why there is no shared memory with somebody, said once and kept for whoever asks.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

/// Reasons kept. Somebody who makes up peers must not make us keep them all.
const MOST: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Fallbacks(BTreeSet<String>);

impl Fallbacks {
    /// Nobody can meet us: all packets take UDP.
    pub(super) fn with_everybody(&mut self, error: &io::Error) {
        let reason = format!("no shared memory with anybody, all packets take UDP: {error}");
        tracing::warn!("{reason}");
        self.keep(reason);
    }

    /// One could not be met. Where it is not on this machine, nothing else was to be expected.
    pub(super) fn with_one(&mut self, local: IpAddr, (remote, slot): (IpAddr, u8), error: &io::Error) {
        let nobody = matches!(error.raw_os_error(), Some(libc::ECONNREFUSED | libc::ENOENT));
        if !nobody {
            let reason = format!("no shared memory with slot {slot} of {remote}, packets take UDP: {error}");
            tracing::warn!("{reason}");
            self.keep(reason);
        } else if remote == local || remote.is_loopback() {
            // A device that was told to take UDP, most often: its owner knows.
            let reason = format!(
                "no shared memory with slot {slot} of {remote}, packets take UDP: it offers none, or lives in another network namespace"
            );
            tracing::debug!("{reason}");
            self.keep(reason);
        }
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
        let [nobody, refused] = [libc::ECONNREFUSED, libc::EMFILE].map(io::Error::from_raw_os_error);
        let mut fallbacks = Fallbacks::default();
        fallbacks.with_one(here, (there, 1), &nobody);
        assert!(fallbacks.reasons().is_empty(), "another machine");
        for _ in 0..3 {
            fallbacks.with_one(here, (here, 1), &nobody);
            fallbacks.with_one(here, (there, 2), &refused);
            fallbacks.with_everybody(&refused);
        }
        let reasons = fallbacks.reasons();
        assert_eq!(reasons.len(), 3, "{reasons:?}");
        assert!(reasons.iter().all(|reason| reason.contains("UDP: ")), "{reasons:?}");
        for slot in 0..100 {
            fallbacks.with_one(here, (here, slot), &nobody);
        }
        assert_eq!(fallbacks.reasons().len(), MOST);
    }
}
