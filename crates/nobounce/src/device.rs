//! The device: where everything starts.

use nobounce_memory::gpu::GpuOptions;
use nobounce_nic::any::{self, OpenError, Pd};
use nobounce_nic::hard;
use nobounce_nic::work::Access;
use nobounce_nic::{Config, ConfigError, Progress};

use crate::choose::{AUTO, DeviceChoice};
use crate::region::{Region, RegisterError};

/// The variable that names the device.
const VARIABLE: &str = "NOBOUNCE_DEVICE";

/// A NIC. Clones share it; it closes when the last object made from it is gone.
///
/// Every peer with the key of a region may use it within its access rights. Keys are 32 random bits
/// and may be guessed. Open two devices to isolate two groups of peers.
#[derive(Clone, Debug)]
pub struct Device {
    nic: any::Device,
    pd: Pd,
}

impl Device {
    /// Opens the device that `NOBOUNCE_DEVICE` names, see [`open_named`](Self::open_named); the
    /// software NIC if it is not set.
    ///
    /// # Errors
    /// A variable is invalid, another user holds the port, ...: the message says what to do.
    pub fn open() -> Result<Self, OpenError> {
        Self::open_named(std::env::var(VARIABLE).as_deref().unwrap_or("nb0"))
    }

    /// Opens the device for memory of CUDA device `gpu`: the one that `NOBOUNCE_DEVICE` names. If
    /// that is unset or `auto`, it is the nearest adapter by PCIe, or the software NIC where there
    /// is none ([`DeviceChoice`] says why).
    ///
    /// # Errors
    /// As for [`open_named`](Self::open_named).
    pub fn open_near_gpu(gpu: i32) -> Result<Self, OpenError> {
        Self::open_named(&name_near_gpu(gpu)?)
    }

    /// As [`open_near_gpu`](Self::open_near_gpu), for a thread that polls all the time: it drives
    /// the software NIC itself, unless `NOBOUNCE_PROGRESS` says otherwise.
    ///
    /// # Errors
    /// As for [`open_named`](Self::open_named).
    pub fn open_near_gpu_polled(gpu: i32) -> Result<Self, OpenError> {
        let name = name_near_gpu(gpu)?;
        match Self::soft_config(&name)? {
            Some(config) if config.progress == Progress::Auto => {
                Self::open_with(&Config { progress: Progress::Caller, ..config })
            }
            _ => Self::open_named(&name),
        }
    }

    /// The configuration of a software NIC; `None` for other names.
    fn soft_config(name: &str) -> Result<Option<Config>, OpenError> {
        let Some(number) = soft_number(name).filter(|_| !Self::is_hardware(name)) else { return Ok(None) };
        let addrs = Config::addrs_from_env()?;
        let none = || ConfigError::Addr(format!("{name}: NOBOUNCE_ADDR has {} addresses", addrs.len()));
        let addr = addrs.get(number).copied().ok_or_else(none)?;
        Ok(Some(Config { addr, ..Config::from_env()? }))
    }

    /// Opens a device by its name. `nb0`, `nb1`, ... are software NICs, configured by
    /// `NOBOUNCE_ADDR` (addresses or interfaces; default loopback), `NOBOUNCE_FAULT`,
    /// `NOBOUNCE_PCAP` and `NOBOUNCE_LINK`. Other names, such as `mlx5_0` or `mlx5_0:2`, are ports
    /// of NICs of the system's libibverbs. If `NOBOUNCE_VERBS` names another libibverbs, all names
    /// are looked up there. `auto` is the fastest usable adapter, or the software NIC where there
    /// is none ([`DeviceChoice`]; for memory of a GPU see [`open_near_gpu`](Self::open_near_gpu)).
    ///
    /// # Errors
    /// There is no such device, it cannot be opened, ...: the message says what to do.
    pub fn open_named(name: &str) -> Result<Self, OpenError> {
        if name == AUTO {
            return Self::open_named(&DeviceChoice::of(None).into_name()?);
        }
        match Self::soft_config(name)? {
            Some(config) => Self::open_with(&config),
            None => Self::open_hardware(name, &hard::Options::from_env()?),
        }
    }

    /// Whether a device of that name is a NIC of a libibverbs and not the software NIC.
    pub fn is_hardware(name: &str) -> bool {
        soft_number(name).is_none() || hard::Library::is_named()
    }

    /// Opens a NIC of the system's libibverbs.
    ///
    /// # Errors
    /// There is no libibverbs, no such device, no permission to open it, no active port, ...: the
    /// message says what to do.
    pub fn open_hardware(name: &str, options: &hard::Options) -> Result<Self, OpenError> {
        Self::from_any(any::Device::Hard(hard::Device::open(name, options)?))
    }

    /// Opens the software NIC.
    ///
    /// # Errors
    /// Another user holds the port, the address is not local, ...: the message says what to do.
    pub fn open_with(config: &Config) -> Result<Self, OpenError> {
        Self::from_any(any::Device::open(config)?)
    }

    /// A device on an open NIC of either kind.
    ///
    /// # Errors
    /// The NIC has too many protection domains already.
    pub fn from_any(nic: any::Device) -> Result<Self, OpenError> {
        Ok(Self { pd: nic.alloc_pd()?, nic })
    }

    /// The underlying NIC.
    pub fn nic(&self) -> &any::Device {
        &self.nic
    }

    /// The protection domain of its regions and connections.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }

    /// Zeroed, page-aligned host memory that peers may read, write and operate on atomically.
    ///
    /// # Errors
    /// Out of memory, or the device has too many regions.
    pub fn register(&self, len: usize) -> Result<Region, RegisterError> {
        self.register_with(len, Region::ALL)
    }

    /// As [`register`](Self::register), with fewer access rights.
    ///
    /// # Errors
    /// As for [`register`](Self::register); or the access rights contradict each other.
    pub fn register_with(&self, len: usize, access: Access) -> Result<Region, RegisterError> {
        Region::allocate(&self.pd, len, access)
    }

    /// Registers existing memory.
    ///
    /// # Safety
    /// Until the region is dropped, this process (through the region), the device and peers read
    /// the memory and, as `access` allows, write it. No Rust reference to it may be live meanwhile.
    /// It may be unmapped (operations then fail), but its addresses must not be reused for
    /// something else.
    ///
    /// # Errors
    /// The range is not mapped with these access rights, or they contradict each other.
    pub unsafe fn register_raw(
        &self,
        base: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Region, RegisterError> {
        // SAFETY: the caller's promise is the same.
        unsafe { Region::of_raw(&self.pd, base, len, access) }
    }

    /// As [`register_raw`](Self::register_raw), for memory whose pages need not be there yet, as a
    /// mapped file: registering it does not read the file. Hardware adapters read and pin all of
    /// it.
    ///
    /// # Safety
    /// As for [`register_raw`](Self::register_raw). Where nothing is mapped, operations fail.
    ///
    /// # Errors
    /// The access rights contradict each other, or the device has too many regions.
    pub unsafe fn register_raw_on_demand(
        &self,
        base: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Region, RegisterError> {
        // SAFETY: the caller's promise is the same.
        unsafe { Region::of_raw_on_demand(&self.pd, base, len, access) }
    }

    /// Memory of the first GPU that peers may read, write and operate on atomically. It is not
    /// zeroed.
    ///
    /// The region's [`paths`](Region::paths) say which path its bytes take. `NOBOUNCE_WINDOW=off`
    /// and `NOBOUNCE_REQUIRE=direct` in the environment apply, see [`GpuOptions`].
    ///
    /// # Errors
    /// There is no GPU, it is out of memory, or a direct path is required and there is none.
    pub fn register_gpu(&self, len: usize) -> Result<Region, RegisterError> {
        self.register_gpu_on(0, len, GpuOptions::default())
    }

    /// The same on CUDA device `ordinal`, with options: [`Require::Direct`](crate::Require) fails,
    /// with the reason, if the path would be staged.
    ///
    /// # Errors
    /// As for [`register_gpu`](Self::register_gpu).
    pub fn register_gpu_on(
        &self,
        ordinal: i32,
        len: usize,
        options: GpuOptions,
    ) -> Result<Region, RegisterError> {
        Region::allocate_gpu(&self.pd, ordinal, len, &options)
    }

    /// Registers memory that CUDA knows (`cudaMalloc`, a tensor, pinned host memory, ...) and that
    /// other code allocated.
    ///
    /// # Safety
    /// Until the region is dropped, this process (through the region), the device and peers read
    /// the memory and, as `access` allows, write it. Concurrent users of the memory must expect
    /// that. Free it after the region is dropped.
    ///
    /// # Errors
    /// It is not GPU memory, crosses the end of its allocation, was freed, ...: the message says
    /// what was found. Or a direct path is required and there is none.
    pub unsafe fn register_gpu_raw(
        &self,
        addr: u64,
        len: usize,
        access: Access,
        options: &GpuOptions,
    ) -> Result<Region, RegisterError> {
        // SAFETY: the caller's promise is the same.
        unsafe { Region::of_gpu_raw(&self.pd, addr, len, access, options) }
    }
}

/// The device that the environment names, or else the nearest one.
fn name_near_gpu(gpu: i32) -> Result<String, OpenError> {
    match std::env::var(VARIABLE) {
        Ok(name) if name != AUTO => Ok(name),
        _ => DeviceChoice::of(Some(gpu)).into_name(),
    }
}

/// The number of a software NIC, from its name.
fn soft_number(name: &str) -> Option<usize> {
    name.strip_prefix("nb").and_then(|number| number.parse().ok())
}
