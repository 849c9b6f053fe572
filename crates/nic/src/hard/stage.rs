//! Staging for GPU memory that the device cannot reach: a shadow buffer in host memory is
//! registered instead, and bytes are copied between the two.
//!
//! Requests are posted on the shadow. Outgoing bytes are copied from the GPU before the post.
//! Incoming bytes are copied to the GPU when the completion is polled, before the caller sees it.
//! Such memory can be the local side of every operation. Peers' requests would reach only the
//! shadow, unnoticed: the region grants them no access.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use nobounce_memory::HostBuffer;
use nobounce_memory::gpu::GpuMemory;
use nobounce_memory::gpu::copy_engine::{CopyEngine, PendingCopy, PinnedChunk};
use nobounce_protocol::qp::{Operation, Status, WorkKind};

use super::error::PostError;
use crate::tally::{PathCounters, PathTotals};
use crate::work::{Sge, WorkCompletion};

/// Piece size of a copy, and pieces in flight.
const PIECE: usize = 512 << 10;
const PIECES: usize = 4;
/// Timeout of one piece: thousands of times what the largest needs.
const LIMIT: Duration = Duration::from_secs(10);
/// Upper half of the wr_id of requests with work to do on completion.
const MARK: u64 = 0x6e62_5354;

/// The shadow of a GPU region in host memory.
pub(crate) struct Shadow {
    memory: Arc<GpuMemory>,
    pub(crate) buffer: HostBuffer,
}

impl fmt::Debug for Shadow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shadow({} bytes of {:#x})", self.buffer.len(), self.memory.addr())
    }
}

impl Shadow {
    pub(crate) fn new(memory: Arc<GpuMemory>) -> io::Result<Self> {
        Ok(Self { buffer: HostBuffer::new(memory.len())?, memory })
    }

    /// Offset of a GPU address in the shadow; `None` if the bytes do not all lie in it.
    fn offset(&self, addr: u64, len: usize) -> Option<usize> {
        let offset = usize::try_from(addr.checked_sub(self.memory.addr())?).ok()?;
        (offset.checked_add(len)? <= self.memory.len()).then_some(offset)
    }

    fn engine(&self) -> Result<CopyEngine, String> {
        self.memory.check_alive().map_err(|gone| gone.to_string())?;
        let context = self.memory.range().context_now().map_err(|error| error.to_string())?;
        CopyEngine::in_context(self.memory.gpu(), context, PIECES, PIECE).map_err(|error| error.to_string())
    }

    /// Copies from the GPU, pipelined in pieces.
    pub(crate) fn fetch(&self, offset: usize, len: usize) -> Result<(), String> {
        if let Some(window) = self.memory.window() {
            window.read_back().map_err(|error| error.to_string())?;
        }
        let engine = self.engine()?;
        let mut under_way: VecDeque<(usize, PendingCopy)> = VecDeque::new();
        let (mut started, mut done) = (0, 0);
        while done < len {
            while started < len && under_way.len() < PIECES {
                let Some(chunk) = chunk(&engine, under_way.is_empty())? else { break };
                let piece = PIECE.min(len - started);
                let copy = engine
                    .start_read(&self.memory, offset + started, piece, chunk)
                    .map_err(|error| error.to_string())?;
                under_way.push_back((offset + started, copy));
                started += piece;
            }
            let Some((at, copy)) = under_way.pop_front() else { continue };
            let piece = copy.len();
            let chunk = wait(&engine, copy)?;
            self.buffer.write_at(at, &chunk[..piece]).map_err(|error| error.to_string())?;
            done += piece;
        }
        Ok(())
    }

    /// Copies to the GPU.
    fn place(&self, offset: usize, len: usize) -> Result<(), String> {
        let engine = self.engine()?;
        let mut under_way: VecDeque<PendingCopy> = VecDeque::new();
        for at in (0..len).step_by(PIECE) {
            if under_way.len() == PIECES
                && let Some(first) = under_way.pop_front()
            {
                wait(&engine, first)?;
            }
            let piece = PIECE.min(len - at);
            let mut room = wait_for_chunk(&engine)?;
            if let Some(bytes) = room.get_mut() {
                self.buffer.read_at(offset + at, &mut bytes[..piece]).map_err(|error| error.to_string())?;
            }
            let copy = engine
                .start_write(&self.memory, offset + at, room, piece)
                .map_err(|error| error.to_string())?;
            under_way.push_back(copy);
        }
        under_way.into_iter().try_for_each(|copy| wait(&engine, copy).map(drop))
    }
}

fn chunk(engine: &CopyEngine, none_under_way: bool) -> Result<Option<PinnedChunk>, String> {
    if none_under_way { wait_for_chunk(engine).map(Some) } else { Ok(engine.take_chunk()) }
}

fn wait_for_chunk(engine: &CopyEngine) -> Result<PinnedChunk, String> {
    let mut found = None;
    poll_until_done(|| {
        found = engine.take_chunk();
        Ok(found.is_some())
    })?;
    found.ok_or_else(too_slow)
}

fn wait(engine: &CopyEngine, copy: PendingCopy) -> Result<PinnedChunk, String> {
    poll_until_done(|| engine.poll(&copy).map_err(|error| error.to_string()))?;
    copy.into_chunk().map_err(|_| too_slow())
}

fn too_slow() -> String {
    format!("the GPU's copy engine did not finish within {LIMIT:?}")
}

fn poll_until_done(mut done: impl FnMut() -> Result<bool, String>) -> Result<(), String> {
    let start = Instant::now();
    while !done()? {
        if start.elapsed() > LIMIT {
            return Err(too_slow());
        }
        std::hint::spin_loop();
    }
    Ok(())
}

/// A request with work to do on completion.
struct StagedWork {
    wr_id: u64,
    qpn: u32,
    /// Whether the application asked for the completion.
    wanted: bool,
    /// Whether it is a READ or an atomic operation, and no receive.
    reads: bool,
    /// Bytes of the whole list.
    len: u32,
    /// Destinations of incoming bytes, in list order.
    inbound: Vec<(Arc<Shadow>, usize, usize)>,
}

/// The request as posted.
pub(crate) struct Staged {
    pub(crate) wr_id: u64,
    pub(crate) signaled: bool,
    pub(crate) sges: Vec<Sge>,
    slot: Option<u32>,
}

/// The staged regions of a device, and the requests that use them.
#[derive(Default)]
pub(crate) struct HostStaging {
    /// Number of staged regions: the only cost for other requests is one load.
    count: AtomicUsize,
    regions: RwLock<HashMap<u32, Weak<Shadow>>>,
    next: AtomicU32,
    under_way: Mutex<HashMap<u32, Arc<StagedWork>>>,
    moved: Mutex<PathCounters>,
}

impl HostStaging {
    pub(crate) fn add(&self, lkey: u32, shadow: &Arc<Shadow>) {
        self.regions.write().unwrap_or_else(PoisonError::into_inner).insert(lkey, Arc::downgrade(shadow));
        self.count.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn remove(&self, lkey: u32) {
        self.count.fetch_sub(1, Ordering::Release);
        self.regions.write().unwrap_or_else(PoisonError::into_inner).remove(&lkey);
    }

    fn works(&self) -> MutexGuard<'_, HashMap<u32, Arc<StagedWork>>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Staged bytes.
    pub(crate) fn counters(&self) -> PathCounters {
        *self.moved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request must be prepared: it may use a staged region, or its `wr_id` looks like
    /// one of ours.
    #[inline]
    pub(crate) fn concerns(&self, wr_id: u64) -> bool {
        self.count.load(Ordering::Acquire) > 0 || self.has_marked(wr_id)
    }

    /// Whether a completion may be one of ours.
    #[inline]
    #[allow(clippy::unused_self)] // reads as a method
    pub(crate) fn has_marked(&self, wr_id: u64) -> bool {
        wr_id >> 32 == MARK
    }

    /// Copies outgoing bytes from the GPU, and records the destinations of incoming ones. `op` is
    /// `None` for a receive.
    pub(crate) fn prepare(
        &self,
        qpn: u32,
        wr_id: u64,
        op: Option<&Operation>,
        signaled: bool,
        sges: &[Sge],
    ) -> Result<Staged, PostError> {
        let comes = op.is_none_or(Operation::fetches);
        let mut staged = Staged { wr_id, signaled, sges: sges.to_vec(), slot: None };
        let mut inbound = Vec::new();
        let reads = op.is_some_and(Operation::fetches);
        for sge in &mut staged.sges {
            let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
            let shadow = regions.get(&sge.lkey).and_then(Weak::upgrade);
            drop(regions);
            let Some(shadow) = shadow else { continue };
            let len = usize::try_from(sge.len).unwrap_or(usize::MAX);
            let outside = || PostError::Staging("the bytes are not inside the region".to_owned());
            let offset = shadow.offset(sge.addr, len).ok_or_else(outside)?;
            if !comes && len > 0 {
                for part in self.not_awaited(&shadow, offset..offset + len) {
                    shadow.fetch(part.start, part.len()).map_err(PostError::Staging)?;
                }
                self.count(len, |moved| &mut moved.outbound);
            }
            sge.addr = shadow.buffer.addr() + offset as u64;
            inbound.push((shadow, offset, len));
        }
        if !comes {
            inbound.clear();
        }
        if !inbound.is_empty() || self.has_marked(wr_id) {
            let slot = self.next.fetch_add(1, Ordering::Relaxed);
            let len = sges.iter().map(|sge| sge.len).sum();
            self.works()
                .insert(slot, Arc::new(StagedWork { wr_id, qpn, wanted: signaled, reads, len, inbound }));
            staged.wr_id = MARK << 32 | u64::from(slot);
            staged.signaled = true;
            staged.slot = Some(slot);
        }
        Ok(staged)
    }

    /// The parts of a range without a READ in flight. The other parts are newer in the shadow, or
    /// will be: a fenced request takes them from there. A copy from the GPU would overwrite them
    /// with stale bytes.
    fn not_awaited(&self, shadow: &Arc<Shadow>, range: Range<usize>) -> Vec<Range<usize>> {
        let mut parts = vec![range];
        for work in self.works().values().filter(|work| work.reads) {
            for (into, offset, len) in work.inbound.iter().filter(|(into, ..)| Arc::ptr_eq(into, shadow)) {
                debug_assert!(offset + len <= into.buffer.len());
                let (from, to) = (*offset, offset + len);
                parts = parts
                    .into_iter()
                    .flat_map(|part| [part.start..part.end.min(from), part.start.max(to)..part.end])
                    .filter(|part| !part.is_empty())
                    .collect();
            }
        }
        parts
    }

    /// The post failed: forgets the request.
    pub(crate) fn cancel(&self, staged: &Staged) {
        if let Some(slot) = staged.slot {
            self.works().remove(&slot);
        }
    }

    /// The queue pair is destroyed; its completions may never be polled.
    pub(crate) fn forget(&self, qpn: u32) {
        self.works().retain(|_, work| work.qpn != qpn);
    }

    /// Copies incoming bytes to the GPU. Returns the completion for the application, and whether
    /// the application gets it.
    pub(crate) fn finish(&self, completion: &WorkCompletion) -> (WorkCompletion, bool) {
        let slot = u32::try_from(completion.wr_id & u64::from(u32::MAX)).unwrap_or(0);
        // Every marked request has a slot, except those of destroyed queue pairs. The slot stays
        // until its bytes are on the GPU: a concurrent send from there must not copy stale bytes
        // over them.
        let Some(work) = self.works().get(&slot).cloned() else { return (*completion, false) };
        let mut original = WorkCompletion { wr_id: work.wr_id, ..*completion };
        // A READ returns the requested length, whatever the device reports: some report nothing.
        if work.reads && completion.status == Status::Success {
            original.byte_len = work.len;
        }
        if completion.status == Status::Success && completion.kind != WorkKind::ReceiveWriteImmediate {
            let mut left = usize::try_from(original.byte_len).unwrap_or(usize::MAX);
            for (shadow, offset, len) in &work.inbound {
                let len = (*len).min(left);
                left -= len;
                if len == 0 {
                    continue;
                }
                if let Err(error) = shadow.place(*offset, len) {
                    // The bytes are in the shadow, but not on the GPU.
                    tracing::warn!("what arrived could not be placed in GPU memory: {error}");
                    original.status = Status::LocalAccess;
                    break;
                }
                self.count(len, |moved| &mut moved.inbound);
            }
        }
        self.works().remove(&slot);
        (original, work.wanted || original.status != Status::Success)
    }

    fn count(&self, len: usize, direction: impl Fn(&mut PathCounters) -> &mut PathTotals) {
        let mut moved = self.moved.lock().unwrap_or_else(PoisonError::into_inner);
        let staged = &mut direction(&mut moved).staged;
        staged.bytes += len as u64;
        staged.operations += 1;
    }
}
