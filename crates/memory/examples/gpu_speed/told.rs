//! Completion detection of a short copy, by three methods. First, an event recorded behind it and
//! polled, as the copy engine does. Second, a word that the GPU writes to pinned memory behind it
//! (`cuStreamWriteValue32`), on which the CPU spins. Third, a synchronous copy, as in naive
//! programs. To the GPU such a copy returns when the driver has taken the bytes. They may still be
//! in flight, so it is also measured with the wait for them.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nobounce_memory::gpu::api::{Api, Event, Stream, consts};
use nobounce_memory::gpu::kernel::PinnedWords;
use nobounce_memory::gpu::{CudaError, Gpu};

use crate::{Outcome, ROUNDS, head};

const SIZES: [usize; 4] = [8, 512, 4 << 10, 32 << 10];
const COPIES: u32 = 200;
/// Timeout for a word to arrive.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);

/// Resources of one copy.
struct Parts<'a> {
    api: &'a Api,
    stream: Stream,
    event: Event,
    words: &'a PinnedWords,
    pinned: *mut c_void,
    pageable: *mut c_void,
    gpu: u64,
}

#[derive(Clone, Copy)]
enum Told {
    Event,
    Word,
    Synchronous,
    Awaited,
}

pub(crate) fn show(gpu: &Arc<Gpu>, memory: u64) -> Outcome<()> {
    head("until a short copy is known to be over", &SIZES);
    let (words, mut pageable) = (PinnedWords::new(gpu, 1)?, vec![0u8; SIZES[3]]);
    let tried = gpu.driver().in_context(gpu.primary()?, |api| {
        let (mut stream, mut event, mut pinned) = (Stream::NULL, Event::NULL, ptr::null_mut());
        // SAFETY: the calls write one handle or address each; all of it is left to the end of the
        // process.
        unsafe {
            api.stream_create(&raw mut stream, consts::STREAM_NON_BLOCKING)?;
            api.event_create(&raw mut event, consts::EVENT_DISABLE_TIMING)?;
            api.mem_host_alloc(&raw mut pinned, SIZES[3], consts::MEMHOSTALLOC_PORTABLE)?;
        }
        let pageable = pageable.as_mut_ptr().cast();
        let parts = Parts { api, stream, event, words: &words, pinned, pageable, gpu: memory };
        let ways = [
            ("event", Told::Event),
            ("word", Told::Word),
            ("synchronous", Told::Synchronous),
            ("sync, awaited", Told::Awaited),
        ];
        for (name, told) in ways {
            for (way, reads) in [("from", true), ("to", false)] {
                // From the GPU a synchronous copy is over when it returns.
                if reads && matches!(told, Told::Awaited) {
                    continue;
                }
                print!("{:<26}", format!("{way} the GPU, {name}"));
                for size in SIZES {
                    match parts.median(told, reads, size) {
                        Ok(seconds) => print!(" {:>16}", crate::cell(size, seconds)),
                        // A driver may do without it.
                        Err(error) if matches!(told, Told::Word) => print!(" {:>16}", error.code),
                        Err(error) => return Err(error),
                    }
                }
                println!();
            }
        }
        Ok(())
    });
    Ok(tried.map_err(|error: CudaError| error)?)
}

impl Parts<'_> {
    /// Seconds of one copy, the median of some rounds.
    fn median(&self, told: Told, reads: bool, size: usize) -> Result<f64, CudaError> {
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let start = Instant::now();
            for turn in 1..=COPIES {
                self.copy(told, reads, size, turn)?;
            }
            times.push(start.elapsed().as_secs_f64() / f64::from(COPIES));
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok(times[ROUNDS / 2])
    }

    fn copy(&self, told: Told, reads: bool, size: usize, turn: u32) -> Result<(), CudaError> {
        let Self { api, stream, event, words, pinned, pageable, gpu } = *self;
        // SAFETY: both sides have `size` bytes and are ours; the copy is over before this returns,
        // or the process gives up.
        unsafe {
            match (told, reads) {
                (Told::Synchronous, true) => {
                    return api.copy_from_device(pageable, gpu, size);
                }
                (Told::Synchronous, false) => {
                    return api.copy_to_device(gpu, pageable, size);
                }
                (Told::Awaited, _) => {
                    api.copy_to_device(gpu, pageable, size)?;
                    return api.stream_synchronize(Stream::NULL);
                }
                (_, true) => api.copy_from_device_async(pinned, gpu, size, stream)?,
                (_, false) => api.copy_to_device_async(gpu, pinned, size, stream)?,
            }
            let Told::Word = told else {
                api.event_record(event, stream)?;
                loop {
                    match api.event_query(event) {
                        Err(error) if error.code == CudaError::NOT_READY => {}
                        answer => return answer,
                    }
                }
            };
            api.stream_write_value(stream, words.address(0), turn, 0)?;
        }
        let start = Instant::now();
        while words.get(0) != u64::from(turn) {
            std::hint::spin_loop();
            if start.elapsed() > REPLY_TIMEOUT {
                return Err(CudaError { call: "the word", code: CudaError::NOT_READY, name: "did not come" });
            }
        }
        Ok(())
    }
}
