//! Events per second of the simulator: permutation traffic, and an all-to-all.
//!
//! `cargo run --release -p nobounce-fabric --example fabric_speed -- HOSTS GBITS MICROSECONDS`

use std::time::Instant;

use nobounce_fabric::units::MICROSECOND;
use nobounce_fabric::{Config, Fabric, Workload};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let hosts = args.next().map_or(Ok(256), |hosts| hosts.parse())?;
    let gbits = args.next().map_or(Ok(100.0), |gbits| gbits.parse())?;
    let micros: u64 = args.next().map_or(Ok(200), |micros| micros.parse())?;
    for workload in
        [Workload::Permutation { message: 1 << 20 }, Workload::AllToAll { bytes: 64 << 10, concurrent: 8 }]
    {
        let config = Config::new(Fabric::leaf_spine(hosts, 32, gbits), micros * MICROSECOND);
        let began = Instant::now();
        let report = nobounce_fabric::run(config, &workload)?;
        let took = began.elapsed().as_secs_f64();
        println!(
            "{}: {:.1} us simulated in {took:.1} s, {:.2} million events/s, goodput {:.3}, Jain {:.3}",
            workload.name(),
            report.time_us,
            report.events as f64 / took / 1e6,
            report.goodput,
            report.jain,
        );
        println!(
            "  {:?}\n  {:?}\n  {:?} {:?}",
            report.packets, report.latency_us, report.queue_bytes, report.deepest_queue
        );
    }
    Ok(())
}
