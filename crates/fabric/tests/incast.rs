//! Incast, losses and a failing link at the size of a rack.

use nobounce_fabric::units::{MICROSECOND, MILLISECOND};
use nobounce_fabric::{Config, Fabric, Failure, Report, Workload, run};

/// 64 senders to one receiver at 100 Gb/s: 16 MB of shared buffer, 10 us round trip, marks from
/// 50 KB on, all from 200 KB on, from the first packet on. Short messages of 8 KiB take 2 % of the
/// link.
fn incast(message: u32) -> Report {
    let fabric = Fabric::single_switch(65, 100.0);
    assert_eq!(fabric.round_trip(1), 10 * MICROSECOND);
    assert_eq!(fabric.switch.buffer, 16_000_000);
    let config = Config::new(fabric, 50 * MILLISECOND);
    run(config, &Workload::Incast { senders: 64, message, short: 8 << 10, short_load: 0.02 }).unwrap()
}

#[test]
fn an_incast_of_64_loses_nothing_shares_fairly_and_delays_little() {
    let (loaded, unloaded) = (incast(1 << 20), incast(0));
    let p99 = |report: &Report| report.latency("short").unwrap().p99;
    assert_eq!(loaded.packets.dropped, 0);
    assert_eq!(loaded.packets.failed, 0);
    assert!(loaded.goodput >= 0.9, "goodput {}", loaded.goodput);
    assert!(loaded.jain >= 0.95, "Jain {}", loaded.jain);
    assert!(p99(&loaded) <= 3.0 * p99(&unloaded), "{} us, unloaded {}", p99(&loaded), p99(&unloaded));
}

#[test]
fn losses_are_repaired_and_everything_arrives() {
    let mut config = Config::new(Fabric::leaf_spine(16, 4, 100.0), 100 * MILLISECOND);
    config.fabric.loss_ppm = 10_000;
    let report = run(config, &Workload::AllToAll { bytes: 256 << 10, concurrent: 4 }).unwrap();
    assert_eq!(report.complete, Some(true));
    assert!(report.packets.lost > 0 && report.packets.retransmitted > 0);
    assert_eq!(report.packets.failed, 0);
}

#[test]
fn a_link_that_fails_is_avoided() {
    let with = |failure| {
        let mut config = Config::new(Fabric::leaf_spine(16, 4, 100.0), 100 * MILLISECOND);
        config.fabric.failure = failure;
        run(config, &Workload::AllToAll { bytes: 1 << 20, concurrent: 4 }).unwrap()
    };
    let failed = with(Some(Failure { at: 100 * MICROSECOND, detected_after: 200 * MICROSECOND }));
    assert_eq!(failed.complete, Some(true));
    assert_eq!(failed.packets.failed, 0);
    assert!(failed.packets.lost > 0);
    assert!(failed.time_us > with(None).time_us);
}

#[test]
fn a_ring_all_reduce_takes_its_steps() {
    let config = Config::new(Fabric::leaf_spine(16, 4, 100.0), 100 * MILLISECOND);
    let report = run(config, &Workload::RingAllReduce { bytes: 16 << 20, shuffled: false }).unwrap();
    assert_eq!(report.complete, Some(true));
    // 30 steps of 1 MiB at line rate take 2.5 ms, and the latency of each step comes on top.
    assert!(report.time_us > 30.0 * 1_048_576.0 / 12_500.0, "{}", report.time_us);
    assert!(report.time_us < 2.0 * 30.0 * 1_048_576.0 / 12_500.0, "{}", report.time_us);
}

#[test]
fn impossible_configurations_are_refused() {
    let mut fabric = Fabric::leaf_spine(16, 4, 100.0);
    fabric.spines = 0;
    let refused = run(Config::new(fabric, 1), &Workload::Kv { load: 0.5 }).unwrap_err();
    assert!(refused.to_string().contains("need spines"), "{refused}");
    let config = Config::new(Fabric::single_switch(4, 100.0), 1);
    for load in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let refused = run(config.clone(), &Workload::Kv { load }).unwrap_err();
        assert!(refused.to_string().contains("invalid load"), "{refused}");
    }
    let workload = Workload::Incast { senders: 4, message: 1, short: 0, short_load: 0.0 };
    assert!(run(config, &workload).unwrap_err().to_string().contains("need 5 hosts"));
}
