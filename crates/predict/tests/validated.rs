//! What the model calls validated against the figures that are scored.

use std::collections::BTreeSet;

use nobounce_predict::fabric::{Fabric, Kind};
use nobounce_predict::interval::Length;
use nobounce_predict::model::direct;
use nobounce_predict::parts::{Memory, Op, Parts, Software, Spec};
use nobounce_predict::published::rows;
use nobounce_topology::platform::Platform;
use nobounce_topology::tree::Distance;

const PLATFORMS: [Platform; 8] = [
    Platform::IntelClient,
    Platform::XeonOld,
    Platform::XeonSkylake,
    Platform::SapphireRapids,
    Platform::EmeraldRapids,
    Platform::Zen,
    Platform::Grace,
    Platform::Other,
];

/// What makes two transfers alike: the network, the way between memory and adapter, and the
/// processor where packets pass it. RoCE's versions differ by their headers only.
fn like(parts: &Parts, size: u64) -> String {
    let link = match parts.link.kind {
        Kind::RoceV1 | Kind::RoceV2 | Kind::RoceV2Ipv6 => "RoCE".to_owned(),
        kind => format!("{kind:?}"),
    };
    let way = match (parts.gpu_over_pcie(), parts.through_processor()) {
        (false, _) => String::new(),
        (true, false) => format!("{:?}, placed: {}", parts.distance, parts.is_placed),
        (true, true) => format!("{:?}, {:?}, {}", parts.distance, parts.platform, parts.acs_redirect),
    };
    let ends = format!("{:?} {:?} {:?}", parts.memory, parts.host_end, parts.far_rails > 0);
    format!("{link}; {way}; {ends}; {:?}; {:?}", parts.operation, Length::of(size))
}

fn scored() -> Vec<(Parts, u64)> {
    let of_row = |row: &nobounce_predict::published::PublishedRow| {
        let parts = row.direct_parts().filter(|_| row.is_scored())?;
        Some(row.points.iter().map(move |(size, _)| (parts.clone(), *size)).collect::<Vec<_>>())
    };
    rows().iter().filter_map(of_row).flatten().filter(|(parts, size)| direct(parts, *size).is_ok()).collect()
}

/// Every transfer that no scored figure is like is named, and has the widest interval.
#[test]
fn transfers_unlike_all_scored_figures_are_unvalidated() {
    let seen: BTreeSet<String> = scored().iter().map(|(parts, size)| like(parts, *size)).collect();
    assert!(seen.len() > 5, "{seen:?}");
    let links =
        ["ib:ndr", "ib-grh:100", "rocev1:100", "rocev2:100", "rocev2-ipv6:100", "iwarp:100", "efa:100"];
    let mut checked = 0;
    for link in links {
        let link: Fabric = link.parse().unwrap();
        for distance in Distance::ALL.into_iter().map(Some).chain([None]) {
            for platform in PLATFORMS {
                for (memory, coherent, redirect) in [
                    (Memory::Host, None, None),
                    (Memory::Gpu, None, None),
                    (Memory::Gpu, None, Some(true)),
                    (Memory::Gpu, Some(true), None),
                ] {
                    for (operation, software) in [
                        (Op::Write, Software::Verbs),
                        (Op::Read, Software::Verbs),
                        (Op::Write, Software::Nccl),
                    ] {
                        let spec = Spec {
                            link: Some(link),
                            nic: "gen3x16".parse().ok(),
                            distance,
                            platform: Some(platform),
                            memory: Some(memory),
                            coherent,
                            acs_redirect: redirect,
                            operation: Some(operation),
                            software: Some(software),
                            ..Spec::default()
                        };
                        let parts = spec.resolve().unwrap();
                        for size in [8, 64 << 10, 1 << 20] {
                            let is_like = seen.contains(&like(&parts, size));
                            let unvalidated = parts.unvalidated(size);
                            checked += 1;
                            assert!(
                                is_like || direct(&parts, size).is_err() || !unvalidated.is_empty(),
                                "no scored figure is like {}",
                                like(&parts, size)
                            );
                        }
                    }
                }
            }
        }
    }
    assert!(checked > 1000);
}

/// The other way round: what is scored is not called unvalidated.
#[test]
fn scored_figures_validate_their_own_kind() {
    for (parts, size) in scored() {
        assert_eq!(parts.unvalidated(size), Vec::<&str>::new(), "{} at {size}", like(&parts, size));
    }
}
