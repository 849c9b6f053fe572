//! Adapters by their driver: which methods of registration it implements.

use crate::facts::{Facts, Nic};

/// Drivers whose verbs never import dma-bufs: none of them implements `reg_user_mr_dmabuf`.
const WITHOUT_DMA_BUF: [&str; 16] = [
    "hfi1",
    "qib",
    "mlx4_core",
    "mlx4_en",
    "ib_mthca",
    "cxgb4",
    "qede",
    "qedr",
    "be2net",
    "ocrdma",
    "i40e",
    "i40iw",
    "enic",
    "usnic_verbs",
    "vmw_pvrdma",
    "hns3",
];

/// Drivers whose registrations never use the peer-memory interface of ib_core, whatever client is
/// registered there.
const WITHOUT_PEER_MEMORY: [&str; 7] = ["hfi1", "qib", "efa", "usnic_verbs", "enic", "vmw_pvrdma", "erdma"];

/// Whether the adapter's own driver may pin GPU memory, without a client of ib_core. Amazon's
/// driver outside of the kernel does, and marks such builds by a `g` behind the version; the
/// kernel's own has no version.
pub fn may_pin_gpu_memory(facts: &Facts, nic: &Nic) -> bool {
    if nic.driver.as_deref() != Some("efa") {
        return false;
    }
    let Some(modules) = facts.kernel.modules.known() else { return true };
    let version = modules.get("efa").and_then(|module| module.version.as_deref());
    version.is_some_and(|version| version.ends_with('g'))
}

/// The driver of an adapter that imports no dma-bufs by its type.
pub fn without_dma_buf(nic: &Nic) -> Option<&str> {
    nic.driver.as_deref().filter(|driver| WITHOUT_DMA_BUF.contains(driver))
}

/// The driver of an adapter that does not use peer memory by its type.
pub fn without_peer_memory(nic: &Nic) -> Option<&str> {
    nic.driver.as_deref().filter(|driver| WITHOUT_PEER_MEMORY.contains(driver))
}

/// The product that people know the driver by.
pub fn product(driver: &str) -> &str {
    match driver {
        "hfi1" => "Omni-Path (hfi1)",
        "qib" => "True Scale (qib)",
        "mlx4_core" | "mlx4_en" => "ConnectX-3 and older (mlx4)",
        "enic" | "usnic_verbs" => "usNIC",
        "vmw_pvrdma" => "VMware's paravirtual RDMA (vmw_pvrdma)",
        other => other,
    }
}
