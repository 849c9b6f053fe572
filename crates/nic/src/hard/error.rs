//! Errors of a hardware NIC, in sentences: libibverbs gives an error number at most.

use std::io;

use super::gid::NoGid;
use super::library::LibraryError;

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no libibverbs.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The list could not be had.
    #[error("libibverbs gives no list of devices: {os}{}", hint(os))]
    List {
        /// What it said.
        os: io::Error,
    },
    /// The list is empty.
    #[error("{library} shows no RDMA device: {why}")]
    None {
        /// Which file was asked.
        library: String,
        /// What the kernel shows.
        why: String,
    },
    /// There is no device of that name.
    #[error("there is no RDMA device {name}; there are: {there}")]
    NoSuch {
        /// The requested name.
        name: String,
        /// The names there are.
        there: String,
    },
    /// It could not be opened.
    #[error("{device} cannot be opened: {os}{}", open_hint(os, node))]
    Open {
        /// The device.
        device: String,
        /// The file behind it.
        node: String,
        /// What libibverbs said.
        os: io::Error,
    },
    /// It could not be asked.
    #[error("{call} of {device} failed: {os}{}", hint(os))]
    Query {
        /// The device.
        device: String,
        /// The function.
        call: &'static str,
        /// What it said.
        os: io::Error,
    },
    /// There is no such port.
    #[error(
        "{name}: no such port{}; ports are named by a number, as in mlx5_0:1",
        ports.map_or(String::new(), |ports| format!(", the device has {ports}"))
    )]
    NoSuchPort {
        /// What was requested.
        name: String,
        /// How many there are, if that is known.
        ports: Option<u8>,
    },
    /// No port works.
    #[error(
        "{device} has no active port ({states}): is the cable in, the interface up (ip link), and on InfiniBand a subnet manager running?"
    )]
    NoPort {
        /// The device.
        device: String,
        /// Each port and its state.
        states: String,
    },
    /// No address works.
    #[error("{device} port {port}: {why}")]
    Gid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Entry by entry.
        why: NoGid,
    },
    /// Packets are to be sealed.
    #[error(
        "a hardware NIC cannot seal packets, but NOBOUNCE_KEY is set: unset it, or use the software NIC (nb0)"
    )]
    Key,
    /// A variable makes no sense.
    #[error("{variable}={value} makes no sense: {expected} is expected")]
    Variable {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
}

/// Why an object could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The device refused.
    #[error("{call} on {device} failed: {os}{}", hint(os))]
    Refused {
        /// The function.
        call: &'static str,
        /// The device.
        device: String,
        /// What it said.
        os: io::Error,
    },
    /// More than the device has.
    #[error("{what}: {asked} are asked for, {device} offers {max}")]
    Limit {
        /// What there are too many of.
        what: &'static str,
        /// The requested number.
        asked: usize,
        /// How many there are.
        max: usize,
        /// The device.
        device: String,
    },
    /// This is a child of the process that opened the device.
    #[error("{0} {FORKED}")]
    Forked(String),
}

/// Why memory could not be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The device refused.
    #[error("{device} cannot register {len} bytes at {addr:#x}: {os}{}", register_hint(os))]
    Refused {
        /// The device.
        device: String,
        /// The first byte.
        addr: u64,
        /// How many.
        len: usize,
        /// What it said.
        os: io::Error,
    },
    /// This is a child of the process that opened the device.
    #[error("{0} {FORKED}")]
    Forked(String),
    /// It is GPU memory, and CUDA does not know it so.
    #[error(transparent)]
    Gpu(#[from] nobounce_memory::gpu::GpuRegisterError),
    /// A direct path was required, and there is none.
    #[error(
        "a direct path is required for {len} bytes of GPU memory at {addr:#x}, but {device} cannot reach it: {why}"
    )]
    NotDirect {
        /// The device.
        device: String,
        /// The first byte.
        addr: u64,
        /// How many.
        len: usize,
        /// Why each method failed.
        why: String,
    },
    /// No host memory for staging.
    #[error("cannot map {len} bytes of host memory to stage GPU memory in: {os}")]
    Shadow {
        /// How many.
        len: usize,
        /// What the kernel said.
        os: io::Error,
    },
}

/// Why a queue pair could not be modified.
#[derive(Debug, thiserror::Error)]
#[error("{device}: the queue pair cannot go to {state}: {os}{}", modify_hint(os, state, towards))]
pub struct ModifyError {
    /// The device.
    pub device: String,
    /// The state it was to go to.
    pub state: &'static str,
    /// From which address to which.
    pub towards: String,
    /// What the device said.
    pub os: io::Error,
}

/// Why a request was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// Too many are outstanding.
    #[error("the queue is full ({0} requests): poll completions first, or make the queue deeper")]
    QueueFull(usize),
    /// The scatter/gather list is too long, or data are too long for inline.
    #[error("{what}: {given}; the queue pair was made for {max}")]
    Limit {
        /// What there is too much of.
        what: &'static str,
        /// How much was given.
        given: usize,
        /// How much there may be.
        max: usize,
    },
    /// More than the port carries in one message.
    #[error(
        "a message of {len} bytes: a port of {device} carries at most {max} at once; cut it into several"
    )]
    TooLong {
        /// Its length in bytes.
        len: u64,
        /// The longest.
        max: u32,
        /// The device.
        device: String,
    },
    /// This is a child of the process that opened the device.
    #[error("{0} {FORKED}")]
    Forked(String),
    /// An operation not offered on this device.
    #[error("{0} is not offered on hardware devices")]
    NotOffered(&'static str),
    /// The copy between GPU memory and the host memory it is staged in failed.
    #[error("GPU memory is staged, and its copy failed: {0}")]
    Staging(String),
    /// The device refused.
    #[error(
        "the device did not take the request: {0} (a queue pair that is not connected, or a list that makes no sense)"
    )]
    Refused(io::Error),
}

/// Why a completion queue cannot be polled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CqError {
    /// `ibv_poll_cq` failed.
    #[error("ibv_poll_cq on {device} failed with {code}: the device is gone, or the queue overflowed")]
    Failed {
        /// The device.
        device: String,
        /// What it returned.
        code: i32,
    },
    /// This is a child of the process that opened the device.
    #[error("{0} {FORKED}")]
    Forked(String),
}

/// The error text for a forked child, after the name of the device.
const FORKED: &str = "was opened before a fork: it is the parent's, and the child must open its own";

pub(crate) fn last() -> io::Error {
    io::Error::last_os_error()
}

/// The error of functions that return a number: it, or errno where they return -1.
pub(crate) fn returned(code: i32) -> io::Error {
    if code > 0 { io::Error::from_raw_os_error(code) } else { last() }
}

fn hint(os: &io::Error) -> String {
    match os.raw_os_error() {
        Some(libc::ENOMEM) => memlock_hint(),
        Some(libc::EIO | libc::ENODEV | libc::ENXIO) => {
            "; the device is gone (its driver was unloaded, or it was unplugged)".to_owned()
        }
        Some(libc::EACCES | libc::EPERM) => {
            "; the files in /dev/infiniband do not let this user in".to_owned()
        }
        Some(libc::ENOSYS) => "; the kernel has no RDMA (modprobe ib_uverbs)".to_owned(),
        _ => String::new(),
    }
}

fn open_hint(os: &io::Error, node: &str) -> String {
    match os.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => format!(
            "; {node} does not let this user in: see its owner and mode (ls -l), add the user to its group, and in a container \
             pass --device={node}"
        ),
        Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => {
            format!("; {node} is not there: modprobe ib_uverbs, and in a container pass --device={node}")
        }
        _ => hint(os),
    }
}

fn register_hint(os: &io::Error) -> String {
    match os.raw_os_error() {
        Some(libc::EFAULT) => "; the range is not mapped, or not with these rights".to_owned(),
        Some(libc::EINVAL) => "; the device does not take such a range or such rights".to_owned(),
        _ => hint(os),
    }
}

/// Devices pin registered memory: the usual cause of ENOMEM is RLIMIT_MEMLOCK, not lack of memory.
fn memlock_hint() -> String {
    let limit = memlock();
    if limit == libc::RLIM_INFINITY {
        "; there is no limit on locked memory here, so the device or the kernel has run out of it".to_owned()
    } else {
        format!(
            "; this process may lock {} KiB of memory, queues and regions together: raise it (ulimit -l unlimited, memlock in \
             /etc/security/limits.conf, LimitMEMLOCK= of a systemd unit, --ulimit memlock=-1 of docker)",
            limit / 1024
        )
    }
}

/// How much memory this process may lock, in bytes.
pub(crate) fn memlock() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call fills a structure of ours.
    if unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } == 0 {
        limit.rlim_cur
    } else {
        libc::RLIM_INFINITY
    }
}

fn modify_hint(os: &io::Error, state: &str, towards: &str) -> String {
    match (os.raw_os_error(), state) {
        (Some(libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH), _) => format!(
            "; no answer from that address ({towards}): is it an address of the peer's RDMA interface, and reachable from here? (NOBOUNCE_GID_INDEX names another of ours)"
        ),
        (Some(libc::EINVAL), "RTR") => format!(
            "; the addresses do not go together ({towards}): the GID may be one of another network, or gone from the table since \
             (NOBOUNCE_GID_INDEX names another)"
        ),
        _ => hint(os),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_says_what_to_do() {
        let errno = io::Error::from_raw_os_error;
        let open = |code| {
            let (device, node) = ("mlx5_0".to_owned(), "/dev/infiniband/uverbs0".to_owned());
            OpenError::Open { device, node, os: errno(code) }.to_string()
        };
        assert!(open(libc::EACCES).contains("does not let this user in"));
        assert!(open(libc::ENOENT).contains("modprobe ib_uverbs"));
        let memory = RegisterError::Refused {
            device: "mlx5_0".to_owned(),
            addr: 0x1000,
            len: 1 << 20,
            os: errno(libc::ENOMEM),
        };
        assert!(memory.to_string().contains("lock"), "{memory}");
        let modify = |code, state| {
            let towards = "10.0.0.1 to 10.0.0.2".to_owned();
            ModifyError { device: "rxe0".to_owned(), state, towards, os: errno(code) }.to_string()
        };
        assert!(modify(libc::ETIMEDOUT, "RTR").contains("no answer from that address"));
        assert!(modify(libc::EINVAL, "RTR").contains("NOBOUNCE_GID_INDEX"));
        assert!(modify(libc::ENODEV, "RTS").contains("the device is gone"));
    }
}
