//! Ping-pong pattern: a delayed ACK that waits to piggyback on a request leaves all the same.

use std::time::Duration;

use crate::common::{End, pair, until};
use nobounce_nic::work::{Mtu, Operation, SendRequest, WorkKind};

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

/// The delayed ACK is bounded: it leaves even if no request follows.
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
    // The other end does not poll any more: its engine thread answers.
    std::thread::sleep(Duration::from_millis(20));
    let mut got = Vec::new();
    until("the last acknowledgement", || {
        a.cq.poll(&mut got, 16).unwrap();
        got.iter().any(|completion| completion.wr_id == 99)
    });
    assert_eq!(a.qps[0].counters().local_ack_timeout_err, 0);
}
