//! Common setup of the litmus tests: a GPU, memory on it with a window, the kernels, and words
//! shared with them.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nobounce_memory::gpu::kernel::{Kernel, Module, Patterns, PinnedWords, Stream};
use nobounce_memory::gpu::{Gpu, GpuBuffer, GpuMemory, GpuOptions, GpuWindow};

use crate::gpu_common::{self, Alone};

const PTX: &str = include_str!("litmus.ptx");
const LEN: usize = 2 << 20;
/// Payload of a packet, in which messages arrive.
const PACKET: usize = 4096;
/// Threads of the one block that every kernel here has.
const BLOCK: u32 = 512;
/// A variant is played so long at most.
const PLAY: Duration = Duration::from_millis(1500);
/// So long the other side may take for one round.
pub(crate) const ROUND: Duration = Duration::from_secs(5);

/// Places of the shared words; the kernels have the same list.
const STOP: usize = 0;
pub(crate) const GO: usize = 8;
const ACK: usize = 16;
const BAD: usize = 17;
const FIRST: usize = 18;
const READS: usize = 19;
const CHANGES: usize = 20;
const WORDS: usize = 32;

/// A GPU with memory, ready to play.
pub(crate) struct Stage {
    // Dropped in this order: the registration before the memory.
    pub(crate) memory: GpuMemory,
    pub(crate) buffer: GpuBuffer,
    pub(crate) gpu: Arc<Gpu>,
    patterns: Option<Patterns>,
    module: Option<Module>,
    _alone: Alone,
}

impl Stage {
    /// A stage with kernels; `None`, with the waiver printed, where there is no GPU.
    pub(crate) fn with_kernels() -> Option<Self> {
        let mut stage = Self::set(true)?;
        stage.patterns = Some(Patterns::load(&stage.gpu).unwrap());
        stage.module = Some(Module::load(&stage.gpu, PTX).unwrap());
        stage.clear();
        Some(stage)
    }

    /// A stage with a window only, which the stand-in driver can provide too.
    pub(crate) fn without_kernels() -> Option<Self> {
        Self::set(false)
    }

    fn set(kernels: bool) -> Option<Self> {
        let (gpu, alone) = gpu_common::gpu(kernels)?;
        let buffer = GpuBuffer::new(&gpu, LEN).unwrap();
        let memory = GpuMemory::register(buffer.addr(), LEN, &GpuOptions::default()).unwrap();
        if memory.window().is_none() {
            return gpu_common::waive(&format!("no window onto GPU memory: {:?}", memory.refusals()));
        }
        Some(Self { memory, buffer, gpu, patterns: None, module: None, _alone: alone })
    }

    pub(crate) fn window(&self) -> &GpuWindow {
        self.memory.window().unwrap()
    }

    /// The first byte of the window in this process, for the tests' own sequences.
    pub(crate) fn base(&self) -> *mut u8 {
        self.window().as_mut_ptr()
    }

    /// The address of a byte of the memory on the GPU.
    pub(crate) fn on_gpu(&self, offset: usize) -> u64 {
        self.memory.addr() + offset as u64
    }

    /// Places a message as the NIC does (`Target::place` of crates/nic): packet by packet, the last
    /// one last, and completed.
    pub(crate) fn place(&self, offset: usize, message: &[u8]) {
        let cut = message.len().saturating_sub(1) / PACKET * PACKET;
        let (body, last) = message.split_at(cut);
        for (packet, bytes) in body.chunks(PACKET).enumerate() {
            self.window().store(offset + packet * PACKET, bytes).unwrap();
        }
        self.window().store_last(offset + cut, last).unwrap();
        self.window().complete().unwrap();
    }

    /// Zeroes the memory by the GPU.
    pub(crate) fn clear(&self) {
        if let Some(patterns) = &self.patterns {
            patterns.fill_byte(&self.buffer, 0..LEN, 0).unwrap();
        }
    }

    /// A kernel of this test, ready on the GPU.
    pub(crate) fn kernel(&self, name: &str) -> Kernel {
        self.module.as_ref().unwrap().kernel(name).unwrap()
    }

    /// Zeroes the memory and starts a kernel; its last argument is the address of the shared words.
    /// `arguments` gets them too.
    pub(crate) fn start(&self, name: &str, arguments: impl FnOnce(&PinnedWords) -> Vec<u64>) -> Running {
        self.clear();
        let kernel = self.kernel(name);
        let words = PinnedWords::new(&self.gpu, WORDS).unwrap();
        let stream = Stream::new(&self.gpu).unwrap();
        let mut arguments = arguments(&words);
        arguments.push(words.address(0));
        // SAFETY: the kernels of litmus.cu take these arguments; memory and words outlive them,
        // since `Running` ends them.
        unsafe { kernel.launch(&stream, 1, BLOCK, &arguments) }.unwrap();
        Running { words, stream }
    }

    /// Plays rounds against `reader`: it waits for the flag, then counts stale words of the
    /// message. `flag` is an offset in GPU memory, or the shared word GO where there is none;
    /// `store` stores round i's message and flag.
    pub(crate) fn play_reader(
        &self,
        words: usize,
        flag: Option<usize>,
        most: u64,
        mut store: impl FnMut(u64, &PinnedWords),
    ) -> Count {
        let running = self.start("reader", |host| {
            let flag = flag.map_or_else(|| host.address(GO), |offset| self.on_gpu(offset));
            vec![self.on_gpu(0), words as u64, flag, most]
        });
        let rounds = play(most, |i| {
            store(i, &running.words);
            running.acknowledged(i);
        });
        Count { rounds, violations: running.words.get(BAD) }
    }
}

/// A kernel at work. Dropping it ends it.
pub(crate) struct Running {
    pub(crate) words: PinnedWords,
    stream: Stream,
}

impl Running {
    /// Waits until the kernel has acknowledged round `i`.
    pub(crate) fn acknowledged(&self, i: u64) {
        let started = Instant::now();
        let mut looks = 0u32;
        while self.words.get(ACK) != i {
            looks += 1;
            if looks.is_multiple_of(1 << 16) {
                assert!(started.elapsed() < ROUND, "round {i}: the kernel stands at {}", self.words.get(ACK));
            }
            std::hint::spin_loop();
        }
    }

    /// The word by which the kernel announces that its round is written.
    pub(crate) fn flag(&self) -> *const u64 {
        self.words.as_ptr().cast::<u64>().wrapping_add(ACK)
    }

    /// Stops the kernel and waits for its end.
    pub(crate) fn stop(&self) {
        self.words.set(STOP, 1);
        self.stream.wait("a litmus kernel", ROUND).unwrap();
    }

    /// What `torn_reader` counted: (torn words, words read, changes seen). After `stop`.
    pub(crate) fn torn(&self) -> (u64, u64, u64) {
        (self.words.get(BAD), self.words.get(READS), self.words.get(CHANGES))
    }

    /// Where the first old word of a message was.
    #[allow(dead_code, reason = "helps to find the cause of a violation")]
    pub(crate) fn first(&self) -> u64 {
        self.words.get(FIRST)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.words.set(STOP, 1);
        let _ = self.stream.wait("a litmus kernel", ROUND);
    }
}

/// Plays rounds 1, 2, ... up to `most` or the time limit, and returns their number.
pub(crate) fn play(most: u64, mut round: impl FnMut(u64)) -> u64 {
    let started = Instant::now();
    for i in 1..=most {
        round(i);
        if i.is_multiple_of(64) && started.elapsed() > PLAY {
            return i;
        }
    }
    most
}

/// A message all of whose words are the number of its round.
#[derive(Clone)]
pub(crate) struct Message(Vec<u64>);

impl Message {
    pub(crate) fn of_words(words: usize) -> Self {
        Self(vec![0; words])
    }

    /// Round `i`'s message.
    pub(crate) fn round(&mut self, i: u64) -> &[u64] {
        self.0.fill(i);
        &self.0
    }

    /// Round `i`'s message as bytes.
    pub(crate) fn bytes(&mut self, i: u64) -> &[u8] {
        bytes(self.round(i))
    }
}

/// Words as the bytes they consist of.
pub(crate) fn bytes(words: &[u64]) -> &[u8] {
    // SAFETY: any word is eight bytes, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

/// Rounds played, and violations found by an observer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) rounds: u64,
    pub(crate) violations: u64,
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.violations, self.rounds)
    }
}

/// Expectation for a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shows {
    /// It shows on an H200, or always.
    Known,
    /// Allowed to happen, but never observed, or not in every run. The reason is printed where
    /// nothing shows: which property of the machine keeps the order by itself, so that removing the
    /// fence proves nothing.
    Perhaps(&'static str),
}

/// Prints the result and fails where the rule did not hold. `taken_out` names what was removed.
pub(crate) fn judge(rule: &str, kept: Count, taken_out: &[(&str, Shows, Count)]) {
    let mut line = format!("litmus: {rule}: {kept}");
    for (what, shows, count) in taken_out {
        let seen = match shows {
            _ if count.violations > 0 => "SEEN TO MATTER".to_owned(),
            Shows::Known => "NOT SEEN here".to_owned(),
            Shows::Perhaps(why) => format!("NOT SEEN here: {why}"),
        };
        line += &format!("; {what}: {count} ({seen})");
    }
    println!("{line}");
    assert_eq!(kept.violations, 0, "{rule}: {kept} messages");
    assert!(kept.rounds > 0, "{rule}: nothing was played");
    if gpu_common::required("litmus") {
        for (what, shows, count) in taken_out {
            assert!(*shows != Shows::Known || count.violations > 0, "{rule}: {what} shows nothing: {count}");
        }
    }
}
