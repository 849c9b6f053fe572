//! Messages of every size, from GPU to GPU: right bytes, nothing beside them, and the path that the
//! registration names.

use fake_cuda::client::StandIn;
use nobounce_memory::gpu::calibration::Calibration;
use nobounce_memory::path::{Mechanism, Path};
use nobounce_nic::tally::PathTotals;
use nobounce_nic::work::Mtu;

use crate::common::on_gpu::used;
use crate::common::pair;
use crate::rig::{GpuMethod, Kind, Rig};
use crate::traffic::{Plan, Regions};

/// Around words, lines, packets, the first fetch, the sum of the first two, chunks.
const SIZES: [usize; 20] = [
    1, 7, 8, 63, 64, 65, 1024, 1025, 4095, 4096, 4097, 20_000, 65_535, 65_536, 65_537, 196_609, 262_143,
    262_144, 262_145, 1_048_579,
];

fn every_size(name: &'static str, net: u8, kind: Kind, way: GpuMethod, direct: bool) {
    let Some(rig) = Rig::new(name) else { return };
    let calibration = Calibration::of(&rig.gpu).unwrap();
    println!("figure: {calibration}");
    if rig.is_stand_in() {
        // As drivers before CUDA 13.3 are.
        StandIn::load().refuse_dmabuf_mmap(i32::from(kind == Kind::Pool));
    }
    let crossover = calibration.load_crossover;
    let mut sizes = SIZES.to_vec();
    sizes.extend([crossover.saturating_sub(1).max(1), crossover.max(1), crossover + 1]);
    for (n, mtu) in [Mtu::Mtu1024, Mtu::Mtu4096].into_iter().enumerate() {
        let (a, b) = pair(&format!("127.85.{net}.{}", n + 1), 4096, mtu);
        let plan = Plan::new(&rig, kind, &sizes);
        let regions = plan.register(&a, &b, way);
        assert!(!direct || regions.source.paths().are_direct(), "{}", regions.source.paths());
        plan.fill(&rig);
        let times = plan.run(&a, &b, &regions);
        println!("figure: {kind:?}, {way:?}, {mtu:?}: {times}; {}", regions.source.paths());
        plan.check(&rig, &format!("{kind:?}, {way:?}, {mtu:?}"));

        let (at_a, at_b) = (a.device.path_counters(), b.device.path_counters());
        placed_as_registered(&plan, &regions, &at_b.inbound, 2);
        placed_as_registered(&plan, &regions, &at_a.inbound, 1);
        gathered_as_registered(&plan, &regions, &at_a.outbound, 2);
        gathered_as_registered(&plan, &regions, &at_b.outbound, 1);
        assert_eq!((a.counter("icrc_errors"), b.counter("icrc_errors")), (0, 0));
        assert_eq!((a.counter("memory_faults"), b.counter("memory_faults")), (0, 0));
    }
    if rig.is_stand_in() {
        StandIn::load().refuse_dmabuf_mmap(0);
    }
}

/// Received bytes, `times` over, took the path of the registration, and no other.
#[track_caller]
fn placed_as_registered(plan: &Plan, regions: &Regions, totals: &PathTotals, times: u64) {
    let (way, tally) = match regions.written.paths().inbound {
        Path::Direct(Mechanism::Window) => ("window", totals.window),
        Path::Staged(_) => ("staged", totals.staged),
        Path::Direct(_) | Path::Believed(..) => panic!("{}", regions.written.paths()),
    };
    assert_eq!(used(totals), [way]);
    assert_eq!((tally.bytes, tally.operations), (plan.bytes() * times, plan.messages() * times));
}

/// Sent bytes took the path of the registration; some of them perhaps twice, where packets were
/// lost.
#[track_caller]
fn gathered_as_registered(plan: &Plan, regions: &Regions, totals: &PathTotals, times: u64) {
    let window = regions.source.gpu_memory().is_some_and(|memory| memory.window().is_some());
    let ways = match (&regions.source.paths().outbound, window) {
        (Path::Staged(_), _) => vec!["staged"],
        (Path::Direct(_), true) => vec!["window", "copy-engine"],
        (Path::Direct(_), false) => vec!["copy-engine"],
        (Path::Believed(..), _) => panic!("{}", regions.source.paths()),
    };
    assert_eq!(used(totals), ways);
    let bytes: u64 = totals.list().iter().map(|(_, tally)| tally.bytes).sum();
    assert!(bytes >= plan.bytes() * times, "{bytes}: {totals:?}");
}

#[test]
fn direct_vmm() {
    every_size("direct_vmm", 1, Kind::Buffer, GpuMethod::Direct, true);
}

#[test]
fn direct_cuda_malloc() {
    every_size("direct_cuda_malloc", 2, Kind::Malloc, GpuMethod::Direct, true);
}

/// Memory of a pool, which drivers before CUDA 13.3 do not let other code map.
#[test]
fn whatever_a_pool_gets() {
    every_size("whatever_a_pool_gets", 3, Kind::Pool, GpuMethod::Direct, false);
}

#[test]
fn staged_on_request() {
    every_size("staged_on_request", 4, Kind::Buffer, GpuMethod::Staged, false);
}

#[test]
fn window_off_by_option() {
    every_size("window_off_by_option", 5, Kind::Malloc, GpuMethod::WindowOff, false);
}
