//! The simulator against queueing theory.

use nobounce_fabric::units::{MICROSECOND, MILLISECOND};
use nobounce_fabric::{Algorithm, Config, Fabric, Report, Workload, run};

/// Wire bytes of a packet of 4096 bytes in the middle of a message.
const WIRE: f64 = 4096.0 + 12.0 + 4.0 + 66.0;
const BYTES_PER_US: f64 = 12_500.0;

/// Senders with a constant window of so many packets to one receiver at 100 Gb/s.
fn fixed(senders: usize, packets: u64) -> Report {
    let mut config = Config::new(Fabric::single_switch(senders + 1, 100.0), 5 * MILLISECOND);
    config.fabric.switch.ecn = false;
    config.transport.control = Algorithm::Fixed(packets * 4096);
    run(config, &Workload::Incast { senders, message: 1 << 20, short: 0, short_load: 0.0 }).unwrap()
}

/// Round trip of a full packet through empty queues: two links each way, both of which serialise
/// it, and the ACK on the way back.
fn round_trip() -> f64 {
    let fabric = Fabric::single_switch(2, 100.0);
    fabric.round_trip(1) as f64 / MICROSECOND as f64 + (2.0 * WIRE + 2.0 * 86.0) / BYTES_PER_US
}

#[test]
fn windows_that_do_not_fill_the_path_share_nothing() {
    // Four packets per round trip and sender.
    let report = fixed(4, 4);
    let expected = 4.0 * 4.0 * 4096.0 * 8.0 / round_trip() / 1e3;
    let error = report.goodput_gbits / expected - 1.0;
    assert!(error.abs() < 0.03, "{} Gb/s, theory {expected}", report.goodput_gbits);
}

#[test]
fn a_bottleneck_is_full_and_its_queue_is_what_exceeds_the_path() {
    for senders in [12, 16, 32, 64] {
        let report = fixed(senders, 4);
        let line = 100.0 * 4096.0 / WIRE;
        let queue = senders as f64 * 4.0 * WIRE - round_trip() * BYTES_PER_US;
        assert!((report.goodput_gbits / line - 1.0).abs() < 0.01, "{} of {line} Gb/s", report.goodput_gbits);
        assert!(
            (report.queue_bytes.p50 / queue - 1.0).abs() < 0.05,
            "{} bytes, theory {queue}",
            report.queue_bytes.p50
        );
        assert!(report.jain > 0.99);
        assert_eq!(report.packets.dropped, 0);
    }
}

/// Packets at random times to one link: the unfinished work that they find is that of M/D/1.
#[test]
fn random_arrivals_wait_as_in_an_m_d_1_queue() {
    for load in [0.3, 0.5, 0.7, 0.8] {
        let mut config = Config::new(Fabric::single_switch(65, 100.0), 100 * MILLISECOND);
        config.fabric.switch.ecn = false;
        config.transport.control = Algorithm::Aimd;
        let workload = Workload::Incast { senders: 64, message: 0, short: 4096, short_load: load };
        let report = run(config, &workload).unwrap();
        // An only packet has a RETH and immediate data, too.
        let wire = WIRE + 16.0 + 4.0;
        let busy = load * wire / 4096.0;
        let expected = busy / (2.0 * (1.0 - busy)) * wire;
        let error = report.queue_bytes.mean / expected - 1.0;
        assert!(error.abs() < 0.06, "load {load}: {} bytes, theory {expected}", report.queue_bytes.mean);
    }
}

/// Two hosts at each of two leaves, two spines. One cycle in three makes both hosts of a leaf send
/// to the other leaf, in both directions; two flows of one direction collide with probability 1/2.
#[test]
fn flows_collide_as_often_as_theory_says() {
    let runs = 1_000;
    let mut collided = 0;
    for seed in 0..runs {
        let mut fabric = Fabric::leaf_spine(4, 2, 100.0);
        fabric.spines = 2;
        let mut config = Config::new(fabric, 200 * MICROSECOND);
        config.seed = seed << 20;
        // More than the path holds: flows are limited by links alone, and a collision costs a
        // quarter.
        config.transport.control = Algorithm::Fixed(64 * 4096);
        let report = run(config, &Workload::Permutation { message: 1 << 20 }).unwrap();
        collided += u32::from(report.goodput < 0.8);
    }
    let (share, expected) = (f64::from(collided) / runs as f64, (1.0 - 0.25) / 3.0);
    assert!((share - expected).abs() < 0.03, "{share} of the runs have a collision, theory {expected}");
}

#[test]
fn a_run_depends_on_its_seed_alone() {
    let report = |seed| {
        let mut config = Config::new(Fabric::leaf_spine(16, 4, 100.0), 200 * MICROSECOND);
        config.seed = seed;
        config.fabric.loss_ppm = 1_000;
        serde_json::to_string(&run(config, &Workload::Kv { load: 0.5 }).unwrap()).unwrap()
    };
    assert_eq!(report(1), report(1));
    assert_ne!(report(1), report(2));
}
