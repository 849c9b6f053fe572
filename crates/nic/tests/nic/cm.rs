//! The connection manager over real sockets: routing between devices, refusals, storms, forged and
//! replayed messages.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::common::{End, MIB, child, config, role, unguarded};
use nobounce_nic::soft::{BindError, Cm, CmChannel, Config, Device, Told};
use nobounce_nic::work::{Psn, QpLimits, Qpn};
use nobounce_protocol::cm::{
    Accept, CommId, Connect, Event, GSI_QKEY, GSI_QPN, Ids, MAD_LEN, MessageKind, Req, ip, reason,
};
use nobounce_protocol::wire::icrc::Flow;
use nobounce_protocol::wire::{Deth, Header, ICRC_LEN, Opcode, ROCE_PORT};

const SERVICE: u64 = 0x0106_04d2;
const EVENT_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) struct Side {
    pub(crate) cm: Cm,
    channel: CmChannel,
}

impl Side {
    fn open(addr: &str) -> Self {
        Self::open_as(&unguarded(addr))
    }

    pub(crate) fn open_as(config: &Config) -> Self {
        let cm = Device::open(config).unwrap().cm().unwrap();
        Self { cm, channel: CmChannel::new().unwrap() }
    }

    fn listening(addr: &str, backlog: usize) -> Self {
        Self::listening_as(&unguarded(addr), backlog)
    }

    pub(crate) fn listening_as(config: &Config, backlog: usize) -> Self {
        let side = Self::open_as(config);
        side.cm.bind(SERVICE).unwrap();
        side.cm.listen(SERVICE, backlog, &side.channel, 1).unwrap();
        side
    }

    pub(crate) fn local(&self) -> IpAddr {
        self.cm.device().local()
    }

    pub(crate) fn connect(&self, to: IpAddr, qpn: u32) -> CommId {
        self.cm.connect(request(self.local(), to, qpn), &self.channel, 2).unwrap()
    }

    /// The next event within the time.
    pub(crate) fn event_within(&self, time: Duration) -> Option<Event> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now()).as_millis() as i32;
            let mut poll = libc::pollfd { fd: self.channel.fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one valid pollfd.
            if unsafe { libc::poll(&raw mut poll, 1, left) } != 1 {
                return None;
            }
            let mut eight = [0_u8; 8];
            // SAFETY: eight bytes that can be written.
            assert_eq!(unsafe { libc::read(self.channel.counter_fd(), eight.as_mut_ptr().cast(), 8) }, 8);
            if let Some(notice) = self.channel.claim()
                && let Told::Event { event, .. } = notice.told
                && !matches!(event, Event::TimewaitExit { .. })
            {
                return Some(event);
            }
        }
    }

    fn event(&self) -> Event {
        self.event_within(EVENT_TIMEOUT).expect("an event within 20 s")
    }

    /// Accepts the next request.
    fn accept(&self, qpn: u32) -> CommId {
        let Event::Request { id, .. } = self.event() else { panic!("no request") };
        self.cm.accept(id, answer(qpn)).unwrap();
        id
    }
}

fn request(local: IpAddr, to: IpAddr, qpn: u32) -> Connect {
    let header = ip::IpHeader { port: 40_000, src: local, dst: to };
    Connect {
        to,
        service: SERVICE,
        qpn: Qpn::new(qpn),
        transport: 0,
        starting_psn: Psn::new(1),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: false,
        mtu: 3,
        local_gid: ip::gid(local),
        remote_gid: ip::gid(to),
        traffic_class: 0,
        local_ack_timeout: 14,
        private: header.prepend(b"hello"),
    }
}

fn answer(qpn: u32) -> Accept {
    Accept {
        qpn: Qpn::new(qpn),
        starting_psn: Psn::new(2),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        rnr_retry_count: 7,
        srq: false,
        private: b"welcome".to_vec(),
    }
}

/// Connects the two, and ends it again.
fn converse(a: &Side, b: &Side) {
    let id = a.connect(b.local(), 0x55);
    let other = b.accept(0x66);
    let Event::Reply { rep, .. } = a.event() else { panic!("no reply") };
    assert_eq!((rep.qpn.get(), &rep.private[..7]), (0x66, &b"welcome"[..]));
    a.cm.establish(id).unwrap();
    assert_eq!(b.event(), Event::Established { id: other });
    b.cm.disconnect(other).unwrap();
    assert_eq!(a.event(), Event::Disconnected { id, silent: false });
    assert_eq!(b.event(), Event::Disconnected { id: other, silent: false });
    a.cm.release(id);
    b.cm.release(other);
}

#[test]
fn devices_of_one_address_and_of_two() {
    for (here, there) in [("127.61.0.1", "127.61.0.1"), ("127.61.0.2", "127.61.0.3"), ("::1", "::1")] {
        let (b, a) = (Side::listening(there, 8), Side::open(here));
        converse(&a, &b);
    }
}

/// CM messages arrive at any device of an address, which hands them to their owners.
#[test]
fn a_device_without_connection_manager_hands_messages_over() {
    let mut plain = End::open(&config("127.61.1.1"), MIB);
    plain.add_qp(QpLimits::default());
    let (b, a) = (Side::listening("127.61.1.1", 8), Side::open("127.61.1.1"));
    // The kernel chooses the device by address hash.
    let handed = || -> u64 {
        plain.device.link_counters().iter().filter(|(n, _)| *n == "handed_over").map(|(_, n)| n).sum()
    };
    for _ in 0..30 {
        converse(&a, &b);
        if handed() > 0 {
            break;
        }
    }
    assert!(handed() >= 1, "no message was handed over");
    // Others now get its share.
    drop(plain);
    converse(&a, &b);
}

#[test]
fn a_dead_listener_refuses_wherever_it_is_looked_for() {
    let refused = |side: &Side, to: &str| {
        let started = Instant::now();
        let id = side.connect(to.parse().unwrap(), 1);
        let event = side.event();
        assert!(matches!(event, Event::Rejected { reason: reason::INVALID_SERVICE_ID, .. }), "{event:?}");
        assert!(started.elapsed() < Duration::from_secs(5), "after {:?}", started.elapsed());
        side.cm.release(id);
    };
    let a = Side::open("127.61.2.1");
    let b = Side::open("127.61.2.2");
    refused(&a, "127.61.2.2"); // a device without a listener
    refused(&a, "127.61.2.1"); // it is our own
    refused(&a, "127.61.2.3"); // no device at all
    b.cm.bind(SERVICE).unwrap();
    refused(&a, "127.61.2.2"); // a service that is bound, without a listener
}

#[test]
fn a_listener_that_comes_a_moment_late_is_found() {
    let a = Side::open("127.61.3.1");
    let b = Side::open("127.61.3.2");
    a.connect(b.local(), 1);
    std::thread::sleep(Duration::from_millis(30));
    b.cm.bind(SERVICE).unwrap();
    b.cm.listen(SERVICE, 8, &b.channel, 1).unwrap();
    b.accept(2);
    assert!(matches!(a.event(), Event::Reply { .. }));
}

#[test]
fn a_taken_service_is_taken_until_it_is_given_back() {
    let (a, b) = (Side::open("127.61.4.1"), Side::open("127.61.4.1"));
    let elsewhere = Side::open("127.61.4.2");
    a.cm.bind(SERVICE).unwrap();
    assert!(matches!(b.cm.bind(SERVICE), Err(BindError::InUse { .. })));
    elsewhere.cm.bind(SERVICE).unwrap();
    for _ in 0..200 {
        a.cm.unbind(SERVICE);
        b.cm.bind(SERVICE).expect("free at once, whatever the helper thread waits for");
        b.cm.unbind(SERVICE);
        a.cm.bind(SERVICE).unwrap();
    }
}

/// Names that were bound before a fork are free when the parent gives them back, however long the
/// child lives.
#[test]
fn a_forked_child_keeps_no_service() {
    let (a, b) = (Side::open("127.61.4.3"), Side::open("127.61.4.3"));
    a.cm.bind(SERVICE).unwrap();
    // SAFETY: the child does nothing but wait for its end.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::sleep(120);
            libc::_exit(0);
        }
    }
    assert!(matches!(b.cm.bind(SERVICE), Err(BindError::InUse { .. })));
    // The child lets go as soon as it runs; until then it has a share in the name.
    a.cm.unbind(SERVICE);
    crate::common::until("the name is free", || b.cm.bind(SERVICE).is_ok());
    // SAFETY: our own child, which is waited for.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
}

#[test]
fn a_storm_of_256_at_once() {
    let b = Side::listening("127.61.5.1", 1024);
    let clients: Vec<_> = (0..4).map(|_| Side::open("127.61.5.1")).collect();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for (n, a) in clients.iter().enumerate() {
            scope.spawn(move || {
                let mine: HashSet<_> =
                    (0..64).map(|i| a.connect(b_address(), 2 + n as u32 * 64 + i)).collect();
                for _ in 0..64 {
                    let Event::Reply { id, .. } = a.event() else { panic!("no reply") };
                    assert!(mine.contains(&id));
                    a.cm.establish(id).unwrap();
                }
            });
        }
        let (mut up, mut qpn) = (HashSet::new(), 1000);
        while up.len() < 256 {
            match b.event() {
                Event::Request { id, .. } => {
                    // A queue pair of its own for each: one that stands in a connection would be
                    // refused as stale.
                    qpn += 1;
                    b.cm.accept(id, answer(qpn)).unwrap();
                }
                Event::Established { id } => assert!(up.insert(id), "twice"),
                other => panic!("{other:?}"),
            }
        }
        up.into_iter().for_each(|id| b.cm.disconnect(id).unwrap());
        for _ in 0..256 {
            let Event::Disconnected { id, silent: false } = b.event() else { panic!("not ended") };
            b.cm.release(id);
        }
    });
    assert!(started.elapsed() < EVENT_TIMEOUT, "{:?}", started.elapsed());
    forgotten(&b);
}

fn b_address() -> IpAddr {
    [127, 61, 5, 1].into()
}

/// What ended is forgotten after a while.
fn forgotten(side: &Side) {
    let end = Instant::now() + EVENT_TIMEOUT;
    while side.cm.communications() > 0 {
        assert!(Instant::now() < end, "{} communications are left", side.cm.communications());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_thousand_connections_one_after_the_other() {
    let (b, a) = (Side::listening("127.61.6.1", 8), Side::open("127.61.6.2"));
    converse(&a, &b);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    for _ in 0..1000 {
        converse(&a, &b);
    }
    assert!(descriptors() <= before + 2, "{} descriptors, {before} before", descriptors());
    forgotten(&a);
    forgotten(&b);
}

#[test]
fn a_device_that_goes_tells_the_other_side() {
    let (b, a) = (Side::listening("127.61.7.1", 8), Side::open("127.61.7.2"));
    let id = a.connect(b.local(), 1);
    b.accept(2);
    a.event();
    a.cm.establish(id).unwrap();
    b.event();
    drop(a);
    assert!(matches!(b.event(), Event::Disconnected { silent: false, .. }));
}

/// Sends hand-made CM messages.
struct Forger {
    socket: UdpSocket,
    flow: Flow,
}

impl Forger {
    fn new(from: IpAddr, dst: IpAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind((from, 0))?;
        let always: libc::c_int = libc::IP_PMTUDISC_DO;
        // SAFETY: one live integer. With DF the identification, which the ICRC covers, is 0.
        unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_IP,
                libc::IP_MTU_DISCOVER,
                (&raw const always).cast(),
                size_of::<libc::c_int>() as u32,
            )
        };
        let src_port = socket.local_addr()?.port();
        Ok(Self { socket, flow: Flow { src: from, dst, src_port, dst_port: ROCE_PORT } })
    }

    fn send(&self, qkey: u32, payload: &[u8]) {
        let mut header = Header::new(Opcode::UdSendOnly, Qpn::new(GSI_QPN), Psn::new(0));
        header.deth = Deth { qkey, source: Qpn::new(GSI_QPN) };
        let mut packet = vec![0; header.len()];
        header.emit(&mut packet);
        packet.extend_from_slice(payload);
        packet.extend_from_slice(&[0; ICRC_LEN]);
        self.flow.close(0, &mut packet);
        self.socket.send_to(&packet, (self.flow.dst, ROCE_PORT)).unwrap();
    }
}

#[test]
fn malformed_forged_and_replayed_messages_change_nothing() {
    let b = Side::listening("127.61.8.1", 64);
    let forger = Forger::new([127, 61, 8, 9].into(), b.local()).unwrap();
    let mut numbers = 1_u32;
    let mut random = move || {
        numbers = numbers.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (numbers >> 24) as u8
    };
    let request = |local_id: u32| {
        let Connect { service, qpn, private, .. } = request([127, 61, 8, 9].into(), b.local(), 1);
        Req {
            local_id,
            service,
            ca_guid: 1,
            qpn,
            transport: 0,
            starting_psn: Psn::new(1),
            responder_resources: 1,
            initiator_depth: 1,
            remote_response_timeout: 20,
            local_response_timeout: 20,
            max_cm_retries: 15,
            flow_control: false,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: false,
            mtu: 3,
            pkey: 0xffff,
            local_gid: ip::gid([127, 61, 8, 9].into()),
            remote_gid: ip::gid(b.local()),
            flow_label: 0,
            packet_rate: 18,
            traffic_class: 0,
            hop_limit: 64,
            service_level: 0,
            local_ack_timeout: 14,
            private,
        }
        .emit(77)
    };
    // Too short, too long, of another class, with another key, and noise.
    forger.send(GSI_QKEY, &[]);
    forger.send(GSI_QKEY, &[1; 16]);
    forger.send(GSI_QKEY, &[0xff; MAD_LEN]);
    forger.send(GSI_QKEY ^ 1, request(5).bytes());
    for _ in 0..500 {
        let mut noise: Vec<u8> = (0..MAD_LEN).map(|_| random()).collect();
        noise[..4].copy_from_slice(&[1, 7, 2, 3]);
        noise[16..18].copy_from_slice(&[0, 0x10 + random() % 12]);
        forger.send(GSI_QKEY, &noise);
    }
    assert_eq!(b.event_within(Duration::from_millis(200)), None, "nothing of it is an event");
    assert_eq!(b.cm.communications(), 0);
    // One request, a hundred times.
    for _ in 0..100 {
        forger.send(GSI_QKEY, request(6).bytes());
    }
    let Event::Request { id, .. } = b.event() else { panic!("no request") };
    assert_eq!(b.event_within(Duration::from_millis(200)), None, "once");
    b.cm.accept(id, answer(1)).unwrap();
    // Messages from an address other than the peer's have no effect.
    let stranger = Forger::new([127, 61, 8, 10].into(), b.local()).unwrap();
    for kind in [MessageKind::Rtu, MessageKind::Drep] {
        stranger.send(GSI_QKEY, Ids { local: 6, remote: id.0 }.emit(kind, 77).bytes());
    }
    assert_eq!(b.event_within(Duration::from_millis(200)), None);
    forger.send(GSI_QKEY, Ids { local: 6, remote: id.0 }.emit(MessageKind::Rtu, 77).bytes());
    assert_eq!(b.event(), Event::Established { id });
    // A real one still gets through.
    converse(&Side::open("127.61.8.2"), &b);
}

/// The listener holds slot 0: its own socket receives what it sends to this address. It exits
/// without a further call; what it said last arrives nevertheless.
#[test]
fn what_was_said_last_arrives_although_the_process_exits_at_once() {
    const ADDR: &str = "127.61.20.1";
    if let Some(role) = role() {
        let side = Side::listening(ADDR, 4);
        println!("ready");
        let Event::Request { id, .. } = side.event() else { panic!("no request") };
        if role == "rejects" {
            side.cm.reject(id, reason::CONSUMER, b"no".to_vec()).unwrap();
        } else {
            side.cm.accept(id, answer(0x66)).unwrap();
            assert_eq!(side.event(), Event::Established { id });
            side.cm.disconnect(id).unwrap();
        }
        // SAFETY: ends the process without any clean-up, as the test wants.
        unsafe { libc::_exit(0) };
    }
    let test = "cm::what_was_said_last_arrives_although_the_process_exits_at_once";
    for round in 0..10 {
        let role = if round % 2 == 0 { "rejects" } else { "disconnects" };
        let mut process = child(test, role).stdout(std::process::Stdio::piped()).spawn().unwrap();
        let lines = io::BufReader::new(process.stdout.take().unwrap());
        assert!(io::BufRead::lines(lines).any(|line| line.unwrap().contains("ready")));
        let side = Side::open(ADDR);
        let id = side.connect(side.local(), 0x55);
        if role == "rejects" {
            let Event::Rejected { reason, .. } = side.event() else { panic!("not rejected") };
            assert_eq!(reason, reason::CONSUMER);
        } else {
            let Event::Reply { .. } = side.event() else { panic!("no reply") };
            side.cm.establish(id).unwrap();
            assert_eq!(side.event(), Event::Disconnected { id, silent: false });
        }
        assert!(process.wait().unwrap().success());
    }
}
