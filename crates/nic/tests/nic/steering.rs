//! A device that closes before younger ones of its address leaves stale socket numbers. The kernel
//! mis-steers packets until the device that moved corrects the program.

use nobounce_nic::soft::LinkChoice;
use nobounce_nic::work::{Mtu, Operation, QpLimits};

use crate::common::{End, MIB, config, connect, link, patterns, until};

/// Two devices get each other's packets while a third one closes. Their traffic goes on, and
/// handovers soon stop.
#[test]
fn traffic_goes_on_while_the_steering_is_set_right() {
    if link() != LinkChoice::Udp {
        return; // packets in shared memory are not steered
    }
    const LEN: u32 = 200_000;
    let at = config("127.66.7.1");
    let open = || {
        let mut end = End::open(&at, MIB);
        end.add_qp(QpLimits::default());
        end
    };
    let mut first = Some(open());
    let ends = [open(), open()];
    let mut senders: Vec<End> = (2..4).map(|n| End::open(&config(&format!("127.66.7.{n}")), MIB)).collect();
    for (sender, end) in senders.iter_mut().zip(&ends) {
        sender.add_qp(QpLimits::default());
        connect(sender, 0, end, 0, Mtu::Mtu4096);
    }
    let (mut round, mut quiet) = (0_u8, 0);
    let handed = || ends.iter().map(|end| end.counter("steered_in")).sum::<u64>();
    until("packets that come to their device directly", || {
        let before = handed();
        round = round.wrapping_add(1);
        for (sender, end) in senders.iter().zip(&ends) {
            sender.fill(round);
            sender.post(Operation::Write(end.remote(0)), 0, LEN);
        }
        if round == 10 {
            // The last of the kernel's list is the first one now.
            first = None;
        }
        for (sender, end) in senders.iter().zip(&ends) {
            sender.succeed(1);
            assert!(end.bytes(0, LEN as usize) == patterns(round, 0, LEN as usize), "round {round}");
        }
        quiet = if handed() == before { quiet + 1 } else { 0 };
        first.is_none() && quiet == 20
    });
    println!("{} packets were handed over", handed());
}
