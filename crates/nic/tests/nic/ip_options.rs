//! IP options: traffic class and hop limit, as they arrive at a plain socket in the role of the
//! peer.

use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use crate::common::{End, config};
use crate::plain::plain_socket;
use nobounce_nic::work::{
    Datagram, IpOptions, Mtu, Operation, Psn, QpAttr, QpLimits, Qpn, Remote, SendRequest,
};

const WANTED: IpOptions = IpOptions { traffic_class: 0x68, hop_limit: 33 };

/// A socket that tells both of what it receives.
fn listen(addr: Ipv4Addr) -> UdpSocket {
    let socket = plain_socket(addr);
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let options = [(libc::IPPROTO_IP, libc::IP_RECVTOS), (libc::IPPROTO_IP, libc::IP_RECVTTL)];
    for (level, name) in options {
        let on = 1_i32;
        // SAFETY: the value is a live int of that size.
        let set = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const on).cast(), 4) };
        assert_eq!(set, 0);
    }
    socket
}

/// The IP options of the next packet of the protocol. (Our device also sends markers to peers on
/// its own machine.)
fn next(socket: &UdpSocket) -> IpOptions {
    loop {
        let (opcode, found) = receive(socket);
        if opcode == 0x64 || opcode < 0x20 {
            return found;
        }
    }
}

fn receive(socket: &UdpSocket) -> (u8, IpOptions) {
    let (mut bytes, mut control) = ([0_u8; 8192], [0_u64; 16]);
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: msghdr is plain integers and pointers; zeros (null, 0) are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the message points at live buffers of the lengths it says.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
    assert!(got > 0, "{}", std::io::Error::last_os_error());
    let mut found = IpOptions::default();
    // SAFETY: the kernel filled the control area; the macros walk within it.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(at) = header.as_ref() {
            let value = libc::CMSG_DATA(header).read();
            match (at.cmsg_level, at.cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_TOS) => found.traffic_class = value,
                _ => found.hop_limit = value,
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    (bytes[0], found)
}

#[test]
fn packets_say_how_they_are_to_be_treated() {
    let mut end = End::open(&config("127.63.9.1"), 64 << 10);
    for (peer, ip_options) in [("127.63.9.2", WANTED), ("127.63.9.3", IpOptions::default())] {
        let addr: Ipv4Addr = peer.parse().unwrap();
        let socket = listen(addr);
        end.qps.clear();
        end.add_qp(QpLimits::default());
        let qp = &end.qps[0];
        let to = QpAttr::to_rtr(addr.into(), Qpn::new(7), Psn::new(1), Mtu::Mtu1024);
        qp.modify(&QpAttr { ip_options, ..to }).unwrap();
        qp.modify(&QpAttr::to_rts(Psn::new(1))).unwrap();
        assert_eq!(qp.attr().ip_options, ip_options);
        let there = Operation::Write(Remote { addr: 0, rkey: 1 });
        // Alone, and several in one GSO send; the peer never answers, so they are retransmitted.
        for (len, packets) in [(100, 1), (8192, 8)] {
            qp.post_send(&SendRequest::new(1, there, &end.sge(0, len))).unwrap();
            for _ in 0..packets {
                assert_eq!(next(&socket), usual(ip_options), "{len} bytes");
            }
        }
    }
}

#[test]
fn every_datagram_has_ip_options_of_its_own() {
    let remote: Ipv4Addr = "127.63.9.5".parse().unwrap();
    let socket = listen(remote);
    let mut end = End::open(&config("127.63.9.4"), 64 << 10);
    end.add_ud(None);
    for ip_options in [WANTED, IpOptions { traffic_class: 0x20, hop_limit: 0 }, WANTED, IpOptions::default()]
    {
        let to = Datagram { remote: remote.into(), dest_qpn: Qpn::new(7), qkey: 5, ip_options };
        end.qps[0].post_send(&SendRequest::new(1, Operation::Send, &end.sge(0, 64)).to(to)).unwrap();
        assert_eq!(next(&socket), usual(ip_options));
    }
}

/// The system's defaults for options not set.
fn usual(ip_options: IpOptions) -> IpOptions {
    if ip_options.hop_limit != 0 {
        return ip_options;
    }
    let hop_limit =
        std::fs::read_to_string("/proc/sys/net/ipv4/ip_default_ttl").unwrap().trim().parse().unwrap();
    IpOptions { hop_limit, ..ip_options }
}
