//! The components of a transfer: given or read as a [`Spec`], checked and completed as [`Parts`].

use serde::{Deserialize, Serialize};

use super::constants as c;
use super::fabric::Fabric;
use super::factor::Factor;
use super::fitted::Fitted;
pub use super::kinds::{End, Memory, Op, Software};
pub use super::parts_error::PartsError;
use super::plausible::{MAX_BAR1, MAX_DRAM, pcie_size, positive};
use super::slot::Slot;
use super::soft::Soft;
use nobounce_topology::facts::GpuVendor;
use nobounce_topology::platform::Platform;
use nobounce_topology::tree::Distance;

/// A transfer as given on the command line, or as a row of figures describes it. Missing parts are
/// completed and reported.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Spec {
    /// `ib:ndr`, `rocev2:400`, ...
    pub link: Option<Fabric>,
    /// Path MTU in bytes.
    pub mtu: Option<u32>,
    /// Switches of the network between the ends.
    pub hops: Option<u32>,
    /// Adapters that work together.
    pub rails: Option<u32>,
    /// Adapters of them on the other socket.
    pub far_rails: Option<u32>,
    /// Slot of each adapter.
    pub nic: Option<Slot>,
    /// Slot of each GPU.
    pub gpu: Option<Slot>,
    /// The GPU is attached to a coherent link to the CPU (NVLink-C2C, or it shares the CPU's
    /// memory), not to PCIe.
    pub coherent: Option<bool>,
    /// GPUs that take part at each end.
    pub gpus: Option<u32>,
    /// Where the bytes lie.
    pub memory: Option<Memory>,
    /// The end that lies in host memory, where the other lies on a GPU.
    pub host_end: Option<End>,
    /// The maker of the GPU.
    pub gpu_vendor: Option<GpuVendor>,
    /// Between GPU and adapter.
    pub distance: Option<Distance>,
    /// The processor.
    pub platform: Option<Platform>,
    /// Whether writes may pass each other.
    pub relaxed_ordering: Option<bool>,
    /// MaxPayload of PCIe, bytes.
    pub max_payload: Option<u32>,
    /// MaxReadReq of the adapter, bytes.
    pub max_read_request: Option<u32>,
    /// BAR1 of the GPU, bytes.
    pub bar1: Option<u64>,
    /// ACS redirect on the ports between GPU and adapter.
    pub acs_redirect: Option<bool>,
    /// An IOMMU translates the addresses of GPU or adapter.
    pub iommu: Option<bool>,
    /// Why GPUDirect is not available here.
    pub unavailable: Option<String>,
    /// The port of the adapter is down, and how.
    pub port_down: Option<String>,
    /// GB/s of the host's memory at each end.
    pub dram: Option<f64>,
    /// GB/s of one socket's memory with all channels, where the CPU's model is known.
    pub memory_per_socket: Option<f64>,
    /// Sockets of each machine: each has memory of its own.
    pub sockets: Option<u32>,
    /// The software that posts.
    pub software: Option<Software>,
    /// Queue pairs at work on each rail.
    pub queue_pairs: Option<u32>,
    /// The operation.
    pub operation: Option<Op>,
    /// Chunk of a staged transfer, bytes.
    pub chunk: Option<u64>,
    /// How many nominal GB/s of GPU traffic share this adapter: GPUs that send through it at once.
    pub sharers: Option<u32>,
}

/// A transfer that can be predicted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Parts {
    /// The link of each rail.
    pub link: Fabric,
    /// Path MTU.
    pub mtu: u32,
    /// Switches between the ends.
    pub hops: u32,
    /// Adapters that work together.
    pub rails: u32,
    /// Adapters of them on the other socket.
    pub far_rails: u32,
    /// Slot of each adapter.
    pub nic: Slot,
    /// Slot of each GPU; none where it is coherent with the processor.
    pub gpu: Option<Slot>,
    /// GPUs that take part.
    pub gpus: u32,
    /// Where the bytes lie.
    pub memory: Memory,
    /// The end that lies in host memory, where the other lies on a GPU.
    pub host_end: Option<End>,
    /// The maker of the GPU.
    pub gpu_vendor: GpuVendor,
    /// Between GPU and adapter.
    pub distance: Distance,
    /// Whether nothing is assumed of it.
    pub is_placed: bool,
    /// The processor.
    pub platform: Platform,
    /// Whether writes may pass each other.
    pub relaxed_ordering: bool,
    /// MaxPayload.
    pub max_payload: u32,
    /// MaxReadReq of the adapter.
    pub max_read_request: u32,
    /// BAR1 of the GPU, where it is known.
    pub bar1: Option<u64>,
    /// ACS redirect on the ports between GPU and adapter.
    pub acs_redirect: bool,
    /// An IOMMU translates the addresses of GPU or adapter.
    pub iommu: bool,
    /// Why GPUDirect is not available here.
    pub unavailable: Option<String>,
    /// The port of the adapter is down, and how.
    pub port_down: Option<String>,
    /// GB/s of host memory.
    pub dram: f64,
    /// Whether that is stated, or follows from the processor.
    pub dram_is_known: bool,
    /// What is assumed of it, where it is not stated.
    #[serde(skip)]
    pub dram_assumed: Option<String>,
    /// The software that posts.
    pub software: Software,
    /// Queue pairs on each rail; 0: enough of them.
    pub queue_pairs: u32,
    /// The operation.
    pub operation: Op,
    /// Chunk of a staged transfer.
    pub chunk: u64,
    /// GPUs that share an adapter.
    pub sharers: u32,
    /// What is known of the software NIC here.
    pub soft: Soft,
    /// Constants that published figures decide; those of the model, but for its validation.
    #[serde(skip)]
    pub fitted: Fitted,
    /// What was not said, and what was taken instead.
    pub assumed: Vec<String>,
}

/// Host memory of a machine.
struct Dram {
    gbytes: f64,
    is_known: bool,
    assumed: Option<String>,
}

/// What is assumed of a software NIC without a calibration.
pub const SOFT_ASSUMED: &str =
    "the software NIC is as fast as on a two-core machine; calibrate for better figures";
/// Rails of one transfer at the most: as many as the largest machines have adapters, with room.
pub const MAX_RAILS: u32 = 64;

impl Spec {
    /// Checks the parts, and completes missing ones with usual values.
    ///
    /// # Errors
    /// Something does not exist or does not fit: the message says what.
    pub fn resolve(&self) -> Result<Parts, PartsError> {
        let link = self.link.ok_or(PartsError::NoLink)?;
        let mut assumed = Vec::new();
        let memory = self.memory.unwrap_or_default();
        self.check_counts()?;
        let mtu = self.mtu(link, &mut assumed)?;
        let coherent = self.coherent.unwrap_or(false);
        match (memory, coherent) {
            (Memory::Host, true) => return Err(PartsError::NoGpu("--coherent")),
            (Memory::Host, false) if self.gpu.is_some() => return Err(PartsError::NoGpu("--gpu")),
            (Memory::Gpu, true) if self.gpu.is_some() => return Err(PartsError::CoherentSlot),
            _ => {}
        }
        let most = self.fastest_slot();
        let nic = or(
            self.nic,
            || link.usual_slot().at_most(most),
            &mut assumed,
            |slot| format!("the adapter is on {slot}, which fits its link"),
        );
        let gpu = match memory {
            Memory::Gpu if !coherent => Some(or(
                self.gpu,
                || nic,
                &mut assumed,
                |slot| format!("the GPU is on {slot}, like the adapter"),
            )),
            _ => None,
        };
        let gpu_memory = memory == Memory::Gpu && !coherent;
        let distance = if gpu_memory {
            or(
                self.distance,
                || Distance::Pix,
                &mut assumed,
                |_| "GPU and adapter are below one PCIe switch (PIX)".to_owned(),
            )
        } else {
            self.distance.unwrap_or(Distance::Phb)
        };
        let platform = self.platform.unwrap_or(Platform::Other);
        if gpu_memory && !distance.is_below_switch() && self.platform.is_none() {
            assumed.push("the processor is unknown: it sets no limit".to_owned());
        }
        if let Some(slot) = [Some(nic), gpu].into_iter().flatten().find(|slot| slot.generation > most) {
            return Err(PartsError::TooNew { slot, processor: platform.name(), most });
        }
        let max_payload = pcie_size(self.max_payload, 256, "MaxPayload")?;
        if self.max_payload.is_none() {
            assumed.push("MaxPayload is 256 bytes, as on most servers".to_owned());
        }
        let max_read_request = pcie_size(self.max_read_request, 4096, "MaxReadReq")?;
        if self.max_read_request.is_none() {
            assumed.push("MaxReadReq of the adapter is 4096 bytes, as vendors recommend".to_owned());
        }
        let dram = self.dram(platform)?;
        if memory == Memory::Host {
            assumed.extend(dram.assumed.clone());
        }
        self.of_software_nic(link, memory, &mut assumed);
        Ok(Parts {
            link,
            mtu,
            hops: self.hops.unwrap_or(1),
            rails: self.rails.unwrap_or(1),
            far_rails: self.far_rails.unwrap_or(0).min(self.rails.unwrap_or(1)),
            nic,
            gpu,
            gpus: self.gpus.unwrap_or(1),
            memory,
            host_end: self.host_end.filter(|_| memory == Memory::Gpu),
            gpu_vendor: self.gpu_vendor.unwrap_or_default(),
            distance,
            is_placed: self.distance.is_some() || !gpu_memory,
            platform,
            relaxed_ordering: self.relaxed_ordering.unwrap_or(true),
            max_payload,
            max_read_request,
            bar1: self.bar1,
            acs_redirect: self.acs_redirect.unwrap_or(false) && distance.is_below_switch(),
            iommu: self.iommu.unwrap_or(false),
            unavailable: self.unavailable.clone(),
            port_down: self.port_down.clone(),
            dram: dram.gbytes,
            dram_is_known: dram.is_known,
            dram_assumed: dram.assumed,
            software: self.software.unwrap_or_default(),
            queue_pairs: self.queue_pairs.unwrap_or(0),
            operation: self.operation.unwrap_or_default(),
            chunk: self.chunk(),
            sharers: self.sharers.unwrap_or(1),
            soft: Soft::default(),
            fitted: Fitted::default(),
            assumed,
        })
    }

    /// The fastest generation of slots: the CPU's, where GPU and adapter are attached to the CPU.
    fn fastest_slot(&self) -> u32 {
        let gpu_memory = self.memory != Some(Memory::Host) && self.coherent != Some(true);
        let through = gpu_memory && self.distance.is_some_and(|distance| !distance.is_below_switch());
        self.platform.and_then(Platform::fastest_slot).filter(|_| through).unwrap_or(u32::MAX)
    }

    /// Slots as fast as the processor's, where devices say that they could do more.
    #[must_use]
    pub fn within_platform(self) -> Self {
        let most = self.fastest_slot();
        let slower = |slot: Option<Slot>| slot.map(|slot| slot.at_most(most));
        Self { nic: slower(self.nic), gpu: slower(self.gpu), ..self }
    }

    /// What is assumed of a software NIC.
    fn of_software_nic(&self, link: Fabric, memory: Memory, assumed: &mut Vec<String>) {
        let is_loopback = link.kind == super::fabric::Kind::Loopback;
        if is_loopback {
            // No adapter, no slot: none of that matters.
            assumed.clear();
        }
        if is_loopback || self.software == Some(Software::Nobounce) {
            assumed.push(SOFT_ASSUMED.to_owned());
        }
        if is_loopback && memory == Memory::Gpu {
            assumed.push("GPU memory is loaded and copied as fast as on an H200".to_owned());
        }
    }

    /// GB/s of host memory, whether it is known, and what is assumed of it.
    fn dram(&self, platform: Platform) -> Result<Dram, PartsError> {
        if let Some(stated) = positive("the bandwidth of host memory", self.dram, MAX_DRAM)? {
            return Ok(Dram { gbytes: stated, is_known: true, assumed: None });
        }
        let sockets = self.sockets.unwrap_or(1).clamp(1, 16);
        let all = |per_socket: f64| per_socket * f64::from(sockets) * c::DRAM_SHARE;
        let (dram, is_known) = match (self.memory_per_socket, platform) {
            (Some(per_socket), _) => (all(per_socket), true),
            (None, Platform::Other) => (200.0, false),
            (None, _) => (all(platform.memory_per_socket()), !platform.memory_varies()),
        };
        let populated = match sockets {
            1 => "every channel of one socket is populated".to_owned(),
            _ => format!("every channel of {sockets} sockets is populated"),
        };
        let why = match platform {
            _ if is_known => populated,
            Platform::Other => "the processor is unknown; add --dram".to_owned(),
            Platform::Zen => {
                "eight channels of DDR4-3200, as the model of the AMD CPU is unknown; add --dram".to_owned()
            }
            _ => format!("the model of the CPU is unknown, and {populated}; add --dram"),
        };
        Ok(Dram { gbytes: dram, is_known, assumed: Some(format!("host memory of {dram:.0} GB/s: {why}")) })
    }

    fn chunk(&self) -> u64 {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a whole number of bytes")]
        let usual = c::CHUNK as u64;
        self.chunk.unwrap_or(usual).max(1)
    }

    fn check_counts(&self) -> Result<(), PartsError> {
        if self.rails == Some(0) {
            return Err(PartsError::NoRails);
        }
        for (what, count, most) in [
            ("rails", self.rails, MAX_RAILS),
            ("GPUs of one machine", self.gpus, MAX_RAILS),
            ("GPUs at one adapter", self.sharers, MAX_RAILS),
            ("switches between two machines", self.hops, 64),
            ("queue pairs", self.queue_pairs, 1 << 24),
        ] {
            match count {
                Some(count) if count > most => return Err(PartsError::TooMany { what, count, most }),
                _ => {}
            }
        }
        for (what, count) in [("the number of GPUs", self.gpus), ("the GPUs at one adapter", self.sharers)] {
            if count == Some(0) {
                return Err(PartsError::NotPositive { what, value: 0.0 });
            }
        }
        if let Some(value) = self.bar1.filter(|value| !(1..=MAX_BAR1).contains(value)) {
            return Err(PartsError::Bar1 { value, most: MAX_BAR1 });
        }
        if self.chunk == Some(0) {
            return Err(PartsError::NotPositive { what: "the chunk of a staged transfer", value: 0.0 });
        }
        Ok(())
    }

    fn mtu(&self, link: Fabric, assumed: &mut Vec<String>) -> Result<u32, PartsError> {
        use super::fabric::Kind;
        let usual = link.usual_mtu();
        let Some(mtu) = self.mtu else {
            assumed.push(match link.kind {
                Kind::RoceV1 | Kind::RoceV2 | Kind::RoceV2Ipv6 => {
                    format!("the path MTU is {usual}; with Ethernet's 1500 bytes it would be 1024")
                }
                _ => format!("the path MTU is {usual}"),
            });
            return Ok(usual);
        };
        let exists = match link.kind {
            Kind::Iwarp | Kind::Efa | Kind::Tcp => (256..=9216).contains(&mtu),
            _ => matches!(mtu, 256 | 512 | 1024 | 2048 | 4096),
        };
        if exists { Ok(mtu) } else { Err(PartsError::Mtu(mtu)) }
    }
}

fn or<T: Copy>(
    said: Option<T>,
    usual: impl FnOnce() -> T,
    assumed: &mut Vec<String>,
    words: impl FnOnce(T) -> String,
) -> T {
    said.unwrap_or_else(|| {
        let value = usual();
        assumed.push(words(value));
        value
    })
}

impl Parts {
    /// Whether this end lies on a GPU.
    #[must_use]
    pub fn is_on_gpu(&self, end: End) -> bool {
        self.memory == Memory::Gpu && self.host_end != Some(end)
    }

    /// Whether packets between GPU and adapter pass the CPU.
    #[must_use]
    pub fn through_processor(&self) -> bool {
        !self.distance.is_below_switch() || self.acs_redirect
    }

    /// Whether bytes pass between GPU and adapter over PCIe.
    #[must_use]
    pub const fn gpu_over_pcie(&self) -> bool {
        matches!(self.memory, Memory::Gpu) && self.gpu.is_some()
    }

    /// The same with the assumption about host memory, if that is what limits one of the figures.
    #[must_use]
    pub fn with_limits(mut self, mut limits: impl Iterator<Item = Factor>) -> Self {
        match &self.dram_assumed {
            Some(line) if !self.assumed.contains(line) && limits.any(|limit| limit == Factor::Dram) => {
                self.assumed.push(line.clone());
            }
            _ => {}
        }
        self
    }

    /// The same transfer of host memory: what staging does in the middle.
    #[must_use]
    pub fn on_host(&self) -> Self {
        Self { memory: Memory::Host, gpu: None, host_end: None, distance: Distance::Phb, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Spec {
        Spec { link: Fabric::infiniband("ndr"), ..Spec::default() }
    }

    #[test]
    fn what_is_not_said_is_completed_and_said() {
        let parts = spec().resolve().unwrap();
        assert_eq!((parts.mtu, parts.nic.to_string()), (4096, "Gen5 x16".to_owned()));
        assert!(parts.assumed.iter().any(|line| line.contains("PIX")));
        let said = Spec {
            mtu: Some(4096),
            nic: Some(parts.nic),
            gpu: parts.gpu,
            distance: Some(Distance::Pix),
            max_payload: Some(256),
            max_read_request: Some(4096),
            ..spec()
        };
        assert_eq!(said.resolve().unwrap().assumed, Vec::<String>::new());
        let soft = Spec { software: Some(Software::Nobounce), ..said };
        assert!(soft.resolve().unwrap().assumed.iter().any(|line| line.contains("calibrate")));
    }

    #[test]
    fn impossible_parts_are_explained() {
        let wrong = |change: fn(&mut Spec)| {
            let mut spec = spec();
            change(&mut spec);
            spec.resolve().unwrap_err().to_string()
        };
        let of = [
            wrong(|spec| spec.link = None),
            wrong(|spec| spec.rails = Some(0)),
            wrong(|spec| spec.rails = Some(65)),
            wrong(|spec| spec.mtu = Some(1500)),
            wrong(|spec| spec.max_payload = Some(100)),
            wrong(|spec| spec.dram = Some(-1.0)),
            wrong(|spec| spec.dram = Some(f64::NAN)),
            wrong(|spec| spec.dram = Some(1e300)),
            wrong(|spec| spec.bar1 = Some(u64::MAX)),
            wrong(|spec| spec.gpus = Some(0)),
            wrong(|spec| spec.chunk = Some(0)),
            wrong(|spec| {
                spec.distance = Some(Distance::Node);
                spec.platform = Some(Platform::XeonOld);
                spec.gpu = Slot::new(5, 16).ok();
            }),
            wrong(|spec| {
                spec.memory = Some(Memory::Host);
                spec.gpu = Slot::new(5, 16).ok();
            }),
            wrong(|spec| {
                spec.coherent = Some(true);
                spec.gpu = Slot::new(5, 16).ok();
            }),
        ];
        let words = [
            "no link given",
            "invalid --rails 0",
            "the maximum is 64",
            "gives 1024",
            "MaxPayload 100",
            "host memory must be more than 0",
            "host memory must be more than 0",
            "host memory must be at most 100000 GB/s",
            "invalid BAR1",
            "number of GPUs",
            "chunk",
            "at most PCIe Gen3",
            "host memory",
            "coherent",
        ];
        for (found, wanted) in of.iter().zip(words) {
            assert!(found.contains(wanted), "{found:?} does not say {wanted:?}");
        }
    }
}
