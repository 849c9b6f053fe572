//! Other users on the same machine. Separate from the other link tests: the processes started here
//! hold copies of all open sockets until exec. They would delay the closing of sockets in those
//! tests.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use nobounce_nic::links::Link;
use nobounce_nic::links::shm::ShmLink;
use nobounce_nic::links::udp::{UdpConfig, UdpLink};

/// A program that the test talks to.
fn python(script: &str) -> Child {
    let mut command = Command::new("python3");
    command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().unwrap()
}

fn counter(link: &dyn Link, name: &str) -> u64 {
    link.counters().into_iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("no counter {name}")).1
}

#[test]
fn a_handover_of_another_user_is_dropped() {
    let mut to = UdpLink::open(&UdpConfig::new("127.30.0.2".parse().unwrap())).unwrap();
    // SAFETY: geteuid reads one number of this process and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("waived (only root can become another user)");
        return;
    }
    let forged = |uid: u32| {
        let script = format!(
            "import os,socket\n\
             os.setuid({uid})\n\
             s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)\n\
             s.connect('\\0nobounce/slot/127.30.0.2/0')\n\
             s.send(b'nbh2\\x04\\x00\\x12\\xb7\\x00\\x00\\x00\\x20\\x0a\\x01\\x02\\x03'+bytes(44))"
        );
        let status = Command::new("python3").args(["-c", &script]).status().unwrap();
        assert!(status.success());
    };
    let mut got = 0;
    forged(65534);
    (0..100).for_each(|_| got += to.receive(&mut |_| {}));
    assert_eq!((got, counter(&to, "handover_refused")), (0, 1));
    forged(0);
    (0..100).for_each(|_| got += to.receive(&mut |d| assert_eq!(d.src.to_string(), "10.1.2.3")));
    assert_eq!((got, counter(&to, "steered_in")), (1, 1), "the same bytes from our own user are taken");
}

/// Another user may take the name of a slot that is free. Packets for it are not handed to them.
#[test]
fn packets_are_not_handed_to_another_user_under_the_name_of_a_slot() {
    // SAFETY: geteuid reads one number of this process and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("waived (only root can become another user)");
        return;
    }
    let mut to = UdpLink::open(&UdpConfig::new("127.30.0.6".parse().unwrap())).unwrap();
    let from = std::net::UdpSocket::bind("127.30.0.7:4791").unwrap();
    let mut gets = |uid: u32, slot: u8, counted: &str| {
        let script = format!(
            "import os,socket,sys\n\
             os.setuid({uid})\n\
             s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)\n\
             s.bind('\\0nobounce/slot/127.30.0.6/{slot}')\n\
             s.listen()\n\
             print('waits',flush=True)\n\
             sys.stdin.read()\n\
             c,_=s.accept()\n\
             got=b''.join(iter(lambda:c.recv(99),b''))\n\
             print(b'payload' in got)"
        );
        let mut host = python(&script);
        let mut lines = BufReader::new(host.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "waits");
        let mut packet = [4, 0, 0xff, 0xff, 0, slot, 0, 2].to_vec();
        packet.extend_from_slice(b"a payload of some bytes");
        from.send_to(&packet, "127.30.0.6:4791").unwrap();
        let start = std::time::Instant::now();
        while counter(&to, counted) == 0 {
            assert!(start.elapsed().as_secs() < 10, "not {counted}");
            to.receive(&mut |_| {});
        }
        // Closes its end of the connection when the next device of the name is looked for.
        to = UdpLink::open(&UdpConfig::new("127.30.0.6".parse().unwrap())).unwrap();
        drop(host.stdin.take());
        let got = lines.next().unwrap().unwrap();
        host.wait().unwrap();
        got
    };
    assert_eq!(gets(65534, 200, "no_such_slot"), "False");
    assert_eq!(gets(0, 201, "handed_over"), "True", "one of our own user gets them");
}

#[test]
fn a_port_held_by_another_user_gives_a_sentence_that_names_the_user() {
    // SAFETY: geteuid reads one number of this process and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("waived (only root can become another user to hold the port)");
        return;
    }
    let mut holder = Command::new("python3")
        .args([
            "-c",
            "import os,socket,sys\n\
             os.setuid(65534)\n\
             s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\n\
             s.setsockopt(socket.SOL_SOCKET,socket.SO_REUSEPORT,1)\n\
             s.bind(('127.29.0.1',4791))\n\
             print('held',flush=True)\n\
             sys.stdin.read()",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let result = UdpLink::open(&UdpConfig::new("127.29.0.1".parse().unwrap()));
    drop(holder.stdin.take());
    holder.wait().unwrap();
    assert_eq!(line, "held\n");
    let error = result.unwrap_err().to_string();
    assert!(
        error.contains("UDP port 4791 on 127.29.0.1 is held by a program of another user (uid 65534"),
        "{error}"
    );
}

fn near(addr: &str) -> ShmLink<UdpLink> {
    let mut link = ShmLink::new(UdpLink::open(&UdpConfig::new(addr.parse().unwrap())).unwrap()).unwrap();
    link.listen().unwrap();
    link
}

/// Shared memory is for processes of one user: connections of other users are refused, whatever
/// they send.
#[test]
fn another_user_who_comes_by_shared_memory_is_sent_away() {
    // SAFETY: geteuid reads one number of this process and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("waived (only root can become another user)");
        return;
    }
    let mut to = near("127.30.0.4");
    let slot = to.slot();
    let mut come = |uid: u32| {
        let script = format!(
            "import os,socket\n\
             os.setuid({uid})\n\
             s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)\n\
             s.connect('\\0nobounce/shm/127.30.0.4/{slot}')\n\
             print('came',flush=True)\n\
             s.settimeout(1)\n\
             try: print(s.recv(9),s.recv(9),flush=True)\n\
             except TimeoutError: print('stays',flush=True)"
        );
        let mut guest = Command::new("python3").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(guest.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "came");
        to.poll_control();
        let heard = lines.next().unwrap().unwrap();
        guest.wait().unwrap();
        (heard, counter(&to, "shm_refused"))
    };
    assert_eq!(come(65534), ("b'no!' b''".to_owned(), 1));
    assert_eq!(come(0), ("stays".to_owned(), 1), "our own user may");
}

/// A sender passes no ring to another user that has bound a peer's name.
#[test]
fn another_user_who_waits_under_a_peers_name_gets_no_ring() {
    // SAFETY: geteuid reads one number of this process and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("waived (only root can become another user)");
        return;
    }
    let mut from = near("127.30.0.5");
    let mut meet = |uid: u32, slot: u8| {
        let script = format!(
            "import os,socket,sys\n\
             os.setuid({uid})\n\
             s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)\n\
             s.bind('\\0nobounce/shm/127.30.0.5/{slot}')\n\
             s.listen()\n\
             print('waits',flush=True)\n\
             sys.stdin.read()"
        );
        let mut host = python(&script);
        let mut line = String::new();
        BufReader::new(host.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "waits\n");
        let ring = from.peer_ring("127.30.0.5".parse().unwrap(), slot);
        drop(host.stdin.take());
        host.wait().unwrap();
        ring.is_some()
    };
    let slot = 200;
    assert!(!meet(65534, slot));
    assert!(meet(0, slot + 1), "one of our own user gets it");
}
