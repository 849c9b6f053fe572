//! Reads of one process.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nobounce::file::{File, FileOptions};
use nobounce::memory::FileMapping;
use nobounce::memory::HostBuffer;
use nobounce::memory::gpu::GpuBuffer;
use nobounce::memory::gpu::naive::{self, DoubleBuffer};
use nobounce::{Device, GpuOptions, Region};

use super::FILE_LEN;
use super::figures::{Cached, Cold};
use crate::bench::numbers::float;
use crate::bench::stats::median;

/// Sizes of reads from the page cache.
const SIZES: [u64; 7] = [4 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20];
/// Time for each measurement.
const AIM: Duration = Duration::from_millis(250);
/// Turns of each kind of read.
const TURNS: u32 = 10;
/// Rounds of the cold reads.
const ROUNDS: usize = 3;
/// As fio: `--direct=1 --bs=1M --numjobs=4`.
const JOBS: usize = 4;
const BLOCK: usize = 1 << 20;
/// Double-buffering: pinned buffers of each thread.
const BUFFERS: usize = 2;
/// Least bytes of a piece. From 512 KiB on, each of the threads has two pieces or more.
const SHORTEST: usize = 64 << 10;

/// What would be measured.
pub(super) fn cases() -> String {
    let sizes: Vec<_> = SIZES.iter().map(|bytes| crate::bench::ranks::size(*bytes)).collect();
    format!(
        "this machine, from the page cache: {}; not in the page cache: the whole file, {ROUNDS} rounds\n",
        sizes.join(", ")
    )
}

pub(super) struct Local {
    file: File,
    /// The same file, for programs without nobounce.
    plain: fs::File,
    region: Region,
    host: HostBuffer,
}

impl Local {
    pub(super) fn open(device: &Device, gpu: Option<i32>, path: &Path) -> anyhow::Result<Self> {
        let len = usize::try_from(FILE_LEN)?;
        let region = match gpu {
            Some(gpu) => device.register_gpu_on(gpu, len, GpuOptions::default())?,
            None => device.register(len)?,
        };
        let (file, plain) = (File::open(path)?, fs::File::open(path)?);
        Ok(Self { file, plain, region, host: HostBuffer::new(len)? })
    }

    pub(super) fn cached(&self) -> anyhow::Result<Vec<Cached>> {
        // The whole file is in the page cache from here on.
        for at in (0..FILE_LEN).step_by(BLOCK) {
            self.pread(at, BLOCK)?;
        }
        SIZES.iter().map(|bytes| self.cached_of(*bytes)).collect()
    }

    fn cached_of(&self, bytes: u64) -> anyhow::Result<Cached> {
        let len = usize::try_from(bytes)?;
        let read = |at| self.region.read_file_with(&self.file, at, 0..len, FileOptions::default());
        let report = read(0)?;
        let paths = report.paths.list().into_iter().filter(|(_, tally)| tally.bytes > 0);
        let path = paths.map(|(path, _)| path).collect::<Vec<_>>().join(", ");
        let read_us = time(bytes, |at| Ok(read(at).map(drop)?))?;
        let (mut memcpy_us, mut double_buffered_us) = (None, None);
        if let Some(buffer) = self.region.gpu_buffer() {
            memcpy_us = Some(time(bytes, |at| {
                self.pread(at, len)?;
                naive::copy_to_gpu(buffer, 0, &self.host, 0, len)?;
                Ok(naive::settle(buffer)?)
            })?);
            double_buffered_us = Some(double_buffered(&self.plain, buffer, bytes)?);
        }
        Ok(Cached { bytes, read_us, path, memcpy_us, double_buffered_us })
    }

    /// Both in turns. `None` where the file system has no `O_DIRECT`, or keeps pages in memory.
    pub(super) fn cold(&self, path: &Path) -> anyhow::Result<Option<Cold>> {
        if self.file.direct_refused().is_some() {
            return Ok(None);
        }
        let len = self.region.len();
        let (mut read, mut disk) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            self.cool();
            if self.is_warm()? {
                return Ok(None);
            }
            let start = Instant::now();
            // A new file has no mapping yet, as in a program that begins.
            self.region.read_file_with(&File::open(path)?, 0, 0..len, FileOptions::default())?;
            read.push(start.elapsed().as_secs_f64());
            self.cool();
            disk.push(raw(path)?);
        }
        let speed = |times: &[f64]| float(FILE_LEN) / median(times).unwrap_or(f64::NAN) / 1e9;
        Ok(Some(Cold { read_gbytes_per_s: speed(&read), disk_gbytes_per_s: speed(&disk) }))
    }

    fn cool(&self) {
        let advice = libc::POSIX_FADV_DONTNEED;
        // SAFETY: advice about a descriptor.
        unsafe { libc::posix_fadvise(self.file.as_fd().as_raw_fd(), 0, 0, advice) };
    }

    /// Whether a page of it is in the page cache, of one in each block.
    fn is_warm(&self) -> anyhow::Result<bool> {
        let len = usize::try_from(FILE_LEN)?;
        let pages = FileMapping::of(self.file.as_fd(), len)?;
        Ok((0..len).step_by(BLOCK).any(|at| pages.is_resident(at..at + 1)))
    }

    fn pread(&self, at: u64, len: usize) -> anyhow::Result<()> {
        // SAFETY: the buffer outlives the call.
        let window = unsafe { self.host.window() };
        Ok(window.read_file(0..len, self.file.as_fd(), at)?)
    }
}

/// Median microseconds of a read with `pread` into pinned buffers and `cuMemcpyHtoDAsync`, by
/// threads that exist before it begins. Short ones take one thread: the caller.
fn double_buffered(file: &fs::File, gpu: &GpuBuffer, bytes: u64) -> anyhow::Result<f64> {
    let len = usize::try_from(bytes)?;
    let piece = (len / (JOBS * BUFFERS)).clamp(SHORTEST, BLOCK);
    let threads = JOBS.min(len.div_ceil(piece));
    // The pieces of one thread.
    let read = |stage: &mut DoubleBuffer<'_>, at: u64, number: usize| -> anyhow::Result<()> {
        for start in (number * piece..len).step_by(threads * piece) {
            let room = &mut stage.buffer()?[..piece.min(len - start)];
            let filled = room.len();
            file.read_exact_at(room, at + start as u64)?;
            stage.copy(start, filled)?;
        }
        Ok(stage.settle()?)
    };
    std::thread::scope(|scope| {
        let (done, ended) = mpsc::channel();
        let mut others = Vec::new();
        for number in 1..threads {
            let mut stage = DoubleBuffer::new(gpu, BUFFERS, piece)?;
            let (begin, begun) = mpsc::channel();
            let (done, read) = (done.clone(), &read);
            // Until one of the channels is closed.
            scope.spawn(move || {
                begun.into_iter().try_for_each(|at| done.send(read(&mut stage, at, number)).ok())
            });
            others.push(begin);
        }
        drop(done);
        let mut stage = DoubleBuffer::new(gpu, BUFFERS, piece)?;
        time(bytes, |at| {
            others.iter().try_for_each(|other| other.send(at))?;
            read(&mut stage, at, 0)?;
            others.iter().try_for_each(|_| ended.recv()?)
        })
    })
}

/// Seconds in which four threads read the file.
fn raw(path: &Path) -> anyhow::Result<f64> {
    let file = fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let next = AtomicU64::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let read = || -> std::io::Result<()> {
            // Aligned within it.
            let mut memory = vec![0; BLOCK + 4096];
            let lead = memory.as_ptr().align_offset(4096);
            loop {
                let at = next.fetch_add(BLOCK as u64, Ordering::Relaxed);
                if at >= FILE_LEN {
                    return Ok(());
                }
                file.read_exact_at(&mut memory[lead..lead + BLOCK], at)?;
            }
        };
        let threads: Vec<_> = (0..JOBS).map(|_| scope.spawn(read)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Ok(())))
    })?;
    Ok(start.elapsed().as_secs_f64())
}

/// Median microseconds of a read of so many bytes, at offsets all over the file.
pub(super) fn time(bytes: u64, mut read: impl FnMut(u64) -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let [read_us] = times(bytes, AIM, [&mut read])?;
    Ok(read_us)
}

/// A kind of read, which gets an offset.
pub(super) type Kind<'a> = &'a mut dyn FnMut(u64) -> anyhow::Result<()>;

/// Median microseconds of each kind of read, of so many bytes, at offsets all over the file. The
/// kinds take turns of a tenth of the time, so that a busy machine slows all of them.
pub(super) fn times<const N: usize>(
    bytes: u64,
    aim: Duration,
    mut kinds: [Kind<'_>; N],
) -> anyhow::Result<[f64; N]> {
    let places = FILE_LEN / bytes;
    let mut times = [(); N].map(|()| Vec::new());
    for _ in 0..TURNS {
        for (kind, times) in kinds.iter_mut().zip(&mut times) {
            let start = Instant::now();
            while times.len() < 3 || start.elapsed() < aim / TURNS {
                // A number without a factor of two visits all places.
                let at = (times.len() as u64).wrapping_mul(0x9e37_79b1) % places * bytes;
                let begun = Instant::now();
                kind(at)?;
                times.push(begun.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    Ok(times.map(|times| median(&times).unwrap_or(f64::NAN)))
}
