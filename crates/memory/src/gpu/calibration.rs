//! Cost of loads, stores and the copy engine on this machine: measured once per GPU, on our own
//! memory, in a few milliseconds.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use thiserror::Error;

use super::copy_engine::{CopyEngine, CopyError, PendingCopy, PinnedChunk};
use super::{CudaError, Gpu, GpuBuffer, GpuMemory, GpuOptions, GpuRegisterError, GpuWindow};
use crate::AccessError;

/// Sizes at which a load and a copy are compared, in bytes.
const SIZES: [usize; 10] = [64, 256, 1024, 2048, 4096, 8192, 12 << 10, 16 << 10, 32 << 10, 64 << 10];
/// Size at which rates are taken.
const LONG: usize = 1 << 20;
/// Measurements of which the median counts.
const ROUNDS: usize = 5;
/// Copies in flight while the engine's rate is taken.
const IN_FLIGHT: usize = 3;
/// Most measurements of a GPU, the first included, while they are cut short.
const MOST_TRIES: u32 = 3;
/// Time budget. Past it no further measurement starts: the GPU is busy, and the results so far
/// count.
const BUDGET: Duration = Duration::from_millis(25);
/// Timeout of a single copy.
const COPY_TIMEOUT: Duration = Duration::from_millis(10);
/// Past this time the wait for a copy yields the CPU to other threads.
const YIELD_AFTER: Duration = Duration::from_micros(100);
/// Taken where nothing could be compared: what an H200 behind PCIe 5.0 shows.
pub const USUAL_CROSSOVER: usize = 4096;

/// Cost of the routes between host and GPU memory on this machine.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Calibration {
    /// Whether every comparison finished in time. If not, the crossover is a default, or rests on a
    /// few lengths.
    pub is_whole: bool,
    /// Up to this many bytes a gather by loads through the window is no slower than one by the copy
    /// engine. 0 without a window.
    pub load_crossover: usize,
    /// Time of a load of 64 bytes through the window.
    pub load_latency: Option<Duration>,
    /// Bytes per second of loads of 64 KiB.
    pub load_rate: Option<f64>,
    /// Time of a store of 64 bytes with its fence.
    pub store_latency: Option<Duration>,
    /// Bytes per second of stores of 1 MiB out of the cache.
    pub store_rate: Option<f64>,
    /// Time of a copy of 64 bytes by the engine, from its start until it is seen to be over.
    pub copy_latency: Option<Duration>,
    /// Bytes per second of copies of 1 MiB from the GPU, several in flight.
    pub copy_rate: Option<f64>,
    /// Duration of the measurement, without allocating and registering its memory.
    pub took: Duration,
    /// The name of the GPU.
    pub gpu: String,
}

/// Why there are no figures.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// No memory for it.
    #[error("cannot allocate scratch memory for the calibration: {0}")]
    Allocation(#[from] CudaError),
    /// Its memory could not be registered.
    #[error("cannot register the scratch memory of the calibration: {0}")]
    Registration(Arc<GpuRegisterError>),
    /// The copy engine failed.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The window failed.
    #[error("access to scratch memory through its window failed: {0}")]
    Window(#[from] AccessError),
}

impl Calibration {
    /// The figures of this GPU, measured at the first call and cached for the life of the process.
    /// The measurement temporarily allocates 3 MiB of GPU memory. Later calls retry, a few times, a
    /// measurement that a busy GPU cut short.
    pub fn of(gpu: &Arc<Gpu>) -> Result<Self, CalibrationError> {
        static KNOWN: Mutex<Vec<(i32, u32, Calibration)>> = Mutex::new(Vec::new());
        // Held while measuring: two measurements at a time would disturb each other.
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known.iter().position(|(ordinal, ..)| *ordinal == gpu.ordinal());
        let tries = before.map_or(0, |index| known[index].1);
        if let Some(index) = before.filter(|&index| known[index].2.is_whole || tries >= MOST_TRIES) {
            return Ok(known[index].2.clone());
        }
        let calibration = Self::measure(gpu)?;
        known.retain(|(ordinal, ..)| *ordinal != gpu.ordinal());
        known.push((gpu.ordinal(), tries + 1, calibration.clone()));
        Ok(calibration)
    }

    /// Measures, whatever is known.
    pub fn measure(gpu: &Arc<Gpu>) -> Result<Self, CalibrationError> {
        let buffer = GpuBuffer::new(gpu, LONG * IN_FLIGHT)?;
        let memory = GpuMemory::register(buffer.addr(), buffer.len(), &GpuOptions::default())
            .map_err(|error| CalibrationError::Registration(Arc::new(error)))?;
        let engine = CopyEngine::new(gpu, IN_FLIGHT, LONG)?;
        CopyBench::new(&memory, &engine).run()
    }
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |time: Option<Duration>| {
            time.map_or("unknown".to_owned(), |time| format!("{:.2} us", time.as_secs_f64() * 1e6))
        };
        let rate =
            |rate: Option<f64>| rate.map_or("unknown".to_owned(), |rate| format!("{:.2} GB/s", rate / 1e9));
        write!(
            f,
            "{}: loads up to {} bytes, copy engine above; load {} and {}, store {} and {}, copy engine {} and {} \
             (64 bytes, long; measured in {:.1} ms)",
            self.gpu,
            self.load_crossover,
            time(self.load_latency),
            rate(self.load_rate),
            time(self.store_latency),
            rate(self.store_rate),
            time(self.copy_latency),
            rate(self.copy_rate),
            self.took.as_secs_f64() * 1e3,
        )
    }
}

struct CopyBench<'a> {
    memory: &'a GpuMemory,
    engine: &'a CopyEngine,
    host: Vec<u8>,
    start: Instant,
}

impl<'a> CopyBench<'a> {
    fn new(memory: &'a GpuMemory, engine: &'a CopyEngine) -> Self {
        Self { memory, engine, host: vec![1; LONG], start: Instant::now() }
    }

    fn run(mut self) -> Result<Calibration, CalibrationError> {
        let window = self.memory.window();
        // The first use of each route pays for page tables and wakes the engine; it is not counted.
        self.copy(64)?;
        let mut compared = Vec::new();
        let mut copy_latency = None;
        for size in SIZES {
            let load = match window {
                Some(window) => self.median(|bench| bench.load(window, size).map(Some))?,
                None => None,
            };
            let copy = self.median(|bench| bench.copy(size))?;
            copy_latency = copy_latency.or(copy);
            if let (Some(load), Some(copy)) = (load, copy) {
                compared.push((size, load, copy));
            }
        }
        let copy_rate = self.copy_rate()?;
        let (mut store_latency, mut store) = (None, None);
        if let Some(window) = window {
            store_latency = self.median(|bench| bench.store(window, 64).map(Some))?;
            store = self.median(|bench| bench.store(window, LONG).map(Some))?;
        }
        let load_crossover = match window {
            None => 0,
            Some(_) => crossover(&compared).unwrap_or(USUAL_CROSSOVER),
        };
        Ok(Calibration {
            is_whole: window.is_none() || compared.len() == SIZES.len(),
            load_crossover,
            load_latency: compared.first().map(|&(_, load, _)| load),
            load_rate: compared.last().map(|&(size, load, _)| rate(size, load)),
            store_latency,
            store_rate: store.map(|time| rate(LONG, time)),
            copy_latency,
            copy_rate,
            took: self.start.elapsed(),
            gpu: self.memory.gpu().name().to_owned(),
        })
    }

    /// The median of some rounds; `None` where the time is up or a round gave up.
    fn median(
        &mut self,
        mut round: impl FnMut(&mut Self) -> Result<Option<Duration>, CalibrationError>,
    ) -> Result<Option<Duration>, CalibrationError> {
        let mut times = Vec::with_capacity(ROUNDS);
        while times.len() < ROUNDS && self.start.elapsed() < BUDGET {
            match round(self)? {
                Some(time) => times.push(time),
                None => break,
            }
        }
        times.sort_unstable();
        Ok(times.get(times.len() / 2).copied())
    }

    fn load(&mut self, window: &GpuWindow, size: usize) -> Result<Duration, CalibrationError> {
        let start = Instant::now();
        window.load(0, &mut self.host[..size])?;
        Ok(start.elapsed())
    }

    fn store(&mut self, window: &GpuWindow, size: usize) -> Result<Duration, CalibrationError> {
        let start = Instant::now();
        window.store_last(0, &self.host[..size])?;
        window.complete()?;
        Ok(start.elapsed())
    }

    /// One copy from the GPU, alone.
    fn copy(&mut self, size: usize) -> Result<Option<Duration>, CalibrationError> {
        let Some(chunk) = self.engine.take_chunk() else { return Ok(None) };
        let start = Instant::now();
        let copy = self.engine.start_read(self.memory, 0, size, chunk)?;
        Ok(self.finish(copy)?.map(|_| start.elapsed()))
    }

    /// Long copies from the GPU, several in flight.
    fn copy_rate(&mut self) -> Result<Option<f64>, CalibrationError> {
        const COPIES: usize = 12;
        if self.start.elapsed() >= BUDGET {
            return Ok(None);
        }
        let start = Instant::now();
        let mut flying = std::collections::VecDeque::new();
        for turn in 0..COPIES {
            let chunk = match self.engine.take_chunk() {
                Some(chunk) => chunk,
                None => match flying.pop_front().map(|copy| self.finish(copy)).transpose()?.flatten() {
                    Some(chunk) => chunk,
                    None => return Ok(None),
                },
            };
            flying.push_back(self.engine.start_read(self.memory, LONG * (turn % IN_FLIGHT), LONG, chunk)?);
        }
        for copy in flying {
            if self.finish(copy)?.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(rate(LONG * COPIES, start.elapsed())))
    }

    /// Waits for a copy, with a timeout: the program's copies may keep the engine busy for seconds.
    fn finish(&self, copy: PendingCopy) -> Result<Option<PinnedChunk>, CalibrationError> {
        let start = Instant::now();
        while !self.engine.poll(&copy)? {
            match start.elapsed() {
                long if long > COPY_TIMEOUT => return Ok(None),
                // Longer than any copy on an idle engine: yield the CPU.
                long if long > YIELD_AFTER => std::thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
        }
        Ok(copy.into_chunk().ok())
    }
}

/// Bytes per second.
fn rate(bytes: usize, time: Duration) -> f64 {
    u32::try_from(bytes).map_or(f64::NAN, f64::from) / time.as_secs_f64().max(1e-9)
}

/// Where loads begin to lose: interpolated between the last size at which they take no longer and
/// the next. In whole lines. The sizes ascend. `None` where there is nothing to compare.
fn crossover(compared: &[(usize, Duration, Duration)]) -> Option<usize> {
    let (first, ..) = *compared.first()?;
    let Some(lost) = compared.iter().position(|(_, load, copy)| load > copy) else {
        return compared.last().map(|&(size, ..)| size);
    };
    let Some(&(below, load, copy)) = lost.checked_sub(1).map(|won| &compared[won]) else {
        // Even the shortest load loses: still, a single line does not justify two driver calls.
        return Some(first.min(64));
    };
    let (above, load_above, copy_above) = compared[lost];
    let ahead = copy.saturating_sub(load).as_nanos();
    let behind = load_above.saturating_sub(copy_above).as_nanos();
    let step = u128::try_from(above - below).unwrap_or(0) * ahead / (ahead + behind).max(1);
    Some((below + usize::try_from(step).unwrap_or(0)) & !63)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(microseconds: u64) -> Duration {
        Duration::from_micros(microseconds)
    }

    #[test]
    fn the_crossover_lies_between_the_sizes_that_enclose_it() {
        // As on the H200: loads 1 us for each 64 bytes in flight, the engine 7 us whatever the
        // size.
        let compared =
            [(64, us(1), us(7)), (4096, us(5), us(7)), (8192, us(11), us(7)), (16384, us(22), us(8))];
        assert_eq!(crossover(&compared), Some(4096 + 4096 * 2 / 6 / 64 * 64));
        assert_eq!(crossover(&compared[2..]), Some(64));
        assert_eq!(crossover(&compared[..2]), Some(4096));
        assert_eq!(crossover(&[]), None);
        // A tie goes to the load, and sizes after the first loss do not count.
        assert_eq!(crossover(&[(64, us(1), us(1)), (128, us(2), us(1)), (256, us(1), us(9))]), Some(64));
    }

    #[test]
    fn it_prints_what_it_knows() {
        let calibration = Calibration {
            load_crossover: 5440,
            load_latency: Some(us(1)),
            load_rate: Some(0.68e9),
            store_latency: Some(Duration::from_nanos(134)),
            store_rate: Some(18.2e9),
            copy_latency: Some(us(7)),
            copy_rate: None,
            is_whole: true,
            took: us(3100),
            gpu: "NVIDIA H200".to_owned(),
        };
        assert_eq!(
            calibration.to_string(),
            "NVIDIA H200: loads up to 5440 bytes, copy engine above; load 1.00 us and 0.68 GB/s, store 0.13 us and \
             18.20 GB/s, copy engine 7.00 us and unknown (64 bytes, long; measured in 3.1 ms)"
        );
    }
}
