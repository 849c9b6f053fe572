//! A failed step of a registration: headline and evidence from one fact.

use super::{list, one_or};
use crate::finding::{Finding, Fix, Severity};
use nobounce_topology::analysis::Pair;
use nobounce_topology::facts::{Facts, Probe, Registration};
use nobounce_topology::methods;

/// The kernel's own error number: libibverbs prints "Unknown error 524".
const ENOTSUPP: i32 = 524;

/// A step that failed. Each constructor takes the fact of its own step and returns `None` unless
/// that fact shows the failure: no finding can name a step that worked.
#[derive(Clone, Debug)]
pub(super) struct FailedStep {
    step: RegistrationStep,
    source: String,
    value: String,
    errno: Option<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RegistrationStep {
    /// The GPU's driver exports memory as a dma-buf.
    Export,
    /// The adapter's driver implements dma-bufs.
    Import,
    /// The adapter registers the exported memory.
    Register,
}

impl FailedStep {
    /// The export by the GPU's driver.
    pub(super) fn export(pair: &Pair<'_>) -> Option<Self> {
        let (source, value) = match pair.gpu.export_probe.known() {
            Some(probe) => ("cuMemGetHandleForAddressRange", failure(probe)?),
            None if pair.gpu.dma_buf.get() == Some(false) => {
                ("CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED (124)", "0".to_owned())
            }
            None => return None,
        };
        Some(Self { step: RegistrationStep::Export, source: source.to_owned(), value, errno: None })
    }

    /// The adapter's driver, asked without a dma-buf.
    pub(super) fn import(pair: &Pair<'_>) -> Option<Self> {
        let value = failure(pair.nic.dma_buf_probe.known()?)?;
        let source = format!("ibv_reg_dmabuf_mr on {}", pair.nic.name);
        Some(Self { step: RegistrationStep::Import, source, value, errno: None })
    }

    /// The adapter's registration of exported memory.
    pub(super) fn register(facts: &Facts, pair: &Pair<'_>) -> Option<Self> {
        let of_pair = |r: &&Registration| {
            r.way == "dma-buf"
                && r.gpu == pair.gpu.address
                && r.nic == pair.nic.name
                && methods::is_refused(facts, r)
        };
        let failed = facts.registrations.iter().find(of_pair)?;
        let source = format!("ibv_reg_dmabuf_mr of {} with {}", failed.gpu, failed.nic);
        let value = failure(&failed.probe)?;
        Some(Self { step: RegistrationStep::Register, source, value, errno: failed.probe.errno })
    }

    /// The finding of this step.
    pub(super) fn finding(self, severity: Severity, names: &[String], why: &str) -> Finding {
        let who = list(names);
        let finding = match self.step {
            RegistrationStep::Export => Finding::new("dmabuf-export", severity, format!("{who}: memory cannot be exported as a dma-buf"))
                .fix(Fix::host().remark("use the open kernel module, 515 or newer, with a driver library for CUDA 11.7 or newer; virtual GPUs need support in the host's driver"))
                .root(),
            RegistrationStep::Import => Finding::new("dmabuf-nic", severity, format!("{who}: the driver of the {} takes no dma-bufs", one_or(names, "adapter", "adapters")))
                .fix(Fix::host().remark("upgrade the adapter's driver: DOCA-OFED, or a newer kernel (mlx5 since 5.12, efa since 5.16, irdma and bnxt_re since 6.5)"))
                .root(),
            RegistrationStep::Register if self.errno == Some(ENOTSUPP) => Finding::new("dmabuf-register", severity, format!("{who}: NVIDIA's driver does not map the exported GPU memory for the {}", one_or(names, "adapter", "adapters")))
                .fix(Fix::container().set("UCX_IB_DIRECT_NIC=n").remark("UCX 1.19 and newer; or name the adapter of the GPU's own data-direct function, with its port up, by UCX_NET_DEVICES"))
                .fix(Fix::host().run("sudo dmesg | tail -n 20").remark("the drivers log the reason")),
            RegistrationStep::Register => Finding::new("dmabuf-register", severity, format!("{who}: the {} refused GPU memory that was exported as a dma-buf", one_or(names, "adapter", "adapters")))
                .fix(Fix::host().run("sudo dmesg | tail -n 20").remark("the adapter's driver logs the reason"))
                .fix(Fix::host().remark("upgrade the adapter's driver and firmware (DOCA-OFED, or a newer kernel)"))
                .root(),
        };
        let why = match self.step {
            RegistrationStep::Export => why.to_owned(),
            RegistrationStep::Import => format!(
                "The export by the GPU is not the cause: the adapter's driver does not implement the call. {why}"
            ),
            RegistrationStep::Register if self.errno == Some(ENOTSUPP) => format!(
                "524 (ENOTSUPP) comes from the attachment of the dma-buf: memory exported for PCIe (data direct, Direct NIC of Grace machines) can be attached only by the data-direct function in the GPU's IOMMU group. {why}"
            ),
            RegistrationStep::Register => {
                format!("The GPU's driver exported the memory; the adapter's driver did not accept it. {why}")
            }
        };
        finding.why(why).seen(self.source, self.value)
    }
}

/// What a failed probe said.
fn failure(probe: &Probe) -> Option<String> {
    (!probe.ok).then(|| if probe.detail.is_empty() { "failed".to_owned() } else { probe.detail.clone() })
}
