//! Latency until a kernel sees what arrives. A flag goes from GPU memory to GPU memory. A kernel
//! polls for it and notifies its host, which sends the next flag back. Half of a round trip is one
//! result.

use std::time::Instant;

use anyhow::Context;
use nobounce::memory::gpu::GpuBuffer;
use nobounce::memory::gpu::kernel::FlagWait;
use nobounce::nic::work::{Operation, Remote, SendRequest, Sge};
use nobounce::{Connection, Region, RemoteRegion};

use super::drive::asks_for_completion;
use super::exchange::{Step, Work, exchange_regions, hear_ready, say};
use super::gpu;
use super::ring::{self, GUARD, GUARD_BYTE};
use super::round::Round;
use super::side::{Side, Timed, path_of};
use super::watch::{Watch, is_receive};

/// Most messages per round: each has its own source word, written before the round.
pub(super) const MAX_ROUND: u64 = MESSAGES as u64;
const MESSAGES: usize = 100_000;
const WORD: usize = 8;
/// The flags to send: consecutive from the start.
const FLAGS: usize = (MESSAGES * WORD).next_multiple_of(4096);
/// Where the flag arrives, between guard bytes.
const TARGET: usize = FLAGS + GUARD;
const LEN: usize = TARGET + 2 * GUARD;

/// One end.
pub(super) struct Visible<'a> {
    connection: &'a Connection,
    region: Region,
    peer: RemoteRegion,
    work: Work,
    asks: bool,
}

impl<'a> Visible<'a> {
    pub(super) fn new(connection: &'a Connection, work: Work, asks: bool) -> anyhow::Result<Self> {
        gpu::kernels().context("gpu-visible latency needs a kernel that polls GPU memory")?;
        let region = ring::region(connection.device(), work.place, LEN)?;
        let peer = region.remote();
        Ok(Self { connection, region, peer, work, asks })
    }

    /// Tells the other end where our flag is.
    pub(super) fn connect(mut self) -> anyhow::Result<Self> {
        self.peer = exchange_regions(self.connection, &self.region)?;
        Ok(self)
    }

    fn buffer(&self) -> anyhow::Result<&GpuBuffer> {
        self.region.gpu_buffer().context("GPU memory of our own has a buffer")
    }

    /// Posts a flag; with `stands_for`, the request is signaled.
    fn post(&self, message: u64, stands_for: Option<u64>) -> anyhow::Result<()> {
        let mr = self.region.mr();
        let sges = [Sge { addr: mr.addr() + message * WORD as u64, len: 8, lkey: mr.lkey() }];
        let remote = Remote { addr: self.peer.addr + TARGET as u64, rkey: self.peer.rkey };
        let request = SendRequest {
            signaled: stands_for.is_some(),
            ..SendRequest::new(stands_for.unwrap_or(0), Operation::Write(remote), &sges)
        };
        Ok(self.connection.qp(0).post_send(&request)?)
    }

    fn ping_pong(&self, kernel: &FlagWait<'_>, first: u64, messages: u64) -> anyhow::Result<Vec<f64>> {
        let mut samples = Vec::new();
        let (mut got, mut watch) = (Vec::with_capacity(64), Watch::new(self.connection));
        let (mut unsent, mut unasked) = (0_u64, 0);
        let mut wait_for = |value: u64, unsent: &mut u64| -> anyhow::Result<()> {
            while kernel.seen() < value {
                // Also drives the device, at this end for what arrives.
                watch.poll(&mut got)?;
                *unsent -= got.iter().filter(|one| !is_receive(one)).map(|one| one.wr_id).sum::<u64>();
            }
            watch.moved();
            Ok(())
        };
        for message in 0..messages {
            let start = Instant::now();
            if !self.asks {
                wait_for(first + message, &mut unsent)?;
            }
            unsent += 1;
            unasked += 1;
            let asks = asks_for_completion(message, messages);
            self.post(message, asks.then_some(unasked))?;
            unasked = if asks { 0 } else { unasked };
            if self.asks {
                wait_for(first + message, &mut unsent)?;
                samples.push(start.elapsed().as_secs_f64() / 2.0 * 1e6);
            }
        }
        // The last one is signaled: until its completion, its flag may not have left.
        while unsent > 0 {
            watch.poll(&mut got)?;
            unsent -= got.iter().filter(|one| !is_receive(one)).map(|one| one.wr_id).sum::<u64>();
        }
        Ok(samples)
    }
}

/// The first flag of a round; flags of different rounds never collide.
fn first_of(round: Round) -> u64 {
    (u64::from(round.index) + 1) << 32
}

impl Side for Visible<'_> {
    fn prepare(&self, round: Round) -> anyhow::Result<()> {
        let first = first_of(round);
        let flags: Vec<u8> = (0..MAX_ROUND).flat_map(|i| (first + i).to_le_bytes()).collect();
        self.region.write_at(0, &flags)?;
        self.region.fill(FLAGS..LEN, GUARD_BYTE)?;
        Ok(())
    }

    fn timed(&self, round: Round) -> anyhow::Result<Timed> {
        let (kernels, first, messages) = (gpu::kernels()?, first_of(round), round.messages);
        let kernel = kernels.flag.start(self.buffer()?, TARGET, first, messages)?;
        // Both kernels are launched before the first flag is sent.
        say(self.connection, &Step::Ready)?;
        hear_ready(self.connection)?;
        let samples = self.ping_pong(&kernel, first, messages)?;
        // The answering side's last flag is the last of all; the requesting side has seen it.
        drop(kernel);
        Ok(Timed::of_latencies(samples, true))
    }

    fn check(&self, round: Round) -> Result<(), String> {
        let mut found = [0; 3 * GUARD];
        self.region.read_at(FLAGS, &mut found).map_err(|error| error.to_string())?;
        let mut expected = [GUARD_BYTE; 3 * GUARD];
        let last = first_of(round) + round.messages - 1;
        expected[GUARD..GUARD + WORD].copy_from_slice(&last.to_le_bytes());
        match (0..found.len()).find(|&at| found[at] != expected[at]) {
            None => Ok(()),
            Some(at) => Err(format!(
                "round {}: byte {at} next to the flag is {:#04x}, expected {:#04x}",
                round.index, found[at], expected[at]
            )),
        }
    }

    fn checkable(&self) -> u64 {
        // Each flag is a distinct number, and the kernel waits for one after the other. None is
        // left to compare, so `compared` is 0. The host reads the bytes around the flag (`check`).
        0
    }

    fn path(&self) -> String {
        path_of(&self.region)
    }

    fn memory(&self) -> &'static str {
        gpu::memory_name(self.work.place)
    }
}
