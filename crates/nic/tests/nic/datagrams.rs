//! Datagrams between devices over real sockets.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::common::on_gpu::{GpuMethod, OnGpu};
use crate::common::unreliable::{QKEY, ud_end};
use crate::common::{End, MIB, config, patterns, until};
use fake_cuda::client::StandIn;
use nobounce_nic::links::udp::{UdpConfig, UdpLink};
use nobounce_nic::links::{Link, TxBatch};
use nobounce_nic::soft::{Config, SrqLimits};
use nobounce_nic::work::{
    Datagram, DatagramSource, IpOptions, Operation, PostError, QpState, Qpn, RecvRequest, SendRequest,
    Service, Status,
};
use nobounce_protocol::wire::Marker;

const GRH: usize = 40;

/// The source and destination that the bytes before a datagram name.
fn route(grh: &[u8]) -> (IpAddr, IpAddr) {
    if grh[0] >> 4 == 6 {
        let [src, dst] = [8, 24].map(|at| <[u8; 16]>::try_from(&grh[at..at + 16]).unwrap());
        return (src.into(), dst.into());
    }
    assert_eq!((&grh[..20], grh[20]), (&[0; 20][..], 0x45), "an IPv4 header in the last 20 bytes");
    let [src, dst] = [32, 36].map(|at| <[u8; 4]>::try_from(&grh[at..at + 4]).unwrap());
    (src.into(), dst.into())
}

#[test]
fn datagrams_of_every_size_arrive_with_their_source() {
    for (from, to) in [("127.63.0.1", "127.63.0.2"), ("127.63.0.3", "127.63.0.3"), ("::1", "::1")] {
        let (a, b) = (ud_end(from, MIB), ud_end(to, MIB));
        let mtu = b.device.max_mtu().bytes() as usize;
        for (round, len) in [0, 1, 3, 256, mtu - 1, mtu].into_iter().enumerate() {
            a.fill(round as u8);
            b.fill(0xee);
            b.post_recv(5, 64, (len + GRH) as u32);
            a.send_to(&b, Operation::SendImmediate(3), 7, len as u32);
            a.succeed(1);
            let got = b.completions(1)[0];
            assert_eq!((got.wr_id, got.status, got.byte_len), (5, Status::Success, (len + GRH) as u32));
            assert_eq!((got.immediate, got.source), (Some(3), Some(DatagramSource { qpn: a.qps[0].qpn() })));
            let bytes = b.bytes(64, GRH + len);
            assert_eq!(route(&bytes), (a.device.local(), b.device.local()));
            assert!(bytes[GRH..] == patterns(round as u8, 7, len));
            assert_eq!(b.bytes(64 + GRH + len, 8), patterns(0xee, 64 + GRH + len, 8));
        }
        b.only_markers_sent();
        assert_eq!(b.counter("icrc_errors"), 0);
    }
}

#[test]
fn a_receiver_that_is_away_loses_nothing() {
    const MESSAGES: usize = 2000; // of 64 bytes: a receive buffer holds 550
    let receiver = "127.63.4.2".parse().unwrap();
    let mut to = UdpLink::open(&UdpConfig::new(receiver)).unwrap();
    let mut from = End::open(&config("127.63.4.1"), MIB);
    from.add_ud(None);
    let at =
        Datagram { remote: receiver, dest_qpn: Qpn::new(7), qkey: QKEY, ip_options: IpOptions::default() };
    let sges = from.sge(0, 64);
    let mut batch = TxBatch::new(to.capabilities());
    let (mut posted, mut arrived, mut sent) = (0, 0, Vec::new());
    let mut looked = Instant::now();
    until("all have arrived", || {
        while posted < MESSAGES && posted - sent.len() < 500 {
            from.qps[0].post_send(&SendRequest::new(1, Operation::Send, &sges).to(at)).unwrap();
            posted += 1;
        }
        from.cq.poll(&mut sent, 500).unwrap();
        // It polls only after a long time, and sends markers back then.
        if looked.elapsed() > Duration::from_millis(3) {
            looked = Instant::now();
            while to.receive(&mut |datagram| match Marker::parse(datagram.bytes) {
                None => arrived += 1,
                Some(marker) => {
                    assert!(batch.put(datagram.src, 0, Marker::LEN, |room| {
                        marker.returned().emit(room);
                    }));
                }
            }) > 0
            {}
            to.send(&mut batch);
        }
        arrived >= MESSAGES
    });
    assert_eq!(arrived, MESSAGES);
    let drops = to.counters().into_iter().find(|(name, _)| *name == "udp_rx_lost_queue_full").unwrap().1;
    assert_eq!(drops, 0);
}

#[test]
fn one_queue_pair_speaks_with_many() {
    let hub = ud_end("127.63.1.1", MIB);
    let others: Vec<End> = (2..8).map(|n| ud_end(&format!("127.63.1.{n}"), MIB)).collect();
    let rounds = 20_u64;
    for other in &others {
        (0..rounds).for_each(|n| other.post_recv(n, n * 300, 300));
    }
    (0..rounds * others.len() as u64).for_each(|n| hub.post_recv(n, 100_000 + n * 300, 300));
    hub.fill(9);
    // All in one list, so that packets to different places share a batch; among them are two of one
    // place in a row.
    let sges: Vec<_> = (0..rounds).map(|n| hub.sge(n, 200)).collect();
    let requests: Vec<_> = sges
        .iter()
        .flat_map(|sge| {
            let to_all = others.iter().map(|other| other.at());
            to_all.map(|to| SendRequest::new(1, Operation::Send, sge).to(to))
        })
        .collect();
    hub.qps[0].post_sends(&requests).unwrap();
    hub.succeed(requests.len());
    for (index, other) in others.iter().enumerate() {
        for (n, got) in other.completions(rounds as usize).iter().enumerate() {
            assert_eq!(
                (got.status, got.source),
                (Status::Success, Some(DatagramSource { qpn: hub.qps[0].qpn() }))
            );
            assert!(other.bytes(n * 300 + GRH, 200) == patterns(9, n, 200));
        }
        other.fill(index as u8);
        (0..rounds).for_each(|_| other.send_to(&hub, Operation::SendImmediate(index as u32), 0, 100));
    }
    for got in hub.completions(rounds as usize * others.len()) {
        let index = got.immediate.unwrap() as usize;
        assert_eq!(got.source, Some(DatagramSource { qpn: others[index].qps[0].qpn() }));
        let at = 100_000 + got.wr_id as usize * 300;
        assert_eq!(route(&hub.bytes(at, GRH)).0, others[index].device.local());
        assert!(hub.bytes(at + GRH, 100) == patterns(index as u8, 0, 100));
    }
}

#[test]
fn to_itself_and_to_others_of_the_same_device() {
    let mut a = ud_end("127.63.2.1", MIB);
    a.add_ud(None);
    a.fill(2);
    for qp in 0..2 {
        a.qps[qp].post_recv(&RecvRequest { wr_id: 90, sges: &a.sge(MIB as u64 / 2, 500) }).unwrap();
        let to = Datagram { dest_qpn: a.qps[qp].qpn(), ..a.at() };
        a.qps[0].post_send(&SendRequest::new(1, Operation::Send, &a.sge(0, 400)).to(to)).unwrap();
        let got = a.completions(2);
        let received = got.iter().find(|c| c.wr_id == 90).unwrap();
        assert_eq!((received.qpn, received.byte_len), (a.qps[qp].qpn(), 440));
        assert!(a.bytes(MIB / 2 + GRH, 400) == patterns(2, 0, 400));
    }
}

#[test]
fn what_cannot_be_sent_is_refused_when_posted() {
    let a = ud_end("127.63.3.1", MIB);
    let mtu = a.device.max_mtu().bytes();
    let post = |op, len, to: Option<Datagram>| {
        let sges = a.sge(0, len);
        a.qps[0].post_send(&SendRequest { to, ..SendRequest::new(1, op, &sges) })
    };
    let here = Some(a.at());
    assert_eq!(post(Operation::Send, 8, None), Err(PostError::Destination(Service::Ud)));
    let too_long = PostError::DatagramTooLong { given: mtu + 1, max: mtu };
    assert_eq!(post(Operation::Send, mtu + 1, here), Err(too_long));
    let op = Operation::Write(a.remote(0));
    assert_eq!(post(op, 8, here), Err(PostError::NotOffered { service: Service::Ud, operation: op.kind() }));
    let remote: IpAddr = "::1".parse().unwrap();
    let refused = post(Operation::Send, 8, Some(Datagram { remote, ..a.at() })).unwrap_err();
    assert!(refused.to_string().contains("other IP version"), "{refused}");
    a.quiet();
}

#[test]
fn what_is_not_for_it_is_dropped_and_counted() {
    let (a, b) = (ud_end("127.63.4.1", MIB), ud_end("127.63.4.2", MIB));
    let send = |to: Datagram| {
        a.qps[0].post_send(&SendRequest::new(1, Operation::Send, &a.sge(0, 8)).to(to)).unwrap();
        a.succeed(1);
    };
    let counted = |name: &str| {
        until(name, || {
            b.cq.poll(&mut Vec::new(), 1).unwrap();
            b.counter(name) == 1
        });
    };
    send(b.at());
    counted("out_of_buffer");
    b.post_recv(1, 0, 100);
    send(Datagram { qkey: QKEY + 1, ..b.at() });
    counted("qkey_violations");
    let absent = Qpn::new(b.qps[0].qpn().get() + 100);
    send(Datagram { dest_qpn: absent, ..b.at() });
    counted("no_such_qp");
    // Its own key, which is the right one.
    send(Datagram { qkey: 0x8000_0000, ..b.at() });
    b.succeed(1);
}

#[test]
fn a_receive_that_is_too_short_fails() {
    let (a, b) = (ud_end("127.63.5.1", MIB), ud_end("127.63.5.1", MIB));
    b.post_recv(1, 0, 47);
    b.post_recv(2, 0, 100);
    a.send_to(&b, Operation::Send, 0, 8);
    a.succeed(1);
    let got = b.completions(2);
    assert_eq!((got[0].wr_id, got[0].status), (1, Status::LocalLength));
    assert_eq!((got[1].wr_id, got[1].status), (2, Status::Flushed));
    assert_eq!(b.qps[0].state(), QpState::Error);
}

#[test]
fn inline_data_lists_and_shared_receives() {
    let a = ud_end("127.63.6.1", MIB);
    let mut b = End::open(&config("127.63.6.1"), MIB);
    let srq = b.pd.create_srq(SrqLimits { depth: 8, sges: 3 }).unwrap();
    b.add_ud(Some(&srq));
    // The header and the payload go to different places, as many programs have it; the payload to
    // two.
    let lists = [b.sge(0, 40)[0], b.sge(1000, 5)[0], b.sge(2000, 100)[0]];
    srq.post_recv(&RecvRequest { wr_id: 4, sges: &lists }).unwrap();
    a.qps[0].post_send(&SendRequest::inline(1, Operation::Send, b"hello world").to(b.at())).unwrap();
    a.succeed(1);
    let got = b.completions(1)[0];
    assert_eq!((got.wr_id, got.byte_len), (4, 51));
    assert_eq!(route(&b.bytes(0, GRH)).0, a.device.local());
    assert_eq!((b.bytes(1000, 5), b.bytes(2000, 6)), (b"hello".to_vec(), b" world".to_vec()));
}

#[test]
fn over_a_bad_network_what_arrives_is_whole() {
    let fault = "loss=0.02,dup=0.02,reorder=0.02,corrupt=0.02".parse().unwrap();
    let mut a = End::open(&Config { fault: Some(fault), ..config("127.63.7.1") }, MIB);
    a.add_ud(None);
    let b = ud_end("127.63.7.1", 4 * MIB);
    a.fill(6);
    let messages = 500_usize;
    (0..1000).for_each(|slot| b.post_recv(slot, slot * 2000, 2000));
    let mut got = Vec::new();
    for number in 0..messages {
        a.send_to(&b, Operation::SendImmediate(number as u32), number as u64, 1500);
        a.succeed(1);
        b.cq.poll(&mut got, 64).unwrap();
    }
    let mut quiet = 0;
    until("the last datagram", || {
        quiet = if b.cq.poll(&mut got, 64).unwrap() == 0 { quiet + 1 } else { 0 };
        quiet > 20_000
    });
    println!("{} of {messages} arrived", got.len());
    assert!(got.len() > messages * 8 / 10);
    for done in &got {
        let bytes = b.bytes(done.wr_id as usize * 2000 + GRH, 1500);
        assert!(bytes == patterns(6, done.immediate.unwrap() as usize, 1500));
    }
    assert!(b.counter("icrc_errors") > 0);
}

#[test]
fn gpu_memory_at_both_ends() {
    let gpu = StandIn::program();
    for (n, way) in GpuMethod::ALL.into_iter().enumerate() {
        let addr = format!("127.63.8.{}", n + 1);
        let (a, b) = (ud_end(&addr, MIB), ud_end(&addr, MIB));
        let (at_a, at_b) = (OnGpu::new(&a, gpu, way), OnGpu::new(&b, gpu, way));
        at_a.fill(5);
        at_b.fill(6);
        for (round, len) in [0, 8, 1000, 4096].into_iter().enumerate() {
            b.qps[0].post_recv(&RecvRequest { wr_id: 1, sges: &[at_b.sge(64, len + GRH)] }).unwrap();
            let from = [at_a.sge(round, len)];
            a.qps[0].post_send(&SendRequest::new(1, Operation::Send, &from).to(b.at())).unwrap();
            a.succeed(1);
            let got = b.completions(1)[0];
            assert_eq!((got.status, got.byte_len as usize), (Status::Success, len + GRH), "{way:?}");
            let grh = gpu.peek(at_b.addr + 64, GRH);
            assert_eq!(route(&grh), (a.device.local(), b.device.local()), "{way:?}");
            at_b.holds(64 + GRH, &patterns(5, round, len));
            at_b.holds(64 + GRH + len, &patterns(6, 64 + GRH + len, 8));
        }
    }
}
