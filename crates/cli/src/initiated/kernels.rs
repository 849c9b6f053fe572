//! The kernels that are measured.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use nobounce::memory::gpu::Gpu;
use nobounce::memory::gpu::kernel::{Kernel, Module, PinnedWords, Stream};

const PTX: &str = include_str!("bench.ptx");
/// Rounds of one measurement: each has a word.
pub(super) const MAX_ROUNDS: u64 = 20_000;
/// Words before those of the rounds.
const HEAD: usize = 2;
/// Thousands of times what one takes.
const LIMIT: Duration = Duration::from_secs(30);

/// The kernels, ready to be launched, and the words in which they answer.
pub(super) struct InitiatedKernels {
    ping_pong: Kernel,
    values: Kernel,
    signals: Kernel,
    read_signals: Kernel,
    stream: Kernel,
    one_put: Kernel,
    queue: Stream,
    words: PinnedWords,
}

/// What each channel posts, for a rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Posted {
    Values,
    /// From this signal on, one for each channel.
    Signals(u16),
}

/// Operations of which a stream consists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamOp {
    Put,
    Get,
}

impl InitiatedKernels {
    pub(super) fn load(gpu: &Arc<Gpu>) -> anyhow::Result<Self> {
        let module = Module::load(gpu, PTX)?;
        let words = usize::try_from(MAX_ROUNDS)? + HEAD;
        Ok(Self {
            ping_pong: module.kernel("ping_pong")?,
            values: module.kernel("values")?,
            signals: module.kernel("signals")?,
            read_signals: module.kernel("read_signals")?,
            stream: module.kernel("stream")?,
            one_put: module.kernel("one_put")?,
            queue: Stream::new(gpu)?,
            words: PinnedWords::new(gpu, words)?,
        })
    }

    /// The GPU, in words.
    pub(super) fn gpu(&self) -> String {
        self.values.gpu().to_string()
    }

    fn run(&self, kernel: &Kernel, blocks: u32, arguments: &[u64]) -> anyhow::Result<()> {
        // SAFETY: the arguments are those of the kernel; the world and the words outlive it, since
        // it is waited for.
        unsafe { kernel.launch(&self.queue, blocks, 32, arguments) }?;
        self.queue.wait("a kernel of the benchmark", LIMIT).context("the kernel does not end")
    }

    fn answers(&self) -> u64 {
        self.words.address(0)
    }

    /// Nanoseconds, if nothing failed.
    fn time(&self) -> anyhow::Result<u64> {
        ensure!(
            self.words.get(1) == 0,
            "an operation of the kernel failed: the other rank is gone, or refused it"
        );
        Ok(self.words.get(0).max(1))
    }

    /// Nanoseconds of all rounds, and of each.
    pub(super) fn ping_pong(
        &self,
        channel: u64,
        peer: u32,
        rounds: u64,
        bytes: u64,
        before: u64,
    ) -> anyhow::Result<(u64, Vec<u64>)> {
        let rounds = rounds.min(MAX_ROUNDS);
        self.run(&self.ping_pong, 1, &[channel, peer.into(), rounds, bytes, self.answers(), before])?;
        let end = HEAD + usize::try_from(rounds)?;
        Ok((self.time()?, (HEAD..end).map(|at| self.words.get(at)).collect()))
    }

    /// Nanoseconds of the slowest channel. The channels lie `stride` bytes apart.
    pub(super) fn post(
        &self,
        posted: Posted,
        (channel, stride): (u64, u64),
        channels: u32,
        peer: u32,
        count: u64,
    ) -> anyhow::Result<u64> {
        let (peer, answers) = (u64::from(peer), self.answers());
        match posted {
            Posted::Values => self.run(&self.values, channels, &[channel, stride, peer, count, answers]),
            Posted::Signals(first) => {
                self.run(&self.signals, channels, &[channel, stride, peer, count, first.into(), answers])
            }
        }?;
        let of = |number: u32, word: usize| self.words.get(2 * number as usize + word);
        ensure!((0..channels).all(|number| of(number, 1) == 0), "a flush of the kernel failed");
        Ok((0..channels).map(|number| of(number, 0)).max().unwrap_or(1).max(1))
    }

    /// What some signals of this rank are.
    pub(super) fn read_signals(&self, channel: u64, first: u16, count: u32) -> anyhow::Result<Vec<u64>> {
        self.run(&self.read_signals, 1, &[channel, first.into(), count.into(), self.answers()])?;
        Ok((0..count as usize).map(|at| self.words.get(at)).collect())
    }

    /// Nanoseconds of a stream of which at most `ahead` operations are incomplete.
    pub(super) fn stream(
        &self,
        channel: u64,
        peer: u32,
        moved: StreamOp,
        (count, bytes): (u64, u64),
        ahead: u64,
        before: u64,
    ) -> anyhow::Result<u64> {
        let is_get = u64::from(moved == StreamOp::Get);
        self.run(
            &self.stream,
            1,
            &[channel, peer.into(), count, bytes, is_get, ahead, self.answers(), before],
        )?;
        self.time()
    }

    /// Nanoseconds until one put of 8 bytes is complete.
    pub(super) fn one_put(&self, channel: u64, peer: u32, before: u64) -> anyhow::Result<u64> {
        self.run(&self.one_put, 1, &[channel, peer.into(), 8, self.answers(), before])?;
        self.time()
    }
}
