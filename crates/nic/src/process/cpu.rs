//! Allowed CPUs, and how the scheduler treats the engine threads.

/// Minimum number of CPUs on which both ends of a connection and their engine threads run in
/// parallel.
const MANY_CPUS: usize = 4;

/// Whether the process may run on that many CPUs.
pub(crate) fn has_many_cpus() -> bool {
    are_many(allowed_cpus())
}

/// Whether that many CPUs suffice.
pub(crate) const fn are_many(cpus: usize) -> bool {
    cpus >= MANY_CPUS
}

/// CPUs this process may run on.
pub(crate) fn allowed_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The time slice that engine threads ask for: the shortest the kernel takes.
const SLICE_NS: u64 = 100_000;

/// Requests short time slices. From Linux 6.12 on, a waking thread with a short slice preempts one
/// with a longer slice, such as an application that spins on memory on the same CPU. Older kernels
/// ignore the request.
pub(crate) fn ask_for_short_slices() {
    let attr = SchedAttr {
        size: 48,
        policy: 0, // SCHED_OTHER
        flags: 0,
        nice: 0,
        priority: 0,
        runtime: SLICE_NS,
        deadline: 0,
        period: 0,
    };
    // SAFETY: the structure has the size it says, in the kernel's layout, and is only read. 0 names
    // this thread.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    // The default timer slack of 50 us is longer than the sleeps of an engine thread.
    // SAFETY: sets a property of this thread, and takes no pointers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000_u64, 0, 0, 0) };
}

/// The kernel's sched_attr, first version.
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}
