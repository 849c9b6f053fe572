//! Files into regions and back: host memory, and GPU memory with the stand-in driver.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use fake_cuda::client::StandIn;
use nobounce::file::{File, FileError, FileOptions, FileQueue, FileReport, file_counters};
use nobounce::{AccessError, GpuOptions, Region, Require};

use crate::common::{SOON, device, pattern};

const MIB: usize = 1 << 20;
const DIRECT: FileOptions = FileOptions { require: Require::Direct };

/// A file with a name of its own, removed at the end.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let path = path.join(format!("files-{name}-{}", std::process::id()));
        fs::write(&path, bytes).unwrap();
        Self(path)
    }

    fn open(&self) -> File {
        File::open(&self.0).unwrap()
    }

    /// Takes its pages out of the page cache. False where the file system has no `O_DIRECT`, or
    /// keeps pages.
    fn cool(&self) -> bool {
        let file = self.open();
        file.sync().unwrap();
        // SAFETY: advice about a descriptor.
        let advised =
            unsafe { libc::posix_fadvise(file.as_fd().as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        advised == 0 && file.direct_refused().is_none()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Bytes by path: cpu, window, copy engine, staged.
fn by_path(report: &FileReport) -> [u64; 4] {
    let paths = &report.paths;
    [paths.cpu.bytes, paths.window.bytes, paths.copy_engine.bytes, paths.staged.bytes]
}

fn check(region: &Region, at: usize, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    region.read_at(at, &mut bytes).unwrap();
    assert!(bytes == expected, "{} bytes at {at}", expected.len());
}

#[test]
fn host_memory() {
    let device = device("127.75.1.1");
    let bytes = pattern(3 * MIB, 1);
    let temporary = Temporary::new("host", &bytes);
    let (file, region) = (temporary.open(), device.register(4 * MIB).unwrap());
    let before = file_counters().read.paths.cpu;
    let report = region.read_file(&file, 5, 7..7 + 2 * MIB).unwrap();
    assert_eq!((by_path(&report), report.paths.cpu.operations), ([2 * MIB as u64, 0, 0, 0], 1));
    check(&region, 7, &bytes[5..5 + 2 * MIB]);
    assert_eq!(file_counters().read.paths.cpu.bytes - before.bytes, 2 * MIB as u64);

    let copy = Temporary::new("host-copy", b"begin");
    let written = File::create(&copy.0).unwrap();
    region.write_file(&written, 3, 7..7 + 2 * MIB).unwrap();
    let found = fs::read(&copy.0).unwrap();
    assert!(found[..3] == *b"beg" && found[3..] == bytes[5..5 + 2 * MIB]);
}

#[test]
fn what_is_refused_reads_nothing() {
    let device = device("127.75.1.2");
    let temporary = Temporary::new("refused", &[9; 10_000]);
    let (file, region) = (temporary.open(), device.register(20_000).unwrap());
    let error = region.read_file(&file, 9000, 0..1001).unwrap_err();
    assert!(matches!(error, FileError::OutOfBounds { size: 10_000, .. }), "{error}");
    let error = region.read_file(&file, u64::MAX, 0..2).unwrap_err();
    assert!(matches!(error, FileError::OutOfBounds { .. }), "{error}");
    let error = region.read_file(&file, 0, 19_999..20_001).unwrap_err();
    assert!(matches!(error, FileError::Memory(AccessError::OutOfBounds { .. })), "{error}");
    check(&region, 0, &[0; 20_000]);
    let error = File::open(env!("CARGO_TARGET_TMPDIR")).unwrap_err();
    assert!(error.to_string().contains("is a directory: only regular files"), "{error}");
    let error = File::open("/dev/null").unwrap_err();
    assert!(error.to_string().contains("is a character device"), "{error}");
    let error = region.write_file(&file, 0, 0..8).unwrap_err();
    assert!(error.to_string().starts_with("cannot write "), "{error}");
    assert!(matches!(File::open("/nowhere/file"), Err(FileError::Open { .. })));
}

/// Every path, and ranges that no alignment fits. Bringing a file to a busy disk stalls other
/// tests.
#[test]
fn alone_gpu_memory() {
    let cuda = StandIn::load();
    let device = device("127.75.1.3");
    let bytes = pattern(5 * MIB + 77, 2);
    let temporary = Temporary::new("gpu", &bytes);
    let ranges = [
        (0, 0, 5 * MIB + 77),
        (3, 11, 4 * MIB + 5),
        (MIB - 1, 0, MIB + 2),
        (4097, 5, 4096),
        (0, 0, 1),
        (8, 8, 0),
    ];
    let window = GpuOptions::default();
    for options in [window, GpuOptions { window: false, ..window }] {
        let region = device.register_gpu_on(0, 6 * MIB, options).unwrap();
        for is_cold in [false, true] {
            if is_cold && !temporary.cool() {
                continue;
            }
            for (from, to, len) in ranges {
                let file = temporary.open();
                region.fill(0..6 * MIB, 0xee).unwrap();
                let report = region.read_file(&file, from as u64, to..to + len).unwrap();
                assert_eq!(report.bytes(), len as u64);
                let [cpu, through_window, copied, staged] = by_path(&report);
                assert_eq!((cpu, copied), (0, 0));
                assert_eq!(staged, report.staged.iter().map(|staged| staged.bytes).sum::<u64>());
                if options.window && is_cold && len > MIB {
                    assert!(staged > 0 && report.staged[0].reason.to_string().contains("page cache"));
                } else {
                    let unused = if options.window { staged } else { through_window };
                    assert_eq!(unused, 0, "{:?}", report.staged);
                }
                if options.window {
                    let report = region.read_file_with(&file, from as u64, to..to + len, DIRECT).unwrap();
                    assert_eq!(by_path(&report), [0, len as u64, 0, 0]);
                    // A mapping keeps pages.
                    drop(file);
                    assert!(!is_cold || temporary.cool());
                }
                let seen = cuda.peek(region.addr(), 6 * MIB);
                assert!(seen[to..to + len] == bytes[from..from + len], "{from} {to} {len}");
                assert!(seen[..to].iter().chain(&seen[to + len..]).all(|byte| *byte == 0xee));
            }
        }
    }
}

/// The kernel calls every page of a file resident to a process that may only read it.
#[test]
fn files_of_other_users_are_read_past_the_page_cache() {
    let _ = StandIn::load();
    let device = device("127.75.1.10");
    let bytes = pattern(4 * MIB, 6);
    let temporary = Temporary::new("other", &bytes);
    fs::set_permissions(&temporary.0, fs::Permissions::from_mode(0o644)).unwrap();
    let region = device.register_gpu_on(0, 4 * MIB, GpuOptions::default()).unwrap();
    let read = |file: &File| {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                // SAFETY: changes the user for files of this thread, and of those that it starts.
                unsafe { libc::setfsuid(65534) };
                by_path(&region.read_file(file, 0, 0..4 * MIB).unwrap())
            });
            other.join().unwrap()
        })
    };
    let all = 4 * MIB as u64;
    // The mapping of this read would keep pages.
    assert_eq!(read(&temporary.open()), [0, all, 0, 0], "it was just written");
    check(&region, 0, &bytes);
    // The pages are asked for by reads that do not wait: a disk that is quicker than this thread
    // has some of them there in time.
    let past = (0..10).map_while(|_| temporary.cool().then(|| read(&temporary.open()))).find(|found| {
        check(&region, 0, &bytes);
        assert_eq!(found.iter().sum::<u64>(), all);
        found[3] > 0
    });
    assert!(past.is_some() || !temporary.cool(), "all of it came from the page cache, ten times");
}

#[test]
fn staged_reads_of_several_threads_reuse_pinned_memory() {
    const READERS: usize = 4;
    let cuda = StandIn::load();
    let device = device("127.75.1.9");
    let bytes = pattern(4 * MIB, 3);
    let temporary = Temporary::new("reuse", &bytes);
    let options = GpuOptions { window: false, ..GpuOptions::default() };
    let regions: Vec<_> =
        (0..READERS).map(|_| device.register_gpu_on(0, 4 * MIB, options).unwrap()).collect();
    let read_all = || {
        std::thread::scope(|scope| {
            for region in &regions {
                let read = || region.read_file(&temporary.open(), 0, 0..4 * MIB).unwrap();
                scope.spawn(move || assert_eq!(by_path(&read()), [0, 0, 0, 4 * MIB as u64]));
            }
        });
    };
    let most = cuda.live(c"host") + i64::try_from(READERS * 4).unwrap();
    (0..25).for_each(|_| read_all());
    assert!(cuda.live(c"host") <= most, "more than one buffer for each thread that reads");
    regions.iter().for_each(|region| check(region, 0, &bytes));
}

#[test]
fn direct_is_refused_without_a_window() {
    let _ = StandIn::load();
    let device = device("127.75.1.5");
    let temporary = Temporary::new("direct", &[1; 4096]);
    let file = File::create(&temporary.0).unwrap();
    let region =
        device.register_gpu_on(0, 4096, GpuOptions { window: false, ..GpuOptions::default() }).unwrap();
    let error = region.read_file_with(&file, 0, 0..4096, DIRECT).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, FileError::NotDirect { .. }) && text.contains("switched off"), "{text}");
    assert!(matches!(region.write_file_with(&file, 0, 0..1, DIRECT), Err(FileError::NotDirect { .. })));
}

#[test]
fn gpu_memory_into_a_file() {
    let _ = StandIn::load();
    let device = device("127.75.1.6");
    let region = device.register_gpu_on(0, 3 * MIB, GpuOptions::default()).unwrap();
    let bytes = pattern(3 * MIB, 4);
    region.write_at(0, &bytes).unwrap();
    let temporary = Temporary::new("out", b"");
    let file = File::create(&temporary.0).unwrap();
    let report = region.write_file(&file, 10, 1..3 * MIB).unwrap();
    assert_eq!(by_path(&report), [0, 0, 3 * MIB as u64 - 1, 0]);
    assert!(fs::read(&temporary.0).unwrap()[10..] == bytes[1..]);
}

#[test]
fn a_truncated_file_is_an_error() {
    let _ = StandIn::load();
    let device = device("127.75.1.7");
    let temporary = Temporary::new("truncated", &[5; 4 * MIB]);
    let (file, region) = (temporary.open(), device.register_gpu(4 * MIB).unwrap());
    // The mapping is made for the whole file.
    region.read_file(&file, 0, 0..MIB).unwrap();
    File::create(&temporary.0).unwrap();
    fs::File::options().write(true).open(&temporary.0).unwrap().set_len(100).unwrap();
    let error = region.read_file(&file, 0, 0..MIB).unwrap_err();
    assert!(matches!(error, FileError::OutOfBounds { size: 100, .. }), "{error}");
    // It grows again: the old mapping serves.
    fs::write(&temporary.0, vec![6; 5 * MIB]).unwrap();
    let wide = device.register_gpu(5 * MIB).unwrap();
    wide.read_file(&file, 0, 0..5 * MIB).unwrap();
    check(&wide, 4 * MIB, &[6; MIB]);
}

#[test]
fn jobs_in_the_background() {
    let device = device("127.75.1.8");
    let bytes = pattern(2 * MIB, 5);
    let temporary = Temporary::new("jobs", &bytes);
    let (file, region) = (Arc::new(temporary.open()), Arc::new(device.register(2 * MIB).unwrap()));
    let queue = FileQueue::new(2).unwrap();
    let piece = 64 << 10;
    let jobs: Vec<_> = (0..2 * MIB / piece)
        .map(|at| at * piece)
        .map(|at| queue.read(&region, &file, at as u64, at..at + piece, FileOptions::default()))
        .collect();
    let moved: u64 = jobs.iter().map(|job| job.wait(SOON).unwrap().bytes()).sum();
    assert_eq!(moved, 2 * MIB as u64);
    check(&region, 0, &bytes);
    let failed = queue.read(&region, &file, 2 * MIB as u64, 0..1, FileOptions::default());
    assert!(matches!(failed.wait(SOON), Err(FileError::OutOfBounds { .. })));
    let written = Arc::new(File::create(&temporary.0).unwrap());
    queue.write(&region, &written, 2 * MIB as u64, 0..100, FileOptions::default()).wait(SOON).unwrap();
    assert!(fs::read(&temporary.0).unwrap()[2 * MIB..] == bytes[..100]);
}
