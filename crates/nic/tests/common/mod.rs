//! Two ends in one process, each with a device of its own; and what the tests share besides.
#![allow(dead_code)] // each test binary uses a part of it
#![allow(clippy::cast_possible_truncation)] // patterns are bytes of larger numbers

pub(crate) mod on_gpu;
pub(crate) mod unix;
pub(crate) mod unreliable;

use std::io::Write as _;
use std::net::IpAddr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nobounce_memory::HostBuffer;
use nobounce_nic::links::sealed::{KeySource, SealKeys};
use nobounce_nic::soft::{AsyncEvent, Config, Cq, Device, LinkChoice, LocalPorts, Mr, Pd, Progress, Qp};
use nobounce_nic::work::{
    Access, Mtu, Operation, Psn, QpAttr, QpLimits, QpState, RecvRequest, Remote, SendRequest, Sge, Status,
    WorkCompletion,
};
use nobounce_protocol::seal::SealMode;

pub(crate) const ALL_ACCESS: Access = Access::all();
pub(crate) const MIB: usize = 1 << 20;
/// Longer than anything here takes: a test that waits so long has failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// One end: a device with a domain, a region, a completion queue and queue pairs.
pub(crate) struct End {
    pub(crate) qps: Vec<Qp>,
    pub(crate) cq: Cq,
    pub(crate) mr: Mr,
    pub(crate) buffer: HostBuffer,
    /// A queue pair that does nothing.
    pub(crate) ballast: Option<Qp>,
    pub(crate) pd: Pd,
    pub(crate) device: Device,
}

impl End {
    pub(crate) fn open(config: &Config, bytes: usize) -> Self {
        Self::of(Device::open(config).unwrap(), bytes)
    }

    pub(crate) fn of(device: Device, bytes: usize) -> Self {
        let pd = device.alloc_pd().unwrap();
        let buffer = HostBuffer::new(bytes).unwrap();
        let mr = register(&pd, &buffer, ALL_ACCESS);
        let cq = device.create_cq(4096, None).unwrap();
        Self { qps: Vec::new(), cq, mr, buffer, ballast: None, pd, device }
    }

    pub(crate) fn add_qp(&mut self, limits: QpLimits) -> &Qp {
        let qp = self.pd.create_qp(&self.cq, &self.cq, limits).unwrap();
        qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
        self.qps.push(qp);
        self.qps.last().unwrap()
    }

    pub(crate) fn sge(&self, offset: u64, len: u32) -> [Sge; 1] {
        [Sge { addr: self.mr.addr() + offset, len, lkey: self.mr.lkey() }]
    }

    pub(crate) fn remote(&self, offset: u64) -> Remote {
        Remote { addr: self.mr.addr() + offset, rkey: self.mr.rkey() }
    }

    pub(crate) fn post(&self, op: Operation, offset: u64, len: u32) {
        self.qps[0].post_send(&SendRequest::new(7, op, &self.sge(offset, len))).unwrap();
    }

    pub(crate) fn post_recv(&self, wr_id: u64, offset: u64, len: u32) {
        self.qps[0].post_recv(&RecvRequest { wr_id, sges: &self.sge(offset, len) }).unwrap();
    }

    /// Polls until `count` completions came, or fails the test.
    #[track_caller]
    pub(crate) fn completions(&self, count: usize) -> Vec<WorkCompletion> {
        let mut got = Vec::new();
        let end = Instant::now() + LIMIT;
        while got.len() < count {
            self.cq.poll(&mut got, count).unwrap();
            assert!(
                Instant::now() < end,
                "{} of {count} completions after {LIMIT:?}: {got:?}; {:?}; {:?}",
                got.len(),
                self.device.counters(),
                self.device.link_counters()
            );
        }
        got
    }

    /// One completion, and its status.
    #[track_caller]
    pub(crate) fn status(&self) -> Status {
        self.completions(1)[0].status
    }

    /// `count` completions, all of them successes.
    #[track_caller]
    pub(crate) fn succeed(&self, count: usize) {
        for completion in self.completions(count) {
            assert_eq!(completion.status, Status::Success, "{completion:?}");
        }
    }

    /// Nothing has completed, and polling for a while makes nothing complete.
    #[track_caller]
    pub(crate) fn quiet(&self) {
        let mut got = Vec::new();
        (0..200).for_each(|_| _ = self.cq.poll(&mut got, 16).unwrap());
        assert!(got.is_empty(), "{got:?}");
    }

    pub(crate) fn fill(&self, seed: u8) {
        self.buffer.write_at(0, &patterns(seed, 0, self.buffer.len())).unwrap();
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.buffer.read_at(offset, &mut bytes).unwrap();
        bytes
    }

    /// The next asynchronous event; fails the test if none comes.
    #[track_caller]
    pub(crate) fn event(&self) -> AsyncEvent {
        let mut event = None;
        until("an event", || {
            event = self.device.next_event();
            event.is_some()
        });
        event.unwrap()
    }

    /// A counter of the device or of its link.
    #[track_caller]
    pub(crate) fn counter(&self, name: &str) -> u64 {
        let mut all = self.device.counters().list();
        all.extend(self.device.link_counters());
        all.iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("no counter {name} in {all:?}")).1
    }

    /// Only markers were sent. The engine thread may send them at any time, so both counters are
    /// read at once.
    pub(crate) fn only_markers_sent(&self) {
        let counters = self.device.counters();
        assert_eq!(counters.sent_pkts, counters.sent_markers);
    }
}

pub(crate) fn register(pd: &Pd, buffer: &HostBuffer, access: Access) -> Mr {
    // SAFETY: tests touch their buffers through windows only, and drop the region before the
    // buffer.
    unsafe { pd.register(buffer.as_mut_ptr(), buffer.len(), access) }.unwrap()
}

/// Asks again and again, at most for [`LIMIT`].
#[track_caller]
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < end, "still waiting for {what} after {LIMIT:?}");
        std::thread::yield_now();
    }
}

pub(crate) fn pattern(seed: u8, i: usize) -> u8 {
    (i.wrapping_mul(31) ^ (i >> 8) ^ usize::from(seed)) as u8
}

pub(crate) fn patterns(seed: u8, from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|i| pattern(seed, i)).collect()
}

/// As [`config`], for a device that takes packets from any port of this host: those of a forger,
/// who has the rights of this user then.
pub(crate) fn unguarded(addr: &str) -> Config {
    Config { local_ports: LocalPorts::Any, ..config(addr) }
}

/// The same by UDP: packets of a forger beside a ring are not looked at.
pub(crate) fn unguarded_udp(addr: &str) -> Config {
    Config { link: LinkChoice::Udp, ..unguarded(addr) }
}

pub(crate) fn config(addr: &str) -> Config {
    let addr = addr.parse::<IpAddr>().unwrap();
    Config { addr, link: link(), engines: engines(), progress: progress(), key: key(), ..Config::default() }
}

/// The link of the tests: the whole matrix runs on either, by default on UDP.
pub(crate) fn link() -> LinkChoice {
    std::env::var("NOBOUNCE_LINK").map_or(LinkChoice::Udp, |link| link.parse().unwrap())
}

/// The key of the tests, if configured: all of them pass over sealed packets but those that forge
/// plain ones.
fn key() -> Option<SealKeys> {
    let named = std::env::var("NOBOUNCE_KEY").ok()?;
    Some(SealKeys::read(KeySource::from_text(&named), SealMode::Encrypt).unwrap())
}

/// The number of engines of the tests, if configured.
pub(crate) fn engines() -> Option<usize> {
    std::env::var("NOBOUNCE_ENGINES").ok().map(|engines| engines.parse().unwrap())
}

/// The progress mode of the tests, if configured.
pub(crate) fn progress() -> Progress {
    std::env::var("NOBOUNCE_PROGRESS").map_or(Progress::Auto, |progress| progress.parse().unwrap())
}

/// Where the next connection's sequence numbers begin. The first one wraps soon. Each is far from
/// the one before, or stale packets of a reset queue pair could be accepted.
static NEXT_PSN: AtomicU32 = AtomicU32::new(0xff_fff0);

/// Connects queue pair `i` of one end with queue pair `j` of the other.
pub(crate) fn connect(a: &End, i: usize, b: &End, j: usize, mtu: Mtu) {
    let fresh = || Psn::new(NEXT_PSN.fetch_add(0x12_3457, Ordering::Relaxed) & 0xff_ffff);
    let (pa, pb) = (fresh(), fresh());
    join(&a.qps[i], &b.device, &b.qps[j], (pa, pb), mtu);
    join(&b.qps[j], &a.device, &a.qps[i], (pb, pa), mtu);
}

fn join(qp: &Qp, device: &Device, peer: &Qp, (mine, theirs): (Psn, Psn), mtu: Mtu) {
    qp.modify(&QpAttr::to_rtr(device.local(), peer.qpn(), theirs, mtu)).unwrap();
    qp.modify(&QpAttr { timeout: 16, ..QpAttr::to_rts(mine) }).unwrap();
}

/// Two connected ends on one address.
pub(crate) fn pair(addr: &str, bytes: usize, mtu: Mtu) -> (End, End) {
    pair_with(&config(addr), &config(addr), bytes, mtu)
}

pub(crate) fn pair_with(ca: &Config, cb: &Config, bytes: usize, mtu: Mtu) -> (End, End) {
    let (mut a, mut b) = (End::open(ca, bytes), End::open(cb, bytes));
    if ca.engines.is_some_and(|engines| engines > 1) {
        // It takes the place in the first engine: one end's queue pairs begin in the second one,
        // the other's in the first.
        a.ballast = Some(a.pd.create_qp(&a.cq, &a.cq, QpLimits::default()).unwrap());
    }
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    connect(&a, 0, &b, 0, mtu);
    (a, b)
}

/// Takes the first queue pair of both ends back and connects them anew.
pub(crate) fn reconnect(a: &End, b: &End, mtu: Mtu) {
    for qp in [&a.qps[0], &b.qps[0]] {
        qp.modify(&QpAttr::to_state(QpState::Reset)).unwrap();
        qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    }
    connect(a, 0, b, 0, mtu);
}

/// A WRITE from `a` to `b` whose bytes are checked.
#[track_caller]
pub(crate) fn check_write(a: &End, b: &End, seed: u8, len: usize) {
    a.fill(seed);
    a.post(Operation::Write(b.remote(0)), 0, len as u32);
    a.succeed(1);
    assert!(b.bytes(0, len) == patterns(seed, 0, len), "what was written is not what arrived");
}

/// Bytes of this process in memory.
pub(crate) fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * nobounce_memory::page_size() as u64
}

/// A test that cannot run here says so, and fails where it is required.
pub(crate) fn waive(name: &str, reason: &str) {
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|n| n == name), "{name} is required, but {reason}");
    println!("waived ({reason})");
    if let Some(file) = std::env::var_os("NOBOUNCE_WAIVERS") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
        // One write: tests of other processes append to it too.
        file.unwrap().write_all(format!("{name}: {reason}\n").as_bytes()).unwrap();
    }
}

/// Tells a thread to stop, also where an assertion fails: its scope waits for it.
pub(crate) struct StopAtEnd<'a>(pub(crate) &'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

const ROLE: &str = "NOBOUNCE_TEST_ROLE";

/// What this process was started for by [`child`], if it was.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// This test binary once more, to run `test` in another role.
pub(crate) fn child(test: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command
}

/// Waits for the child; one that hangs is killed, and the test fails.
#[track_caller]
pub(crate) fn outcome(child: libc::pid_t) -> i32 {
    let start = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: a child of ours, and a valid place for its status.
        if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
            assert!(libc::WIFEXITED(status), "the child was ended by signal {}", libc::WTERMSIG(status));
            return libc::WEXITSTATUS(status);
        }
        if start.elapsed() > LIMIT {
            // SAFETY: a child of ours that has not been waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            panic!("the child hangs");
        }
        std::thread::yield_now();
    }
}
