//! Same-host peer death: a killed peer fails the connected queue pairs; an orderly exit does not.
#![allow(clippy::cast_possible_truncation)] // small constants

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::common::{End, child, config, role};
use nobounce_nic::soft::{AsyncEvent, Config, LinkChoice};
use nobounce_nic::work::{Mtu, Operation, Psn, QpAttr, QpEvent, QpLimits, QpState, Qpn, Status};

const TEST: &str = "deaths::a_peer_that_is_killed_is_missed";
const LEN: u32 = 4096;

fn near(addr: &str) -> Config {
    Config { link: LinkChoice::Auto, ..config(addr) }
}

fn join(end: &End, addr: &str, peer: u32) {
    let to = QpAttr::to_rtr(addr.parse().unwrap(), Qpn::new(peer), Psn::new(5), Mtu::Mtu1024);
    end.qps[0].modify(&to).unwrap();
    end.qps[0].modify(&QpAttr { timeout: 14, ..QpAttr::to_rts(Psn::new(5)) }).unwrap();
}

/// A child: connects, sends one message, and on command exits as its role says.
fn guest(how: &str) {
    let (way, addr) = how.split_once(' ').unwrap();
    let mut end = End::open(&near(addr), LEN as usize);
    println!("\nhello {}", end.add_qp(QpLimits::default()).qpn().get());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    join(&end, addr, line.trim().parse().unwrap());
    end.post(Operation::Send, 0, 8);
    end.succeed(1);
    match way {
        // The last message may not have been read when it is over.
        "killed" => {
            end.post(Operation::Send, 0, 8);
            // SAFETY: ends this process, at once.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        "exits" => std::process::exit(0),
        _ => {}
    }
}

/// The child, and its words, which must be heard for it to end well.
fn invite(here: &End, how: &str, addr: &str) -> (Child, impl Sized) {
    let mut process =
        child(TEST, &format!("{how} {addr}")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let peer =
        lines.find_map(|line| line.unwrap().strip_prefix("hello ").map(|n| n.parse().unwrap())).unwrap();
    join(here, addr, peer);
    writeln!(process.stdin.as_mut().unwrap(), "{}", here.qps[0].qpn().get()).unwrap();
    (process, lines)
}

fn waiting(addr: &str) -> End {
    let mut here = End::open(&near(addr), LEN as usize);
    here.add_qp(QpLimits::default());
    (0..3).for_each(|wr_id| here.post_recv(wr_id, 0, LEN));
    here
}

/// A pure receiver learns of the peer's death: it has no request in flight that could fail.
#[test]
fn a_peer_that_is_killed_is_missed() {
    if let Some(how) = role() {
        return guest(&how);
    }
    let here = waiting("127.56.3.1");
    let (mut process, _words) = invite(&here, "killed", "127.56.3.1");
    let got = here.completions(3);
    assert!(process.wait().unwrap().code().is_none());
    let statuses: Vec<Status> = got.iter().map(|completion| completion.status).collect();
    assert!(
        matches!(statuses[..], [Status::Success, Status::Success | Status::Flushed, Status::Flushed]),
        "{statuses:?}"
    );
    assert_eq!(here.qps[0].state(), QpState::Error);
    let fatal = AsyncEvent::Qp { qpn: here.qps[0].qpn(), event: QpEvent::Fatal };
    while here.event() != fatal {}
}

/// An orderly exit: the application says nothing, but the library sends the goodbye.
#[test]
fn a_peer_that_leaves_is_not() {
    for (n, how) in ["exits", "leaves"].into_iter().enumerate() {
        let addr = format!("127.56.3.{}", n + 2);
        let here = waiting(&addr);
        let (mut process, _words) = invite(&here, how, &addr);
        here.succeed(1);
        assert!(process.wait().unwrap().success());
        let end = Instant::now() + Duration::from_millis(400);
        while Instant::now() < end {
            here.quiet();
        }
        assert_eq!(here.qps[0].state(), QpState::Rts, "{how}");
    }
}
