//! GPUs, as their driver tells.

use serde::{Deserialize, Serialize};

use super::{Probe, Read};

/// Why an attribute of CUDA's is not known: the driver is older than the attribute. Its number
/// follows.
pub const ATTRIBUTE_UNKNOWN: &str = "the driver does not know attribute";

/// GPU vendor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GpuVendor {
    /// NVIDIA.
    #[default]
    Nvidia,
    /// AMD.
    Amd,
    /// Intel.
    Intel,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Its PCI address.
    pub address: String,
    /// Its vendor.
    #[serde(default)]
    pub vendor: GpuVendor,
    /// Its name: `NVIDIA H100 80GB HBM3`.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub name: Read<String>,
    /// Its index for the driver (NVML's order, which is the order of PCI addresses).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// Compute capability times ten: 90 for 9.0.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub compute_capability: Read<u32>,
    /// Its memory, in bytes.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub memory_bytes: Read<u64>,
    /// BAR1, the aperture through which other devices reach its memory, in bytes.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub bar1_bytes: Read<u64>,
    /// How much of BAR1 is in use.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub bar1_used_bytes: Read<u64>,
    /// CUDA attribute 116: other devices may reach its memory. Drivers before 465 do not know it.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub gpudirect_rdma: Read<bool>,
    /// CUDA attribute 110: VMM memory, too.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub gpudirect_rdma_vmm: Read<bool>,
    /// CUDA attribute 124: its memory can be exported as a dma-buf. Drivers before 515 do not know
    /// it.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub dma_buf: Read<bool>,
    /// Whether it is divided (MIG).
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub mig: Read<bool>,
    /// Whether confidential computing is on.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub confidential: Read<bool>,
    /// Performance state, 0 (busy) to 15 (idle): an idle GPU downtrains its link.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub performance_state: Read<u32>,
    /// Whether NVLink or C2C joins it to the processor (GH200, GB200).
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub coherent_link: Read<bool>,
    /// Links of NVLink that are up.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub nvlinks: Read<u32>,
    /// Memory of it was exported as a dma-buf, really.
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub export_probe: Read<Probe>,
    /// The CPU mapped its memory in a test with nothing installed (the resource manager's window,
    /// or mmap of a dma-buf).
    #[serde(default, skip_serializing_if = "Read::is_not_recorded")]
    pub window_probe: Read<Probe>,
}

impl Gpu {
    /// Its name, or its address where the driver reported none.
    #[must_use]
    pub fn title(&self) -> &str {
        self.name.known().unwrap_or(&self.address)
    }

    /// `GPU 3`, or `GPU 0000:1b:00.0` where the driver did not number it.
    #[must_use]
    pub fn label(&self) -> String {
        self.index.map_or_else(|| format!("GPU {}", self.address), |index| format!("GPU {index}"))
    }
}
