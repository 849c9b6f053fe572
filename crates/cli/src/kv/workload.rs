//! Block tables and requests, alike in every run.

use nobounce_transfer::{Pages, Repeat};

/// A model with grouped keys: 8 layers, keys and values, 1 KiB for each token and layer.
const LAYERS: u64 = 8;
const TOKEN_BYTES: u64 = 1024;
/// Tokens of a request.
const TOKENS: u64 = 1024;

/// A pseudo-random permutation of `0..count`.
pub(super) fn shuffled(count: u64, seed: u64) -> Vec<u64> {
    let mut order: Vec<_> = (0..count).collect();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for left in (1..order.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = usize::try_from((state >> 33) % (left as u64 + 1)).unwrap_or(0);
        order.swap(left, at);
    }
    order
}

/// Requests over one pool of blocks, layer by layer.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) page_tokens: u64,
    /// Bytes of keys and values of all layers in the pool.
    bytes: u64,
    local: Vec<u64>,
    remote: Vec<u64>,
}

impl Pool {
    /// A pool of so many bytes, with other block tables at the two ends.
    pub(super) fn new(page_tokens: u64, bytes: u64) -> Self {
        let blocks = bytes / (2 * LAYERS * page_tokens * TOKEN_BYTES);
        Self { page_tokens, bytes, local: shuffled(blocks, 1), remote: shuffled(blocks, 2) }
    }

    pub(super) fn page_bytes(&self) -> u64 {
        self.page_tokens * TOKEN_BYTES
    }

    pub(super) fn request_bytes(&self) -> u64 {
        2 * LAYERS * TOKENS * TOKEN_BYTES
    }

    /// How many requests have blocks of their own.
    pub(super) fn requests(&self) -> u64 {
        self.local.len() as u64 / (TOKENS / self.page_tokens)
    }

    /// The pages of a request. Requests beyond the pool's size use blocks of earlier ones.
    pub(super) fn with_pages<T>(&self, request: u64, run: impl FnOnce(&Pages<'_>) -> T) -> T {
        let blocks = usize::try_from(TOKENS / self.page_tokens).unwrap_or(1);
        let first = usize::try_from(request % self.requests().max(1)).unwrap_or(0) * blocks;
        let step = self.bytes / (2 * LAYERS);
        let layers = Repeat { count: 2 * LAYERS, local_step: step, remote_step: step };
        let (local, remote) = (&self.local[first..][..blocks], &self.remote[first..][..blocks]);
        run(&Pages { repeats: &[layers], ..Pages::whole(local, remote, self.page_bytes()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_cover_the_pool_without_overlap() {
        let pool = Pool::new(16, 64 << 20);
        assert_eq!((pool.requests(), pool.request_bytes()), (4, 16 << 20));
        let mut covered = vec![false; (64 << 20) / 1024];
        for request in 0..pool.requests() {
            for piece in pool.with_pages(request, |pages| pages.pieces().unwrap()) {
                for at in (piece.remote..piece.remote + piece.len).step_by(1024) {
                    let place = &mut covered[usize::try_from(at / 1024).unwrap()];
                    assert!(!std::mem::replace(place, true), "request {request} at {at}");
                }
            }
        }
        assert!(covered.iter().all(|covered| *covered));
    }
}
