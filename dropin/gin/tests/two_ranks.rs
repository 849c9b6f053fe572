//! Two ranks call the plugin as NCCL does, on the stand-in driver, and act as kernels of its device
//! API: they read their channel in GPU memory and write descriptors into its ring.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Barrier;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fake_cuda::client::StandIn;
use nobounce_gin::abi::{Config, Config14, DeviceHandle, GPI, GinProperties, HANDLE_BYTES, NcclResult};
use nobounce_gin::plugin::{ncclGinPlugin_v13 as V13, ncclGinPlugin_v14 as GIN};
use nobounce_initiated::descriptor::{Action, Counted, Descriptor, Place, Signal, Transfer};
use nobounce_initiated::words::{COUNT_MASK, ERROR};

const BYTES: usize = 1 << 16;
const SIGNALS: usize = 5;
const COUNTERS: usize = 3;
const CONTEXTS: usize = 2;
const DEPTH: u64 = 64;
const STRIDE: u64 = 64;
const LIMIT: Duration = Duration::from_secs(20);
const OK: NcclResult = NcclResult::SUCCESS;

fn address<T>(place: &mut T) -> u64 {
    ptr::from_mut(place).expose_provenance() as u64
}

fn read<const N: usize>(cuda: &StandIn, from: u64) -> [u64; N] {
    let mut words = [0; N];
    assert_eq!(cuda.read_sync(address(&mut words), from, 8 * N), 0);
    words
}

fn write(cuda: &StandIn, to: u64, mut word: u64) {
    assert_eq!(cuda.write_async(to, address(&mut word), 8, 0), 0);
    assert_eq!(cuda.synchronize_stream(0), 0);
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LIMIT, "{what}");
        std::thread::yield_now();
    }
}

/// What both ranks share: a barrier, and their handles.
struct Shared {
    barrier: Barrier,
    handles: Mutex<[[u8; HANDLE_BYTES]; 2]>,
}

/// A rank.
struct Rank {
    cuda: &'static StandIn,
    rank: usize,
    instance: *mut c_void,
    member: *mut c_void,
    contexts: *mut c_void,
    channels: u64,
    /// Descriptors so far, of each context.
    produced: [u64; CONTEXTS],
}

impl Rank {
    fn join(rank: usize, shared: &Shared, is_old: bool) -> Self {
        let cuda = StandIn::load();
        let (mut context, mut instance, mut listener) = (0, ptr::null_mut(), ptr::null_mut());
        assert_eq!((cuda.init(0), cuda.retain_primary(&mut context, 0), cuda.push(context)), (0, 0, 0));
        let mut ours = [0; HANDLE_BYTES];
        // SAFETY: the calls that NCCL makes, in its order, with places for the results.
        unsafe {
            assert_eq!((GIN.init)(&raw mut instance, 7, None), OK);
            assert_eq!((GIN.listen)(instance, 0, (&raw mut ours).cast(), &raw mut listener), OK);
            shared.handles.lock().unwrap()[rank] = ours;
            shared.barrier.wait();
            let all = *shared.handles.lock().unwrap();
            let handles: [*const c_void; 2] = all.each_ref().map(|handle| ptr::from_ref(handle).cast());
            let (mut member, mut contexts, mut handle) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
            let at = rank as c_int;
            assert_eq!((GIN.connect)(instance, handles.as_ptr(), 2, at, listener, &raw mut member), OK);
            assert_eq!((GIN.close_listen)(listener), OK);
            let config = Config {
                signals: SIGNALS as c_int,
                counters: COUNTERS as c_int,
                contexts: CONTEXTS as c_int,
                queue_depth: DEPTH as c_int,
                traffic_class: -1,
            };
            let (context, place) = (&raw mut contexts, &raw mut handle);
            let made = if is_old {
                (V13.create_context)(member, &raw const config, context, place)
            } else {
                let config = Config14 { config, backend_version: 1, rank_stride: 2 };
                (GIN.create_context)(member, &raw const config, context, place)
            };
            assert_eq!(made, OK);
            let DeviceHandle { net_device_type, handle, needs_proxy_progress, .. } = &*handle;
            assert_eq!((*net_device_type, *needs_proxy_progress), (GPI, 0));
            let channels = handle.addr() as u64;
            Self { cuda, rank, instance, member, contexts, channels, produced: [0; CONTEXTS] }
        }
    }

    /// A window of zeroed GPU memory: its address and handle.
    fn window(&self, len: usize) -> (u64, u16) {
        let (mut memory, mut registration, mut window) = (0, ptr::null_mut(), ptr::null_mut());
        assert_eq!(self.cuda.alloc(&mut memory, len), 0);
        let zeroes = vec![0_u64; len / 8];
        let from = zeroes.as_ptr().expose_provenance() as u64;
        assert_eq!(self.cuda.write_async(memory, from, len, 0), 0);
        assert_eq!(self.cuda.synchronize_stream(0), 0);
        let data = ptr::with_exposed_provenance_mut(memory as usize);
        let (registration, place) = (&raw mut registration, &raw mut window);
        // SAFETY: as above.
        let made = unsafe { (GIN.register)(self.member, data, len, 2, 0, registration, place) };
        assert_eq!(made, OK);
        (memory, window.addr() as u16)
    }

    /// Counters, signals, ring, tickets, consumer index, its shadow, depth.
    fn channel(&self, context: usize) -> [u64; 7] {
        read(self.cuda, self.channels + (context * (56 + 2 * 8)) as u64)
    }

    /// As `gpi_gpu_channel_post_gfd_thread` does.
    fn post(&mut self, context: usize, action: Action, counter: Option<u16>) {
        let [_, _, ring, _, consumed, _, log_depth] = self.channel(context);
        assert_eq!(1 << log_depth, DEPTH);
        let number = self.produced[context];
        self.produced[context] += 1;
        until("room", || number - read::<1>(self.cuda, consumed)[0] < DEPTH);
        let counter = counter.map(|index| Counted { index, is_written_back: true });
        let words = Descriptor { action, counter }.words(number >> log_depth & 1 == 1);
        for (at, word) in words.into_iter().enumerate() {
            let place = ring + (number % DEPTH) * 64 + 8 * at as u64;
            // SAFETY: pinned memory of the ring, accessed as atomic words.
            unsafe { &*ptr::with_exposed_provenance::<AtomicU64>(place as usize) }
                .store(word, Ordering::Release);
        }
    }

    fn counter(&self, context: usize, index: u16) -> u64 {
        read::<1>(self.cuda, self.channel(context)[0] + STRIDE * u64::from(index))[0]
    }

    /// Value and flags.
    fn signal(&self, context: usize, index: u16) -> [u64; 2] {
        read(self.cuda, self.channel(context)[1] + STRIDE * u64::from(index))
    }

    /// As `flushImplMode` does: the counter is found by its distance from the signals.
    fn flush(&mut self, context: usize, rank: u32) -> u64 {
        let [counters, signals, ..] = self.channel(context);
        let first = (signals - counters) / STRIDE - 2;
        assert_eq!(first, COUNTERS as u64);
        let index = first as u16 + rank as u16;
        let before = self.counter(context, index) & COUNT_MASK;
        self.post(context, Action::Flush { rank }, Some(index));
        until("flush", || self.counter(context, index) & COUNT_MASK > before);
        self.counter(context, index)
    }

    fn has_failed(&self) -> bool {
        let mut has_failed = false;
        // SAFETY: as above.
        assert_eq!(unsafe { (GIN.last_error)(self.contexts, &raw mut has_failed) }, OK);
        has_failed
    }

    fn leave(self) {
        // SAFETY: as above.
        unsafe {
            assert_eq!((GIN.destroy_context)(self.contexts), OK);
            assert_eq!((GIN.close_coll)(self.member), OK);
            assert_eq!((GIN.finalize)(self.instance), OK);
        }
    }
}

/// Runs both ranks.
fn both(is_old: bool, run: impl Fn(&mut Rank, &Barrier) + Sync) {
    let shared = Shared { barrier: Barrier::new(2), handles: Mutex::new([[0; HANDLE_BYTES]; 2]) };
    std::thread::scope(|scope| {
        for number in 0..2 {
            let (shared, run) = (&shared, &run);
            scope.spawn(move || {
                let mut rank = Rank::join(number, shared, is_old);
                run(&mut rank, &shared.barrier);
                shared.barrier.wait();
                rank.leave();
            });
        }
    });
}

/// An all-to-all, as nccl-tests has it: data and a signal to the other rank and to itself.
#[test]
fn puts_arrive_before_their_signals() {
    for is_old in [false, true] {
        both(is_old, |rank, barrier| {
            let (memory, window) = rank.window(BYTES);
            let half = BYTES as u64 / 2;
            barrier.wait();
            for round in 1..100_u64 {
                let context = round as usize % CONTEXTS;
                let word = round << 32 | rank.rank as u64;
                write(rank.cuda, memory + 8 * (rank.rank as u64), word);
                for to in 0..2 {
                    let transfer = Transfer {
                        local_handle: window,
                        local_offset: 8 * rank.rank as u64,
                        remote: Place { rank: to, handle: window, offset: half + 8 * rank.rank as u64 },
                        len: 8,
                    };
                    let signal = Some(Signal { index: 4, add: 1 });
                    rank.post(context, Action::Put(transfer, signal), Some(2));
                }
                let seen = 2 * round.div_ceil(CONTEXTS as u64);
                let seen = if context == 0 { 2 * (round / CONTEXTS as u64) } else { seen };
                until("signal", || rank.signal(context, 4)[0] >= seen);
                let found = read::<2>(rank.cuda, memory + half);
                assert_eq!(found, [round << 32, round << 32 | 1], "round {round}");
                rank.flush(context, 0);
                rank.flush(context, 1);
                barrier.wait();
            }
            assert_eq!(rank.counter(0, 2) + rank.counter(1, 2), 2 * 99);
            assert!(!rank.has_failed());
        });
    }
}

/// Other operations: values, additions to memory, READs, resets.
#[test]
fn every_operation_is_carried_out() {
    both(false, |rank, barrier| {
        let (_, first) = rank.window(64);
        let (memory, window) = rank.window(BYTES);
        assert_ne!(first, window);
        let other = 1 - rank.rank as u32;
        let to = |offset| Place { rank: other, handle: window, offset };
        barrier.wait();
        let signal = Some(Signal { index: 0, add: 40 });
        rank.post(0, Action::PutValue { to: to(16), value: 0x1234, len: 8, signal }, None);
        rank.post(0, Action::Add { to: to(24), value: 5 }, Some(0));
        until("signal", || rank.signal(0, 0) == [40, 1]);
        until("addition", || read::<2>(rank.cuda, memory + 16) == [0x1234, 5]);
        // A flagged signal is reset by a descriptor; then the kernel clears the flag.
        rank.post(0, Action::ResetSignal { index: 0 }, None);
        until("reset", || rank.signal(0, 0)[0] == 0);
        write(rank.cuda, rank.channel(0)[1] + 8, 0);
        barrier.wait();
        rank.post(0, Action::PutValue { to: to(16), value: 1, len: 1, signal }, None);
        until("signal", || rank.signal(0, 0) == [40, 1]);
        let remote = to(16);
        let get = Transfer { local_handle: window, local_offset: 512, remote, len: 16 };
        rank.flush(0, other);
        rank.post(0, Action::Get(get), None);
        assert_eq!(rank.flush(0, other) & ERROR, 0);
        assert_eq!(read::<2>(rank.cuda, memory + 512), [0x1201, 5]);
        assert!(!rank.has_failed());
    });
}

#[test]
fn a_descriptor_out_of_bounds_sets_the_error_and_moves_nothing() {
    both(false, |rank, barrier| {
        let (memory, window) = rank.window(BYTES);
        let remote = Place { rank: 1 - rank.rank as u32, handle: window, offset: BYTES as u64 - 4 };
        barrier.wait();
        let transfer = Transfer { local_handle: window, local_offset: 0, remote, len: 8 };
        rank.post(1, Action::Put(transfer, None), Some(1));
        until("error", || rank.counter(1, 1) & ERROR != 0);
        assert!(rank.has_failed());
        assert_eq!(read::<1>(rank.cuda, memory + BYTES as u64 - 8), [0]);
        // So does a flush, which has no counter of the program's.
        rank.post(1, Action::Put(Transfer { local_handle: 77, ..transfer }, None), None);
        // A signal in user memory behind it would say that it has arrived.
        let word = Place { offset: 8, ..remote };
        rank.post(1, Action::Add { to: word, value: 1 }, Some(2));
        until("error", || rank.counter(1, 2) & ERROR != 0);
        assert_ne!(rank.flush(1, remote.rank) & ERROR, 0);
        rank.post(1, Action::Add { to: word, value: 1 }, None);
        assert_eq!(rank.flush(1, remote.rank) & ERROR, 0);
        barrier.wait();
        assert_eq!(read::<1>(rank.cuda, memory + 8), [1]);
        // A window that is deregistered has no name any more.
        barrier.wait();
        let registration = ptr::without_provenance_mut(window.into());
        // SAFETY: as above.
        assert_eq!(unsafe { (GIN.deregister)(rank.member, registration) }, OK);
        rank.post(0, Action::Put(Transfer { len: 4, ..transfer }, None), Some(0));
        until("error", || rank.counter(0, 0) & ERROR != 0);
    });
}

#[test]
fn nccl_is_told_what_the_plugin_can_do() {
    let mut properties = GinProperties { strong_signals: false, va_signals: false };
    let mut count = 0;
    // SAFETY: places for the results.
    unsafe {
        assert_eq!((GIN.gin_properties)(&raw mut properties), OK);
        assert_eq!((GIN.devices)(&raw mut count), OK);
        // Without places, and without a communicator.
        assert_eq!((GIN.devices)(ptr::null_mut()), NcclResult::INVALID_ARGUMENT);
        assert_eq!((GIN.deregister)(ptr::null_mut(), ptr::null_mut()), NcclResult::INVALID_ARGUMENT);
    }
    assert!(properties.strong_signals && properties.va_signals && count == 1);
}
