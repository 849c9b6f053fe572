//! Common parts of the tests with the stand-in driver.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::env;
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fake_cuda::client::StandIn;
use nobounce_memory::gpu::{GpuMemory, GpuOptions, GpuRegisterError};

pub(crate) const MIB: usize = 1 << 20;

/// Names the test that a child process is to run.
const ALONE: &str = "NOBOUNCE_TEST_ALONE";
/// A test that takes longer hangs.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `body` in a process of its own: a driver is loaded once per process, and its state cannot
/// be reset. `name` is the test's own name; `environment` is set for it, and our variables of this
/// process are removed.
pub(crate) fn alone(name: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    if env::var(ALONE).is_ok_and(|chosen| chosen == name) {
        body();
        return;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]);
    for ours in ["NOBOUNCE_CUDA", "NOBOUNCE_WINDOW", "NOBOUNCE_REQUIRE"] {
        command.env_remove(ours);
    }
    // One heap for all threads, so that mappings can be counted.
    command.env(ALONE, name).env("MALLOC_ARENA_MAX", "1").envs(environment.iter().copied());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let out = thread::spawn(move || text_of(&mut stdout));
    let err = thread::spawn(move || text_of(&mut stderr));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > TEST_TIMEOUT {
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        thread::sleep(Duration::from_millis(2));
    };
    let (out, err) = (out.join().unwrap(), err.join().unwrap());
    match status {
        Some(status) if status.success() => {
            assert!(out.contains("1 passed"), "{name} did not run:\n{out}\n{err}")
        }
        Some(status) => panic!("{name} ended with {status}:\n{out}\n{err}"),
        None => panic!("{name} hung:\n{out}\n{err}"),
    }
}

fn text_of(pipe: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = pipe.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Registers with the default options.
pub(crate) fn register(addr: u64, len: usize) -> Result<GpuMemory, GpuRegisterError> {
    GpuMemory::register(addr, len, &GpuOptions::default())
}

/// Runs `work` on a thread of its own and fails if it has not ended in `limit`: a non-blocking call
/// has blocked.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (sender, receiver) = mpsc::channel();
    let thread = thread::spawn(move || sender.send(work()));
    match receiver.recv_timeout(limit) {
        Ok(answer) => answer,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what} blocks"),
        // It panicked: show that one.
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(_) => unreachable!("the sender was dropped without a panic"),
        },
    }
}

/// Polls until `done`, with a timeout of a minute.
pub(crate) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TEST_TIMEOUT, "{what} did not come");
        thread::yield_now();
    }
}

/// Open descriptors of this process.
pub(crate) fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Mappings of this process.
pub(crate) fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Device memory of each kind, as another program makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Made {
    Malloc,
    /// A small allocation that begins inside a page, in a block it shares with others.
    Small,
    Vmm,
    VmmPrivate,
    VmmSeveral,
    Pool,
    Imported,
    Managed,
    Pinned,
}

impl Made {
    pub(crate) const ALL: [Self; 9] = [
        Self::Malloc,
        Self::Small,
        Self::Vmm,
        Self::VmmPrivate,
        Self::VmmSeveral,
        Self::Pool,
        Self::Imported,
        Self::Managed,
        Self::Pinned,
    ];

    /// Whether a driver that lets the CPU map dma-bufs yields a window onto it.
    pub(crate) fn has_window(self) -> bool {
        !matches!(self, Self::Imported | Self::Managed | Self::Pinned)
    }

    /// Makes it: address and length. A context must be current. It is not freed: the process ends
    /// soon.
    pub(crate) fn make(self, cuda: &StandIn) -> (u64, usize) {
        let mut addr = 0;
        let mut code = 0;
        let mut len = 4 * MIB;
        match self {
            Self::Malloc => addr = cuda.malloc(len),
            Self::Small => {
                len = 10_000;
                addr = cuda.malloc(len);
                assert_ne!(addr % 4096, 0);
            }
            Self::Vmm => addr = cuda.vmm(1, len, true).addr,
            Self::VmmPrivate => addr = cuda.vmm(1, len, false).addr,
            Self::VmmSeveral => addr = cuda.vmm(2, len / 2, true).addr,
            Self::Pool => code = cuda.alloc_async(&mut addr, len, cuda.stream(1)),
            Self::Imported => {
                cuda.allow_self_import(1);
                let mut handle = fake_cuda::client::IpcHandle::default();
                assert_eq!(cuda.ipc_handle(&mut handle, cuda.malloc(len)), 0);
                code = cuda.ipc_open(&mut addr, handle, 1);
            }
            Self::Managed => code = cuda.alloc_managed(&mut addr, len, 1),
            Self::Pinned => code = cuda.alloc_host(&mut addr, len, 0),
        }
        assert_eq!(code, 0);
        (addr, len)
    }
}
