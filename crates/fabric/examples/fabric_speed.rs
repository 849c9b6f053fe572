//! Speed of the simulator: permutation traffic for some time, and an all-to-all of 64 KiB to its
//! end.
//!
//! `cargo run --release -p nobounce-fabric --example fabric_speed -- HOSTS GBITS MICROSECONDS`

use std::time::Instant;

use nobounce_fabric::units::{MICROSECOND, MILLISECOND, Picos};
use nobounce_fabric::{Config, Fabric, Workload};

/// Much longer than the all-to-all takes.
const LONGEST: Picos = 1_000 * MILLISECOND;

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let hosts = args.next().map_or(Ok(256), |hosts| hosts.parse())?;
    let gbits = args.next().map_or(Ok(100.0), |gbits| gbits.parse())?;
    let micros: u64 = args.next().map_or(Ok(1_000), |micros| micros.parse())?;
    for (workload, until) in [
        (Workload::Permutation { message: 1 << 20 }, micros * MICROSECOND),
        (Workload::AllToAll { bytes: 64 << 10, concurrent: 16 }, LONGEST),
    ] {
        let mut config = Config::new(Fabric::leaf_spine(hosts, 32, gbits), until);
        config.sample_every = 10 * MICROSECOND;
        let began = Instant::now();
        let report = nobounce_fabric::run(config, &workload)?;
        let took = began.elapsed().as_secs_f64();
        println!(
            "{}: {:.1} us in {took:.1} s, {:.2} million events/s, goodput {:.3}, Jain {:.3}, deepest queue {} B",
            workload.name(),
            report.time_us,
            report.events as f64 / took / 1e6,
            report.goodput,
            report.jain,
            report.deepest_queue.bytes,
        );
        println!("  {:?}\n  {:?}", report.packets, report.latency_us);
    }
    Ok(())
}
