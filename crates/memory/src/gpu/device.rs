//! The GPUs of this machine, as far as CUDA shows them to this process.

use std::ffi::{c_char, c_int, c_uint};
use std::fmt;
use std::fs;
use std::sync::{Arc, Mutex, OnceLock};

use super::api::{Api, Context, consts};
use super::driver::Driver;
use super::error::{CudaError, DriverError};
use super::gpu_window::Unsettled;

/// One GPU that CUDA exposes to this process.
///
/// Creating this creates no context; [`primary`](Self::primary) does, when memory is allocated,
/// registered or copied.
#[derive(Debug)]
pub struct Gpu {
    driver: &'static Driver,
    ordinal: i32,
    device: c_int,
    name: String,
    uuid: [u8; 16],
    pci_address: String,
    minor: Option<u32>,
    bar1_size: Option<u64>,
    total_memory: u64,
    gpu_direct_rdma: Option<bool>,
    gpu_direct_rdma_with_vmm: Option<bool>,
    dma_buf: Option<bool>,
    writes_ordering: u32,
    /// The primary context once it is retained, and its identity.
    primary: Mutex<Option<(Context, u64)>>,
    /// Stores through windows onto it that no load has settled.
    unsettled: Arc<Unsettled>,
}

impl Gpu {
    pub(super) fn unsettled(&self) -> &Arc<Unsettled> {
        &self.unsettled
    }

    /// All GPUs, in CUDA's order. The same objects at every call.
    pub fn list() -> Result<Vec<Arc<Self>>, DriverError> {
        static LIST: OnceLock<Result<Vec<Arc<Gpu>>, DriverError>> = OnceLock::new();
        let driver = Driver::get()?;
        LIST.get_or_init(|| driver.relaxed(|api| Self::find_all(driver, api)).map_err(DriverError::init))
            .clone()
    }

    /// The GPU that CUDA counts as `ordinal`, if there is one.
    pub fn by_ordinal(ordinal: i32) -> Result<Option<Arc<Self>>, DriverError> {
        Ok(Self::list()?.into_iter().find(|gpu| gpu.ordinal == ordinal))
    }

    fn find_all(driver: &'static Driver, api: &Api) -> Result<Vec<Arc<Self>>, CudaError> {
        let mut count = 0;
        // SAFETY: the call writes one int.
        unsafe { api.device_count(&raw mut count) }?;
        (0..count).map(|ordinal| Self::find(driver, api, ordinal).map(Arc::new)).collect()
    }

    fn find(driver: &'static Driver, api: &Api, ordinal: c_int) -> Result<Self, CudaError> {
        let mut device: c_int = 0;
        // SAFETY: the call writes one int.
        unsafe { api.device_get(&raw mut device, ordinal) }?;
        let name = text(|buffer, len| {
            // SAFETY: the buffer has room for `len` characters.
            unsafe { api.device_name(buffer, len, device) }
        })?;
        let mut uuid = [0; 16];
        // SAFETY: the calls write 16 bytes. The second version identifies a MIG slice where the
        // first identifies the whole GPU.
        unsafe {
            api.device_uuid_v2(&raw mut uuid, device).or_else(|_| api.device_uuid(&raw mut uuid, device))
        }?;
        let pci_address = text(|buffer, len| {
            // SAFETY: the buffer has room for `len` characters.
            unsafe { api.device_pci_bus_id(buffer, len, device) }
        })?
        .to_ascii_lowercase();
        let mut total = 0;
        // SAFETY: the call writes one size.
        unsafe { api.device_total_mem(&raw mut total, device) }?;
        // An old driver refuses attributes that it does not know: that says nothing about the GPU.
        let attribute = |which: c_uint| {
            let mut value = 0;
            // SAFETY: the call writes one int.
            unsafe { api.device_attribute(&raw mut value, which, device) }
                .ok()
                .and_then(|()| u32::try_from(value).ok())
        };
        let flag = |which: c_uint| attribute(which).map(|value| value != 0);
        Ok(Self {
            driver,
            ordinal,
            device,
            name,
            uuid,
            minor: minor_of(&pci_address),
            bar1_size: bar1_size_of(&pci_address),
            pci_address,
            total_memory: u64::try_from(total).unwrap_or(u64::MAX),
            gpu_direct_rdma: flag(consts::ATTRIBUTE_GPU_DIRECT_RDMA),
            gpu_direct_rdma_with_vmm: flag(consts::ATTRIBUTE_RDMA_WITH_VMM),
            dma_buf: flag(consts::ATTRIBUTE_DMA_BUF),
            // Unknown counts as none: a read settles the stores.
            writes_ordering: attribute(consts::ATTRIBUTE_RDMA_WRITES_ORDERING).unwrap_or(0),
            primary: Mutex::new(None),
            unsettled: Arc::default(),
        })
    }

    /// The driver it was found by.
    #[must_use]
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// CUDA's number for it in this process (`CUDA_VISIBLE_DEVICES` renumbers).
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Its name, such as `NVIDIA H200`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its UUID.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Its address on the PCI bus, such as `0000:1b:00.0`.
    #[must_use]
    pub fn pci_address(&self) -> &str {
        &self.pci_address
    }

    /// The N of its `/dev/nvidiaN`, if the kernel module reports it.
    #[must_use]
    pub fn minor(&self) -> Option<u32> {
        self.minor
    }

    /// The size of its BAR1 in bytes: how much of its memory the CPU can map at one time. From
    /// sysfs, if available there.
    #[must_use]
    pub fn bar1_size(&self) -> Option<u64> {
        self.bar1_size
    }

    /// The size of its memory, in bytes.
    #[must_use]
    pub fn total_memory(&self) -> u64 {
        self.total_memory
    }

    /// Whether other devices may reach its memory (attribute 116). `None`: the driver does not know
    /// the attribute, as before 465.
    #[must_use]
    pub fn gpu_direct_rdma(&self) -> Option<bool> {
        self.gpu_direct_rdma
    }

    /// Whether that holds for VMM memory too (attribute 110). `None`: the driver does not know it.
    #[must_use]
    pub fn gpu_direct_rdma_with_vmm(&self) -> Option<bool> {
        self.gpu_direct_rdma_with_vmm
    }

    /// Whether its memory can be exported as a dma-buf (attribute 124). `None`: the driver does not
    /// know the attribute, as before 515.
    #[must_use]
    pub fn dma_buf(&self) -> Option<bool> {
        self.dma_buf
    }

    /// Attribute 118: the scope in which remote stores are visible in order. 0: none, until a read
    /// flushes them; 100: this GPU; 200: all GPUs.
    #[must_use]
    pub fn writes_ordering(&self) -> u32 {
        self.writes_ordering
    }

    /// Its primary context, the one that the CUDA runtime uses. Retained at the first call, which
    /// creates it where there is none. Kept for the life of the process: releasing it could destroy
    /// it under running work. After `cudaDeviceReset` it is retained anew.
    pub fn primary(&self) -> Result<Context, CudaError> {
        let mut primary = self.primary.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some((context, id)) = *primary
            && self.primary_is_active()?
            && self.driver.context_id(context) == Ok(id)
        {
            return Ok(context);
        }
        let mut context = Context::NULL;
        // SAFETY: the call writes one handle.
        self.driver.relaxed(|api| unsafe { api.primary_retain(&raw mut context, self.device) })?;
        *primary = Some((context, self.driver.context_id(context)?));
        Ok(context)
    }

    /// Whether its primary context exists, which asking does not change.
    pub fn primary_is_active(&self) -> Result<bool, CudaError> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the call writes two words.
        self.driver
            .relaxed(|api| unsafe { api.primary_state(self.device, &raw mut flags, &raw mut active) })
            .map(|()| active != 0)
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({}, {})", self.ordinal, self.name, self.pci_address)
    }
}

/// A text that a function writes as a C string.
fn text(write: impl FnOnce(*mut c_char, c_int) -> Result<(), CudaError>) -> Result<String, CudaError> {
    let mut buffer = [0u8; 128];
    write(buffer.as_mut_ptr().cast(), 127)?;
    let end = buffer.iter().position(|&byte| byte == 0).unwrap_or(buffer.len());
    Ok(String::from_utf8_lossy(&buffer[..end]).into_owned())
}

/// The kernel module's number for the device, which is neither CUDA's nor the resource manager's.
fn minor_of(pci_address: &str) -> Option<u32> {
    let facts = fs::read_to_string(format!("/proc/driver/nvidia/gpus/{pci_address}/information")).ok()?;
    parse_minor(&facts)
}

fn parse_minor(facts: &str) -> Option<u32> {
    facts.lines().find_map(|line| line.strip_prefix("Device Minor:")?.trim().parse().ok())
}

fn bar1_size_of(pci_address: &str) -> Option<u64> {
    parse_bar1(&fs::read_to_string(format!("/sys/bus/pci/devices/{pci_address}/resource")).ok()?)
}

/// BAR1 in the kernel's list of a device's regions: the largest prefetchable memory region. Its
/// index differs by generation: a 64-bit region takes two entries, and the one before it may be of
/// either kind. A hypervisor may report no region as prefetchable: then the largest of 64 bits, if
/// it is too large for registers.
fn parse_bar1(resource: &str) -> Option<u64> {
    const REGIONS: usize = 6;
    const MEMORY: u64 = 0x200;
    const PREFETCH: u64 = 0x2000;
    const WIDE: u64 = 0x10_0000;
    const BEYOND_REGISTERS: u64 = 128 << 20;
    // Behind the six regions come the ROM and those of virtual functions, which may be larger and
    // are not ours.
    let regions: Vec<(u64, u64)> = resource
        .lines()
        .take(REGIONS)
        .filter_map(|line| {
            let mut fields =
                line.split_whitespace().map(|field| u64::from_str_radix(field.strip_prefix("0x")?, 16).ok());
            let (start, end, flags) = (fields.next()??, fields.next()??, fields.next()??);
            (flags & MEMORY != 0 && end > start).then(|| ((end - start).saturating_add(1), flags))
        })
        .collect();
    let largest =
        |wanted: u64| regions.iter().filter(|&&(_, flags)| flags & wanted != 0).map(|&(size, _)| size).max();
    largest(PREFETCH).or_else(|| largest(WIDE).filter(|&size| size >= BEYOND_REGISTERS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minor_number_is_read_from_the_modules_text() {
        let facts = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 123\nBus Location: \t 0000:1b:00.0\nDevice Minor: \t 3\nGPU Excluded:\t No\n";
        assert_eq!(parse_minor(facts), Some(3));
        assert_eq!(parse_minor("Model: \t NVIDIA\n"), None);
    }

    #[test]
    fn bar1_is_the_largest_region_that_may_be_prefetched() {
        // A Hopper: all regions of 64 bits, two places each; behind the ROM those of virtual
        // functions.
        let hopper = "0x0000380040000000 0x0000380043ffffff 0x000000000014220c\n\
                      0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                      0x0000384000000000 0x0000387fffffffff 0x000000000014220c\n\
                      0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                      0x0000380044000000 0x0000380045ffffff 0x000000000014220c\n\
                      0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                      0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                      0x0000400000000000 0x00005fffffffffff 0x000000000014220c\n";
        assert_eq!(parse_bar1(hopper), Some(256 << 30));
        // An older card: registers of 32 bits first, then BAR1 with 256 MiB, an aperture of 32 MiB,
        // ports.
        let older = "0x00000000f6000000 0x00000000f6ffffff 0x0000000000040200\n\
                     0x00000000e0000000 0x00000000efffffff 0x000000000014220c\n\
                     0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                     0x00000000f0000000 0x00000000f1ffffff 0x000000000014220c\n\
                     0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                     0x000000000000e000 0x000000000000e07f 0x0000000000040101\n\
                     0x00000000000c0000 0x00000000000dffff 0x0000000000000212\n";
        assert_eq!(parse_bar1(older), Some(256 << 20));
        let not_marked = hopper.replace("14220c", "140204");
        assert_eq!(parse_bar1(&not_marked), Some(256 << 30));
        for nothing in
            ["0x0 0x0 0x0\n0x0 0x0 0x0\n", "nonsense", "", "0x1000 0x1fff\n", "0x2000 0x1000 0x14220c\n"]
        {
            assert_eq!(parse_bar1(nothing), None, "{nothing}");
        }
    }
}
