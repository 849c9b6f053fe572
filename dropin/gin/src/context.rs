//! A context of NCCL's device API: rings that its kernels fill, and the proxy that serves them.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nobounce::{Access, Device, GpuOptions, Hello, Region, RemoteRegion};
use nobounce_initiated::descriptor::BYTES;
use nobounce_initiated::mesh::Mesh;
use nobounce_initiated::parts::{Channel, Parts, Scratch};
use nobounce_initiated::proxy::Proxy;
use nobounce_initiated::ring::{MAX_LOG_DEPTH, Ring};
use nobounce_initiated::table::{RankTable, Table};
use nobounce_initiated::thread::ProxyThread;
use nobounce_initiated::words::{STRIDE, WordMemory, Words};
use nobounce_memory::Window;
use nobounce_memory::gpu::kernel::PinnedWords;
use nobounce_memory::gpu::{Gpu, GpuBuffer, GpuMemory, Shadowed};
use serde::{Deserialize, Serialize};

use crate::abi::{Config, DeviceHandle, GPI, GPI_VERSION};
use crate::error::GinError;
use crate::group::Group;
use crate::layout::{self, Layout};
use crate::log;

/// Descriptors of a ring where NCCL does not say: as many as NCCL's own proxy has.
const DEFAULT_DEPTH: usize = 1024;
/// Where atomics return old values.
const SCRATCH: usize = 4096;
/// Kernels compute indices of counters in 16 bits with a sign.
const MOST_COUNTERS: usize = 1 << 15;

/// What ranks tell each other.
#[derive(Debug, Serialize, Deserialize)]
struct Card {
    /// A queue pair to each rank that kernels name.
    hello: Hello,
    /// Of each context.
    signals: Vec<RemoteRegion>,
}

/// Contexts that are served by one proxy.
#[derive(Debug)]
pub struct Contexts {
    // Fields drop in this order: the proxy ends before its memory does.
    proxy: ProxyThread,
    _signals: Vec<Region>,
    _scratch: Region,
    _memory: Arc<GpuMemory>,
    _buffer: GpuBuffer,
    _group: Arc<Group>,
    handle: Box<DeviceHandle>,
    has_warned: AtomicBool,
}

// SAFETY: the address in the handle is the GPU's.
unsafe impl Send for Contexts {}

fn count(given: i32, what: &'static str) -> Result<usize, GinError> {
    usize::try_from(given).map_err(|_| GinError::Argument { what })
}

/// What NCCL asks for, checked.
struct Plan {
    layout: Layout,
    log_depth: u32,
}

impl Plan {
    fn of(config: &Config, ranks: usize) -> Result<Self, GinError> {
        let layout = Layout {
            contexts: count(config.contexts, "a negative number of contexts")?.max(1),
            ranks,
            counters: count(config.counters, "a negative number of counters")?,
            // A registration has at least one byte.
            signals: count(config.signals, "a negative number of signals")?.max(1),
        };
        if layout.all_counters() > MOST_COUNTERS {
            return Err(GinError::Argument { what: "more counters than 15 bits count" });
        }
        Ok(Self { layout, log_depth: log_depth(config.queue_depth)? })
    }
}

/// Memory that kernels and the proxy share.
struct Shared {
    // Registrations end before the memory does.
    signals: Vec<Region>,
    memory: Arc<GpuMemory>,
    buffer: GpuBuffer,
    rings: PinnedWords,
}

impl Shared {
    fn allocate(gpu: &Arc<Gpu>, device: &Device, plan: &Plan) -> Result<Self, GinError> {
        let Plan { layout, log_depth, .. } = plan;
        let (memory, buffer) = control_memory(gpu, layout.len())?;
        let rings = PinnedWords::new(gpu, layout.contexts * (BYTES << log_depth) / 8)?;
        let signals = (0..layout.contexts).map(|context| {
            let (addr, len) = (buffer.addr() + layout.signals(context) as u64, layout.signals * STRIDE);
            let access = Access::LOCAL_WRITE | Access::REMOTE_ATOMIC;
            let options = GpuOptions { shadow: Shadowed::Signals, ..GpuOptions::default() };
            // SAFETY: the memory is freed later. Atomics change it, and kernels without the flag.
            unsafe { device.register_gpu_raw(addr, len, access, &options) }
                .map_err(|source| GinError::Register { len, source })
        });
        let signals = signals.collect::<Result<_, _>>()?;
        Ok(Self { signals, memory, buffer, rings })
    }

    fn words(&self, offset: usize, len: usize) -> Result<WordMemory, GinError> {
        let lost = || GinError::NoWindow { reason: self.memory.paths().to_string() };
        WordMemory::gpu(self.memory.clone(), offset, len).ok_or_else(lost)
    }

    /// The proxy's end of a context.
    fn channel(&self, plan: &Plan, context: usize) -> Result<Channel, GinError> {
        let Plan { layout, log_depth, .. } = plan;
        let base = self.rings.as_ptr().cast::<u8>().wrapping_add(context * (BYTES << log_depth));
        // SAFETY: pinned words are never freed, and are only accessed as atomic words.
        let ring = unsafe { Window::new(base, BYTES << log_depth) };
        let counters = self.words(layout.counters(context), layout.all_counters() * STRIDE)?;
        Ok(Channel {
            ring: Ring::new(ring, *log_depth)?,
            consumed: Words::new(self.words(layout.consumed(context), STRIDE)?),
            counters: Words::new(counters),
            signals: signal_words(&self.signals[context])?,
        })
    }

    /// Writes the kernels' end of all contexts.
    fn describe(&self, plan: &Plan) -> Result<(), GinError> {
        let Plan { layout, log_depth, .. } = plan;
        let lost = || GinError::NoWindow { reason: self.memory.paths().to_string() };
        let window = self.memory.window().ok_or_else(lost)?;
        let at = |offset: usize| self.buffer.addr() + offset as u64;
        for context in 0..layout.contexts {
            let channel = layout::Channel {
                counters: at(layout.counters(context)),
                signals: at(layout.signals(context)),
                ring: self.rings.address(context * (BYTES << log_depth) / 8),
                consumed: at(layout.consumed(context)),
                log_depth: *log_depth,
            };
            window.store(context * layout.description_stride(), &channel.bytes()[..])?;
        }
        Ok(window.complete()?)
    }
}

/// Connects with all ranks, and returns what they have said.
fn connect(group: &Group, mesh: &Mesh, signals: &[Region]) -> Result<Vec<Card>, GinError> {
    let ours = Card { hello: mesh.hello().clone(), signals: signals.iter().map(Region::remote).collect() };
    let cards: Vec<Card> = group.exchange_made("a context", Some(ours))?;
    let checked = cards.iter().enumerate().try_for_each(|(rank, card)| {
        card.hello.check().map_err(|_| GinError::Malformed { what: "a context", rank })
    });
    let hellos = cards.iter().map(|card| &card.hello);
    let connected = checked.and_then(|()| Ok(mesh.connect(group.place().0, hellos)?));
    // Nothing is sent before all are ready to receive.
    let all = group.exchange_made("its queue pairs", connected.as_ref().ok().copied());
    connected.and(all.map(|_| cards))
}

impl Contexts {
    /// Makes them, as all ranks do.
    ///
    /// # Errors
    /// GPU memory cannot be reached by a window, a rank is gone, ...
    pub fn create(group: &Arc<Group>, gpu: &Arc<Gpu>, config: &Config) -> Result<Self, GinError> {
        let (device, (rank, ranks)) = (group.device(), group.place());
        let plan = Plan::of(config, ranks)?;
        let layout = plan.layout;
        let made = Shared::allocate(gpu, device, &plan).and_then(|shared| {
            let scratch = device.register(SCRATCH);
            let scratch = scratch.map_err(|source| GinError::Register { len: SCRATCH, source })?;
            Ok((shared, scratch, Mesh::create(device, ranks)?))
        });
        let (shared, scratch, mesh) = match made {
            Ok(made) => made,
            Err(error) => {
                // The other ranks wait for this one.
                let _ = group.exchange_made::<Card>("a context", None);
                return Err(error);
            }
        };
        let cards = connect(group, &mesh, &shared.signals)?;
        let tables = cards.into_iter().enumerate();
        let tables = tables.map(|(at, card)| RankTable { at, signals: card.signals }).collect();
        let table = Table::new(group.memory(), tables, layout.all_counters());
        let channels = (0..layout.contexts).map(|context| shared.channel(&plan, context));
        let parts = Parts {
            rank,
            channels: channels.collect::<Result<_, GinError>>()?,
            qps: mesh.qps,
            cq: mesh.cq,
            table: table.with_max_message(device.nic().max_message()),
            scratch: Scratch { addr: scratch.addr(), lkey: scratch.mr().lkey() },
            status: Words::new(shared.words(layout.status(), (layout.ranks + 1) * STRIDE)?),
        };
        shared.describe(&plan)?;
        let proxy = ProxyThread::start(Proxy::new(parts)?)?;
        let addr = usize::try_from(shared.buffer.addr()).unwrap_or(0);
        let handle = Box::new(DeviceHandle {
            net_device_type: GPI,
            net_device_version: GPI_VERSION,
            handle: ptr::without_provenance_mut::<c_void>(addr),
            size: layout.contexts * layout.description_stride(),
            needs_proxy_progress: 0,
        });
        let Shared { buffer, memory, signals, .. } = shared;
        Ok(Self {
            proxy,
            _signals: signals,
            _scratch: scratch,
            _memory: memory,
            _buffer: buffer,
            _group: group.clone(),
            handle,
            has_warned: AtomicBool::new(false),
        })
    }

    /// What NCCL gives to kernels.
    pub fn handle(&mut self) -> *mut DeviceHandle {
        &raw mut *self.handle
    }

    /// Whether a descriptor was refused or failed, or the proxy has ended; the first time, with the
    /// reasons in the log.
    pub fn has_failed(&self) -> bool {
        let reports = self.proxy.reports();
        let has_failed = !reports.is_empty() || self.proxy.has_ended();
        if has_failed && !self.has_warned.swap(true, Ordering::Relaxed) {
            for report in &reports {
                log::warn(&format!(
                    "context {}, descriptor {}: {}",
                    report.channel, report.number, report.reason
                ));
            }
            if self.proxy.has_ended() {
                log::warn("the proxy of a context has ended: its operations are not carried out");
            }
        }
        has_failed
    }
}

/// Signals as the proxy changes them: by the window that peers' atomics use.
fn signal_words(signals: &Region) -> Result<WordMemory, GinError> {
    let memory = signals.mr().gpu_memory().cloned();
    memory
        .and_then(|memory| WordMemory::gpu(memory, 0, signals.len()))
        .ok_or_else(|| GinError::NoWindow { reason: signals.paths().to_string() })
}

fn log_depth(asked: i32) -> Result<u32, GinError> {
    let asked = count(asked, "a negative queue depth")?;
    let depth = if asked == 0 { DEFAULT_DEPTH } else { asked };
    let log = depth.checked_next_power_of_two().map(usize::ilog2);
    log.filter(|log| *log <= MAX_LOG_DEPTH)
        .ok_or(GinError::Argument { what: "a queue depth of more than 2^20" })
}

/// Zeroed GPU memory with a window.
pub(crate) fn control_memory(gpu: &Arc<Gpu>, len: usize) -> Result<(Arc<GpuMemory>, GpuBuffer), GinError> {
    let buffer = GpuBuffer::new(gpu, len)?;
    let memory = Arc::new(GpuMemory::reach(buffer.addr(), len, &GpuOptions::default())?);
    let Some(window) = memory.window() else {
        return Err(GinError::NoWindow { reason: memory.paths().to_string() });
    };
    window.store(0, &vec![0; len][..])?;
    window.complete()?;
    Ok((memory, buffer))
}
