//! The process that reads a file by cuFile, and tells its parent what it does: `cufile.rs`.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nobounce::memory::gpu::Gpu;
use nobounce::memory::gpu::api::Api as Cuda;
use serde::{Deserialize, Serialize};

use super::library::{Library, function};
use super::storage::open_direct;
use super::storage_proof::{CufileLibrary, LIMIT, MAX_BYTES, PIECE};

/// The hidden subcommand under which doctor starts itself again.
pub(crate) const SUBCOMMAND: &str = "cufile-read";

/// When the last piece starts: a slow file shall have figures before the process is killed.
const READ_LIMIT: Duration = LIMIT.saturating_sub(Duration::from_secs(3));
/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const OPAQUE_FD: c_int = 1;
/// Bit of `dstatusflags`: drives that write to the GPU by the kernel's P2PDMA.
const NVME_P2P_SUPPORTED: u32 = 1 << 11;
/// Bit of `dcontrolflags`.
const ALLOW_COMPAT_MODE: u32 = 1 << 1;
/// With this level of statistics cuFile counts the reads of each GPU by their path.
const STATS_OF_GPUS: c_int = 3;
/// More words than `CUfileStatsLevel3_t` has in any version: 16 GPUs with 31 words each, and 200.
const STATS_WORDS: usize = 4096;

/// What the process tells, one line of JSON each.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Record {
    /// What it does next.
    Step(String),
    /// Why nothing is read.
    NotTried(String),
    Library(CufileLibrary),
    /// Nothing can be read.
    Failed(String),
    /// One GPU, by its PCI address.
    Read {
        gpu: String,
        bytes: u64,
        nanoseconds: u64,
        detail: String,
    },
    GpuFailed {
        gpu: String,
        detail: String,
    },
    /// The last one.
    End,
}

/// Arguments of the process.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CufileArgs {
    /// File to read
    file: PathBuf,
    /// The library, for a loader that does not find it
    #[arg(long)]
    library: Option<PathBuf>,
    /// Open the file with O_DIRECT
    #[arg(long)]
    direct: bool,
}

/// `CUfileError_t`.
#[repr(C)]
struct CufileStatus {
    error: c_int,
    cuda: c_int,
}

/// `CUfileDescr_t`; of its union, the descriptor.
#[repr(C)]
struct Descr {
    kind: c_int,
    padding: c_int,
    fd: c_int,
    rest_of_union: c_int,
    fs_ops: *const c_void,
}

/// The start of `CUfileDrvProps_t`, with room for what later versions add.
#[repr(C)]
struct Properties {
    major: u32,
    minor: u32,
    sizes: [usize; 2],
    status: u32,
    control: u32,
    rest: [u64; 128],
}

type Handle = *mut c_void;
type WithoutArguments = unsafe extern "C" fn() -> CufileStatus;

/// The functions that are called.
struct CufileApi {
    open: WithoutArguments,
    close: Option<WithoutArguments>,
    version: Option<unsafe extern "C" fn(*mut c_int) -> CufileStatus>,
    properties: Option<unsafe extern "C" fn(*mut Properties) -> CufileStatus>,
    register: unsafe extern "C" fn(*mut Handle, *const Descr) -> CufileStatus,
    deregister: unsafe extern "C" fn(Handle),
    register_buffer: unsafe extern "C" fn(*const c_void, usize, c_int) -> CufileStatus,
    deregister_buffer: unsafe extern "C" fn(*const c_void) -> CufileStatus,
    read: unsafe extern "C" fn(Handle, *mut c_void, usize, i64, i64) -> isize,
    set_stats_level: Option<unsafe extern "C" fn(c_int) -> CufileStatus>,
    start_stats: Option<WithoutArguments>,
    stats: Option<unsafe extern "C" fn(*mut [u64; STATS_WORDS]) -> CufileStatus>,
    /// Only our own library has it.
    own_paths: Option<unsafe extern "C" fn(*mut c_char, usize) -> usize>,
}

impl CufileApi {
    fn load(library: Library) -> Option<Self> {
        type Version = unsafe extern "C" fn(*mut c_int) -> CufileStatus;
        type GetProperties = unsafe extern "C" fn(*mut Properties) -> CufileStatus;
        type Register = unsafe extern "C" fn(*mut Handle, *const Descr) -> CufileStatus;
        type RegisterBuffer = unsafe extern "C" fn(*const c_void, usize, c_int) -> CufileStatus;
        type DeregisterBuffer = unsafe extern "C" fn(*const c_void) -> CufileStatus;
        type Read = unsafe extern "C" fn(Handle, *mut c_void, usize, i64, i64) -> isize;
        type Stats = unsafe extern "C" fn(*mut [u64; STATS_WORDS]) -> CufileStatus;
        type SetLevel = unsafe extern "C" fn(c_int) -> CufileStatus;
        type OwnPaths = unsafe extern "C" fn(*mut c_char, usize) -> usize;
        Some(Self {
            open: function!(library, c"cuFileDriverOpen", WithoutArguments)?,
            close: function!(library, c"cuFileDriverClose_v2", WithoutArguments),
            version: function!(library, c"cuFileGetVersion", Version),
            properties: function!(library, c"cuFileDriverGetProperties", GetProperties),
            register: function!(library, c"cuFileHandleRegister", Register)?,
            deregister: function!(library, c"cuFileHandleDeregister", unsafe extern "C" fn(Handle))?,
            register_buffer: function!(library, c"cuFileBufRegister", RegisterBuffer)?,
            deregister_buffer: function!(library, c"cuFileBufDeregister", DeregisterBuffer)?,
            read: function!(library, c"cuFileRead", Read)?,
            set_stats_level: function!(library, c"cuFileSetStatsLevel", SetLevel),
            start_stats: function!(library, c"cuFileStatsStart", WithoutArguments),
            stats: function!(library, c"cuFileGetStatsL3", Stats),
            own_paths: function!(library, c"nobounce_cufile_read_paths", OwnPaths),
        })
    }
}

/// The pipe to the parent. Standard output is standard error from now on: libraries print to it.
struct Told(RefCell<File>);

impl Told {
    fn take() -> io::Result<Self> {
        let pipe = io::stdout().as_fd().try_clone_to_owned()?;
        // SAFETY: both numbers are open descriptors of this process.
        if unsafe { libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(RefCell::new(pipe.into())))
    }

    /// At once: the next call may not return. A parent that is gone needs none.
    fn tell(&self, record: &Record) {
        if let Ok(line) = serde_json::to_string(record) {
            let _ = self.0.borrow_mut().write_all(format!("{line}\n").as_bytes());
        }
    }

    fn step(&self, name: &str) {
        self.tell(&Record::Step(name.to_owned()));
    }
}

/// The process.
pub(crate) fn main(args: &CufileArgs) -> anyhow::Result<()> {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: settings of this process: it ends with its parent, and a crash leaves no core file.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
    }
    let told = Told::take().context("cannot use standard output")?;
    if let Err(error) = run(args, &told) {
        told.tell(&Record::Failed(format!("{error:#}")));
    }
    told.tell(&Record::End);
    Ok(())
}

fn run(args: &CufileArgs, told: &Told) -> anyhow::Result<()> {
    let deadline = Instant::now() + READ_LIMIT;
    told.step("the start of CUDA");
    let none = match Gpu::list() {
        Ok(gpus) if gpus.is_empty() => "CUDA shows no GPU".to_owned(),
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    };
    if !none.is_empty() {
        told.tell(&Record::NotTried(none));
        return Ok(());
    }
    told.step("dlopen");
    let library = match open_library(args.library.as_deref()) {
        Ok(library) => library,
        Err(error) => {
            let remedy = "install nvidia-cufile (a part of CUDA), or add its folder to LD_LIBRARY_PATH";
            told.tell(&Record::NotTried(format!("libcufile cannot be loaded ({error}): {remedy}")));
            return Ok(());
        }
    };
    let api = CufileApi::load(library).context("this libcufile lacks functions of cuFile")?;
    told.tell(&Record::Library(described(&api)));
    told.step("cuFileDriverOpen");
    // SAFETY: it may be called at any time.
    checked("cuFileDriverOpen", &unsafe { (api.open)() })?;
    if let (Some(set_level), Some(start)) = (api.set_stats_level, api.start_stats) {
        told.step("cuFileStatsStart");
        // SAFETY: a number; the driver is open. Without counters the properties tell the path.
        let _ = unsafe { (set_level(STATS_OF_GPUS), start()) };
    }
    for gpu in Gpu::list()? {
        let name = gpu.pci_address().to_owned();
        if Instant::now() >= deadline {
            told.tell(&Record::NotTried(format!("GPU {name}: {} s are over", READ_LIMIT.as_secs())));
            continue;
        }
        told.tell(&match read_into(&api, &gpu, args, told, deadline) {
            Ok((bytes, time, detail)) => {
                let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
                Record::Read { gpu: name, bytes, nanoseconds, detail }
            }
            Err(error) => Record::GpuFailed { gpu: name, detail: format!("{error:#}") },
        });
    }
    if let Some(close) = api.close {
        told.step("cuFileDriverClose");
        // SAFETY: it is open, and nothing is registered any more.
        unsafe { close() };
    }
    Ok(())
}

fn open_library(found: Option<&Path>) -> Result<Library, String> {
    let found = found.and_then(|path| CString::new(path.as_os_str().to_owned().into_vec()).ok());
    let names = [c"libcufile.so.0", c"libcufile.so"].into_iter().chain(found.as_deref());
    let mut errors: Vec<String> = Vec::new();
    for name in names {
        match Library::open(&[name]) {
            Ok(library) => return Ok(library),
            Err(error) => errors.push(error),
        }
    }
    Err(errors.join("; "))
}

fn described(api: &CufileApi) -> CufileLibrary {
    let mut number = 0;
    let version = api.version.filter(|version| {
        // SAFETY: the call writes one int.
        unsafe { version(&raw mut number) }.error == 0
    });
    let version = version.map(|_| format!("{}.{}", number / 1000, number % 1000 / 10));
    // SAFETY: plain pointers and a number, for which zeros are valid.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: an address, and a place for the answer.
    let found = unsafe { libc::dladdr(api.open as *const c_void, &raw mut info) };
    let path = if found == 0 || info.dli_fname.is_null() {
        "libcufile".to_owned()
    } else {
        // SAFETY: a string of the loader's, for as long as the library is loaded.
        unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned()
    };
    let path = std::fs::canonicalize(&path).map_or(path, |path| path.display().to_string());
    CufileLibrary { path, version, is_nobounce: api.own_paths.is_some() }
}

/// Reads the file into memory of a GPU as programs do: allocated by `cuMemAlloc`, and registered.
fn read_into(
    api: &CufileApi,
    gpu: &Gpu,
    args: &CufileArgs,
    told: &Told,
    deadline: Instant,
) -> anyhow::Result<(u64, Duration, String)> {
    let plain = File::open(&args.file).with_context(|| format!("cannot open {}", args.file.display()))?;
    let direct = if args.direct { open_direct(&args.file).ok() } else { None };
    let fd = direct.as_ref().unwrap_or(&plain).as_raw_fd();
    gpu.driver().in_context(gpu.primary()?, |cuda| {
        let mut memory = 0;
        // SAFETY: the call writes one address.
        unsafe { cuda.mem_alloc(&raw mut memory, PIECE) }?;
        let base = std::ptr::with_exposed_provenance_mut(usize::try_from(memory)?);
        told.step("cuFileHandleRegister");
        let mut handle = std::ptr::null_mut();
        let descr = Descr { kind: OPAQUE_FD, padding: 0, fd, rest_of_union: 0, fs_ops: std::ptr::null() };
        // SAFETY: an open file, described as the header says; the call writes one handle.
        checked("cuFileHandleRegister", &unsafe { (api.register)(&raw mut handle, &raw const descr) })?;
        told.step("cuFileBufRegister");
        // SAFETY: live memory of that length, which is deregistered before it is freed.
        let registered = checked("cuFileBufRegister", &unsafe { (api.register_buffer)(base, PIECE, 0) });
        let before = own_bytes(api);
        told.step("cuFileRead");
        let read = pump(api, cuda, handle, base, &plain, deadline);
        told.step("cuFileGetStatsL3 or cuFileDriverGetProperties");
        let path = path_of(api, gpu, &before);
        told.step("cuFileHandleDeregister");
        // SAFETY: what was registered above; no read is under way.
        unsafe {
            if registered.is_ok() {
                (api.deregister_buffer)(base);
            }
            (api.deregister)(handle);
            cuda.mem_free(memory)?;
        }
        let (bytes, time) = read?;
        let refused = registered.err().map_or(String::new(), |error| format!("; not registered: {error}"));
        let opened = if direct.is_some() { "opened with O_DIRECT" } else { "opened without O_DIRECT" };
        Ok((bytes, time, format!("{path}; {opened}{refused}; the last piece was compared")))
    })
}

/// Reads the file piece by piece to the start of the memory, and compares the last piece. The
/// number of bytes, and the time.
fn pump(
    api: &CufileApi,
    cuda: &Cuda,
    handle: Handle,
    base: *mut c_void,
    file: &File,
    deadline: Instant,
) -> anyhow::Result<(u64, Duration)> {
    let len = file.metadata()?.len().min(MAX_BYTES);
    let (start, mut at, mut last) = (Instant::now(), 0_u64, 0_usize);
    while at < len && Instant::now() < deadline {
        let wanted = usize::try_from((len - at).min(PIECE as u64))?;
        // SAFETY: the memory has the length of a piece, and lives until the call has returned.
        let read = unsafe { (api.read)(handle, base, wanted, i64::try_from(at)?, 0) };
        let system = io::Error::last_os_error();
        last = match usize::try_from(read) {
            Ok(0) => bail!("cuFileRead at offset {at} found the end of a file of {len} bytes"),
            Ok(last) if last <= wanted => last,
            Ok(last) => bail!("cuFileRead of {wanted} bytes returned {last}"),
            Err(_) if read == -1 => bail!("cuFileRead at offset {at}: {system}"),
            Err(_) => bail!("cuFileRead at offset {at}: {}", meaning(-read)),
        };
        at += last as u64;
    }
    let time = start.elapsed();
    let (mut right, mut found) = (vec![0; last], vec![0_u8; last]);
    file.read_exact_at(&mut right, at - last as u64)?;
    // SAFETY: both have that many bytes.
    unsafe { cuda.copy_from_device(found.as_mut_ptr().cast(), base.expose_provenance() as u64, last) }?;
    ensure!(found == right, "the GPU's memory does not hold what is in the file");
    Ok((at, time))
}

/// Which path the bytes took, as far as the library tells.
fn path_of(api: &CufileApi, gpu: &Gpu, before: &[(String, u64)]) -> String {
    if api.own_paths.is_some() {
        let now = own_bytes(api).into_iter();
        let taken: Vec<_> = now
            .filter(|(path, bytes)| !before.iter().any(|(old, count)| old == path && count == bytes))
            .map(|(path, _)| path)
            .collect();
        return format!("by {} (its own counters)", taken.join(", "));
    }
    counted(api, gpu.uuid()).unwrap_or_else(|| by_properties(api))
}

/// The counters of our own library: bytes read by this process, by path.
fn own_bytes(api: &CufileApi) -> Vec<(String, u64)> {
    let Some(paths) = api.own_paths else { return Vec::new() };
    let mut text = [0_u8; 256];
    // SAFETY: the buffer has that length; the call writes no more.
    let len = unsafe { paths(text.as_mut_ptr().cast(), text.len()) }.min(text.len());
    let text = String::from_utf8_lossy(&text[..len]).into_owned();
    let words: Vec<&str> = text.split_whitespace().collect();
    let pairs = words.chunks_exact(2).filter_map(|pair| Some((pair[0].to_owned(), pair[1].parse().ok()?)));
    pairs.collect()
}

/// cuFile's own counters of the GPU, since 1.15.
fn counted(api: &CufileApi, uuid: [u8; 16]) -> Option<String> {
    let mut words = Box::new([0_u64; STATS_WORDS]);
    // SAFETY: there is room for more than any version writes.
    let status = unsafe { (api.stats?)(&raw mut *words) };
    if status.error != 0 { None } else { by_counters(&words[..], uuid) }
}

/// The path by `CUfileStatsLevel3_t`. Its first parts grow from version to version; the part of a
/// GPU begins with its UUID: then bytes, bandwidth, utilization, duration and reads, and of these
/// the ones by P2PDMA, nvidia-fs and POSIX calls.
fn by_counters(words: &[u64], uuid: [u8; 16]) -> Option<String> {
    let (first, second) = uuid.split_at(8);
    let uuid = [first, second].map(|half| half.try_into().map_or(0, u64::from_ne_bytes));
    let at = words.windows(2).position(|pair| pair == uuid)?;
    let reads = words.get(at + 7..at + 10)?;
    let names = ["P2PDMA", "nvidia-fs", "POSIX calls through host memory (compatibility mode)"];
    let taken: Vec<_> = names.iter().zip(reads).filter(|(_, count)| **count > 0).collect();
    match taken[..] {
        [] => None,
        [(name, _)] => Some(format!("by {name} (cuFile's counters)")),
        _ => {
            let texts: Vec<_> =
                taken.iter().map(|(name, count)| format!("{count} reads by {name}")).collect();
            Some(format!("{} (cuFile's counters)", texts.join(", ")))
        }
    }
}

/// What is known without counters.
fn by_properties(api: &CufileApi) -> String {
    // SAFETY: plain numbers, for which zeros are valid.
    let mut found: Properties = unsafe { std::mem::zeroed() };
    // SAFETY: the structure has room for what any version writes.
    let status = api.properties.map(|properties| unsafe { properties(&raw mut found) });
    if status.is_none_or(|status| status.error != 0) {
        return "path not known: cuFile tells no properties".to_owned();
    }
    let (is_p2p, may_bounce) =
        (found.status & NVME_P2P_SUPPORTED != 0, found.control & ALLOW_COMPAT_MODE != 0);
    let nvidia_fs = (found.major, found.minor) != (0, 0);
    match (nvidia_fs, is_p2p, may_bounce) {
        (false, false, true) => {
            "through host memory (compatibility mode): cuFile sees neither nvidia-fs nor P2PDMA".to_owned()
        }
        (.., false) => "not in compatibility mode, which is not allowed".to_owned(),
        _ => {
            let fs = format!("nvidia-fs {}.{}", found.major, found.minor);
            let offered = [nvidia_fs.then_some(fs), is_p2p.then(|| "P2PDMA".to_owned())];
            let offered: Vec<_> = offered.into_iter().flatten().collect();
            format!("path not known: cuFile sees {}, and this version counts no reads", offered.join(" and "))
        }
    }
}

fn checked(call: &str, status: &CufileStatus) -> anyhow::Result<()> {
    let cuda = if status.cuda == 0 { String::new() } else { format!(", error {} of CUDA", status.cuda) };
    ensure!(status.error == 0, "{call}: {}{cuda}", meaning(isize::try_from(status.error)?));
    Ok(())
}

/// An error of cuFile's in words.
fn meaning(error: isize) -> String {
    let text = match error {
        5001 => "the driver is not initialized",
        5004 => "this nvidia-fs has another version than libcufile needs",
        5007 => "cuFile does not support this platform",
        5008 => "cuFile does not support this file",
        5009 => "cuFile does not support this GPU",
        5010 => "nvidia-fs refused",
        5011 => "CUDA's driver refused",
        5018 => "cuFile does not support this type of file",
        5020 => "cuFile needs O_DIRECT here",
        5025 => "no access to the driver or the file",
        5030 => "internal error of cuFile",
        _ => return format!("cuFile error {error}"),
    };
    format!("cuFile error {error}: {text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_of_a_gpu_are_found_by_its_uuid_whatever_stands_before() {
        let uuid = *b"0123456789abcdef";
        let halves = [0, 8].map(|at| u64::from_ne_bytes(uuid[at..at + 8].try_into().unwrap()));
        for before in [129, 150] {
            let mut words = vec![3; before];
            words.extend(halves);
            // Bytes, bandwidth, utilization, duration, reads.
            words.extend([4096, 1, 2, 3, 7]);
            let with = |counts: [u64; 3]| by_counters(&[&words[..], &counts].concat(), uuid);
            assert_eq!(with([7, 0, 0]).as_deref(), Some("by P2PDMA (cuFile's counters)"));
            assert_eq!(with([0, 7, 0]).as_deref(), Some("by nvidia-fs (cuFile's counters)"));
            let mixed = with([5, 0, 2]).unwrap();
            assert!(mixed.starts_with("5 reads by P2PDMA, 2 reads by POSIX calls"), "{mixed}");
            assert_eq!(with([0; 3]), None, "a library that counts nothing");
            assert_eq!(by_counters(&words, uuid), None, "cut off");
            assert_eq!(by_counters(&words, [9; 16]), None, "another GPU");
        }
    }

    #[test]
    fn structures_have_the_layout_of_the_header() {
        assert_eq!((std::mem::offset_of!(Descr, fd), std::mem::offset_of!(Descr, fs_ops)), (8, 16));
        assert_eq!(std::mem::offset_of!(Properties, status), 24);
        assert_eq!(std::mem::offset_of!(Properties, control), 28);
    }
}
