//! Other users on the same machine. Separate from the other link tests: the processes started here
//! hold copies of all open sockets until exec. They would delay the closing of sockets in those
//! tests.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use nobounce_nic::links::Link;
use nobounce_nic::links::shm::ShmLink;
use nobounce_nic::links::udp::{LocalPorts, UdpConfig, UdpLink};

use crate::plain::{own_network, plain_socket};

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
    let from = plain_socket([127, 30, 0, 7].into());
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

/// A program of another user that binds RoCE's port of an address by all means that the kernel has,
/// and tells whether one of them succeeded.
fn other_user_takes(addr: &str) -> (Child, String) {
    let script = format!(
        "import os,socket,sys\n\
         os.setuid(65534)\n\
         held=[]\n\
         for family,to in (socket.AF_INET,'{addr}'),(socket.AF_INET6,'::ffff:{addr}'),(socket.AF_INET6,'::1'):\n\
         \x20for options in (),(socket.SO_REUSEPORT,),(socket.SO_REUSEADDR,),(socket.SO_REUSEPORT,socket.SO_REUSEADDR):\n\
         \x20 for device in b'',b'lo':\n\
         \x20  s=socket.socket(family,socket.SOCK_DGRAM)\n\
         \x20  for option in options: s.setsockopt(socket.SOL_SOCKET,option,1)\n\
         \x20  if device: s.setsockopt(socket.SOL_SOCKET,socket.SO_BINDTODEVICE,device)\n\
         \x20  try: s.bind((to,4791)); held.append(s)\n\
         \x20  except OSError as e: assert e.errno==98,e\n\
         print('held' if held else 'free',flush=True)\n\
         sys.stdin.read()"
    );
    let mut holder = python(&script);
    let mut line = String::new();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (holder, line.trim().to_owned())
}

/// The error of a device beside a program of another user that holds the port of an address.
fn error_beside(held: &str, config: &UdpConfig) -> String {
    let (mut holder, line) = other_user_takes(held);
    let result = UdpLink::open(config);
    drop(holder.stdin.take());
    holder.wait().unwrap();
    assert_eq!(line, "held");
    result.map_or_else(|error| error.to_string(), |_| String::new())
}

#[test]
fn a_port_held_by_another_user_gives_a_sentence_that_names_the_user() {
    // SAFETY: geteuid reads one number of this process and cannot fail.
    if unsafe { libc::geteuid() } != 0 || !own_network() {
        println!("waived (only root can become another user to hold the port)");
        return;
    }
    let own = UdpConfig::new("127.29.0.1".parse().unwrap());
    let error = error_beside("127.29.0.1", &own);
    let expected = "UDP port 4791 on 127.29.0.1 is held by a program of another user (uid 65534";
    assert!(error.contains(expected), "{error}");
    let error = error_beside("127.29.0.2", &own);
    let expected = "UDP port 4791 on 127.29.0.2 is held by a program of another user (uid 65534";
    assert!(error.contains(expected) && error.contains("NOBOUNCE_LOCAL_PORTS=any"), "{error}");
    assert_eq!(error_beside("127.29.0.2", &UdpConfig { local_ports: LocalPorts::Any, ..own }), "");
    let _holder = std::net::UdpSocket::bind("127.28.0.1:4791").unwrap();
    let error = UdpLink::open(&UdpConfig::new("127.28.0.1".parse().unwrap())).unwrap_err().to_string();
    assert!(error.contains("another program of this user"), "{error}");
    assert!(error.contains("does not share it"), "{error}");
}

/// Who holds the port of any local address can send with the source address of any other.
#[test]
fn no_other_user_can_take_the_port_of_another_address() {
    // SAFETY: geteuid reads one number of this process and cannot fail.
    if unsafe { libc::geteuid() } != 0 || !own_network() {
        println!("waived (only root can become another user)");
        return;
    }
    let taken_beside = |devices: &[UdpLink]| {
        let (mut holder, line) = other_user_takes("127.31.0.99");
        drop(holder.stdin.take());
        holder.wait().unwrap();
        println!("{line} beside {} devices", devices.len());
        line
    };
    let open = |last: u8, local_ports| {
        let addr = std::net::IpAddr::from([127, 31, 0, last]);
        UdpLink::open(&UdpConfig { local_ports, ..UdpConfig::new(addr) }).unwrap()
    };
    let mut devices = vec![open(1, LocalPorts::Any)];
    assert_eq!(taken_beside(&devices), "held");
    // With more sockets on a port the kernel searches them by address.
    for last in 2..20 {
        devices.push(open(last, LocalPorts::Own));
        if [2, 19].contains(&last) {
            assert_eq!(taken_beside(&devices), "free");
        }
    }
    devices.truncate(1);
    assert_eq!(taken_beside(&devices), "held");
}

/// Over IPv6 any user may send with an address that no interface has, such as a remote peer's.
#[test]
fn packets_of_this_host_with_a_foreign_source_address_are_dropped() {
    // SAFETY: geteuid reads one number of this process and cannot fail.
    if unsafe { libc::geteuid() } != 0 || !own_network() {
        println!("waived (only root can become another user)");
        return;
    }
    let added =
        Command::new("ip").args(["-6", "address", "add", "fd00::1/64", "dev", "lo", "nodad"]).status();
    if !added.is_ok_and(|status| status.success()) {
        println!("waived (no IPv6)");
        return;
    }
    let arrives = |local_ports, source: &str, uid: u32| {
        let config = UdpConfig { local_ports, ..UdpConfig::new("fd00::1".parse().unwrap()) };
        let mut to = UdpLink::open(&config).unwrap();
        let script = format!(
            "import os,socket\n\
             os.setuid({uid})\n\
             s=socket.socket(socket.AF_INET6,socket.SOCK_DGRAM)\n\
             s.setsockopt(socket.SOL_SOCKET,socket.SO_REUSEPORT,1)\n\
             s.setsockopt(socket.IPPROTO_IPV6,78,1)\n\
             s.bind(('{source}',4791 if {uid}==0 else 40000))\n\
             s.sendto(bytes(64),('fd00::1',4791))"
        );
        assert!(Command::new("python3").args(["-c", &script]).status().unwrap().success());
        let mut got = 0;
        (0..50).for_each(|_| got += to.receive(&mut |_| {}));
        got
    };
    assert_eq!(arrives(LocalPorts::Any, "fd00::dead", 65534), 1, "the kernel delivers it");
    assert_eq!(arrives(LocalPorts::Own, "fd00::dead", 65534), 0);
    assert_eq!(arrives(LocalPorts::Own, "::1", 0), 1, "those of our own user are taken");
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
        let ring = from.local_route(("127.30.0.5".parse().unwrap(), slot));
        drop(host.stdin.take());
        host.wait().unwrap();
        ring.is_some()
    };
    let slot = 200;
    assert!(!meet(65534, slot));
    assert!(meet(0, slot + 1), "one of our own user gets it");
}
