//! Devices that go before younger ones of their address: the kernel steers packets by numbers that are not right any more, until whoever gets
//! his from others sets it right.

use nobounce_nic::soft::{LinkChoice, Mtu};
use nobounce_nic::work::{Operation, QpLimits};

use crate::common::{End, MIB, config, connect, link, patterns, until};

/// Two devices get each other's packets; both have traffic, which goes on, and before long nobody hands anything over.
#[test]
fn traffic_goes_on_while_the_steering_is_set_right() {
    if link() != LinkChoice::Udp {
        return; // packets in shared memory are steered by nobody
    }
    const LEN: u32 = 200_000;
    let at = config("127.66.7.1");
    let open = || {
        let mut end = End::open(&at, MIB);
        end.add_qp(QpLimits::default());
        end
    };
    let (first, second) = (open(), open());
    drop(first);
    // The second is the first of the kernel's list now, and who comes next has the slot of that number.
    let ends = [second, open()];
    let mut senders: Vec<End> = (2..4).map(|n| End::open(&config(&format!("127.66.7.{n}")), MIB)).collect();
    for (sender, end) in senders.iter_mut().zip(&ends) {
        sender.add_qp(QpLimits::default());
        connect(sender, 0, end, 0, Mtu::Mtu4096);
    }
    let (mut round, mut quiet) = (0_u8, 0);
    let handed = || ends.iter().map(|end| end.counter("handed_in")).sum::<u64>();
    until("packets that come to their device directly", || {
        let before = handed();
        round = round.wrapping_add(1);
        for (sender, end) in senders.iter().zip(&ends) {
            sender.fill(round);
            sender.post(Operation::Write(end.remote(0)), 0, LEN);
        }
        for (sender, end) in senders.iter().zip(&ends) {
            sender.succeed(1);
            assert!(end.bytes(0, LEN as usize) == patterns(round, 0, LEN as usize), "round {round}");
        }
        quiet = if handed() == before { quiet + 1 } else { 0 };
        quiet == 20
    });
    assert!(handed() > 0, "this test is about packets that were steered wrongly");
}
