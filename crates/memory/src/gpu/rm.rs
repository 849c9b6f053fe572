//! A client of the driver's resource manager: imports memory objects of this process by handle and
//! maps them through BAR1.
//!
//! This needs no privileges: the device nodes are open to all, and the resource manager lets a
//! process share and map its own objects. Every object made here is freed when its Rust owner is
//! dropped; the kernel frees the rest at process exit.

mod abi;
mod status;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use thiserror::Error;

use super::driver::Driver;
use super::nodes;

/// The first object handle that we choose; the resource manager keeps handles per client, so any
/// value works.
const FIRST_NAME: u32 = 0x6E62_0000;
const CONTROL_NODE: &str = "/dev/nvidiactl";

/// Why a resource manager request failed.
#[derive(Debug, Error)]
pub(super) enum RmError {
    /// A device node cannot be opened.
    #[error("{node} cannot be opened ({source}): {}", nodes::advice(.source))]
    Open { node: String, source: io::Error },
    /// The kernel refused the ioctl itself.
    #[error("the ioctl {call} failed ({source})")]
    Ioctl { call: &'static str, source: io::Error },
    /// The resource manager answered with a status.
    #[error("{call} returned status {status:#x}: {}", status::words(*.status))]
    Status { call: &'static str, status: u32 },
    /// An exported descriptor does not hold an object of GPU memory.
    #[error(
        "the exported descriptor has {count} objects, the first of type {kind}; expected GPU memory (type 1)"
    )]
    NotVideoMemory { count: u16, kind: u8 },
    /// An exported descriptor does not reveal its device.
    #[error("the driver does not report the device of an exported allocation")]
    NoInstance,
    /// `mmap` failed.
    #[error("mmap of {len} bytes of the GPU's BAR1 failed ({source})")]
    Mmap { len: usize, source: io::Error },
}

impl RmError {
    /// True where space ran out.
    pub(super) fn is_lack_of_space(&self) -> bool {
        match self {
            Self::Status { status, .. } => status::is_lack_of_space(*status),
            Self::Mmap { source, .. } => source.raw_os_error() == Some(libc::ENOMEM),
            _ => false,
        }
    }
}

/// One GPU as the resource manager knows it, in a client of our own.
#[derive(Debug)]
pub(super) struct RmDevice {
    control: File,
    /// Registered with the control descriptor; mappings depend on it.
    _node: File,
    node_path: String,
    client: u32,
    device: u32,
    instance: u32,
    next_name: AtomicU32,
}

impl RmDevice {
    /// The GPU behind `/dev/nvidia<minor>`, whose resource manager instance is
    /// `instance_of(exported)`. The descriptor of a VMM allocation on it reveals the instance;
    /// neither CUDA's ordinal nor the minor number does.
    pub(super) fn open(minor: u32, exported: BorrowedFd<'_>) -> Result<Arc<Self>, RmError> {
        Self::open_nodes(CONTROL_NODE, format!("/dev/nvidia{minor}"), exported)
    }

    fn open_nodes(control: &str, node_path: String, exported: BorrowedFd<'_>) -> Result<Arc<Self>, RmError> {
        let control = open_node(control)?;
        let node = open_node(&node_path)?;
        let mut control_fd = control.as_raw_fd();
        // SAFETY: the ioctl reads one int.
        unsafe { ioctl(&node, abi::REGISTER_FD, &raw mut control_fd, "REGISTER_FD") }?;
        let mut this = Self {
            control,
            _node: node,
            node_path,
            client: 0,
            device: 0,
            instance: 0,
            next_name: AtomicU32::new(FIRST_NAME),
        };
        this.client = this.alloc(0, 0, abi::CLASS_CLIENT, &mut [0u32; 0])?;
        this.instance = this.export_info(exported)?.device_instance;
        if this.instance == u32::MAX {
            return Err(RmError::NoInstance);
        }
        let mut params = abi::DeviceParams { instance: this.instance, ..Default::default() };
        this.device =
            this.alloc(this.client, this.name(), abi::CLASS_DEVICE, std::slice::from_mut(&mut params))?;
        let subdevice = this.name();
        this.alloc(this.device, subdevice, abi::CLASS_SUBDEVICE, &mut [0u32])?;
        Ok(Arc::new(this))
    }

    /// The resource manager's number for the GPU.
    pub(super) fn instance(&self) -> u32 {
        self.instance
    }

    /// The resource manager's number of the GPU that an exported allocation lies on.
    pub(super) fn instance_of(&self, exported: BorrowedFd<'_>) -> Result<u32, RmError> {
        self.export_info(exported).map(|info| info.device_instance)
    }

    /// Imports memory that the driver exported as a file descriptor. The descriptor is not needed
    /// afterwards.
    pub(super) fn import(self: &Arc<Self>, exported: BorrowedFd<'_>) -> Result<Arc<RmMemory>, RmError> {
        let info = self.export_info(exported)?;
        if info.max_objects == 0 {
            return Err(RmError::NotVideoMemory { count: 0, kind: 0 });
        }
        // Only the first object is requested; its size then shows whether it is all there is.
        let name = self.name();
        let mut import = abi::ImportObjects {
            fd: exported.as_raw_fd(),
            parent: self.device,
            objects: [0; abi::IMPORT_MAX],
            types: [0; abi::IMPORT_MAX],
            count: 1,
            index: 0,
        };
        import.objects[0] = name;
        self.control(self.client, abi::CMD_IMPORT_OBJECTS, &mut import, "IMPORT_OBJECTS_FROM_FD")?;
        let memory = RmMemory { device: Arc::clone(self), name };
        if import.types[0] != abi::OBJECT_VIDEO_MEMORY {
            return Err(RmError::NotVideoMemory { count: info.max_objects, kind: import.types[0] });
        }
        Ok(Arc::new(memory))
    }

    /// Memory that another client of this process has made shareable, by its names.
    pub(super) fn duplicate(
        self: &Arc<Self>,
        client_source: u32,
        object_source: u32,
    ) -> Result<Arc<RmMemory>, RmError> {
        let mut dup = abi::Dup {
            client: self.client,
            parent: self.device,
            object: self.name(),
            client_source,
            object_source,
            flags: 0,
            status: 0,
        };
        // SAFETY: the structure is the one this number takes.
        unsafe { ioctl(&self.control, abi::DUP_OBJECT, &raw mut dup, "DUP_OBJECT") }?;
        check(dup.status, "DUP_OBJECT")?;
        Ok(Arc::new(RmMemory { device: Arc::clone(self), name: dup.object }))
    }

    fn export_info(&self, exported: BorrowedFd<'_>) -> Result<abi::ExportInfo, RmError> {
        let mut info = abi::ExportInfo {
            fd: exported.as_raw_fd(),
            device_instance: 0,
            gpu_instance: 0,
            max_objects: 0,
            metadata: [0; 64],
        };
        self.control(self.client, abi::CMD_EXPORT_INFO, &mut info, "GET_EXPORT_OBJECT_INFO")?;
        Ok(info)
    }

    /// An object handle that is unused in this client. Handles wrap after 2^32 registrations; the
    /// resource manager refuses one that is still in use.
    fn name(&self) -> u32 {
        self.next_name.fetch_add(1, Ordering::Relaxed)
    }

    fn alloc<T>(&self, parent: u32, name: u32, class: u32, params: &mut [T]) -> Result<u32, RmError> {
        let size = size_of_val(params);
        let mut alloc = abi::Alloc {
            root: self.client,
            parent,
            new: name,
            class,
            params: if size == 0 { 0 } else { params.as_mut_ptr().expose_provenance() as u64 },
            params_size: u32::try_from(size).unwrap_or(u32::MAX),
            ..Default::default()
        };
        // SAFETY: the structure is the one this number takes; it points to `params`, which has the
        // length it states.
        unsafe { ioctl(&self.control, abi::ALLOC, &raw mut alloc, "ALLOC") }?;
        check(alloc.status, "ALLOC")?;
        Ok(alloc.new)
    }

    fn control<T>(
        &self,
        object: u32,
        command: u32,
        params: &mut T,
        call: &'static str,
    ) -> Result<(), RmError> {
        let mut control = abi::Control {
            client: self.client,
            object,
            command,
            flags: 0,
            params: (&raw mut *params).expose_provenance() as u64,
            params_size: u32::try_from(size_of::<T>()).unwrap_or(u32::MAX),
            status: 0,
        };
        // SAFETY: the structure is the one this number takes; it points to `params`, whose type is
        // the command's.
        unsafe { ioctl(&self.control, abi::CONTROL, &raw mut control, call) }?;
        check(control.status, call)
    }
}

/// A memory object in our client. It keeps the physical memory alive, even after its owner has
/// freed it.
#[derive(Debug)]
pub(super) struct RmMemory {
    device: Arc<RmDevice>,
    name: u32,
}

impl RmMemory {
    /// The size of the object, in bytes: of the whole chunk that an allocation lies in.
    pub(super) fn size(&self) -> Result<u64, RmError> {
        let mut list = [
            abi::SurfaceEntry { index: abi::SURFACE_SIZE_LOW, data: 0 },
            abi::SurfaceEntry { index: abi::SURFACE_SIZE_HIGH, data: 0 },
        ];
        let mut info =
            abi::SurfaceInfo { count: 2, pad: 0, list: (&raw mut list).expose_provenance() as u64 };
        self.device.control(self.name, abi::CMD_SURFACE_INFO, &mut info, "GET_SURFACE_INFO")?;
        Ok(u64::from(list[1].data) << 32 | u64::from(list[0].data))
    }

    /// Maps `len` bytes from `offset` on at `at`, over whatever is mapped there.
    ///
    /// # Safety
    /// The range `at..at + len` belongs to the caller and is unused; both are multiples of the page
    /// size.
    pub(super) unsafe fn map_at(
        self: &Arc<Self>,
        offset: u64,
        len: usize,
        at: *mut u8,
    ) -> Result<RmMapping, RmError> {
        // Each mapping wants a descriptor of its own, which the mapping itself then keeps alive.
        let node = open_node(&self.device.node_path)?;
        let mut map = abi::Map {
            client: self.device.client,
            device: self.device.device,
            memory: self.name,
            offset,
            length: len as u64,
            fd: node.as_raw_fd(),
            ..Default::default()
        };
        // SAFETY: the structure is the one this number takes.
        unsafe { ioctl(&self.device.control, abi::MAP_MEMORY, &raw mut map, "MAP_MEMORY") }?;
        check(map.status, "MAP_MEMORY")?;
        let mapping = RmMapping { memory: Arc::clone(self), linear: map.linear };
        // SAFETY: the caller's promise.
        unsafe { map_fd(&OwnedFd::from(node), 0, len, at) }
            .map_err(|source| RmError::Mmap { len, source })?;
        Ok(mapping)
    }
}

impl Drop for RmMemory {
    fn drop(&mut self) {
        // A child shares the parent's client: freeing there would take the parent's memory.
        if Driver::is_forked() {
            return;
        }
        let mut free =
            abi::Free { root: self.device.client, parent: self.device.device, object: self.name, status: 0 };
        // SAFETY: the structure is the one this number takes. A failure leaves the object to the
        // end of the process.
        let _ = unsafe { ioctl(&self.device.control, abi::FREE, &raw mut free, "FREE") };
    }
}

/// BAR1 space that a mapping uses. Dropped after the pages were unmapped.
#[derive(Debug)]
pub(super) struct RmMapping {
    memory: Arc<RmMemory>,
    linear: u64,
}

impl Drop for RmMapping {
    fn drop(&mut self) {
        if Driver::is_forked() {
            return;
        }
        let device = &self.memory.device;
        let mut unmap = abi::Unmap {
            client: device.client,
            device: device.device,
            memory: self.memory.name,
            pad: 0,
            linear: self.linear,
            status: 0,
            flags: 0,
        };
        // SAFETY: the structure is the one this number takes. A failure leaves the space to the
        // object's end, which follows.
        let _ = unsafe { ioctl(&device.control, abi::UNMAP_MEMORY, &raw mut unmap, "UNMAP_MEMORY") };
    }
}

/// Maps `len` bytes of `fd` from `offset` on, shared, readable and writable, at `at`.
///
/// # Safety
/// The range `at..at + len` belongs to the caller and is unused. After an error it may belong to no
/// one.
pub(super) unsafe fn map_fd(fd: &OwnedFd, offset: i64, len: usize, at: *mut u8) -> io::Result<()> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: the caller's promise; the call replaces mappings in that range only.
    let mapped = unsafe { libc::mmap(at.cast(), len, protection, flags, fd.as_raw_fd(), offset) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn open_node(path: &str) -> Result<File, RmError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(path)
        .map_err(|source| RmError::Open { node: path.to_owned(), source })
}

fn check(status: u32, call: &'static str) -> Result<(), RmError> {
    if status == 0 { Ok(()) } else { Err(RmError::Status { call, status }) }
}

/// Makes one call, again where a signal interrupted it.
///
/// # Safety
/// `argument` points to the structure that `number` takes, which the kernel reads and writes.
unsafe fn ioctl<T>(file: &File, number: u8, argument: *mut T, call: &'static str) -> Result<(), RmError> {
    let request = request(b'F', number, size_of::<T>());
    loop {
        // SAFETY: the caller's promise.
        if unsafe { libc::ioctl(file.as_raw_fd(), request, argument) } >= 0 {
            return Ok(());
        }
        let source = io::Error::last_os_error();
        if source.kind() != io::ErrorKind::Interrupted {
            return Err(RmError::Ioctl { call, source });
        }
    }
}

/// The kernel's number of an ioctl that reads and writes `size` bytes.
pub(super) const fn request(magic: u8, number: u8, size: usize) -> libc::Ioctl {
    const READ_AND_WRITE: libc::Ioctl = 3;
    READ_AND_WRITE << 30 | (size as libc::Ioctl) << 16 | (magic as libc::Ioctl) << 8 | number as libc::Ioctl
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn ioctl_numbers_are_the_kernels() {
        assert_eq!(request(b'F', abi::MAP_MEMORY, size_of::<abi::Map>()), 0xC038_464E);
        assert_eq!(request(b'F', abi::REGISTER_FD, 4), 0xC004_46C9);
    }

    #[test]
    fn errors_say_what_to_do() {
        let full = RmError::Status { call: "MAP_MEMORY", status: 0x1A };
        assert!(full.is_lack_of_space());
        assert!(full.to_string().contains("BAR1"), "{full}");
    }

    /// A container without the control node, without the GPU's, or with other files under their
    /// names.
    #[test]
    fn missing_nodes_are_named() {
        let exported = File::open("/dev/null").unwrap();
        let open = |control: &str, node: &str| {
            RmDevice::open_nodes(control, node.to_owned(), exported.as_fd()).unwrap_err()
        };
        for (control, node) in [("/dev/not-nvidiactl", "/dev/null"), ("/dev/null", "/dev/not-nvidia0")] {
            let error = open(control, node);
            let words = error.to_string();
            assert!(matches!(&error, RmError::Open { node, .. } if node.contains("not-nvidia")), "{error}");
            assert!(words.contains("does not exist") && words.contains("--gpus all"), "{words}");
            assert!(!error.is_lack_of_space());
        }
        let error = open("/dev/null", "/dev/null");
        assert!(matches!(error, RmError::Ioctl { call: "REGISTER_FD", .. }), "{error}");
    }

    #[test]
    fn nodes_that_are_not_permitted_are_named() {
        let path = std::env::temp_dir().join(format!("nobounce-rm-{}", std::process::id()));
        let file =
            OpenOptions::new().create(true).write(true).truncate(true).mode(0o200).open(&path).unwrap();
        let words = std::thread::scope(|scope| {
            let opening = scope.spawn(|| {
                // SAFETY: drops root's file access rights in this thread only, which ends here.
                unsafe { libc::setfsuid(65534) };
                let node = path.to_str().unwrap();
                RmDevice::open_nodes(node, node.to_owned(), file.as_fd()).unwrap_err().to_string()
            });
            opening.join().unwrap()
        });
        std::fs::remove_file(&path).unwrap();
        assert!(words.contains("permission denied for this user") && words.contains("0666"), "{words}");
    }
}
