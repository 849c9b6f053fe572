//! Whether a GPU is of a class that GPUDirect RDMA supports.

use crate::facts::{ATTRIBUTE_UNKNOWN, Facts, Gpu, GpuVendor};
use crate::methods::Answer;

/// The first driver that knows CUDA attribute 116.
const ATTRIBUTE_SINCE: u32 = 465;

/// Whether other devices may reach the GPU's memory. A registration decides, then the driver's
/// attribute, then an export; the model decides only for drivers older than the attribute.
pub fn supported(facts: &Facts, gpu: &Gpu) -> Answer {
    if gpu.vendor != GpuVendor::Nvidia {
        return Answer::Yes("no GPU of its vendor is excluded".to_owned());
    }
    if facts.registrations.iter().any(|r| r.gpu == gpu.address && r.probe.ok) {
        return Answer::Yes("registered by probe".to_owned());
    }
    let too_old = facts.kernel.nvidia_major().is_some_and(|major| major < ATTRIBUTE_SINCE);
    match gpu.gpudirect_rdma.get() {
        Some(true) => return Answer::Yes("the driver says so".to_owned()),
        Some(false) if !too_old => {
            return Answer::No("gpu-class", "the driver offers no GPUDirect RDMA for this GPU".to_owned());
        }
        Some(false) | None => {}
    }
    if gpu.export_probe.known().is_some_and(|probe| probe.ok) {
        return Answer::Yes("exported by probe".to_owned());
    }
    let name = gpu.title();
    if is_consumer(name) {
        return Answer::Unknown(format!(
            "{name} is a consumer card: most have no GPUDirect RDMA, and the driver was not asked"
        ));
    }
    if too_old && is_data_centre(name) {
        return Answer::Yes(format!("{name} is a data-centre model; driver before {ATTRIBUTE_SINCE}"));
    }
    let why = gpu.gpudirect_rdma.why_not().filter(|why| !why.starts_with(ATTRIBUTE_UNKNOWN));
    Answer::Unknown(match why {
        Some(why) if !gpu.gpudirect_rdma.is_not_recorded() => {
            format!("whether the GPU supports GPUDirect RDMA is unknown: {why}")
        }
        _ => "whether the GPU supports GPUDirect RDMA is unknown: CUDA was not asked".to_owned(),
    })
}

/// Whether CUDA waits for the fabric manager: it starts on GPUs behind NVSwitches only when those
/// are set up.
#[must_use]
pub fn waits_for_fabric(gpu: &Gpu) -> bool {
    const TEXTS: [&str; 4] = ["SYSTEM_NOT_READY", "SYSTEM NOT YET INITIALIZED", "(802)", "ERROR 802"];
    let why = gpu.gpudirect_rdma.why_not().unwrap_or_default().to_ascii_uppercase();
    TEXTS.iter().any(|text| why.contains(text))
}

/// GeForce and TITAN.
#[must_use]
pub fn is_consumer(name: &str) -> bool {
    name.contains("GeForce") || name.to_ascii_uppercase().contains("TITAN")
}

/// Models for servers and workstations, all of which have GPUDirect RDMA.
#[must_use]
pub fn is_data_centre(name: &str) -> bool {
    const MODELS: [&str; 30] = [
        "Tesla", "Quadro", "K40", "K80", "P4", "P40", "P100", "V100", "T4", "A2", "A10", "A16", "A30", "A40",
        "A100", "A800", "L4", "L40", "L40S", "H20", "H100", "H200", "H800", "B100", "B200", "B300", "GH200",
        "GB200", "GB300", "A6000",
    ];
    !is_consumer(name) && name.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| MODELS.contains(&word))
}
