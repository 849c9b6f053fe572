//! The ranks of a job, and what each of them needs: the symmetric heap, channels, and the proxy.

use std::sync::{Arc, RwLock};

use nobounce::{Device, Hello, Region, RemoteRegion};
use nobounce_memory::gpu::{Gpu, GpuOptions, Shadowed};
use nobounce_nic::work::Access;
use serde::{Deserialize, Serialize};

use crate::control_memory::{ControlMemory, HEAP};
use crate::join_error::JoinError;
use crate::mesh::Mesh;
use crate::options::Options;
use crate::parts::{Channel, Parts, Scratch};
use crate::proxy::{Proxy, Report};
use crate::rendezvous::{Rendezvous, RendezvousError};
use crate::ring::Ring;
use crate::table::{LocalMemory, Memory, RankTable, Table};
use crate::thread::ProxyThread;
use crate::words::{WordMemory, Words};

const SCRATCH: usize = 4096;

/// What a rank tells the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Card {
    /// Its device, with a queue pair for each rank.
    hello: Hello,
    heap: RemoteRegion,
    signals: RemoteRegion,
}

/// Waits for the kernels of this process, as freeing memory by CUDA does.
#[derive(Debug)]
struct KernelsEnd(Arc<Gpu>);

impl Drop for KernelsEnd {
    fn drop(&mut self) {
        let Ok(context) = self.0.primary() else { return };
        // SAFETY: the call takes nothing. An error means that the context is gone, with its
        // kernels.
        let _ = self.0.driver().in_context(context, |api| unsafe { api.ctx_synchronize() });
    }
}

/// A rank. Dropping it carries out what kernels have posted, ends the proxy, so that kernels that
/// wait return with an error, and waits for all kernels of this process. Other ranks lose it: call
/// [`barrier`](Self::barrier) first.
#[derive(Debug)]
pub struct World {
    // Fields drop in this order: the proxy ends before its memory does.
    proxy: ProxyThread,
    _kernels: KernelsEnd,
    heap: Region,
    _signals: Region,
    _scratch: Region,
    control: ControlMemory,
    device: Device,
    rank: u32,
    ranks: u32,
    rendezvous: Rendezvous,
}

impl World {
    /// Allocates the memory of this rank, and connects it with all others.
    ///
    /// # Errors
    /// There is no GPU, the other ranks do not come, ...: the message says what to do.
    pub fn join(options: &Options) -> Result<Self, JoinError> {
        check(options)?;
        let mut rendezvous =
            Rendezvous::meet(options.rendezvous, options.rank, options.ranks, options.limit)?;
        let gpu = Gpu::by_ordinal(options.gpu)?.ok_or(JoinError::NoGpu { ordinal: options.gpu })?;
        let device = Device::open_near_gpu_polled(options.gpu)?;
        let gpu_options = GpuOptions::default();
        let heap = device.register_gpu_on(options.gpu, options.heap, gpu_options)?;
        heap.fill(0..options.heap, 0)?;
        let control = ControlMemory::allocate(&gpu, options)?;
        let (addr, len) = control.signals();
        let shadowed = GpuOptions { shadow: Shadowed::Words, ..gpu_options };
        let access = Access::LOCAL_WRITE | Access::REMOTE_ATOMIC;
        // SAFETY: the memory is that of `control`, which is freed later. Only atomics change it.
        let signals = unsafe { device.register_gpu_raw(addr, len, access, &shadowed) }?;
        let scratch = device.register(SCRATCH)?;
        check_reachable(&device, &heap, &signals)?;

        let ranks = options.ranks as usize;
        let mesh = Mesh::create(&device, ranks)?;
        let ours = Card { hello: mesh.hello().clone(), heap: heap.remote(), signals: signals.remote() };
        let cards = exchange(&mut rendezvous, &ours)?;
        mesh.connect(options.rank as usize, cards.iter().map(|card| &card.hello))?;
        // Nothing is sent before all are ready to receive.
        rendezvous.exchange(&[])?;
        let rendezvous = rendezvous.without_limit()?;

        let local = LocalMemory { addr: heap.addr(), len: heap.len() as u64, lkey: heap.mr().lkey() };
        let mut memory = Memory::new(ranks);
        memory.set(HEAP, local, cards.iter().map(|card| card.heap));
        let tables = cards.iter().enumerate();
        let tables = tables.map(|(at, card)| RankTable { at, signals: vec![card.signals] }).collect();
        let table = Table::new(Arc::new(RwLock::new(memory)), tables, control.counters_of_channel());
        let table = table.with_max_message(device.nic().max_message());
        let signal_words = signal_words(&signals)?;
        let channels = (0..options.channels).map(|number| {
            let words = control.channel(number)?;
            Ok(Channel {
                ring: Ring::new(words.ring, options.log_depth)?,
                consumed: Words::new(words.consumed),
                counters: Words::new(words.counters),
                signals: signal_words.clone(),
            })
        });
        let parts = Parts {
            rank: options.rank as usize,
            channels: channels.collect::<Result<_, JoinError>>()?,
            qps: mesh.qps,
            cq: mesh.cq,
            table,
            scratch: Scratch { addr: scratch.addr(), lkey: scratch.mr().lkey() },
            status: Words::new(control.status()?),
        };
        control.describe(options, heap.addr(), device.nic().max_message())?;
        let proxy = ProxyThread::start(Proxy::new(parts)?)?;
        let (rank, ranks) = (options.rank, options.ranks);
        let _kernels = KernelsEnd(gpu);
        Ok(Self {
            proxy,
            _kernels,
            heap,
            _signals: signals,
            _scratch: scratch,
            control,
            device,
            rank,
            ranks,
            rendezvous,
        })
    }

    /// The number of this rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many there are.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The symmetric heap of this rank.
    #[must_use]
    pub fn heap(&self) -> &Region {
        &self.heap
    }

    /// The address of a channel, for kernels: a `nobounce::Channel *`. `None` if there is no such
    /// channel.
    #[must_use]
    pub fn channel(&self, number: usize) -> Option<u64> {
        self.control.channel_addr(number)
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Refused and failed descriptors so far.
    #[must_use]
    pub fn reports(&self) -> Vec<Report> {
        self.proxy.reports()
    }

    /// Waits until all ranks have called it. For hosts; kernels have a barrier of their own.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn barrier(&mut self) -> Result<(), RendezvousError> {
        self.rendezvous.exchange(&[]).map(|_| ())
    }

    /// Gives some bytes of this rank to all ranks, and returns those of all.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn exchange(&mut self, ours: &[u8]) -> Result<Vec<Vec<u8>>, RendezvousError> {
        self.rendezvous.exchange(ours)
    }
}

/// An adapter may have no access to GPU memory, or no atomics.
fn check_reachable(device: &Device, heap: &Region, signals: &Region) -> Result<(), JoinError> {
    let unreachable = |reason: String| Err(JoinError::Unreachable { reason });
    match [heap, signals].into_iter().find(|region| region.is_closed()) {
        Some(closed) => unreachable(closed.paths().to_string()),
        None if device.nic().hard().is_some_and(|hard| !hard.has_atomics()) => {
            unreachable("it has no atomics, which signals need".to_owned())
        }
        None => Ok(()),
    }
}

/// Signals as the proxy changes them: by the window that peers' atomics use.
fn signal_words(signals: &Region) -> Result<WordMemory, JoinError> {
    let reason = || signals.paths().to_string();
    let memory = signals.mr().gpu_memory().cloned();
    memory
        .and_then(|memory| WordMemory::gpu(memory, 0, signals.len()))
        .ok_or_else(|| JoinError::NoWindow { reason: reason() })
}

fn check(options: &Options) -> Result<(), JoinError> {
    let counts = [
        ("channels", options.channels, 1024),
        ("bytes of the heap", options.heap, isize::MAX.unsigned_abs()),
        ("signals", options.signals.into(), u16::MAX.into()),
        ("counters", options.counters.into(), usize::from(u16::MAX) - crate::rendezvous::MAX_RANKS as usize),
    ];
    for (what, given, most) in counts {
        if given == 0 || given > most {
            return Err(JoinError::Count { what, given, most });
        }
    }
    Ok(())
}

fn exchange(rendezvous: &mut Rendezvous, ours: &Card) -> Result<Vec<Card>, JoinError> {
    let malformed =
        |rank, error: &dyn std::fmt::Display| JoinError::Malformed { rank, error: error.to_string() };
    let bytes = postcard::to_stdvec(ours).map_err(|error| malformed(0, &error))?;
    let all = rendezvous.exchange(&bytes)?;
    let count = all.len();
    let parse = |(bytes, rank): (Vec<u8>, u32)| {
        let card: Card = postcard::from_bytes(&bytes).map_err(|error| malformed(rank, &error))?;
        card.hello.check().map_err(|error| malformed(rank, &error))?;
        if card.hello.qps.len() != count {
            return Err(malformed(rank, &"another number of ranks"));
        }
        if card.heap.len != ours.heap.len {
            return Err(JoinError::Heaps { rank, ours: ours.heap.len, theirs: card.heap.len });
        }
        Ok(card)
    };
    all.into_iter().zip(0..).map(parse).collect()
}
