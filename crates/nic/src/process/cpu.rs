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

/// The CPU time of a thread, which any thread of the process may read.
#[derive(Debug, Default)]
pub(crate) struct ThreadClock {
    clock: Option<libc::clockid_t>,
    /// Nanoseconds of threads that have ended.
    ended: u64,
}

impl ThreadClock {
    /// Counts the calling thread from now on.
    pub(crate) fn start(&mut self) {
        let mut clock = 0;
        // SAFETY: the calling thread exists, and the result is written to a local.
        let found = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) } == 0;
        self.clock = found.then_some(clock);
    }

    /// The thread ends.
    pub(crate) fn stop(&mut self) {
        (self.ended, self.clock) = (self.nanoseconds(), None);
    }

    /// Nanoseconds so far.
    pub(crate) fn nanoseconds(&self) -> u64 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the result is written to a local; a clock of an ended thread gives an error.
        let read = self.clock.is_some_and(|clock| unsafe { libc::clock_gettime(clock, &raw mut time) } == 0);
        let now =
            if read { time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs() } else { 0 };
        self.ended + now
    }
}

/// The time slice that threads of the data path ask for: the shortest the kernel takes.
const SLICE_NS: u64 = 100_000;

/// Requests short time slices for this thread, and exact sleeps. From Linux 6.12 on, a waking
/// thread with a short slice preempts one with a longer slice, such as an application that spins on
/// memory on the same CPU. Older kernels ignore the request.
pub fn ask_for_short_slices() {
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
    // The default timer slack of 50 us is longer than the sleeps of such a thread.
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
