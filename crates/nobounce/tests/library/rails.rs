//! One transfer over two devices, of host memory and of a GPU's (the stand-in driver's).

use std::time::Duration;

use crate::common::{SOON, is_dropin, is_hardware, pair, pattern, waive};
use fake_cuda::client::StandIn;
use nobounce::nic::work::{QpAttr, QpState};
use nobounce::{ConnectOptions, GpuOptions, RailError, Rails, Require};

const LEN: usize = 3 << 20;

fn rails(addrs: [&str; 2]) -> (Rails, Rails) {
    rails_of(addrs, &ConnectOptions { retries: 2, ..ConnectOptions::default() })
}

fn rails_of(addrs: [&str; 2], options: &ConnectOptions) -> (Rails, Rails) {
    let (a, b): (Vec<_>, Vec<_>) = addrs.into_iter().map(|addr| pair(addr, options)).unzip();
    (Rails::new(a).unwrap(), Rails::new(b).unwrap())
}

#[test]
fn a_transfer_is_split_and_comes_together_again() {
    let (a, b) = rails(["127.173.0.1", "127.173.0.2"]);
    let a = a.with_speeds(vec![1, 2]).unwrap();
    let (ours, theirs) = (a.register(LEN).unwrap(), b.register(LEN).unwrap());
    let remote = std::thread::scope(|scope| {
        let there = scope.spawn(|| b.exchange(&theirs, SOON).unwrap());
        let remote = a.exchange(&ours, SOON).unwrap();
        there.join().unwrap();
        remote
    });
    let bytes = pattern(LEN - 100, 7);
    ours.memory().write_at(50, &bytes).unwrap();
    a.write(&ours, 50..LEN - 50, &remote, 20, SOON).unwrap();
    let mut found = vec![0; bytes.len()];
    theirs.memory().read_at(20, &mut found).unwrap();
    assert!(found == bytes);
    if !is_hardware() {
        // A hardware NIC moves bytes uncounted.
        let moved: Vec<u64> = b
            .connections()
            .iter()
            .map(|rail| rail.device().nic().path_counters().inbound.cpu.bytes)
            .collect();
        assert!(moved[0] > 900_000 && moved[1] > 1_900_000, "both carried their share: {moved:?}");
    }
    ours.memory().fill(0..LEN, 0).unwrap();
    a.read(&ours, 0..bytes.len(), &remote, 20, SOON).unwrap();
    ours.memory().read_at(0, &mut found).unwrap();
    assert!(found == bytes);
    assert!(matches!(
        a.write(&ours, 0..8, &remote[..1], 0, SOON),
        Err(RailError::Count { given: 1, rails: 2 })
    ));
}

/// Queues of four, and more pieces than a thousand: what does not fit into a queue waits for room,
/// and is no failure.
#[test]
fn a_transfer_of_more_messages_than_the_queues_hold() {
    const PIECE: u32 = 4096;
    let few = ConnectOptions { depth: 4, retries: 2, ..ConnectOptions::default() };
    let (a, b) = rails_of(["127.173.0.7", "127.173.0.8"], &few);
    let a = a.with_speeds(vec![1, 2]).unwrap().with_pieces(PIECE);
    let len = 1500 * PIECE as usize + 77;
    let (ours, theirs) = (a.register(len).unwrap(), b.register(len).unwrap());
    let mut remote: Vec<_> = theirs.regions().map(nobounce::Region::remote).collect();
    let bytes = pattern(len, 9);
    ours.memory().write_at(0, &bytes).unwrap();
    a.write(&ours, 0..len, &remote, 0, SOON).unwrap();
    let mut found = vec![0; len];
    theirs.memory().read_at(0, &mut found).unwrap();
    assert!(found == bytes);
    ours.memory().fill(0..len, 0).unwrap();
    a.read(&ours, 0..len, &remote, 0, SOON).unwrap();
    ours.memory().read_at(0, &mut found).unwrap();
    assert!(found == bytes);
    // A rail that fails with most of its pieces still to come ends the transfer, and leaves nothing
    // under way.
    remote[1].rkey ^= 0xffff;
    let error = a.write(&ours, 0..len, &remote, 0, SOON).unwrap_err();
    assert!(matches!(&error, RailError::Failed { rail: 1, .. }), "{error}");
    assert_eq!(a.connections().iter().map(nobounce::Connection::pending).sum::<usize>(), 0);
}

#[test]
fn a_rail_that_fails_is_named_and_nothing_is_left_under_way() {
    let (a, b) = rails(["127.173.0.3", "127.173.0.4"]);
    let (ours, theirs) = (a.register(LEN).unwrap(), b.register(LEN).unwrap());
    let mut remote: Vec<_> = theirs.regions().map(nobounce::Region::remote).collect();
    remote[1].rkey ^= 0xffff;
    let error = a.write(&ours, 0..LEN, &remote, 0, Duration::from_secs(20)).unwrap_err();
    assert!(matches!(&error, RailError::Failed { rail: 1, .. }), "{error}");
    let words = error.to_string();
    let rail = &a.connections()[1];
    assert!(words.contains("rail 1") && words.contains(&rail.peer().to_string()), "{words}");
    if rail.device().nic().soft().is_some() {
        assert!(words.contains(&format!("at {}", rail.device().nic().local())), "{words}");
    }
    assert_eq!(a.connections().iter().map(nobounce::Connection::pending).sum::<usize>(), 0);
}

#[test]
fn memory_of_a_gpu_is_registered_with_every_rail() {
    let cuda = StandIn::load();
    let (a, b) = rails(["127.173.0.5", "127.173.0.6"]);
    let direct = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
    // The stand-in's memory is not GPU memory, so a real device cannot reach it. Our own drop-in
    // must.
    if is_hardware() && !is_dropin() {
        let refused = a.register_gpu(0, 4096, direct).unwrap_err().to_string();
        assert!(refused.contains("dma-buf: ") && refused.contains("peermem: "), "{refused}");
        waive(
            "memory_of_a_gpu_is_registered_with_every_rail",
            "the device does not reach the stand-in's memory",
        );
        return;
    }
    let before = cuda.live(c"allocations");
    let (ours, theirs) = (a.register_gpu(0, LEN, direct).unwrap(), b.register_gpu(0, LEN, direct).unwrap());
    assert_eq!(
        cuda.live(c"allocations"),
        before + 2,
        "one allocation at each end, whatever the number of rails"
    );
    for region in ours.regions() {
        assert!(region.is_gpu() && region.paths().are_direct() && region.addr() == ours.memory().addr());
    }
    let remote: Vec<_> = theirs.regions().map(nobounce::Region::remote).collect();
    let bytes = pattern(LEN - 5000, 8);
    ours.memory().write_at(7, &bytes).unwrap();
    a.write(&ours, 7..7 + bytes.len(), &remote, 99, SOON).unwrap();
    assert!(cuda.peek(theirs.memory().addr() + 99, bytes.len()) == bytes);
    ours.memory().fill(0..LEN, 0).unwrap();
    a.read(&ours, 11..11 + bytes.len(), &remote, 99, SOON).unwrap();
    assert!(cuda.peek(ours.memory().addr() + 11, bytes.len()) == bytes);
    drop((ours, theirs));
    assert_eq!(cuda.live(c"allocations"), before);
    // A rail that has no direct path is named.
    let staged = GpuOptions { staged: true, ..direct };
    let refused = a.register_gpu(0, LEN, staged).unwrap_err().to_string();
    assert!(refused.contains("rail 0") && refused.contains("a direct path is required"), "{refused}");
}

/// A link that fails in the midst of a transfer: the other rail carries the rest, and everything
/// after it.
#[test]
fn a_link_that_fails_moves_its_part_to_the_other_rail() {
    const PIECE: u32 = 16 << 10;
    let hasty = ConnectOptions { ack_timeout: 12, retries: 1, depth: 8, ..ConnectOptions::default() };
    for broken in [0, 1] {
        let (a, b) = rails_of(["127.173.0.9", "127.173.0.10"], &hasty);
        let a = a.with_pieces(PIECE);
        let (ours, theirs) = (a.register(LEN).unwrap(), b.register(LEN).unwrap());
        let remote: Vec<_> = theirs.regions().map(nobounce::Region::remote).collect();
        let bytes = pattern(LEN, 11);
        ours.memory().write_at(0, &bytes).unwrap();
        a.write(&ours, 0..LEN / 2, &remote, 0, SOON).unwrap();
        assert_eq!(a.failed(), [0; 0]);
        // The peer's end of the rail answers no more, as behind a cut cable.
        let end = QpAttr::to_state(QpState::Error);
        b.connections()[broken].qp(0).modify(&end, 0).unwrap();
        a.write(&ours, 0..LEN, &remote, 0, SOON).unwrap();
        assert_eq!(a.failed(), [broken]);
        let mut found = vec![0; LEN];
        theirs.memory().read_at(0, &mut found).unwrap();
        assert!(found == bytes);
        ours.memory().fill(0..LEN, 0).unwrap();
        a.read(&ours, 0..LEN, &remote, 0, SOON).unwrap();
        ours.memory().read_at(0, &mut found).unwrap();
        assert!(found == bytes);
        assert_eq!(a.connections().iter().map(nobounce::Connection::pending).sum::<usize>(), 0);
        // The last one has none to stand in for it.
        b.connections()[1 - broken].qp(0).modify(&end, 0).unwrap();
        let error = a.write(&ours, 0..LEN, &remote, 0, SOON).unwrap_err();
        assert!(matches!(&error, RailError::Failed { rail, .. } if *rail == 1 - broken), "{error}");
        assert_eq!(a.connections().iter().map(nobounce::Connection::pending).sum::<usize>(), 0);
    }
}
