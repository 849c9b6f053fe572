//! Methods to register GPU memory with an adapter: dma-buf and peer memory; a probe decides where
//! there was one.

use crate::facts::{Facts, Gpu, GpuVendor, Nic, Registration};
use crate::{adapters, gpudirect};

/// The first kernel whose verbs take dma-bufs.
const DMABUF_KERNEL: (u32, u32) = (5, 12);
/// The first NVIDIA driver that exports dma-bufs, with its open kernel module.
const DMABUF_DRIVER: u32 = 515;
/// Turing, the first GPU that the open kernel module supports.
const OPEN_MODULE_CC: u32 = 75;

/// The first kernel without the option `DMABUF_MOVE_NOTIFY`, in which it is always on.
const MOVE_NOTIFY_ALWAYS: (u32, u32) = (7, 0);

const EOPNOTSUPP: i32 = 95;
const EPROTONOSUPPORT: i32 = 93;

/// Whether something can be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Yes, and how it is known.
    Yes(String),
    /// No: the finding that explains it, and a short reason.
    No(&'static str, String),
    /// Unknown, and why; nothing contradicts it.
    Unknown(String),
}

impl Answer {
    /// Yes.
    pub fn is_yes(&self) -> bool {
        matches!(self, Self::Yes(_))
    }

    /// No.
    pub fn is_no(&self) -> bool {
        matches!(self, Self::No(..))
    }
}

/// Whether a registration failed for good. A lack of memory, or of BAR1 space, says nothing about
/// the method.
pub fn is_refused(facts: &Facts, registration: &Registration) -> bool {
    const ENOMEM: i32 = 12;
    /// A registration of this size always fits where the method works at all.
    const SMALL: u64 = 4 << 20;
    let bar1 =
        facts.gpus.iter().find(|gpu| gpu.address == registration.gpu).and_then(|gpu| gpu.bar1_bytes.get());
    let too_large = bar1.is_some_and(|bar1| registration.bytes > bar1 / 8 * 7);
    !registration.probe.ok
        && (registration.probe.errno != Some(ENOMEM) || registration.bytes <= SMALL)
        && !too_large
}

/// Whether memory of the GPU can be exported as a dma-buf.
pub fn export(facts: &Facts, gpu: &Gpu) -> Answer {
    if let Some(probe) = gpu.export_probe.known() {
        if probe.ok {
            return Answer::Yes("exported by probe".to_owned());
        }
        let (id, why) = why_no_export(facts, gpu)
            .or_else(|| no_p2pdma(facts))
            .unwrap_or(("dmabuf-export", String::new()));
        let why = if why.is_empty() { format!("the export failed: {}", probe.detail) } else { why };
        return Answer::No(id, why);
    }
    match gpu.dma_buf.get() {
        Some(true) => match gpudirect::supported(facts, gpu) {
            // Attribute 124 is also 1 for cards whose memory the driver gives to no other device.
            Answer::Unknown(why) if gpudirect::is_consumer(gpu.title()) => Answer::Unknown(why),
            _ => Answer::Yes("the driver says so".to_owned()),
        },
        Some(false) => {
            let (id, why) = why_no_export(facts, gpu).or_else(|| no_p2pdma(facts)).unwrap_or((
                "dmabuf-export",
                "the driver says that it cannot (attribute 124 is 0)".to_owned(),
            ));
            Answer::No(id, why)
        }
        None => match why_no_export(facts, gpu).or_else(|| no_p2pdma(facts)) {
            Some((id, why)) => Answer::No(id, why),
            None => Answer::Unknown("the driver was not queried".to_owned()),
        },
    }
}

/// A cause that facts show, by itself enough.
fn why_no_export(facts: &Facts, gpu: &Gpu) -> Option<(&'static str, String)> {
    if facts.kernel.has_option("DMA_SHARED_BUFFER") == Some(false) {
        return Some(("kernel-no-dmabuf", "the kernel was built without dma-buf".to_owned()));
    }
    match gpu.vendor {
        GpuVendor::Nvidia => {
            if let Answer::No(id, why) = gpudirect::supported(facts, gpu) {
                return Some((id, why));
            }
            // Before driver and kernel module: neither a newer nor an open one would help such a
            // GPU.
            if gpu.compute_capability.get().is_some_and(|cc| cc < OPEN_MODULE_CC) {
                return Some(("gpu-too-old", "the GPU is older than Turing".to_owned()));
            }
            let module = facts.kernel.nvidia.known()?.as_ref()?;
            let major = facts.kernel.nvidia_major()?;
            if major < DMABUF_DRIVER {
                return Some((
                    "driver-too-old",
                    format!("driver {} is older than {DMABUF_DRIVER}", module.version),
                ));
            }
            if module.open == Some(false) {
                return Some(("closed-module", "the closed kernel module exports no dma-bufs".to_owned()));
            }
            None
        }
        GpuVendor::Amd => {
            // Kernels without the option always behave as if it were set.
            let gone = facts.kernel.version().is_some_and(|version| version >= MOVE_NOTIFY_ALWAYS);
            let missing = ["PCI_P2PDMA", "DMABUF_MOVE_NOTIFY", "HSA_AMD_P2P"]
                .into_iter()
                .filter(|option| !(gone && *option == "DMABUF_MOVE_NOTIFY"))
                .find(|option| facts.kernel.has_option(option) == Some(false))?;
            Some(("kernel-no-p2pdma", format!("the kernel was built without {missing}")))
        }
        GpuVendor::Intel => None,
    }
}

/// The cause of a failed export or registration, as far as files tell: the kernel has no PCI
/// peer-to-peer DMA.
pub fn no_p2pdma(facts: &Facts) -> Option<(&'static str, String)> {
    let missing = facts.kernel.has_option("PCI_P2PDMA") == Some(false);
    missing.then(|| ("kernel-no-p2pdma", "the kernel was built without PCI_P2PDMA".to_owned()))
}

/// Why the adapter refused to register a dma-buf that the GPU's driver had exported. `elsewhere`:
/// another adapter registers memory of this GPU.
pub fn refusal(facts: &Facts, failed: &Registration, elsewhere: bool) -> Answer {
    let why = format!("{} refused the exported dma-buf: {}", failed.nic, failed.probe.detail);
    match (failed.probe.errno, no_p2pdma(facts)) {
        // The adapter's driver lacks the call, whatever others do.
        (Some(EOPNOTSUPP | EPROTONOSUPPORT), _) => Answer::No("dmabuf-nic", why),
        _ if elsewhere => Answer::No("registration-pair", why),
        (_, Some((id, cause))) => Answer::No(id, cause),
        _ => Answer::No("dmabuf-register", why),
    }
}

/// Whether the adapter takes dma-bufs.
pub fn import(facts: &Facts, nic: &Nic) -> Answer {
    const ID: &str = "dmabuf-nic";
    if nic.is_software() {
        return Answer::No("software-nic", "a software adapter has no DMA of its own".to_owned());
    }
    if let Some(driver) = adapters::without_dma_buf(nic) {
        let product = adapters::product(driver);
        return Answer::No("nic-no-dmabuf", format!("{product} does not register dma-bufs"));
    }
    if let Some(probe) = nic.dma_buf_probe.known() {
        if probe.ok {
            return Answer::Yes("the adapter takes dma-bufs, by probe".to_owned());
        }
        // What explains the failure is the better answer.
        return match (why_no_import(facts), probe.errno) {
            (Some((id, why)), _) => Answer::No(id, why),
            (None, Some(EOPNOTSUPP | EPROTONOSUPPORT)) => {
                Answer::No(ID, format!("{} takes no dma-bufs ({})", nic.name, probe.detail))
            }
            (None, _) => Answer::No(ID, format!("the probe failed: {}", probe.detail)),
        };
    }
    match why_no_import(facts) {
        Some((id, why)) => Answer::No(id, why),
        None => Answer::Unknown("the adapter was not asked".to_owned()),
    }
}

/// A sufficient cause by facts alone, whatever the adapter.
fn why_no_import(facts: &Facts) -> Option<(&'static str, String)> {
    if let Some(version) = facts.kernel.version()
        && version < DMABUF_KERNEL
        && !matches!(facts.kernel.ofed.known(), Some(Some(_)))
    {
        return Some(("kernel-too-old", format!("kernel {} is older than 5.12", facts.kernel.release)));
    }
    if let Some(Some(verbs)) = facts.libraries.verbs.known()
        && verbs.lacks.iter().any(|name| name == "ibv_reg_dmabuf_mr")
    {
        return Some(("verbs-too-old", "libibverbs has no ibv_reg_dmabuf_mr".to_owned()));
    }
    None
}

/// Whether peer memory is likely to work although no registration proves it: its module is loaded,
/// or the adapter's own driver may do without.
pub fn peermem_is_likely(facts: &Facts, nic: &Nic, peermem: &Answer) -> bool {
    let loaded = |name: &str| facts.kernel.is_loaded(name) == Some(true);
    matches!(peermem, Answer::Unknown(_))
        && (["nvidia_peermem", "nv_peer_mem"].iter().any(|name| loaded(name))
            || adapters::may_pin_gpu_memory(facts, nic))
}

/// Whether peer memory works: a kernel module of the GPU is registered with the adapters' core.
pub fn peermem(facts: &Facts, gpu: &Gpu) -> Answer {
    match (module(facts, gpu), gpudirect::supported(facts, gpu)) {
        (_, no @ Answer::No(..)) => no,
        // The module serves GPUs that the driver supports.
        (Answer::Yes(_), Answer::Unknown(why)) => Answer::Unknown(why),
        (module, _) => module,
    }
}

/// Whether a module for the GPU is registered with the adapters' core.
fn module(facts: &Facts, gpu: &Gpu) -> Answer {
    let kernel = &facts.kernel;
    let clients = kernel.peer_memory_clients.known();
    let has_client =
        |begin: &str| clients.is_some_and(|clients| clients.iter().any(|name| name.starts_with(begin)));
    if gpu.vendor == GpuVendor::Amd {
        if has_client("amdkfd") || has_client("amdp2p") {
            return Answer::Yes("amdkfd is registered".to_owned());
        }
        return match (clients, kernel.peer_memory_api.get()) {
            (_, Some(false)) => {
                Answer::No("peermem-no-api", "ib_core has no peer-memory interface".to_owned())
            }
            (None, _) | (_, None) => {
                Answer::Unknown("/sys/kernel/mm/memory_peers could not be read".to_owned())
            }
            (_, Some(true)) => Answer::No("peermem-amd", "amdkfd is not registered with ib_core".to_owned()),
        };
    }
    if gpu.vendor == GpuVendor::Intel {
        return Answer::No("peermem-no-api", "Intel's GPUs have no peer-memory module".to_owned());
    }
    let loaded = |name: &str| kernel.is_loaded(name);
    let (new, old) = (loaded("nvidia_peermem"), loaded("nv_peer_mem"));
    if new == Some(false) && old == Some(false) {
        return Answer::No("peermem-not-loaded", "no peer-memory module is loaded".to_owned());
    }
    if new.is_none() && kernel.peer_memory_api.get() == Some(false) {
        // Whatever is loaded has nothing to register with.
        return Answer::No("peermem-no-api", "ib_core has no peer-memory interface".to_owned());
    }
    if new.is_none() {
        return Answer::Unknown("the list of modules could not be read".to_owned());
    }
    if has_client("nv_mem") {
        return Answer::Yes("nv_mem is registered".to_owned());
    }
    // One successful registration proves that the module is registered, whatever GPU or adapter it
    // used.
    let mut probes = facts.registrations.iter().filter(|registration| registration.way == "peermem");
    if probes.clone().any(|registration| registration.probe.ok) {
        return Answer::Yes("registered by probe".to_owned());
    }
    if let Some(failed) =
        probes.find(|registration| registration.gpu == gpu.address && is_refused(facts, registration))
    {
        let why = format!("the module is loaded, but registering failed: {}", failed.probe.detail);
        return Answer::No("peermem-not-registered", why);
    }
    match kernel.peer_memory_api.get() {
        Some(false) => Answer::No(
            "peermem-not-registered",
            "the module is loaded, but ib_core has no peer-memory interface".to_owned(),
        ),
        // The folder is there, and the module is not in it.
        Some(true) if clients.is_some() => Answer::No(
            "peermem-not-registered",
            "the module is loaded, but is no client in /sys/kernel/mm/memory_peers".to_owned(),
        ),
        Some(true) | None => {
            Answer::Unknown("the module is loaded; whether it is registered was not probed".to_owned())
        }
    }
}
