//! The ranks of a communicator: how they find each other, and the windows that all have registered.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use nobounce::{Access, Device, GpuOptions, Region, RemoteRegion};
use nobounce_initiated::rendezvous::{Rendezvous, Token};
use nobounce_initiated::table::{LocalMemory, Memory};
use serde::{Deserialize, Serialize};

use crate::abi::HANDLE_BYTES;
use crate::error::GinError;

/// Bound on the wait for other ranks: NCCL calls all of them at about the same time.
const LIMIT: Duration = Duration::from_secs(120);
/// NCCL takes 0 for a window that is not registered.
const FIRST_HANDLE: u16 = 1;

/// What rank 0 tells the others by NCCL's handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Address {
    ip: IpAddr,
    port: u16,
    token: Token,
}

/// A rank that waits for the others.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    address: Address,
}

impl Listener {
    /// Listens at the address of the device.
    ///
    /// # Errors
    /// The system refuses.
    pub fn open(device: &Device) -> Result<Self, GinError> {
        let ip = device.nic().local();
        let failed = |source| GinError::Listen { addr: ip, source };
        let socket = TcpListener::bind((ip, 0)).map_err(failed)?;
        let port = socket.local_addr().map_err(failed)?.port();
        let mut token = Token::default();
        // SAFETY: the buffer has so many bytes.
        if unsafe { libc::getrandom(token.as_mut_ptr().cast(), token.len(), 0) } != token.len().cast_signed()
        {
            return Err(failed(std::io::Error::last_os_error()));
        }
        Ok(Self { socket, address: Address { ip, port, token } })
    }

    /// The handle that NCCL brings to the other ranks.
    #[must_use]
    pub fn handle(&self) -> [u8; HANDLE_BYTES] {
        let mut handle = [0; HANDLE_BYTES];
        // An address has at most 36 bytes.
        let _ = postcard::to_slice(&self.address, &mut handle);
        handle
    }
}

/// Memory that kernels name by a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    #[allow(missing_docs)]
    Host,
    #[allow(missing_docs)]
    Gpu,
}

/// The ranks of a communicator.
#[derive(Debug)]
pub struct Group {
    device: Arc<Device>,
    rank: usize,
    ranks: usize,
    rendezvous: Mutex<Rendezvous>,
    memory: Arc<RwLock<Memory>>,
    regions: Mutex<HashMap<u16, Region>>,
}

impl Group {
    /// Connects with all ranks, of which `first` is the handle of rank 0.
    ///
    /// # Errors
    /// They do not come in time.
    pub fn connect(
        device: Arc<Device>,
        listener: &Listener,
        first: &[u8; HANDLE_BYTES],
        (rank, ranks): (usize, usize),
    ) -> Result<Self, GinError> {
        let number =
            |value: usize| u32::try_from(value).map_err(|_| GinError::Argument { what: "too many ranks" });
        let (own, count) = (number(rank)?, number(ranks)?);
        let rendezvous = if rank == 0 {
            Rendezvous::host(&listener.socket, listener.address.token, count, LIMIT)?
        } else {
            let malformed = |_| GinError::Malformed { what: "the handle", rank: 0 };
            let Address { ip, port, token } = postcard::from_bytes(first).map_err(malformed)?;
            Rendezvous::join(SocketAddr::new(ip, port), token, own, count, LIMIT)?
        };
        // From now on ranks take part when their programs do.
        let rendezvous = rendezvous.without_limit()?;
        let memory = Arc::new(RwLock::new(Memory::new(ranks)));
        let (rendezvous, regions) = (Mutex::new(rendezvous), Mutex::default());
        Ok(Self { device, rank, ranks, rendezvous, memory, regions })
    }

    #[allow(missing_docs)]
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The number of this rank, and how many there are.
    #[must_use]
    pub fn place(&self) -> (usize, usize) {
        (self.rank, self.ranks)
    }

    /// The windows, by handle.
    #[must_use]
    pub fn memory(&self) -> Arc<RwLock<Memory>> {
        self.memory.clone()
    }

    /// Gives something to all ranks, and returns what all have given.
    ///
    /// # Errors
    /// A rank is gone, or gives something else.
    pub fn exchange<T: Serialize + for<'a> Deserialize<'a>>(
        &self,
        what: &'static str,
        ours: &T,
    ) -> Result<Vec<T>, GinError> {
        let malformed = |rank| GinError::Malformed { what, rank };
        let bytes = postcard::to_stdvec(&(what, ours)).map_err(|_| malformed(self.rank))?;
        let all = self.rendezvous.lock().unwrap_or_else(PoisonError::into_inner).exchange(&bytes)?;
        let parse = |(rank, bytes): (usize, &Vec<u8>)| match postcard::from_bytes::<(String, T)>(bytes) {
            Ok((theirs, value)) if theirs == what => Ok(value),
            _ => Err(malformed(rank)),
        };
        all.iter().enumerate().map(parse).collect()
    }

    /// The same for what a rank may have failed to make. All ranks take part, whatever happened
    /// here.
    ///
    /// # Errors
    /// A rank has none.
    pub fn exchange_made<T: Serialize + for<'a> Deserialize<'a>>(
        &self,
        what: &'static str,
        ours: Option<T>,
    ) -> Result<Vec<T>, GinError> {
        let all = self.exchange(what, &ours)?.into_iter().enumerate();
        all.map(|(rank, made)| made.ok_or(GinError::Peer { what, rank })).collect()
    }

    /// Registers the part of this rank in a window, as all others do theirs, and returns its
    /// handle.
    ///
    /// # Safety
    /// The memory stays as it is until [`deregister`](Self::deregister); the device and peers read
    /// and write it meanwhile.
    ///
    /// # Errors
    /// It cannot be registered, here or at another rank.
    pub unsafe fn register(&self, addr: u64, len: usize, kind: MemoryKind) -> Result<u16, GinError> {
        let registered = match kind {
            // SAFETY: the caller's promise.
            MemoryKind::Gpu => unsafe {
                self.device.register_gpu_raw(addr, len, Access::all(), &GpuOptions::default())
            },
            MemoryKind::Host => {
                let base = std::ptr::with_exposed_provenance_mut(usize::try_from(addr).unwrap_or(0));
                // SAFETY: the caller's promise.
                unsafe { self.device.register_raw(base, len, Access::all()) }
            }
        };
        let ours = registered.as_ref().ok().filter(|region| !region.is_closed()).map(Region::remote);
        let all: Result<Vec<RemoteRegion>, _> = self.exchange_made("a registration", ours);
        // The reason here says more than that there is none.
        let (region, all) = (registered.map_err(|source| GinError::Register { len, source })?, all?);
        let mut memory = self.memory.write().unwrap_or_else(PoisonError::into_inner);
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = memory.free_handle(FIRST_HANDLE).ok_or(GinError::Handles(regions.len()))?;
        let local = LocalMemory { addr: region.addr(), len: region.len() as u64, lkey: region.mr().lkey() };
        memory.set(handle, local, all);
        regions.insert(handle, region);
        Ok(handle)
    }

    /// Ends a registration.
    pub fn deregister(&self, handle: u16) {
        self.memory.write().unwrap_or_else(PoisonError::into_inner).clear(handle);
        let region = self.regions.lock().unwrap_or_else(PoisonError::into_inner).remove(&handle);
        drop(region);
    }
}
