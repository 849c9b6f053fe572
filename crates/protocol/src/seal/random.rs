//! Unpredictable numbers from a seed, which the caller draws from the system.

use std::fmt;

use ring::hmac;

/// HMAC-SHA256 of a count under the seed.
pub(super) struct Random {
    key: hmac::Key,
    count: u64,
}

impl fmt::Debug for Random {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Random").finish_non_exhaustive()
    }
}

impl Random {
    pub(super) fn new(seed: &[u8; 32]) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, seed), count: 0 }
    }

    pub(super) fn nonce(&mut self) -> [u8; 16] {
        self.count += 1;
        let tag = hmac::sign(&self.key, &self.count.to_be_bytes());
        std::array::from_fn(|i| tag.as_ref().get(i).copied().unwrap_or(0))
    }

    pub(super) fn number(&mut self) -> u64 {
        let nonce = self.nonce();
        u64::from_be_bytes(std::array::from_fn(|i| nonce[i]))
    }
}
