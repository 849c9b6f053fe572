//! An application kernel occupies every multiprocessor, perhaps waiting for our network: the NIC
//! must not wait for it.

use std::time::{Duration, Instant};

use nobounce_nic::work::Mtu;

use crate::common::pair;
use crate::occupied::Occupier;
use crate::rig::{GpuMethod, Kind, Rig};
use crate::traffic::{Plan, Times};

const SIZES: [usize; 8] = [1, 64, 4096, 4097, 65_536, 262_145, 1 << 20, 3 << 20];
/// Time limit of everything: seconds less than the kernel spins.
const LIMIT: Duration = Duration::from_secs(5);

#[test]
fn traffic_goes_on() {
    let Some(rig) = Rig::new("spinning::traffic_goes_on") else { return };
    let mut occupier = Occupier::new(&rig);
    for (n, kind) in [Kind::Buffer, Kind::Malloc].into_iter().enumerate() {
        let (times, waited) =
            beside_a_kernel(&rig, &mut occupier, &format!("127.85.11.{}", n + 1), (kind, GpuMethod::Direct));
        assert!(!waited && times.total < LIMIT, "{kind:?}: {times}");
    }
}

/// Memory without a window needs copies. On an H200 the driver lets them wait for such a kernel in
/// a fifth of all runs, with 8 hardware queues and with 32. They are made when it ends.
#[test]
fn staged_traffic_waits_for_the_kernel_at_most() {
    let Some(rig) = Rig::new("spinning::staged_traffic_waits_for_the_kernel_at_most") else { return };
    let mut occupier = Occupier::new(&rig);
    let cases = [
        (Kind::Pool, GpuMethod::Direct),
        (Kind::Malloc, GpuMethod::Staged),
        (Kind::Buffer, GpuMethod::WindowOff),
    ];
    for (n, case) in cases.into_iter().enumerate() {
        beside_a_kernel(&rig, &mut occupier, &format!("127.85.13.{}", n + 1), case);
    }
}

/// Traffic while a kernel spins, for [`LIMIT`] at most: its times, and whether it waited for the
/// kernel's end. The bytes are right in either case.
fn beside_a_kernel(
    rig: &Rig,
    occupier: &mut Occupier,
    addr: &str,
    (kind, way): (Kind, GpuMethod),
) -> (Times, bool) {
    let (a, b) = pair(addr, 4096, Mtu::Mtu4096);
    let plan = Plan::new(rig, kind, &SIZES);
    plan.fill(rig);
    let regions = plan.register(&a, &b, way);
    let idle = plan.run(&a, &b, &regions);
    plan.fill(rig);
    let occupied = occupier.start();
    let (times, waited) = std::thread::scope(|scope| {
        let traffic = scope.spawn(|| plan.run(&a, &b, &regions));
        let begin = Instant::now();
        while !traffic.is_finished() && begin.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        let waited = !traffic.is_finished();
        occupied.still();
        drop(occupied);
        (traffic.join().unwrap(), waited)
    });
    plan.check(rig, &format!("{kind:?}, {way:?}, under a spinning kernel"));
    let waited_for = if waited { "; WAITED FOR THE KERNEL" } else { "" };
    println!("figure: spinning kernel, {kind:?}, {way:?}: {times}{waited_for}; idle GPU: {idle}");
    (times, waited)
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
    let regions = plan.register(&a, &b, GpuMethod::Direct);
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
