//! What sealing costs: CPU time per byte of WRITEs by UDP between two devices of this process, with
//! a key and without, beside what AES-256-GCM itself takes for packets of that size; and that of an
//! 8-byte WRITE and its ACK. Runs alternate; each figure is the median.
//!
//!     cargo run --release -p nobounce-nic --example sealed_cost

use nobounce_memory::HostBuffer;
use nobounce_nic::links::sealed::{KeySource, SealKeys};
use nobounce_nic::soft::{Config, Cq, Device, LinkChoice, Mr, Pd, Progress, Qp};
use nobounce_nic::work::{Access, Mtu, Operation, Psn, QpAttr, QpLimits, Remote, SendRequest, Sge, Status};
use nobounce_protocol::seal::{KeyRing, SealMode};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

const MESSAGE: usize = 256 << 10;
const MESSAGES: usize = 400;
const PINGS: usize = 20_000;
const RUNS: usize = 7;
/// BTH and ICRC of a packet in the midst of a message.
const HEADERS: usize = 16;

struct End {
    qp: Qp,
    cq: Cq,
    mr: Mr,
    _pd: Pd,
    device: Device,
    _buffer: HostBuffer,
}

impl End {
    fn open(addr: &str, mode: Option<SealMode>) -> Self {
        let ring = KeyRing::parse(&"5a".repeat(32)).expect("64 digits");
        let key = mode.map(|mode| SealKeys { source: KeySource::Descriptor(-1), ring, mode, version: None });
        let addr = addr.parse().expect("an address");
        // One thread drives both ends, so that its CPU time is the cost.
        let (link, progress, engines) = (LinkChoice::Udp, Progress::Caller, Some(1));
        let config = Config { addr, key, link, progress, engines, ..Config::default() };
        let device = Device::open(&config).expect("a device");
        let pd = device.alloc_pd().expect("a domain");
        let buffer = HostBuffer::new(MESSAGE).expect("memory");
        // SAFETY: the buffer outlives the region, and is touched by the device only.
        let mr = unsafe { pd.register(buffer.as_mut_ptr(), buffer.len(), Access::all()) }.expect("a region");
        let cq = device.create_cq(256, None).expect("a queue");
        let qp = pd.create_qp(&cq, &cq, QpLimits::default()).expect("a queue pair");
        qp.modify(&QpAttr::to_init(Access::all())).expect("init");
        Self { qp, cq, mr, _pd: pd, device, _buffer: buffer }
    }

    fn join(&self, peer: &Self, mtu: Mtu) {
        let psn = Psn::new(1000);
        self.qp.modify(&QpAttr::to_rtr(peer.device.local(), peer.qp.qpn(), psn, mtu)).expect("rtr");
        self.qp.modify(&QpAttr { timeout: 16, ..QpAttr::to_rts(psn) }).expect("rts");
    }

    fn write(&self, peer: &Self, len: usize) {
        let len = u32::try_from(len).expect("short");
        let sges = [Sge { addr: self.mr.addr(), len, lkey: self.mr.lkey() }];
        let to = Remote { addr: peer.mr.addr(), rkey: peer.mr.rkey() };
        self.qp.post_send(&SendRequest::new(1, Operation::Write(to), &sges)).expect("posted");
    }
}

/// Posts so many WRITEs, a few at a time; returns CPU nanoseconds.
fn writes(a: &End, b: &End, count: usize, len: usize, deep: usize) -> f64 {
    let (mut posted, mut done, mut got) = (0, 0, Vec::new());
    let start = cpu_ns();
    while done < count {
        while posted < count && posted - done < deep {
            a.write(b, len);
            posted += 1;
        }
        for end in [a, b] {
            end.cq.poll(&mut got, 16).expect("polled");
        }
        assert!(got.iter().all(|completion| completion.status == Status::Success), "{got:?}");
        done += got.drain(..).count();
    }
    cpu_ns() - start
}

#[allow(clippy::cast_precision_loss)] // nanoseconds of one run
fn cpu_ns() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a live timespec to fill.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Nanoseconds to seal and to open a packet of that size, by the crate alone.
fn crate_cost(len: usize, mode: SealMode) -> f64 {
    const TIMES: u32 = 20_000;
    let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &[7; 32]).expect("32 bytes"));
    let nonce = |n: u32| {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&n.to_be_bytes());
        Nonce::assume_unique_for_key(bytes)
    };
    let mut packet = vec![1; len + 16];
    let start = cpu_ns();
    for n in 0..TIMES {
        let (body, room) = packet.split_at_mut(len);
        match mode {
            SealMode::Encrypt => {
                let tag = key.seal_in_place_separate_tag(nonce(n), Aad::from([0; 24]), body).expect("sealed");
                room.copy_from_slice(tag.as_ref());
                key.open_in_place(nonce(n), Aad::from([0; 24]), &mut packet).expect("opened");
            }
            SealMode::Authenticate => {
                let tag =
                    key.seal_in_place_separate_tag(nonce(n), Aad::from(&*body), &mut []).expect("sealed");
                room.copy_from_slice(tag.as_ref());
                key.open_in_place(nonce(n), Aad::from(&*body), room).expect("opened");
            }
        }
    }
    (cpu_ns() - start) / f64::from(TIMES)
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

#[allow(clippy::cast_precision_loss)] // sizes and counts are small
fn main() {
    let modes = [None, Some(SealMode::Encrypt), Some(SealMode::Authenticate)];
    let name = |mode: Option<SealMode>| mode.map_or("plain", SealMode::name);
    for mtu in [Mtu::Mtu1024, Mtu::Mtu4096] {
        let len = mtu.bytes() as usize + HEADERS;
        let ends = modes.map(|mode| {
            let at = |host| format!("127.88.{}.{host}", mtu.bytes() >> 10);
            let place = 2 * modes.iter().position(|one| *one == mode).unwrap_or(0);
            let (a, b) = (End::open(&at(place + 1), mode), End::open(&at(place + 2), mode));
            a.join(&b, mtu);
            b.join(&a, mtu);
            writes(&a, &b, 20, MESSAGE, 4);
            (a, b)
        });
        let (mut bytes, mut pings, mut own) =
            ([const { Vec::new() }; 3], [const { Vec::new() }; 3], [const { Vec::new() }; 3]);
        for _ in 0..RUNS {
            for (at, (a, b)) in ends.iter().enumerate() {
                bytes[at].push(writes(a, b, MESSAGES, MESSAGE, 4) / (MESSAGES * MESSAGE) as f64);
                pings[at].push(writes(a, b, PINGS, 8, 1) / PINGS as f64);
                own[at].push(modes[at].map_or(0.0, |mode| crate_cost(len, mode) / f64::from(mtu.bytes())));
            }
        }
        let [bytes, pings, own] = [bytes, pings, own].map(|all| all.map(median));
        for (at, mode) in modes.iter().enumerate() {
            let added = bytes[at] - bytes[0];
            println!(
                "mtu {} {:<12} {:.3} ns/B cpu; added {added:.3}, seal and open alone {:.3}: {:.2} x; 8 B {:.0} ns cpu, added {:.0}",
                mtu.bytes(),
                name(*mode),
                bytes[at],
                own[at],
                added / own[at],
                pings[at],
                pings[at] - pings[0]
            );
        }
    }
}
