//! Ranks in one process, with host memory in place of GPU memory: threads write descriptors as
//! kernels do.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::net::IpAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use nobounce::RemoteRegion;
use nobounce_initiated::descriptor::{Action, Counted, Descriptor, OWNER, Place, Signal, Transfer};
use nobounce_initiated::parts::{Channel, Parts, Scratch};
use nobounce_initiated::proxy::Proxy;
use nobounce_initiated::ring::Ring;
use nobounce_initiated::table::{LocalMemory, Memory, RankTable, Refusal, Table};
use nobounce_initiated::thread::ProxyThread;
use nobounce_initiated::words::{ERROR, STRIDE, WordMemory, Words};
use nobounce_memory::{HostBuffer, Window};
use nobounce_nic::any::{Cq, Device, Mr, Pd, Qp};
use nobounce_nic::soft::{self, Config, LinkChoice};
use nobounce_nic::work::{Access, Mtu, Psn, QpAttr, QpLimits};

const BYTES: usize = 64 << 10;
const SIGNALS: usize = 8;
const COUNTERS: usize = 8;
const LOG_DEPTH: u32 = 4;
const LIMIT: Duration = Duration::from_secs(20);

fn window(buffer: &HostBuffer) -> Window {
    // SAFETY: the buffer lives as long as the rank, and no reference into it is made.
    unsafe { Window::new(buffer.as_mut_ptr(), buffer.len()) }
}

fn words(buffer: &HostBuffer) -> WordMemory {
    WordMemory::host(window(buffer))
}

/// Memory of a rank, its queue pairs, and what its kernels see.
struct Rank {
    proxy: Option<ProxyThread>,
    memory: (HostBuffer, Mr),
    signals: (HostBuffer, Mr),
    scratch: (HostBuffer, Mr),
    ring: HostBuffer,
    consumed: HostBuffer,
    counters: HostBuffer,
    status: HostBuffer,
    qps: Vec<Qp>,
    cq: Option<Cq>,
    _pd: Pd,
    device: soft::Device,
    produced: u64,
}

impl Rank {
    fn open(config: &Config, ranks: usize) -> Self {
        let device = soft::Device::open(config).unwrap();
        let any = Device::Soft(device.clone());
        let (pd, cq) = (any.alloc_pd().unwrap(), any.create_cq(1024, None).unwrap());
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let registered = |len| {
            let buffer = HostBuffer::new(len).unwrap();
            // SAFETY: as for `window`; it is freed after the registration.
            let mr = unsafe { pd.register(buffer.as_mut_ptr(), len, access) }.unwrap();
            (buffer, mr)
        };
        let limits = QpLimits { send_depth: 16, ..QpLimits::default() };
        let qp = |_| {
            let qp = pd.create_qp(&cq, &cq, limits).unwrap();
            qp.modify(&QpAttr::to_init(access), 0).unwrap();
            qp
        };
        let plain = |len| HostBuffer::new(len).unwrap();
        Self {
            proxy: None,
            memory: registered(BYTES),
            signals: registered(SIGNALS * STRIDE),
            scratch: registered(4096),
            ring: plain(64 << LOG_DEPTH),
            consumed: plain(STRIDE),
            counters: plain(COUNTERS * STRIDE),
            status: plain((ranks + 1) * STRIDE),
            qps: (0..ranks).map(qp).collect(),
            cq: Some(cq),
            _pd: pd,
            device,
            produced: 0,
        }
    }

    /// Memory and signals.
    fn regions(&self) -> [RemoteRegion; 2] {
        [&self.memory.1, &self.signals.1].map(|mr| RemoteRegion {
            addr: mr.addr(),
            len: mr.len(),
            rkey: mr.rkey(),
            closed: false,
        })
    }

    fn start(&mut self, rank: usize, ranks: &[[RemoteRegion; 2]]) {
        let mr = &self.memory.1;
        let local = LocalMemory { addr: mr.addr(), len: mr.len(), lkey: mr.lkey() };
        let mut memory = Memory::new(ranks.len());
        memory.set(1, local, ranks.iter().map(|[memory, _]| *memory));
        let table =
            |(at, [_, signals]): (usize, &[RemoteRegion; 2])| RankTable { at, signals: vec![*signals] };
        let tables = ranks.iter().enumerate().map(table).collect();
        let channel = Channel {
            ring: Ring::new(window(&self.ring), LOG_DEPTH).unwrap(),
            consumed: Words::new(words(&self.consumed)),
            counters: Words::new(words(&self.counters)),
            signals: words(&self.signals.0),
        };
        let parts = Parts {
            rank,
            channels: vec![channel],
            qps: std::mem::take(&mut self.qps),
            cq: self.cq.take().unwrap(),
            table: Table::new(Arc::new(RwLock::new(memory)), tables, COUNTERS),
            scratch: Scratch { addr: self.scratch.1.addr(), lkey: self.scratch.1.lkey() },
            status: Words::new(words(&self.status)),
        };
        self.proxy = Some(ProxyThread::start(Proxy::new(parts).unwrap()).unwrap());
    }

    /// As a kernel does: waits for room, then stores the words.
    fn issue(&mut self, action: Action, counter: Option<u16>) {
        let counter = counter.map(|index| Counted { index, is_written_back: true });
        let owner = self.produced >> LOG_DEPTH & OWNER != 0;
        self.store(Descriptor { action, counter }.words(owner));
    }

    fn store(&mut self, words: [u64; 8]) {
        let room = 1 << LOG_DEPTH;
        let consumed = window(&self.consumed);
        until("room", || self.produced - consumed.load_u64(0).unwrap() < room);
        let at = 64 * (self.produced as usize % room as usize);
        // In an order that differs each time.
        for number in 0..8 {
            let number = (number + self.produced as usize * 3) % 8;
            window(&self.ring).store_u64(at + 8 * number, words[number]).unwrap();
        }
        self.produced += 1;
    }

    fn signal(&self, index: usize) -> u64 {
        window(&self.signals.0).load_u64(index * STRIDE).unwrap()
    }

    fn counter(&self, index: usize) -> u64 {
        window(&self.counters).load_u64(index * STRIDE).unwrap()
    }

    fn status(&self, rank: usize) -> u64 {
        window(&self.status).load_u64(rank * STRIDE).unwrap()
    }

    fn reasons(&self) -> Vec<Refusal> {
        self.proxy.as_ref().unwrap().reports().into_iter().map(|report| report.reason).collect()
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LIMIT, "no {what} within {LIMIT:?}");
        std::thread::yield_now();
    }
}

/// Two ranks that are connected, each also with itself.
fn two(link: LinkChoice) -> [Rank; 2] {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let addr: IpAddr = format!("127.58.{}.{number}", std::process::id() % 250 + 1).parse().unwrap();
    let config = Config { addr, link, ..Config::default() };
    let mut ranks = [0, 1].map(|_| Rank::open(&config, 2));
    for (one, other) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let (qp, peer) = (&ranks[one].qps[other], &ranks[other].qps[one]);
        let psn = |from: usize, to: usize| Psn::new((from * 16 + to + 1) as u32);
        let to = ranks[other].device.local();
        qp.modify(&QpAttr::to_rtr(to, peer.qpn(), psn(other, one), Mtu::Mtu1024), 0).unwrap();
        qp.modify(&QpAttr { timeout: 14, ..QpAttr::to_rts(psn(one, other)) }, 0).unwrap();
    }
    let tables: Vec<_> = ranks.iter().map(Rank::regions).collect();
    ranks.iter_mut().enumerate().for_each(|(number, rank)| rank.start(number, &tables));
    ranks
}

fn to(rank: u32, offset: u64) -> Place {
    Place { rank, handle: 1, offset }
}

fn moved(rank: u32, local_offset: u64, offset: u64, len: u32) -> Transfer {
    Transfer { local_handle: 1, local_offset, remote: to(rank, offset), len }
}

/// A kernel that sees the signal sees the whole put before it.
#[test]
fn puts_arrive_before_their_signals() {
    const LEN: usize = 3000;
    for link in [LinkChoice::Auto, LinkChoice::Udp] {
        let [mut a, b] = two(link);
        for round in 1..=300_u64 {
            let bytes: Vec<u8> = (0..LEN).map(|at| (at as u64 + round) as u8).collect();
            a.memory.0.write_at(0, &bytes).unwrap();
            let signal = Some(Signal { index: 3, add: 5 });
            a.issue(Action::Put(moved(1, 0, 4096, LEN as u32), signal), Some(2));
            until("signal", || b.signal(3) == 5 * round);
            let mut there = vec![0; LEN];
            b.memory.0.read_at(4096, &mut there).unwrap();
            assert!(there == bytes, "{link:?}, round {round}");
            until("completion", || a.counter(2) == round);
        }
        assert!(a.reasons().is_empty() && b.reasons().is_empty());
    }
}

#[test]
fn every_operation_does_what_it_says() {
    let [mut a, b] = two(LinkChoice::Auto);
    let word = |rank: &Rank, at: usize| window(&rank.memory.0).load_u64(at).unwrap();
    a.issue(Action::PutValue { to: to(1, 8), value: 0x1122_3344_5566_7788, len: 4, signal: None }, None);
    let signal = Some(Signal { index: 0, add: u64::MAX });
    a.issue(Action::PutValue { to: to(1, 16), value: 77, len: 8, signal }, None);
    a.issue(Action::Add { to: to(1, 16), value: 3 }, None);
    let nowhere = Transfer { local_handle: 0, remote: Place { handle: 0, ..to(1, 0) }, ..moved(1, 0, 0, 0) };
    a.issue(Action::Put(nowhere, Some(Signal { index: 1, add: 9 })), None);
    a.issue(Action::Flush { rank: 1 }, Some(0));
    until("flush", || a.counter(0) == 1);
    assert_eq!((word(&b, 8), word(&b, 16), b.signal(0), b.signal(1)), (0x5566_7788, 80, u64::MAX, 9));
    a.issue(Action::Get(moved(1, 1024, 0, 24)), Some(1));
    until("get", || a.counter(1) == 1);
    assert_eq!((word(&a, 1024), word(&a, 1032), word(&a, 1040)), (0, 0x5566_7788, 80));
    // To itself.
    a.issue(Action::Put(moved(0, 1032, 2048, 8), Some(Signal { index: 7, add: 1 })), None);
    until("signal", || a.signal(7) == 1);
    assert_eq!(word(&a, 2048), 0x5566_7788);
    a.issue(Action::ResetSignal { index: 7 }, None);
    a.issue(Action::ResetCounter(Counted { index: 1, is_written_back: true }), None);
    until("reset", || a.counter(1) == 0 && a.signal(7) == 0);
    assert!(a.reasons().is_empty(), "{:?}", a.reasons());
}

/// Many laps of a small ring, more requests than a send queue holds, and all are counted.
#[test]
fn a_full_ring_and_full_queues_lose_nothing() {
    const COUNT: u64 = 5000;
    let [mut a, b] = two(LinkChoice::Auto);
    for number in 0..COUNT {
        let signal = Some(Signal { index: 2, add: 1 });
        a.issue(Action::PutValue { to: to(1, 8 * (number % 100)), value: number, len: 8, signal }, Some(4));
    }
    until("signals", || b.signal(2) == COUNT);
    until("completions", || a.counter(4) == COUNT);
    for at in 0..100 {
        assert_eq!(window(&b.memory.0).load_u64(8 * at as usize).unwrap(), COUNT - 100 + at);
    }
}

#[test]
fn wrong_descriptors_set_the_error_bit_and_move_nothing() {
    let [mut a, b] = two(LinkChoice::Auto);
    let before = b.device.path_counters();
    let wrong = [
        (Action::Put(moved(2, 0, 0, 8), None), Refusal::Rank { rank: 2, ranks: 2 }),
        (
            Action::Put(moved(1, 0, BYTES as u64 - 7, 8), None),
            Refusal::Range { handle: 1, offset: BYTES as u64 - 7, len: 8, of: BYTES as u64 },
        ),
        (
            Action::Get(moved(1, BYTES as u64, 0, 1)),
            Refusal::Range { handle: 1, offset: BYTES as u64, len: 1, of: BYTES as u64 },
        ),
        (
            Action::Put(Transfer { local_handle: 9, ..moved(1, 0, 0, 8) }, None),
            Refusal::LocalHandle { handle: 9 },
        ),
        (
            Action::Put(Transfer { remote: Place { handle: 0, ..to(1, 0) }, ..moved(1, 0, 0, 8) }, None),
            Refusal::RemoteHandle { handle: 0, rank: 1 },
        ),
        (Action::Add { to: to(1, 4), value: 1 }, Refusal::Misaligned { handle: 1, offset: 4 }),
        (Action::PutValue { to: to(1, 0), value: 1, len: 9, signal: None }, Refusal::ValueLength { len: 9 }),
        (
            Action::Put(moved(1, 0, 0, 8), Some(Signal { index: SIGNALS as u16, add: 1 })),
            Refusal::Signal { index: SIGNALS as u16, signals: SIGNALS as u64 },
        ),
        (Action::Flush { rank: 9 }, Refusal::Rank { rank: 9, ranks: 2 }),
    ];
    for (number, (action, reason)) in wrong.into_iter().enumerate() {
        a.issue(Action::ResetCounter(Counted { index: 5, is_written_back: true }), None);
        until("reset", || a.counter(5) == 0);
        a.issue(action, Some(5));
        until("error bit", || a.counter(5) & ERROR != 0);
        assert_eq!(a.reasons()[number], reason);
    }
    a.issue(Action::ResetSignal { index: SIGNALS as u16 }, None);
    until("reason", || {
        let unknown = Refusal::Signal { index: SIGNALS as u16, signals: SIGNALS as u64 };
        a.reasons().last() == Some(&unknown)
    });
    let known = a.reasons().len();
    // Without a counter, with a counter that does not exist, and words that mean nothing.
    a.issue(Action::Flush { rank: 9 }, None);
    a.issue(Action::Flush { rank: 1 }, Some(COUNTERS as u16));
    let owner = a.produced >> LOG_DEPTH & OWNER;
    a.store([0x55 << 16 | owner, owner, owner, owner, owner, owner, owner, owner]);
    // A flush tells of refused descriptors, once.
    a.issue(Action::Flush { rank: 1 }, Some(6));
    until("failed flush", || a.counter(6) == ERROR | 1);
    a.issue(Action::Flush { rank: 1 }, Some(6));
    until("flush", || a.counter(6) == 2);
    assert_eq!(a.reasons().len(), known + 4);
    assert_eq!(b.device.path_counters(), before, "nothing arrived");
}

/// Kernels see that a proxy has ended.
#[test]
fn a_proxy_that_ends_says_so() {
    let [mut a, _b] = two(LinkChoice::Auto);
    assert_eq!(a.status(2), 0);
    drop(a.proxy.take());
    assert_eq!([a.status(0), a.status(1), a.status(2)], [2; 3]);
}

/// A kernel that only waits for signals of a rank learns that it is gone, though nothing was
/// posted.
#[test]
fn a_rank_that_is_gone_is_noticed_without_requests() {
    for link in [LinkChoice::Auto, LinkChoice::Udp] {
        let [mut a, mut b] = two(link);
        b.issue(
            Action::PutValue { to: to(0, 0), value: 1, len: 8, signal: Some(Signal { index: 0, add: 1 }) },
            None,
        );
        until("signal", || a.signal(0) == 1);
        a.issue(Action::PutValue { to: to(1, 0), value: 1, len: 8, signal: None }, Some(0));
        until("completion", || a.counter(0) == 1);
        drop(b);
        let began = Instant::now();
        until("status", || a.status(1) == 1);
        println!("{link:?}: noticed after {:?}", began.elapsed());
    }
}

/// The same while there is always something to do with another rank.
#[test]
fn a_rank_that_is_gone_is_noticed_beside_traffic() {
    let [mut a, b] = two(LinkChoice::Udp);
    drop(b);
    let began = Instant::now();
    while a.status(1) == 0 && began.elapsed() < LIMIT {
        a.issue(Action::Put(moved(0, 0, 4096, 64), None), None);
    }
    println!("noticed after {:?}", began.elapsed());
    assert_eq!((a.status(0), a.status(1)), (0, 1));
}

/// What kernels have posted is carried out before a proxy ends.
#[test]
fn a_proxy_ends_when_all_is_complete() {
    for link in [LinkChoice::Auto, LinkChoice::Udp] {
        let [mut a, b] = two(link);
        for number in 0..12 {
            let signal = Some(Signal { index: 1, add: 1 });
            a.issue(Action::Put(moved(1, 0, 1024 * number, 1024), signal), None);
        }
        a.proxy = None;
        assert_eq!(b.signal(1), 12, "{link:?}");
        assert_eq!(a.status(1), 2);
    }
}

/// A rank that is gone: what waits for it fails within a second, and kernels can see that it is.
#[test]
fn a_rank_that_is_gone_fails_what_waits_for_it() {
    let [mut a, b] = two(LinkChoice::Auto);
    a.issue(Action::Put(moved(1, 0, 0, 64), None), Some(0));
    until("completion", || a.counter(0) == 1);
    drop(b);
    let began = Instant::now();
    a.issue(Action::Put(moved(1, 0, 0, 64), Some(Signal { index: 0, add: 1 })), Some(1));
    a.issue(Action::Flush { rank: 1 }, Some(2));
    until("error bits", || a.counter(1) & ERROR != 0 && a.counter(2) & ERROR != 0);
    println!("reported after {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!((a.status(0), a.status(1), a.status(2)), (0, 1, 1));
    assert!(matches!(&a.reasons()[0], Refusal::Unreachable { rank: 1, .. }), "{:?}", a.reasons());
    // Later ones are refused at once, and other ranks are not affected.
    a.issue(Action::Flush { rank: 1 }, Some(3));
    until("error bit", || a.counter(3) == ERROR | 1);
    a.issue(Action::Put(moved(0, 0, 4096, 64), None), Some(4));
    until("completion", || a.counter(4) == 1);
}
