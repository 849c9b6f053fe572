//! Properties of the model: more never hurts, direct beats staging as a whole, and limits hold.

use nobounce_predict::calibration::{Bench, Calibration};
use nobounce_predict::fabric::{Fabric, Kind};
use nobounce_predict::factor::Factor;
use nobounce_predict::model::direct;
use nobounce_predict::parts::{End, Memory, Op, Parts, Software, Spec};
use nobounce_predict::report::{MAX_SIZE, report};
use nobounce_predict::slot::Slot;
use nobounce_predict::soft::{Soft, Via};
use nobounce_predict::staging::staged;
use nobounce_topology::facts::GpuVendor;
use nobounce_topology::platform::Platform;
use nobounce_topology::tree::Distance;
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;

fn software() -> impl Strategy<Value = Software> {
    prop::sample::select(vec![Software::Verbs, Software::Nccl, Software::Nobounce])
}

fn link() -> impl Strategy<Value = Fabric> {
    let names = ["sdr", "ddr", "qdr", "fdr10", "fdr", "edr", "hdr", "ndr", "xdr"];
    let infiniband = prop::sample::select(names.to_vec()).prop_map(|name| Fabric::infiniband(name).unwrap());
    let kinds = vec![Kind::RoceV1, Kind::RoceV2, Kind::RoceV2Ipv6, Kind::Iwarp];
    let rates = vec![10.0, 25.0, 40.0, 50.0, 100.0, 200.0, 400.0, 800.0];
    let ethernet = (prop::sample::select(kinds), prop::sample::select(rates));
    prop_oneof![infiniband, ethernet.prop_map(|(kind, gbps)| Fabric { kind, gbps })]
}

fn slot() -> impl Strategy<Value = Slot> {
    (1_u32..=7, prop::sample::select(vec![1_u32, 2, 4, 8, 16]))
        .prop_map(|(generation, lanes)| Slot { generation, lanes })
}

fn platform() -> impl Strategy<Value = Platform> {
    prop::sample::select(vec![
        Platform::XeonSkylake,
        Platform::SapphireRapids,
        Platform::EmeraldRapids,
        Platform::Zen,
        Platform::Grace,
        Platform::Other,
    ])
}

fn parts() -> impl Strategy<Value = Parts> {
    parts_in(vec![Memory::Gpu, Memory::Host])
}

prop_compose! {
    fn parts_in(memories: Vec<Memory>)(
        memory in prop::sample::select(memories),
        link in link(),
        (nic, gpu) in (slot(), slot()),
        (rails, gpus, sharers, hops) in (1_u32..=64, 1_u32..=8, 1_u32..=4, 0_u32..=5),
        distance in prop::sample::select(Distance::ALL.to_vec()),
        platform in platform(),
        software in software(),
        (relaxed, read, queue_pairs) in (any::<bool>(), any::<bool>(), 0_u32..=4),
        (payload, request, mtu) in (0_u32..=2, 0_u32..=5, 0_u32..=4),
        dram in 20.0..1000.0_f64,
    ) -> Parts {
        let mtu = match link.kind { Kind::Iwarp | Kind::Efa => 1460, _ => 256 << mtu };
        // Devices attached to a CPU's slots are no faster than the slots.
        let most = platform.fastest_slot().filter(|_| !distance.is_below_switch()).unwrap_or(u32::MAX);
        let (nic, gpu) = (nic.at_most(most), gpu.at_most(most));
        // Between sockets of an unknown processor nothing is predicted.
        let far = distance == Distance::Sys && platform.between_sockets().is_none();
        let distance = if far { Distance::Node } else { distance };
        Spec {
            link: Some(link),
            mtu: Some(mtu),
            hops: Some(hops),
            rails: Some(rails),
            far_rails: None,
            nic: Some(nic),
            gpu: (memory == Memory::Gpu).then_some(gpu),
            coherent: None,
            gpus: Some(gpus),
            memory: Some(memory),
            host_end: None,
            gpu_vendor: None,
            distance: Some(distance),
            platform: Some(platform),
            relaxed_ordering: Some(relaxed),
            max_payload: Some(128 << payload),
            max_read_request: Some(128 << request),
            bar1: None,
            acs_redirect: None,
            iommu: None,
            unavailable: None,
            port_down: None,
            dram: Some(dram),
            memory_per_socket: None,
            sockets: None,
            software: Some(software),
            queue_pairs: Some(queue_pairs),
            operation: Some(if read { Op::Read } else { Op::Write }),
            chunk: None,
            sharers: Some(sharers),
        }
        .resolve()
        .unwrap()
    }
}

fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(MAX_SIZE), (0_u32..=40).prop_map(|power| 1 << power), 0..=MAX_SIZE]
}

prop_compose! {
    /// The software NIC of a machine whose passes found anything: sizes that stall or fly, alone or
    /// in most passes.
    fn calibrated()(
        base in 0.3..20.0_f64,
        byte in 0.0..0.002_f64,
        odd in prop::collection::vec(0.1..6.0_f64, 18),
        passes in prop::collection::vec(0.5..2.0_f64, 0..12),
    ) -> Parts {
        let case = |(at, odd): (usize, &f64)| {
            let size = [1_u64, 8, 64, 512, 4096, 32768, 262_144, 1 << 20, 8 << 20][at / 2];
            #[allow(clippy::cast_precision_loss)]
            let bytes = size as f64;
            let time = (base + byte * bytes) * odd;
            let (kind, name, figure) = match at % 2 {
                0 => ("latency", "p50_us", time),
                _ => ("bandwidth", "gbytes_per_s", bytes / time / 1000.0),
            };
            let passes: Vec<f64> = passes.iter().map(|factor| figure * factor).collect();
            serde_json::json!({"op": "write", "kind": kind, "size": size, "qps": 1, "memory": "host", "path": "direct",
                "mtu": 4096, "wait": "cq", "passes": passes, name: figure})
        };
        let results: Vec<_> = odd.iter().enumerate().map(case).collect();
        let run = serde_json::json!({"schema": "nobounce-bench/1", "results": results}).to_string();
        let calibration = Calibration::of(&[Bench::from_json(&run).unwrap()]).unwrap();
        let spec = Spec {
            link: "loopback:1000".parse().ok(),
            memory: Some(Memory::Host),
            software: Some(Software::Nobounce),
            ..Spec::default()
        };
        Parts { soft: Soft::of_calibration(calibration, Via::default(), 4096), ..spec.resolve().unwrap() }
    }
}

/// Whether anything is predicted: not NCCL's short messages, nor reads of a GPU through a Zen CPU
/// by hardware.
fn is_known(parts: &Parts, size: u64) -> bool {
    let is_short = parts.software == Software::Nccl && size < 1 << 20;
    let is_zen = parts.platform == Platform::Zen && parts.gpu_over_pcie() && parts.through_processor();
    let is_refused = is_zen && parts.software != Software::Nobounce;
    !(is_short || is_refused)
}

/// Time and rate of the direct way.
fn figures(parts: &Parts, size: u64) -> (f64, f64) {
    let found = direct(parts, size).unwrap();
    (found.microseconds.expected, found.gbytes_per_s.expected)
}

/// Whether long messages are bound by reads that are too short for the way to the GPU, by an order
/// of writes that the processor keeps for GPUs only.
fn loses_between_devices(parts: &Parts) -> bool {
    match direct(parts, MAX_SIZE).unwrap().stream_binds {
        Factor::ReadWindow => true,
        Factor::StrictOrder => parts.platform.strict_order_of_host().is_none(),
        _ => false,
    }
}

/// Whether a change that gives more of something did not make anything worse.
fn not_worse(before: &Parts, after: &Parts, size: u64) -> Result<(), TestCaseError> {
    let ((time, rate), (new_time, new_rate)) = (figures(before, size), figures(after, size));
    prop_assert!(new_time <= time * 1.000_001, "{time} us became {new_time}");
    prop_assert!(new_rate >= rate * 0.999_999, "{rate} GB/s became {new_rate}");
    let (old, new) = (staged(before, size, true).unwrap(), staged(after, size, true).unwrap());
    prop_assert!(new.microseconds.expected <= old.microseconds.expected * 1.000_001, "staged");
    prop_assert!(new.gbytes_per_s.expected >= old.gbytes_per_s.expected * 0.999_999, "staged");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn more_bandwidth_never_lowers_the_prediction(parts in parts(), size in sizes()) {
        if !is_known(&parts, size) {
            return Ok(());
        }
        if let Some(link) = parts.link.next() {
            not_worse(&parts, &Parts { link, ..parts.clone() }, size)?;
        }
        if let Some(nic) = parts.nic.next() {
            not_worse(&parts, &Parts { nic, ..parts.clone() }, size)?;
        }
        if let Some(gpu) = parts.gpu.and_then(Slot::next) {
            not_worse(&parts, &Parts { gpu: Some(gpu), ..parts.clone() }, size)?;
        }
        not_worse(&parts, &Parts { dram: parts.dram * 2.0, ..parts.clone() }, size)?;
        not_worse(&parts, &Parts { rails: parts.rails * 2, ..parts.clone() }, size)?;
        not_worse(&parts, &Parts { relaxed_ordering: true, ..parts.clone() }, size)?;
        not_worse(&parts, &Parts { max_read_request: 4096, ..parts.clone() }, size)?;
    }

    /// Unless the direct way is bound by something that only traffic between devices meets. Which
    /// parts these are is in docs/reference/predict-model.md.
    #[test]
    fn direct_is_never_slower_than_staging_as_a_whole(parts in parts_in(vec![Memory::Gpu]), size in sizes()) {
        if !is_known(&parts, size) {
            return Ok(());
        }
        let (time, _) = figures(&parts, size);
        let whole = staged(&parts, size, false).unwrap().microseconds.expected;
        let slower = time > whole * 1.000_001;
        prop_assert!(!slower || loses_between_devices(&parts), "direct {time} us, staged {whole} us");
    }

    /// With the settings that vendors advise there is no exception.
    #[test]
    fn direct_is_never_slower_with_settings_as_they_should_be(parts in parts_in(vec![Memory::Gpu]), size in sizes()) {
        if !is_known(&parts, size) {
            return Ok(());
        }
        let parts = Parts { relaxed_ordering: true, max_read_request: 4096, ..parts };
        let whole = staged(&parts, size, false).unwrap().microseconds.expected;
        prop_assert!(figures(&parts, size).0 <= whole * 1.000_001);
    }

    #[test]
    fn every_figure_is_one_and_bands_hold_it(parts in parts(), size in sizes()) {
        let found = report("any", &parts, &[size]);
        let row = &found.rows[0];
        for one in [&row.direct, &row.staged, &row.unpipelined].into_iter().flatten() {
            let time = one.microseconds;
            prop_assert!(time.expected.is_finite() && time.expected > 0.0, "{one:?}");
            prop_assert!(time.low <= time.expected && time.expected <= time.high);
            let rate = one.gbytes_per_s;
            prop_assert!(rate.expected.is_finite() && rate.expected >= 0.0, "{one:?}");
            prop_assert!(rate.low <= rate.expected && rate.expected <= rate.high);
            prop_assert!((size == 0) == (rate.expected == 0.0), "{one:?}");
            let sum: f64 = one.shares.iter().map(|share| share.microseconds).sum();
            prop_assert!((sum / time.expected - 1.0).abs() < 1e-9);
        }
    }

    /// What was seen on a machine is added, and named; whatever it was, it is no more than the
    /// rest, and no longer message is quicker by it.
    #[test]
    fn what_was_seen_on_a_machine_keeps_the_properties(parts in calibrated(), size in sizes(), more in sizes()) {
        let found = direct(&parts, size).unwrap();
        let sum: f64 = found.shares.iter().map(|share| share.microseconds).sum();
        prop_assert!((sum / found.microseconds.expected - 1.0).abs() < 1e-9 && sum > 0.0);
        let seen = found.seen_us();
        let rest = found.microseconds.expected - seen;
        prop_assert!(seen <= rest * 1.000_001 && seen >= -rest / 1.999_99, "{seen} of {rest} us");
        prop_assert!(found.binds != Factor::Seen || seen > 0.0);
        prop_assert!(found.shares.iter().all(|share| share.microseconds > 0.0 || share.factor == Factor::Seen));
        prop_assert!(found.shares.iter().all(|share| found.part(share) <= 1.0));
        let (short, long) = (size.min(more), size.max(more));
        prop_assert!(figures(&parts, short).0 <= figures(&parts, long).0 * 1.000_001);
        if let Some(link) = parts.link.next() {
            not_worse(&parts, &Parts { link, ..parts.clone() }, size)?;
        }
        not_worse(&parts, &Parts { dram: parts.dram * 2.0, ..parts.clone() }, size)?;
    }

    #[test]
    fn longer_messages_take_longer_over_plain_verbs(parts in parts(), size in sizes(), more in sizes()) {
        let parts = Parts { software: Software::Verbs, ..parts };
        let (short, long) = (size.min(more), size.max(more));
        if !is_known(&parts, short) {
            return Ok(());
        }
        prop_assert!(figures(&parts, short).0 <= figures(&parts, long).0 * 1.000_001);
    }
}

/// The best of many, so that a busy machine does not fail it; with a calibration that has seen
/// something, and without.
#[test]
fn alone_a_prediction_takes_less_than_a_millisecond() {
    let best = |parts: &Parts| {
        let once = |_| {
            let start = std::time::Instant::now();
            let found = direct(std::hint::black_box(parts), 300_000).unwrap();
            let way = staged(parts, 300_000, true).unwrap();
            std::hint::black_box((found, way));
            start.elapsed()
        };
        (0..200).map(once).min().unwrap()
    };
    let gpu = Spec { link: Fabric::infiniband("ndr"), ..Spec::default() }.resolve().unwrap();
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let seen = |_| calibrated().new_tree(&mut runner).unwrap().current();
    let has_seen = |parts: &Parts| direct(parts, 300_000).unwrap().seen_us() != 0.0;
    let seen = (0..100).map(seen).find(has_seen).expect("some machine was seen to differ");
    for parts in [gpu, seen] {
        let took = best(&parts);
        assert!(took < std::time::Duration::from_millis(1), "{took:?}");
    }
}

/// The table of docs/reference/predict-model.md: the longest read requests with which the direct
/// way loses against staging as a whole.
#[test]
fn short_read_requests_lose_as_documented() {
    let longest = |link: &str, generation: u32, distance: Distance| {
        let loses = |request: &u32| {
            let spec = Spec {
                link: Fabric::infiniband(link),
                nic: Slot::new(generation, 16).ok(),
                gpu: Slot::new(generation, 16).ok(),
                distance: Some(distance),
                platform: Some(Platform::EmeraldRapids),
                max_read_request: Some(*request),
                ..Spec::default()
            };
            let parts = spec.resolve().unwrap();
            figures(&parts, 1 << 30).0 > staged(&parts, 1 << 30, false).unwrap().microseconds.expected
        };
        [128, 256, 512, 1024, 2048, 4096].into_iter().filter(loses).max().unwrap_or(0)
    };
    for (link, generation, wanted) in [
        ("edr", 3, [0, 0, 128]),
        ("hdr", 4, [128, 128, 256]),
        ("ndr", 5, [256, 256, 512]),
        ("xdr", 6, [512, 512, 512]),
    ] {
        let found =
            [Distance::Pix, Distance::Phb, Distance::Sys].map(|distance| longest(link, generation, distance));
        assert_eq!(found, wanted, "{link} on Gen{generation}");
    }
}

/// Adapters on the other socket add no more than its link carries, and what is known of old
/// processors is too little.
#[test]
fn rails_on_the_other_socket_share_its_link() {
    let rate = |far: u32, platform: Platform| {
        let spec = Spec {
            link: Fabric::infiniband("ndr"),
            rails: Some(4),
            far_rails: Some(far),
            gpus: Some(4),
            distance: Some(Distance::Pix),
            platform: Some(platform),
            ..Spec::default()
        };
        direct(&spec.resolve().unwrap(), 1 << 30).map(|one| one.gbytes_per_s.expected)
    };
    let (near, mixed) =
        (rate(0, Platform::SapphireRapids).unwrap(), rate(2, Platform::SapphireRapids).unwrap());
    assert!(near > 190.0 && (115.0..122.0).contains(&mixed), "{near}, {mixed}");
    assert!(rate(2, Platform::Other).is_err());
    let old = Spec {
        link: Fabric::infiniband("fdr"),
        distance: Some(Distance::Phb),
        platform: Some(Platform::XeonOld),
        ..Spec::default()
    };
    assert!(direct(&old.resolve().unwrap(), 1 << 20).unwrap_err().to_string().contains("older than Skylake"));
}

/// Where no figure decides, nothing is predicted; where none validates, the band is the widest.
#[test]
fn what_no_source_measured_is_refused_or_wide() {
    let ndr = Spec { link: Fabric::infiniband("ndr"), ..Spec::default() };
    let band = |spec: &Spec, size: u64| {
        let found = direct(&spec.resolve().unwrap(), size).map_err(|why| why.to_string())?;
        Ok::<f64, String>(found.microseconds.high / found.microseconds.expected)
    };
    let placed = Spec { distance: Some(Distance::Pix), ..ndr.clone() };
    assert!(band(&placed, 1 << 20).unwrap() < 1.3);
    let slot = Slot::new(6, 16).ok();
    for (what, spec) in [
        ("an assumed distance", ndr.clone()),
        ("EFA", Spec { link: "efa:400".parse().ok(), ..placed.clone() }),
        ("iWARP", Spec { link: "iwarp:100".parse().ok(), ..placed.clone() }),
        ("above 400", Spec { link: Fabric::infiniband("xdr"), ..placed.clone() }),
        ("Gen6", Spec { nic: slot, gpu: slot, ..placed.clone() }),
        ("unknown processor", Spec { distance: Some(Distance::Node), ..ndr.clone() }),
        ("RDMA READ", Spec { operation: Some(Op::Read), ..placed.clone() }),
        ("NVIDIA", Spec { gpu_vendor: Some(GpuVendor::Amd), ..placed.clone() }),
    ] {
        let said = spec.resolve().unwrap().unvalidated(1 << 20).join("; ");
        assert!(said.contains(what), "{what}: {said}");
        for size in [64 << 10, 1 << 20] {
            // EFA's short messages are not predicted at all.
            let wide = match band(&spec, size) {
                Ok(factor) => factor > 1.9,
                Err(_) => what == "EFA" && size < 1 << 20,
            };
            assert!(wide, "{what} at {size}: {:?}", band(&spec, size));
        }
        assert!(report(what, &spec.resolve().unwrap(), &[1 << 20]).text().contains("widest band"), "{what}");
    }
    let nccl = Spec { software: Some(Software::Nccl), ..placed.clone() };
    assert!(band(&nccl, 64 << 10).unwrap_err().contains("LL128") && band(&nccl, 1 << 20).is_ok());
    let zen = |distance| Spec { distance, platform: Some(Platform::Zen), ..ndr.clone() };
    for distance in [None, Some(Distance::Node), Some(Distance::Sys)] {
        assert!(band(&zen(distance), 1 << 20).unwrap_err().contains("Zen"), "{distance:?}");
    }
    assert!(band(&zen(Some(Distance::Pix)), 1 << 20).is_ok());
    let into = Spec { host_end: Some(End::Source), ..zen(Some(Distance::Node)) };
    assert!(band(&into, 1 << 20).is_ok());
}

/// The memory of a Zen is known only with its model, and its assumption is listed.
#[test]
fn memory_of_a_zen_is_assumed_unless_its_model_is_known() {
    let host = Spec {
        link: Fabric::infiniband("ndr"),
        memory: Some(Memory::Host),
        rails: Some(8),
        platform: Some(Platform::Zen),
        ..Spec::default()
    };
    let parts = host.resolve().unwrap();
    assert!(parts.assumed.iter().any(|line| line.contains("DDR4-3200") && line.contains("--dram")));
    assert!(direct(&parts, 1 << 20).unwrap_err().to_string().contains("--dram"));
    let known = Spec { memory_per_socket: Some(460.8), ..host }.resolve().unwrap();
    assert!(direct(&known, 1 << 20).is_ok() && known.dram > 300.0);
}

/// Classes with several generations of memory do not tell it.
#[test]
fn memory_of_a_xeon_is_assumed_unless_its_model_is_known() {
    for platform in [Platform::XeonSkylake, Platform::EmeraldRapids] {
        let host = Spec {
            link: Fabric::infiniband("ndr"),
            memory: Some(Memory::Host),
            rails: Some(4),
            platform: Some(platform),
            ..Spec::default()
        };
        let parts = host.resolve().unwrap();
        let lines: Vec<_> = parts.assumed.iter().filter(|line| line.contains("host memory")).collect();
        assert!(
            lines.len() == 1 && lines[0].contains("one socket") && lines[0].contains("--dram"),
            "{lines:?}"
        );
        assert!(direct(&parts, 1 << 20).is_err());
        assert!(direct(&Spec { memory_per_socket: Some(204.8), ..host }.resolve().unwrap(), 1 << 20).is_ok());
    }
}

/// Host memory that limits a figure is listed once, unless it is stated.
#[test]
fn host_memory_that_limits_is_listed_once() {
    let spec = Spec {
        link: Fabric::infiniband("ndr"),
        distance: Some(Distance::Pix),
        platform: Some(Platform::SapphireRapids),
        rails: Some(8),
        gpus: Some(8),
        ..Spec::default()
    };
    let lines = |spec: &Spec, size: u64| {
        let found = report("any", &spec.resolve().unwrap(), &[size]);
        found.parts.assumed.iter().filter(|line| line.contains("host memory")).count()
    };
    assert_eq!(lines(&spec, 1 << 30), 1);
    assert_eq!(lines(&Spec { dram: Some(200.0), ..spec.clone() }, 1 << 30), 0);
    assert_eq!(lines(&Spec { rails: Some(1), gpus: Some(1), ..spec.clone() }, 1 << 30), 0);
    assert_eq!(lines(&Spec { memory: Some(Memory::Host), gpus: None, ..spec }, 1 << 30), 1);
}

/// A translating IOMMU is in the way of host memory and of staging, too.
#[test]
fn a_translating_iommu_stops_every_prediction() {
    for memory in [Memory::Host, Memory::Gpu] {
        let spec = Spec {
            link: Fabric::infiniband("edr"),
            memory: Some(memory),
            iommu: Some(true),
            ..Spec::default()
        };
        let parts = spec.resolve().unwrap();
        assert!(direct(&parts, 1 << 20).unwrap_err().to_string().contains("iommu=pt"), "{memory:?}");
        assert!(staged(&parts, 1 << 20, true).is_err());
    }
}

/// A core moves the bytes of the software NIC: no packet passes from device to device.
#[test]
fn limits_between_devices_do_not_stop_the_software_nic() {
    let fdr = Spec { link: Fabric::infiniband("fdr"), ..Spec::default() };
    for (distance, platform) in [
        (Distance::Node, Platform::XeonOld),
        (Distance::Node, Platform::Zen),
        (Distance::Sys, Platform::Other),
    ] {
        let by = |software| {
            let (distance, platform) = (Some(distance), Some(platform));
            Spec { distance, platform, software: Some(software), ..fdr.clone() }.resolve().unwrap()
        };
        assert!(direct(&by(Software::Verbs), 1 << 20).is_err(), "{platform:?}");
        let soft = by(Software::Nobounce);
        assert!(direct(&soft, 1 << 20).is_ok(), "{platform:?}: {:?}", direct(&soft, 1 << 20));
        let here = Parts { link: "loopback:1000".parse().unwrap(), ..by(Software::Verbs) };
        assert!(direct(&here, 1 << 20).is_ok(), "{platform:?}: {:?}", direct(&here, 1 << 20));
    }
}

#[test]
fn limits_hold() {
    let one_lane = Spec { link: Fabric::infiniband("ndr"), nic: Slot::new(5, 1).ok(), ..Spec::default() };
    let found = direct(&one_lane.resolve().unwrap(), 1 << 30).unwrap();
    assert!((3.0..3.6).contains(&found.gbytes_per_s.expected), "{found:?}");
    let rails = Spec {
        link: Fabric::infiniband("ndr"),
        rails: Some(64),
        memory: Some(Memory::Host),
        dram: Some(10_000.0),
        ..Spec::default()
    };
    let found = direct(&rails.resolve().unwrap(), 1 << 40).unwrap();
    assert!((3000.0..3179.0).contains(&found.gbytes_per_s.expected), "{found:?}");
    let empty = direct(&rails.resolve().unwrap(), 0).unwrap();
    assert!(empty.gbytes_per_s.expected == 0.0 && empty.microseconds.expected > 0.5);
}
