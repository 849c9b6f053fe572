//! Multicast datagrams between devices over real sockets.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::net::IpAddr;

use nobounce_nic::soft::{Config, DeviceLimits, GroupError};
use nobounce_nic::work::{
    Datagram, DatagramSource, IpOptions, Operation, QpLimits, Qpn, RecvRequest, SendRequest, Status,
};

use crate::common::unreliable::{QKEY, ud_end, ud_end_with};
use crate::common::{End, LIMIT, MIB, config, patterns};

const GRH: usize = 40;

fn group(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn to(group: IpAddr, qkey: u32) -> Datagram {
    Datagram { remote: group, dest_qpn: Qpn::new(0xff_ffff), qkey, ip_options: IpOptions::default() }
}

impl End {
    fn multicast(&self, group: IpAddr, offset: u64, len: u32) {
        let sges = self.sge(offset, len);
        let request = SendRequest::new(7, Operation::SendImmediate(9), &sges).to(to(group, QKEY));
        self.qps[0].post_send(&request).unwrap();
    }

    #[track_caller]
    fn heard(&self, from: &Self, at: usize, len: usize, group: IpAddr) {
        let got = self.completions(1)[0];
        assert_eq!((got.status, got.byte_len), (Status::Success, (GRH + len) as u32));
        assert_eq!((got.immediate, got.source), (Some(9), Some(DatagramSource { qpn: from.qps[0].qpn() })));
        let bytes = self.bytes(at, GRH + len);
        let destination = <[u8; 4]>::try_from(&bytes[36..40]).unwrap();
        assert_eq!(IpAddr::from(destination), group, "the header before the payload names the group");
        assert!(bytes[GRH..] == patterns(3, 5, len));
    }
}

#[test]
fn each_attached_queue_pair_gets_a_copy() {
    let to = group("239.64.1.1");
    let addrs = ["127.64.1.1", "127.64.1.2", "127.64.1.2", "127.64.1.3"];
    let [sender, mut one, other, aside] = addrs.map(|addr| ud_end(addr, MIB));
    one.add_ud(None);
    for qp in [&one.qps[0], &one.qps[1], &other.qps[0], &sender.qps[0]] {
        qp.attach(to).unwrap();
        qp.attach(to).unwrap(); // again is no second copy
        assert!(qp.is_attached());
    }
    for len in [0, 1, 1024, sender.device.max_mtu().bytes() as usize] {
        sender.fill(3);
        for end in [&sender, &other, &aside] {
            end.post_recv(1, 65_536, (GRH + len) as u32);
        }
        for (n, qp) in one.qps.iter().enumerate() {
            let sges = one.sge(n as u64 * 10_000, (GRH + len) as u32);
            qp.post_recv(&RecvRequest { wr_id: n as u64, sges: &sges }).unwrap();
        }
        sender.multicast(to, 5, len as u32);
        // Its own copy and the completion of the request, in any order.
        let both = sender.completions(2);
        assert!(both.iter().all(|done| done.status == Status::Success), "{both:?}");
        other.heard(&sender, 65_536, len, to);
        let mut heard = one.completions(2);
        heard.sort_by_key(|got| got.wr_id);
        for (n, got) in heard.iter().enumerate() {
            assert_eq!((got.wr_id, got.status, got.qpn), (n as u64, Status::Success, one.qps[n].qpn()));
            assert!(one.bytes(n * 10_000 + GRH, len) == patterns(3, 5, len));
        }
        aside.quiet();
    }
    assert_eq!(other.counter("icrc_errors"), 0);
}

#[test]
fn no_copy_without_key_or_after_detaching() {
    let here = group("239.64.2.1");
    let (a, b, witness) = (ud_end("127.64.2.1", MIB), ud_end("127.64.2.2", MIB), ud_end("127.64.2.3", MIB));
    b.qps[0].attach(here).unwrap();
    witness.qps[0].attach(here).unwrap();
    a.fill(3);
    (0..3).for_each(|n| b.post_recv(n, n * 1000, 1000));
    (0..3).for_each(|n| witness.post_recv(n, n * 1000, 1000));
    let sges = a.sge(5, 64);
    let wrong = SendRequest::new(7, Operation::Send, &sges).to(to(here, QKEY + 1));
    a.qps[0].post_send(&wrong).unwrap();
    a.multicast(here, 5, 64);
    a.succeed(2);
    b.heard(&a, 0, 64, here);
    witness.heard(&a, 0, 64, here);
    assert_eq!(b.counter("qkey_violations"), 1);
    b.qps[0].detach(here).unwrap();
    assert!(!b.qps[0].is_attached());
    a.multicast(here, 5, 64);
    witness.heard(&a, 1000, 64, here);
    b.quiet();
    assert!(matches!(b.qps[0].detach(here), Err(GroupError::NotAttached(_))));
    // A queue pair that is gone is attached to nothing.
    let mut b = b;
    b.qps[0].attach(here).unwrap();
    b.qps.clear();
    b.add_ud(None);
    b.post_recv(9, 0, 1000);
    a.multicast(here, 5, 64);
    witness.heard(&a, 2000, 64, here);
    b.quiet();
}

#[test]
fn only_datagrams_and_groups_of_this_network_are_accepted() {
    let mut end = ud_end("127.64.3.1", MIB);
    for wrong in ["127.64.3.1", "10.0.0.1", "ff02::1"] {
        let refused = end.qps[0].attach(group(wrong)).unwrap_err();
        assert!(matches!(refused, GroupError::Address { .. }), "{refused}");
        assert_eq!(refused.errno(), libc::EINVAL);
    }
    end.add_qp(QpLimits::default());
    let refused = end.qps[1].attach(group("239.64.3.1")).unwrap_err();
    assert!(matches!(refused, GroupError::Service), "{refused}");
    let DeviceLimits { max_groups, max_group_qps, .. } = DeviceLimits::OURS;
    for n in 0..max_groups {
        end.qps[0].attach(group(&format!("239.64.4.{n}"))).unwrap();
    }
    let refused = end.qps[0].attach(group("239.64.5.1")).unwrap_err();
    assert_eq!(refused.errno(), libc::ENOMEM, "{refused}");
    (0..max_group_qps).for_each(|_| end.add_ud(None));
    for qp in &end.qps[2..max_group_qps + 1] {
        qp.attach(group("239.64.4.0")).unwrap();
    }
    let refused = end.qps[max_group_qps + 1].attach(group("239.64.4.0")).unwrap_err();
    assert_eq!(refused.errno(), libc::ENOMEM, "{refused}");
}

#[test]
fn a_damaged_or_doubled_network_brings_no_wrong_byte() {
    let here = group("239.64.6.1");
    let fault = "loss=0.2,dup=0.2,reorder=0.2,corrupt=0.2,seed=64".parse().unwrap();
    let a = ud_end_with(&Config { fault: Some(fault), ..config("127.64.6.1") }, MIB);
    let b = ud_end("127.64.6.2", MIB);
    b.qps[0].attach(here).unwrap();
    a.fill(3);
    let mut heard = 0;
    let end = std::time::Instant::now() + LIMIT;
    (0..64).for_each(|n| b.post_recv(n, n * 1000, 1000));
    let mut got = Vec::new();
    while heard < 60 {
        a.multicast(here, 5, 512);
        a.succeed(1);
        b.cq.poll(&mut got, 64).unwrap();
        for done in got.drain(..) {
            assert_eq!((done.status, done.byte_len), (Status::Success, 512 + GRH as u32));
            assert!(b.bytes(done.wr_id as usize * 1000 + GRH, 512) == patterns(3, 5, 512));
            heard += 1;
        }
        assert!(std::time::Instant::now() < end, "{heard} heard");
    }
    assert!(b.counter("icrc_errors") > 0);
}
