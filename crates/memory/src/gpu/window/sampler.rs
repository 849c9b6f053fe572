//! Single words copied between GPU and host by the copy engine: the reference that a window is
//! compared with.
//!
//! Copies go through a non-blocking stream of our own and are polled without blocking. A GPU that
//! is occupied for good by a kernel that waits for us must not block us.

use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::super::api::{Api, Context, Stream, consts};
use super::super::context::KeptContext;
use super::super::driver::Driver;
use super::super::error::CudaError;
use super::super::own_stream::own_stream;
use super::Refused;

/// Words copied at one time.
pub(super) const WORDS: usize = 4096;
/// A few words take microseconds, and milliseconds on a GPU that is shared by time slices.
const SAMPLE_TIMEOUT: Duration = Duration::from_millis(500);

/// A stream and a page-locked slab in one context. Neither is ever freed: that could wait for the
/// GPU.
struct Sampler {
    /// With the slab as its witness.
    context: KeptContext,
    stream: Stream,
    slab: *mut u64,
}

// SAFETY: the slab is ours alone and only touched under the lock that the sampler lives under.
unsafe impl Send for Sampler {}

static SAMPLERS: LazyLock<Mutex<Vec<Sampler>>> = LazyLock::new(Mutex::default);

/// The liveness check of this context, if there is a sampler in it.
pub(in super::super) fn witness_of(context: Context) -> Option<KeptContext> {
    let samplers = SAMPLERS.lock().unwrap_or_else(PoisonError::into_inner);
    samplers.iter().find(|sampler| sampler.context.handle() == context).map(|sampler| sampler.context)
}

/// Reads the aligned words at `addresses`, as the GPU sees them.
pub(super) fn read(driver: &Driver, context: Context, addresses: &[u64]) -> Result<Vec<u64>, Refused> {
    let mut words = Vec::with_capacity(addresses.len());
    for part in addresses.chunks(WORDS) {
        with_sampler(driver, context, |api, sampler| {
            for (index, &address) in part.iter().enumerate() {
                let slot: *mut c_void = sampler.slab.wrapping_add(index).cast();
                // SAFETY: the slab has WORDS words; the address is checked by the driver.
                unsafe { api.copy_from_device_async(slot, address, size_of::<u64>(), sampler.stream) }?;
            }
            wait(api, sampler.stream)?;
            // SAFETY: the copies are over and the slab has no other writer.
            words.extend((0..part.len()).map(|index| unsafe { sampler.slab.add(index).read_volatile() }));
            Ok(())
        })?;
    }
    Ok(words)
}

/// Writes words to memory of our own.
pub(super) fn write(driver: &Driver, context: Context, words: &[(u64, u64)]) -> Result<(), Refused> {
    for part in words.chunks(WORDS) {
        with_sampler(driver, context, |api, sampler| {
            for (index, &(address, word)) in part.iter().enumerate() {
                let slot = sampler.slab.wrapping_add(index);
                // SAFETY: the slab has WORDS words and no copy is in flight; the driver checks the
                // address.
                unsafe {
                    slot.write_volatile(word);
                    api.copy_to_device_async(
                        address,
                        slot.cast_const().cast(),
                        size_of::<u64>(),
                        sampler.stream,
                    )
                }?;
            }
            wait(api, sampler.stream)
        })?;
    }
    Ok(())
}

/// Why a copy failed.
enum Failed {
    Cuda(CudaError),
    TooLate,
}

impl From<CudaError> for Failed {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

fn with_sampler(
    driver: &Driver,
    context: Context,
    work: impl FnOnce(&Api, &Sampler) -> Result<(), Failed>,
) -> Result<(), Refused> {
    let mut samplers = SAMPLERS.lock().unwrap_or_else(PoisonError::into_inner);
    // A destroyed context took its sampler along. The requested context is alive: live memory names
    // it.
    samplers.retain(|sampler| sampler.context.is_alive(driver));
    let answer = driver.in_context(context, |api| {
        let index = match samplers.iter().position(|sampler| sampler.context.handle() == context) {
            Some(index) => index,
            None => {
                samplers.push(Sampler::new(driver, api, context)?);
                samplers.len() - 1
            }
        };
        work(api, &samplers[index])
    });
    answer.map_err(|failed| {
        // Copies into the slab may still be in flight: abandon it, and make another next time.
        samplers.retain(|sampler| sampler.context.handle() != context);
        match failed {
            Failed::Cuda(error) => Refused::passing(format!("the GPU cannot copy sample words: {error}")),
            Failed::TooLate => Refused::passing(format!(
                "the GPU did not copy sample words within {} ms, so the window could not be compared with its memory",
                SAMPLE_TIMEOUT.as_millis()
            )),
        }
    })
}

impl Sampler {
    /// To be called with the context current.
    fn new(driver: &Driver, api: &Api, context: Context) -> Result<Self, CudaError> {
        let stream = own_stream(api)?;
        let mut slab = std::ptr::null_mut();
        // SAFETY: the call writes one address.
        unsafe {
            api.mem_host_alloc(&raw mut slab, WORDS * size_of::<u64>(), consts::MEMHOSTALLOC_PORTABLE)
        }?;
        let context = KeptContext::new(driver, context, Some(slab.expose_provenance() as u64))?;
        Ok(Self { context, stream, slab: slab.cast() })
    }
}

/// Polls the stream until it is done, with a timeout.
fn wait(api: &Api, stream: Stream) -> Result<(), Failed> {
    let deadline = Instant::now() + SAMPLE_TIMEOUT;
    loop {
        // SAFETY: the stream is live.
        match unsafe { api.stream_query(stream) } {
            Err(error) if error.code == CudaError::NOT_READY => {}
            answer => return answer.map_err(Failed::Cuda),
        }
        if Instant::now() > deadline {
            return Err(Failed::TooLate);
        }
        std::thread::yield_now();
    }
}
