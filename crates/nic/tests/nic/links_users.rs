//! Other users on the same machine. Apart from the other link tests: the processes started here hold copies of all open
//! sockets until they run their program, and so delay the closing of sockets that those tests close.

use nobounce_nic::links::Link;
use nobounce_nic::links::udp::{UdpConfig, UdpLink};

fn counter(link: &UdpLink, name: &str) -> u64 {
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
             s=socket.socket(socket.AF_UNIX,socket.SOCK_DGRAM)\n\
             s.sendto(b'nbh1\\x04\\x00\\x12\\xb7\\x00\\x00\\x00\\x20\\x0a\\x01\\x02\\x03'+bytes(44),'\\0nobounce/slot/127.30.0.2/0')"
        );
        let status = std::process::Command::new("python3").args(["-c", &script]).status().unwrap();
        assert!(status.success());
    };
    let mut got = 0;
    forged(65534);
    (0..100).for_each(|_| got += to.receive(&mut |_| {}));
    assert_eq!((got, counter(&to, "handover_refused")), (0, 1));
    forged(0);
    (0..100).for_each(|_| got += to.receive(&mut |d| assert_eq!(d.src.to_string(), "10.1.2.3")));
    assert_eq!((got, counter(&to, "handed_in")), (1, 1), "the same bytes from our own user are taken");
}

#[test]
fn a_port_held_by_another_user_gives_a_sentence_that_names_the_user() {
    // SAFETY: geteuid reads one number of this process and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("waived (only root can become another user to hold the port)");
        return;
    }
    let mut holder = std::process::Command::new("python3")
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
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(holder.stdout.take().unwrap()), &mut line)
        .unwrap();
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
