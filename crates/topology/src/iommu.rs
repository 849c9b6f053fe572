//! Whether an IOMMU stands between a device and memory.

use crate::facts::{Facts, PciDevice};

/// Whether an IOMMU translates the addresses of a device; none where that is not known.
#[must_use]
pub fn translates(facts: &Facts, device: &PciDevice) -> Option<bool> {
    let kernel = &facts.kernel;
    match device.iommu.known()? {
        None => Some(false),
        Some(iommu) => match iommu.kind.as_deref() {
            Some("identity" | "auto-identity") => Some(false),
            Some(kind) if kind.starts_with("DMA") => Some(true),
            Some(_) => Some(false),
            // The kernel does not report the domain type: fall back to its command line.
            None => match (kernel.parameter("iommu"), kernel.parameter("iommu.passthrough")) {
                (Some("pt"), _) | (_, Some("1" | "on" | "y")) => Some(false),
                (Some("off"), _) => Some(false),
                _ => kernel.has_option("IOMMU_DEFAULT_PASSTHROUGH").map(|passthrough| !passthrough),
            },
        },
    }
}
