//! What a rank is to be.

use std::net::SocketAddr;
use std::time::Duration;

/// What a rank is to be.
#[derive(Clone, Debug)]
pub struct Options {
    /// The number of this rank, from 0 on.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// Where rank 0 listens for the others. Anyone who can connect there can be a rank.
    pub rendezvous: SocketAddr,
    /// The CUDA ordinal of the GPU.
    pub gpu: i32,
    /// Bytes of the symmetric heap, the same at all ranks.
    pub heap: usize,
    /// Channels: rings that kernels fill independently of each other.
    pub channels: usize,
    /// The logarithm of the number of descriptors in a ring.
    pub log_depth: u32,
    /// Signals of this rank.
    pub signals: u16,
    /// Counters of each channel.
    pub counters: u16,
    /// How long to wait for the other ranks.
    pub limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            rank: 0,
            ranks: 1,
            rendezvous: SocketAddr::from(([127, 0, 0, 1], 14_792)),
            gpu: 0,
            heap: 64 << 20,
            channels: 1,
            log_depth: 10,
            signals: 64,
            counters: 64,
            limit: Duration::from_secs(60),
        }
    }
}
