//! An application kernel occupies every multiprocessor, perhaps waiting for our network: the NIC
//! must not wait for it.

use std::time::{Duration, Instant};

use nobounce_nic::soft::Mtu;

use crate::common::pair;
use crate::occupied::Occupier;
use crate::rig::{Kind, Rig, Way};
use crate::traffic::Plan;

const SIZES: [usize; 8] = [1, 64, 4096, 4097, 65_536, 262_145, 1 << 20, 3 << 20];
/// Time limit of everything: seconds less than the kernel spins.
const LIMIT: Duration = Duration::from_secs(5);

#[test]
fn traffic_goes_on() {
    let Some(rig) = Rig::new("spinning::traffic_goes_on") else { return };
    goes_on(&rig, 11, &[(Kind::Buffer, Way::Direct), (Kind::Malloc, Way::Direct)]);
}

/// Memory without a window needs copies, which must not share a hardware queue with the kernel.
#[test]
fn staged_traffic_goes_on_with_queues_to_spare() {
    // SAFETY: every test has a process of its own, and CUDA is not initialised yet.
    unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    let Some(rig) = Rig::new("spinning::staged_traffic_goes_on_with_queues_to_spare") else { return };
    goes_on(
        &rig,
        13,
        &[(Kind::Pool, Way::Direct), (Kind::Malloc, Way::Staged), (Kind::Buffer, Way::WindowOff)],
    );
}

fn goes_on(rig: &Rig, net: u8, cases: &[(Kind, Way)]) {
    let mut occupier = Occupier::new(rig);
    for (n, &(kind, way)) in cases.iter().enumerate() {
        let (a, b) = pair(&format!("127.85.{net}.{}", n + 1), 4096, Mtu::Mtu4096);
        let plan = Plan::new(rig, kind, &SIZES);
        plan.fill(rig);
        let regions = plan.register(&a, &b, way);
        let idle = plan.run(&a, &b, &regions);
        plan.fill(rig);
        let occupied = occupier.start();
        let times = plan.run(&a, &b, &regions);
        occupied.still();
        drop(occupied);
        plan.check(rig, &format!("{kind:?}, {way:?}, under a spinning kernel"));
        println!("figure: spinning kernel, {kind:?}, {way:?}: {times}; idle GPU: {idle}");
        assert!(times.total < LIMIT, "{times}");
    }
}

/// The first registration of the process proves the recipe, calibrates, and allocates chunks: also
/// that while kernels spin. And what was made is taken down before they end.
#[test]
fn first_registration_and_last_deregistration() {
    let Some(rig) = Rig::new("spinning::first_registration_and_last_deregistration") else { return };
    let mut occupier = Occupier::new(&rig);
    let plan = Plan::new(&rig, Kind::Malloc, &SIZES);
    plan.fill(&rig);
    let occupied = occupier.start();
    let begin = Instant::now();
    let (a, b) = pair("127.85.12.1", 4096, Mtu::Mtu4096);
    let regions = plan.register(&a, &b, Way::Direct);
    let registered = begin.elapsed();
    assert!(regions.source.paths().are_direct(), "{}", regions.source.paths());
    let times = plan.run(&a, &b, &regions);
    let begin = Instant::now();
    drop((regions, a, b));
    let closed = begin.elapsed();
    occupied.still();
    drop(occupied);
    plan.check(&rig, "all of it under a spinning kernel");
    println!(
        "figure: spinning kernel: first registrations {registered:.1?}; {times}; deregistered and closed {closed:.1?}"
    );
    assert!(registered + times.total + closed < LIMIT);
}
