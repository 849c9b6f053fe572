//! Two applications that take turns: the acknowledgement of one message travels with the next message the other way.

use std::time::Duration;

use crate::common::{End, config, pair, until};
use nobounce_nic::soft::{LinkChoice, Mtu, Operation, SendRequest, WorkKind};

const ROUNDS: u64 = 2_000;

fn say(from: &End) {
    from.post(Operation::Send, 0, 8);
}

fn hear(end: &End) {
    let mut got = Vec::new();
    until("a message", || {
        end.cq.poll(&mut got, 16).unwrap();
        got.iter().any(|completion| completion.kind == WorkKind::Receive)
    });
    end.post_recv(0, 64, 64);
}

fn counter(end: &End, name: &str) -> u64 {
    end.device.link_counters().iter().find(|(n, _)| *n == name).map_or(0, |(_, count)| *count)
}

#[test]
fn acknowledgements_travel_with_the_next_request() {
    if config("127.66.0.1").link == LinkChoice::Auto {
        return; // packets that share a system call are counted: there are none in shared memory
    }
    let (a, b) = pair("127.66.0.1", 4096, Mtu::Mtu1024);
    (0..16).for_each(|_| a.post_recv(0, 64, 64));
    (0..16).for_each(|_| b.post_recv(0, 64, 64));
    for _ in 0..ROUNDS {
        say(&a);
        hear(&b);
        say(&b);
        hear(&a);
    }
    for end in [&a, &b] {
        let (packets, calls) = (counter(end, "udp_tx_packets"), counter(end, "udp_tx_calls"));
        assert!(packets >= ROUNDS * 3 / 2, "{packets} packets in {calls} calls");
        // A machine that is busy with other things breaks a few conversations off.
        assert!(calls < ROUNDS * 3 / 2, "{packets} packets in {calls} calls");
    }
}

/// The answer waits for a request, but not for long: who stops talking is acknowledged all the same.
#[test]
fn the_last_word_is_acknowledged() {
    let (a, b) = pair("127.66.0.2", 4096, Mtu::Mtu1024);
    (0..16).for_each(|_| a.post_recv(0, 64, 64));
    (0..16).for_each(|_| b.post_recv(0, 64, 64));
    for _ in 0..20 {
        say(&a);
        hear(&b);
        say(&b);
        hear(&a);
    }
    a.qps[0].post_send(&SendRequest::new(99, Operation::Send, &a.sge(0, 8))).unwrap();
    hear(&b);
    // Nobody polls at the other end any more: its helper thread answers.
    std::thread::sleep(Duration::from_millis(20));
    let mut got = Vec::new();
    until("the last acknowledgement", || {
        a.cq.poll(&mut got, 16).unwrap();
        got.iter().any(|completion| completion.wr_id == 99)
    });
    assert_eq!(a.qps[0].counters().local_ack_timeout_err, 0);
}
