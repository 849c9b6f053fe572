//! What would change most: the next upgrade or setting, by what it buys.

use serde::Serialize;

use super::model::direct;
use super::parts::{MAX_RAILS, Memory, Parts};
use super::slot::Slot;
use super::staging::staged;
use nobounce_topology::tree::Distance;

/// Something that could be changed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Upgrade {
    /// What, for people.
    pub change: String,
    /// Whether it is a setting, or something to buy or move.
    pub free: bool,
    /// GB/s of a stream before.
    pub gbytes_before: f64,
    /// And after.
    pub gbytes_after: f64,
    /// Microseconds of one message before.
    pub microseconds_before: f64,
    /// And after.
    pub microseconds_after: f64,
}

impl Upgrade {
    /// How many times as fast a stream gets.
    #[must_use]
    pub fn factor(&self) -> f64 {
        if self.gbytes_before > 0.0 { self.gbytes_after / self.gbytes_before } else { 1.0 }
    }
}

/// Everything that would make messages of this size at least 2 % faster, the most first.
#[must_use]
pub fn upgrades(parts: &Parts, size: u64) -> Vec<Upgrade> {
    let figures = |parts: &Parts| {
        let estimate = direct(parts, size).ok().or_else(|| staged(parts, size, true).ok())?;
        Some((estimate.gbytes_per_s.expected, estimate.microseconds.expected))
    };
    let Some((gbytes_before, microseconds_before)) = figures(parts) else { return Vec::new() };
    let gain = |one: &Upgrade| one.factor().max(one.microseconds_before / one.microseconds_after);
    let mut found: Vec<Upgrade> = Vec::new();
    for (change, free, parts) in changes(parts) {
        let Some((gbytes_after, microseconds_after)) = figures(&parts) else { continue };
        let one =
            Upgrade { change, free, gbytes_before, gbytes_after, microseconds_before, microseconds_after };
        // What adds parts to a change before it must also add something to what that one buys.
        let needless = found
            .iter()
            .any(|known| one.change.starts_with(&known.change) && gain(&one) < gain(known) * 1.02);
        if gain(&one) > 1.02 && !needless {
            found.push(one);
        }
    }
    found.sort_by(|a, b| gain(b).total_cmp(&gain(a)));
    found
}

fn changes(parts: &Parts) -> Vec<(String, bool, Parts)> {
    let mut found = Vec::new();
    let mut add = |change: String, free: bool, edit: &dyn Fn(&mut Parts)| {
        let mut changed = parts.clone();
        edit(&mut changed);
        found.push((change, free, changed));
    };
    // No card is of a newer generation than the machine it is plugged into.
    let newest = newest_slot(parts);
    let faster = |slot: Slot| slot.next().filter(|next| next.generation <= newest);
    // A link whose adapters need a slot that the machine lacks is no upgrade of it.
    if let Some(link) = parts.link.next().filter(|link| link.usual_slot().generation <= newest) {
        add(link.to_string(), false, &|parts| parts.link = link);
        if let Some(slot) = faster(parts.nic) {
            // The two that hold each other back, together: a faster link needs the slot for it.
            let words = format!("{link} with adapters on {slot}");
            add(words, false, &|parts| (parts.link, parts.nic) = (link, slot));
            if let Some(gpu) = parts.gpu.and_then(faster) {
                let words = format!("{link} with adapters on {slot} and GPUs on {gpu}");
                add(words, false, &|parts| (parts.link, parts.nic, parts.gpu) = (link, slot, Some(gpu)));
            }
        }
    }
    if let Some(slot) = faster(parts.nic) {
        add(format!("the adapter on {slot} instead of {}", parts.nic), false, &|parts| parts.nic = slot);
    }
    if let Some(slot) = parts.gpu.and_then(faster) {
        add(format!("the GPU on {slot}"), false, &|parts| parts.gpu = Some(slot));
    }
    if parts.gpu_over_pcie() && !parts.distance.is_below_switch() {
        add("GPU and adapter below one PCIe switch".to_owned(), false, &|parts| {
            parts.distance = Distance::Pix
        });
    }
    if parts.rails < MAX_RAILS {
        let rails = parts.rails * 2;
        if rails <= MAX_RAILS {
            add(format!("{rails} rails instead of {}", parts.rails), false, &|parts| parts.rails = rails);
        }
    }
    if parts.acs_redirect {
        add("ACS redirect off on the switch's ports".to_owned(), true, &|parts| parts.acs_redirect = false);
    }
    if parts.iommu {
        add("IOMMU pass-through (iommu=pt)".to_owned(), true, &|parts| parts.iommu = false);
    }
    if parts.unavailable.is_some() {
        add("GPUDirect, see `nobounce doctor`".to_owned(), true, &|parts| parts.unavailable = None);
    }
    if !parts.relaxed_ordering {
        add("relaxed ordering".to_owned(), true, &|parts| parts.relaxed_ordering = true);
    }
    if parts.max_read_request < 4096 {
        add("MaxReadReq of 4096 bytes".to_owned(), true, &|parts| parts.max_read_request = 4096);
    }
    if parts.max_payload < 512 {
        let bytes = parts.max_payload * 2;
        add(format!("MaxPayload of {bytes} bytes"), true, &|parts| parts.max_payload = bytes);
    }
    if parts.mtu < parts.link.usual_mtu() {
        let mtu = parts.link.usual_mtu();
        let ethernet = if parts.link.is_ethernet() { " (Ethernet MTU 9000)" } else { "" };
        add(format!("a path MTU of {mtu}{ethernet}"), true, &|parts| parts.mtu = mtu);
    }
    if parts.queue_pairs == 1 {
        add("several queue pairs".to_owned(), true, &|parts| parts.queue_pairs = 4);
    }
    if parts.memory == Memory::Gpu && parts.bar1.is_some() {
        add("a BAR1 as large as the GPU's memory".to_owned(), false, &|parts| parts.bar1 = None);
    }
    found
}

/// The newest PCIe generation of the machine: the processor's, or that of its devices if the
/// processor's is unknown.
fn newest_slot(parts: &Parts) -> u32 {
    let devices = parts.gpu.map_or(0, |gpu| gpu.generation).max(parts.nic.generation);
    parts.platform.fastest_slot().map_or(devices, |generation| generation.max(devices))
}

#[cfg(test)]
mod tests {
    use super::super::fabric::Fabric;
    use super::super::parts::Spec;
    use super::*;

    #[test]
    fn what_binds_is_what_is_advised() {
        let spec = Spec { link: Fabric::infiniband("ndr"), ..Spec::default() };
        let strict = Spec {
            distance: Some(Distance::Node),
            platform: Some(nobounce_topology::platform::Platform::EmeraldRapids),
            relaxed_ordering: Some(false),
            ..spec.clone()
        };
        let found = upgrades(&strict.resolve().unwrap(), 8 << 20);
        let free = found.iter().find(|one| one.free).unwrap();
        assert_eq!(free.change, "relaxed ordering");
        assert!(free.factor() > 2.0);
        let small = Spec { mtu: Some(1024), link: "rocev2:100".parse().ok(), ..spec.clone() };
        assert!(
            upgrades(&small.resolve().unwrap(), 8 << 20).iter().any(|one| one.change.contains("MTU 9000"))
        );
        let infiniband = Spec { mtu: Some(256), ..spec.clone() };
        let found = upgrades(&infiniband.resolve().unwrap(), 8 << 20);
        assert!(found.iter().any(|one| one.change == "a path MTU of 4096"), "{found:?}");
        let good = upgrades(&spec.resolve().unwrap(), 8 << 20);
        assert!(good.iter().all(|one| !one.change.contains("Gen6")), "{good:?}");
        assert!(good.iter().any(|one| one.change.contains("rails")), "{good:?}");
        // Adapters of the next link need the next generation of slots.
        for (link, generation) in [("ndr", 5), ("edr", 3)] {
            let slot = Slot::new(generation, 16).ok();
            let spec = Spec { link: Fabric::infiniband(link), nic: slot, gpu: slot, ..Spec::default() };
            let next = spec.link.and_then(Fabric::next).unwrap().to_string();
            let found = upgrades(&spec.resolve().unwrap(), 8 << 20);
            assert!(found.iter().all(|one| !one.change.contains(&next)), "{next} in {found:?}");
            let newer = Slot::new(generation + 1, 16).ok();
            let found = upgrades(&Spec { nic: newer, gpu: newer, ..spec }.resolve().unwrap(), 8 << 20);
            assert!(found.iter().any(|one| one.change == next), "{next} not in {found:?}");
        }
        assert!(good.iter().all(|one| one.change != "relaxed ordering"));
    }
}
