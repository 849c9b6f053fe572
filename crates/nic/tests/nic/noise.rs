//! Fuzz corpora and random input against a whole device, on the configured link and engines, beside
//! regular traffic. A forger with the peer's address sends them, over the wire or through a ring of
//! its own. (The fuzz targets test the parts: parser, queue pair, ring, neighbour.)
#![allow(clippy::cast_possible_truncation)] // small constants

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::common::unreliable::{DEEP, QKEY};
use crate::common::{ALL_ACCESS, End, StopAtEnd, connect, link, pair_with, patterns, unguarded, until};
use crate::forged::Forger;
use nobounce_memory::HostBuffer;
use nobounce_nic::links::shm::ShmLink;
use nobounce_nic::links::udp::{UdpConfig, UdpLink};
use nobounce_nic::links::{Link, LocalRoute, PacketDestination, PacketShape, PayloadSource, TxBatch};
use nobounce_nic::soft::{Cq, LinkChoice, Mr, Pd, Qp, QpInit};
use nobounce_nic::work::{
    Mtu, Operation, Psn, QpAttr, QpLimits, QpState, Qpn, RecvRequest, Remote, SendRequest, Service, Sge,
};
use nobounce_protocol::sim::fuzzing::{Aim, Bytes};
use nobounce_protocol::sim::{Rng, encode};
use nobounce_protocol::wire::icrc::Flow;
use nobounce_protocol::wire::{BTH_LEN, ICRC_LEN, ROCE_PORT};

/// Queue pairs that work, and bytes that each of them moves.
const WORKERS: usize = 4;
const LEN: usize = 32 << 10;
/// Registered memory that the forger knows, and what lies around it.
const OPEN: usize = 16 << 10;
const GUARD: usize = 4 << 10;
/// Queue pairs that live on while the next ones suffer.
const MOST_TARGETS: usize = 16;
/// As in the simulation whose corpora these are.
const MTU: Mtu = Mtu::Mtu256;
/// The ICRC is written when a packet is sent.
const NOWHERE: Flow = Flow {
    src: IpAddr::V4(Ipv4Addr::LOCALHOST),
    dst: IpAddr::V4(Ipv4Addr::LOCALHOST),
    src_port: ROCE_PORT,
    dst_port: ROCE_PORT,
};

/// Sends packets.
enum Mouth {
    Wire(Forger),
    Ring(Box<Ring>),
}

struct Ring {
    link: ShmLink<UdpLink>,
    /// To each engine of the other device that was spoken to.
    rings: HashMap<u8, LocalRoute>,
    batch: TxBatch,
    to: IpAddr,
}

impl Mouth {
    fn new(from: &End, to: &End) -> Self {
        if link() == LinkChoice::Udp {
            return Self::Wire(Forger::new(from.device.local(), to));
        }
        let mut link = ShmLink::new(UdpLink::open(&UdpConfig::new(from.device.local())).unwrap()).unwrap();
        link.listen().unwrap();
        let batch = TxBatch::new(link.capabilities());
        Self::Ring(Box::new(Ring { link, rings: HashMap::new(), batch, to: to.device.local() }))
    }

    /// One packet to that queue pair, with a valid ICRC; through a ring it may claim to be a run of
    /// several.
    fn say(&mut self, to: Qpn, bytes: Vec<u8>, packets: u16) {
        match self {
            Self::Wire(forger) => forger.send_closed(bytes),
            Self::Ring(mouth) => mouth.say((to.get() >> 16) as u8, &bytes, packets),
        }
    }
}

impl Ring {
    fn say(&mut self, slot: u8, bytes: &[u8], packets: u16) {
        let Self { link, rings, batch, to } = self;
        let ring = rings.entry(slot).or_insert_with(|| link.local_route((*to, slot)).unwrap());
        until("room in the ring", || {
            let shape = PacketShape { len: bytes.len(), head: 12, packets };
            let to = PacketDestination { addr: to, port_hint: 0, ecn: false, local: Some(ring) };
            let space = batch.begin(&to, shape, PayloadSource::Copy);
            let mut said = space.is_some();
            if let Some(mut space) = space {
                space.bytes.put(0, bytes);
                batch.commit(None);
            }
            said &= batch.packets().is_empty(); // beside a full ring it may get lost
            link.send(batch);
            said
        });
    }
}

/// A queue pair with a silent peer, whose place the forger takes. It has a protection domain of its
/// own, and may fail.
struct Target {
    qp: Qp,
    cq: Cq,
    mr: Mr,
    buffer: HostBuffer,
    _pd: Pd,
}

impl Target {
    fn new(of: &End, peer: &End, service: Service) -> Self {
        let pd = of.device.alloc_pd().unwrap();
        let buffer = HostBuffer::new(OPEN + 2 * GUARD).unwrap();
        buffer.write_at(0, &vec![0x33; buffer.len()]).unwrap();
        // SAFETY: a part of the buffer, which outlives its region and is reached through windows
        // only.
        let mr = unsafe { pd.register(buffer.as_mut_ptr().add(GUARD), OPEN, ALL_ACCESS) }.unwrap();
        let cq = of.device.create_cq(4096, None).unwrap();
        let qp = pd
            .create_qp_with(&QpInit { service, send_cq: &cq, recv_cq: &cq, srq: None, limits: DEEP })
            .unwrap();
        let (mine, theirs) = (Psn::new(0xff_fff0), Psn::new(0xff_fff8));
        let absent = Qpn::new(peer.qps[0].qpn().get() | 0xfff0);
        let attributes = match service {
            Service::Rc | Service::XrcInitiator | Service::XrcTarget => [
                QpAttr::to_init(ALL_ACCESS),
                QpAttr::to_rtr(peer.device.local(), absent, theirs, MTU),
                QpAttr { timeout: 12, retry_cnt: 1, ..QpAttr::to_rts(mine) },
            ],
            Service::Uc => [
                QpAttr::to_init(ALL_ACCESS),
                QpAttr::uc_to_rtr(peer.device.local(), absent, theirs, MTU),
                QpAttr::unreliable_to_rts(mine),
            ],
            Service::Ud => {
                [QpAttr::ud_to_init(QKEY), QpAttr::to_state(QpState::Rtr), QpAttr::unreliable_to_rts(mine)]
            }
        };
        attributes.iter().for_each(|attr| qp.modify(attr).unwrap());
        let target = Self { qp, cq, mr, buffer, _pd: pd };
        for i in 0..4 {
            let sges = target.sge(i * 600, 600);
            target.qp.post_recv(&RecvRequest { wr_id: i, sges: &sges }).unwrap();
        }
        target
    }

    fn sge(&self, offset: u64, len: u32) -> [Sge; 1] {
        [Sge { addr: self.mr.addr() + offset, len, lkey: self.mr.lkey() }]
    }

    /// Posts something that only the forger can answer. It may be refused.
    fn ask(&self, bytes: &mut Bytes<'_>) {
        let remote = Remote { addr: self.mr.addr(), rkey: self.mr.rkey() };
        let op = match bytes.byte() % 4 {
            0 => Operation::Write(remote),
            1 => Operation::Read(remote),
            2 => Operation::FetchAdd { remote, add: 1 },
            _ => Operation::Send,
        };
        let len = if matches!(op, Operation::FetchAdd { .. }) { 8 } else { u32::from(bytes.byte()) * 5 };
        let _ = self.qp.post_send(&SendRequest::new(9, op, &self.sge(0, len)));
    }

    /// Sends one input to it. Returns the number of packets.
    fn suffer(&self, service: Service, data: &[u8], mouth: &mut Mouth) -> u32 {
        let mut aim = Aim {
            service,
            qpn: self.qp.qpn(),
            memory: Remote { addr: self.mr.addr(), rkey: self.mr.rkey() },
            mtu: MTU.bytes(),
            qkey: QKEY,
            requests: 0xff_fff8,
            answers: 0xff_fff0,
        };
        let (mut bytes, mut said, mut done) = (Bytes(data), 0, Vec::new());
        while !bytes.0.is_empty() {
            let choice = bytes.byte();
            let packet = match choice % 8 {
                0 => {
                    self.ask(&mut bytes);
                    continue;
                }
                1 | 2 => {
                    self.cq.poll(&mut done, 64).unwrap();
                    continue;
                }
                3 => {
                    let len = usize::from(bytes.byte());
                    let mut raw = bytes.take(len).to_vec();
                    raw.resize(raw.len().max(BTH_LEN) + ICRC_LEN, 0);
                    raw
                }
                _ => {
                    let (header, payload) = aim.forge(&mut bytes);
                    encode(&header, &payload, &NOWHERE, 0)
                }
            };
            mouth.say(self.qp.qpn(), packet, if choice < 0xf0 { 1 } else { u16::from(choice) << 2 });
            said += 1;
        }
        self.cq.poll(&mut done, 64).unwrap();
        said
    }

    /// Memory around the exposed region is unchanged.
    fn check(&self) {
        for at in [0, GUARD + OPEN] {
            let mut bytes = vec![0; GUARD];
            self.buffer.read_at(at, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0x33), "memory beside the region changed");
        }
    }
}

/// Every worker writes its part and reads it back, and every byte is compared.
fn work(a: &End, b: &End, seed: u8) {
    a.fill(seed);
    let post = |i: usize, op, from: usize| {
        a.qps[i].post_send(&SendRequest::new(i as u64, op, &a.sge(from as u64, LEN as u32))).unwrap();
    };
    (0..WORKERS).for_each(|i| post(i, Operation::Write(b.remote((i * LEN) as u64)), i * LEN));
    a.succeed(WORKERS);
    (0..WORKERS).for_each(|i| post(i, Operation::Read(b.remote((i * LEN) as u64)), (WORKERS + i) * LEN));
    a.succeed(WORKERS);
    let want = patterns(seed, 0, WORKERS * LEN);
    assert!(b.bytes(0, WORKERS * LEN) == want, "what was written is not what arrived");
    assert!(a.bytes(WORKERS * LEN, WORKERS * LEN) == want, "what was read is not what is there");
}

/// The inputs of a fuzz target, and as many random ones.
fn inputs(target: &str) -> Vec<Vec<u8>> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 10, "only {} inputs for {target}", files.len());
    let mut inputs: Vec<Vec<u8>> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    let mut random = Rng::new(2026);
    let chance = |_: usize| (0..2000).map(|_| random.next() as u8).collect();
    inputs.extend((0..inputs.len()).map(chance));
    inputs
}

#[test]
fn the_corpora_hurt_only_the_queue_pairs_they_are_aimed_at() {
    let bytes = 2 * WORKERS * LEN;
    let (mut a, mut b) = pair_with(&unguarded("127.57.30.1"), &unguarded("127.57.30.2"), bytes, Mtu::Mtu1024);
    for i in 1..WORKERS {
        a.add_qp(QpLimits::default());
        b.add_qp(QpLimits::default());
        connect(&a, i, &b, i, Mtu::Mtu1024);
    }
    let mut mouth = Mouth::new(&a, &b);
    let (stop, rounds) = (AtomicBool::new(false), AtomicU32::new(0));
    let heard = || b.device.counters().rcvd_pkts;
    std::thread::scope(|scope| {
        let (a, b, stop, rounds) = (&a, &b, &stop, &rounds);
        let worker = scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                work(a, b, rounds.fetch_add(1, Ordering::Relaxed) as u8);
            }
        });
        let ends = StopAtEnd(stop);
        let mut targets = VecDeque::new();
        let (mut said, before) = (0, heard());
        for (corpus, input) in
            ["responder", "receiver"].iter().flat_map(|name| inputs(name).into_iter().map(move |i| (name, i)))
        {
            // As the fuzz targets read them.
            let (first, rest) = input.split_first().unwrap_or((&0, &[]));
            let (service, input) = match (*corpus, first & 1) {
                ("responder", _) => (Service::Rc, &input[..]),
                (_, 0) => (Service::Uc, rest),
                _ => (Service::Ud, rest),
            };
            let target = Target::new(b, a, service);
            said += target.suffer(service, input, &mut mouth);
            // Some packets are received later.
            targets.push_back(target);
            if targets.len() > MOST_TARGETS {
                targets.pop_front().unwrap().check();
            }
            assert!(!worker.is_finished(), "the others work on");
        }
        targets.iter().for_each(Target::check);
        println!(
            "{said} packets made up; {} heard with those of the workers; {:?}",
            heard() - before,
            b.device.counters()
        );
        assert!(said > 3000, "{said}");
        let seen = rounds.load(Ordering::Relaxed);
        until("the workers to go on", || rounds.load(Ordering::Relaxed) > seen + 1 || worker.is_finished());
        drop(ends);
        worker.join().unwrap();
    });
    let noticed = b.counter("unsolicited") + b.counter("duplicate_request") + b.counter("out_of_seq_request");
    assert!(noticed > 100, "{noticed} packets reached a queue pair: {:?}", b.device.counters());
    if link() != LinkChoice::Udp {
        assert!(b.counter("shm_rx_packets") > 3000);
    }
    for end in [&a, &b] {
        assert!(end.qps.iter().all(|qp| qp.state() == QpState::Rts), "who works has noticed nothing");
    }
    work(&a, &b, 0x77);
}
