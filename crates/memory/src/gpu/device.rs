//! The GPUs of this machine, as far as CUDA shows them to this process.

use std::ffi::{c_char, c_int, c_uint};
use std::fmt;
use std::fs;
use std::sync::{Arc, Mutex, OnceLock};

use super::api::{Api, Context, consts};
use super::driver::Driver;
use super::error::{CudaError, DriverError};

/// One GPU that CUDA shows to this process.
///
/// Knowing it creates no context; [`primary`](Self::primary) does, and is called where memory is allocated, registered or copied.
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
    gpu_direct_rdma: bool,
    gpu_direct_rdma_with_vmm: bool,
    dma_buf: bool,
    writes_ordering: u32,
    /// The primary context once it is retained, and its identity.
    primary: Mutex<Option<(Context, u64)>>,
}

impl Gpu {
    /// All GPUs, in CUDA's order. The same objects at every call.
    pub fn list() -> Result<Vec<Arc<Self>>, DriverError> {
        static LIST: OnceLock<Result<Vec<Arc<Gpu>>, DriverError>> = OnceLock::new();
        let driver = Driver::get()?;
        LIST.get_or_init(|| {
            driver.relaxed(|api| Self::find_all(driver, api)).map_err(|error| DriverError::Init { error })
        })
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
        // SAFETY: the calls write 16 bytes. The second version names a slice of a divided GPU where the first names the whole.
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
        // An attribute that an old driver does not know is a property that the GPU does not have.
        let attribute = |which: c_uint| {
            let mut value = 0;
            // SAFETY: the call writes one int.
            unsafe { api.device_attribute(&raw mut value, which, device) }
                .map_or(0, |()| u32::try_from(value).unwrap_or(0))
        };
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
            gpu_direct_rdma: attribute(consts::ATTRIBUTE_GPU_DIRECT_RDMA) != 0,
            gpu_direct_rdma_with_vmm: attribute(consts::ATTRIBUTE_RDMA_WITH_VMM) != 0,
            dma_buf: attribute(consts::ATTRIBUTE_DMA_BUF) != 0,
            writes_ordering: attribute(consts::ATTRIBUTE_RDMA_WRITES_ORDERING),
            primary: Mutex::new(None),
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

    /// The N of its `/dev/nvidiaN`, if the kernel module tells.
    #[must_use]
    pub fn minor(&self) -> Option<u32> {
        self.minor
    }

    /// The size of its BAR1, in bytes: what the CPU can see of its memory at one time. From sysfs, if that shows it.
    #[must_use]
    pub fn bar1_size(&self) -> Option<u64> {
        self.bar1_size
    }

    /// The size of its memory, in bytes.
    #[must_use]
    pub fn total_memory(&self) -> u64 {
        self.total_memory
    }

    /// Whether other devices may reach its memory (attribute 116).
    #[must_use]
    pub fn gpu_direct_rdma(&self) -> bool {
        self.gpu_direct_rdma
    }

    /// Whether that holds for VMM memory too (attribute 110).
    #[must_use]
    pub fn gpu_direct_rdma_with_vmm(&self) -> bool {
        self.gpu_direct_rdma_with_vmm
    }

    /// Whether its memory can be exported as a dma-buf (attribute 124).
    #[must_use]
    pub fn dma_buf(&self) -> bool {
        self.dma_buf
    }

    /// Attribute 118: to whom stores from outside are visible in order. 0: to nobody until they are flushed by a read; 100: to this
    /// GPU; 200: to all GPUs.
    #[must_use]
    pub fn writes_ordering(&self) -> u32 {
        self.writes_ordering
    }

    /// Its primary context, the one that the CUDA runtime uses. Retained at the first call, which creates it where there is none,
    /// and kept for the life of the process: giving it back could destroy it under work that is still going on. After
    /// `cudaDeviceReset` it is retained anew.
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

/// BAR1, in the kernel's count the second memory region: with 64-bit BARs that is line 1 of `resource`, whichever register it starts at.
fn bar1_size_of(pci_address: &str) -> Option<u64> {
    parse_bar1(&fs::read_to_string(format!("/sys/bus/pci/devices/{pci_address}/resource")).ok()?)
}

fn parse_bar1(resource: &str) -> Option<u64> {
    let mut fields = resource
        .lines()
        .nth(1)?
        .split_whitespace()
        .map(|field| field.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok()));
    let (start, end) = (fields.next()??, fields.next()??);
    (end > start).then(|| end - start + 1)
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
    fn bar1_is_the_second_region() {
        let resource = "0x00000000fa000000 0x00000000faffffff 0x0000000000040200\n\
                        0x0000380000000000 0x0000383fffffffff 0x000000000014220c\n\
                        0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        assert_eq!(parse_bar1(resource), Some(256 << 30));
        assert_eq!(parse_bar1("0x0 0x0 0x0\n0x0 0x0 0x0\n"), None);
        assert_eq!(parse_bar1("nonsense"), None);
    }
}
