//! Refuses facts that no machine has, before a figure rests on them.

use super::fabric::MAX_GBPS;
use super::machine::ChoiceError;
use super::parts_error::PartsError;
use nobounce_topology::facts::{Facts, Nic};

/// BAR1 at the most: 64 times the memory of the largest GPU.
pub(super) const MAX_BAR1: u64 = 1 << 44;
/// NVLinks of a GPU at the most: the GB200 has 18.
const MAX_NVLINKS: u32 = 64;
/// GB/s of host memory at the most: a hundred times what any server has.
pub(super) const MAX_DRAM: f64 = 100_000.0;

fn refuse(field: String, value: impl ToString, expected: &'static str) -> Result<(), ChoiceError> {
    Err(ChoiceError::Absurd { field, value: value.to_string(), expected })
}

/// Whether some machine may have these facts.
///
/// # Errors
/// None has: the message names the field.
pub(super) fn check(facts: &Facts) -> Result<(), ChoiceError> {
    facts.nics.iter().try_for_each(ports)?;
    links(facts)?;
    config(facts)?;
    for gpu in &facts.gpus {
        if let Some(links) = gpu.nvlinks.get().filter(|links| *links > MAX_NVLINKS) {
            return refuse(format!("gpus[{}].nvlinks", gpu.address), links, "0 to 64");
        }
        match gpu.bar1_bytes.get() {
            Some(bytes) if !(1..=MAX_BAR1).contains(&bytes) => {
                return refuse(format!("gpus[{}].bar1_bytes", gpu.address), bytes, "1 byte to 16 TiB");
            }
            _ => {}
        }
    }
    match facts.machine.sockets.get() {
        Some(sockets) if !(1..=64).contains(&sockets) => {
            refuse("machine.sockets".to_owned(), sockets, "1 to 64")
        }
        _ => Ok(()),
    }
}

fn ports(nic: &Nic) -> Result<(), ChoiceError> {
    // Others have packet sizes of their own; Amazon's adapters say 4096 and send longer packets.
    let is_ib = !nic.is_software() && !matches!(nic.driver.as_deref(), Some("efa" | "iw_cxgb4" | "siw"));
    for port in &nic.ports {
        let field = |name: &str| format!("nics[{}].ports[{}].{name}", nic.name, port.number);
        match port.rate_gbps.get() {
            Some(rate) if !(0.0..=MAX_GBPS).contains(&rate) => {
                return refuse(field("rate_gbps"), rate, "0 to 1600 Gb/s");
            }
            _ => {}
        }
        match port.active_mtu.get() {
            Some(mtu) if is_ib && !matches!(mtu, 256 | 512 | 1024 | 2048 | 4096) => {
                return refuse(field("active_mtu"), mtu, "256, 512, 1024, 2048 or 4096 bytes");
            }
            Some(mtu) if !(64..=65536).contains(&mtu) => {
                return refuse(field("active_mtu"), mtu, "64 to 65536 bytes");
            }
            _ => {}
        }
    }
    Ok(())
}

fn links(facts: &Facts) -> Result<(), ChoiceError> {
    let adapters = facts.nics.iter().filter_map(|nic| nic.address.as_deref());
    let ends: Vec<&str> = adapters.chain(facts.gpus.iter().map(|gpu| gpu.address.as_str())).collect();
    for device in &facts.pci {
        let is_end = ends.contains(&device.address.as_str());
        let Some(link) = device.link else { continue };
        let field = |name: &str| format!("pci[{}].link.{name}", device.address);
        for (name, speed) in [("speed", link.speed), ("max_speed", link.max_speed)] {
            if !(0.0..=128.0).contains(&speed) {
                return refuse(field(name), speed, "0 to 128 GT/s");
            }
        }
        for (name, width) in [("width", link.width), ("max_width", link.max_width)] {
            if is_end && !matches!(width, 0 | 1 | 2 | 4 | 8 | 12 | 16 | 32) {
                return refuse(field(name), width, "0, 1, 2, 4, 8, 12, 16 or 32 lanes");
            }
            if width > 64 {
                return refuse(field(name), width, "0 to 64 lanes");
            }
        }
    }
    Ok(())
}

/// Packet sizes of the adapters, which enter the prediction. Other devices may be powered off and
/// read as ones.
fn config(facts: &Facts) -> Result<(), ChoiceError> {
    let adapters = facts.nics.iter().filter_map(|nic| nic.address.as_deref());
    for device in adapters.filter_map(|address| facts.pci_device(address)) {
        let Some(config) = device.config.known() else { continue };
        let field = |name: &str| format!("pci[{}].config.{name}", device.address);
        for (name, bytes) in
            [("max_payload", config.max_payload), ("max_read_request", config.max_read_request)]
        {
            match bytes {
                Some(bytes) if !matches!(bytes, 128 | 256 | 512 | 1024 | 2048 | 4096) => {
                    return refuse(field(name), bytes, "128, 256, 512, 1024, 2048 or 4096 bytes");
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// A rate above 0 and at most `most`.
pub(super) fn positive(what: &'static str, value: Option<f64>, most: f64) -> Result<Option<f64>, PartsError> {
    match value {
        Some(value) if !(value.is_finite() && value > 0.0) => Err(PartsError::NotPositive { what, value }),
        Some(value) if value > most => Err(PartsError::TooMuch { what, value, most }),
        other => Ok(other),
    }
}

/// A packet size of PCIe.
pub(super) fn pcie_size(said: Option<u32>, usual: u32, what: &'static str) -> Result<u32, PartsError> {
    match said {
        None => Ok(usual),
        Some(bytes @ (128 | 256 | 512 | 1024 | 2048 | 4096)) => Ok(bytes),
        Some(bytes) => Err(PartsError::PcieSize { what, bytes }),
    }
}
