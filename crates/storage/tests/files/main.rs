//! A file server and its clients: every byte, every refusal, and what is left when one of them
//! ends.

mod death;
mod keys;
mod others;
mod truncated;

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use fake_cuda::client::StandIn;
use nobounce::memory::FileMapping;
use nobounce::{Config, Device, GpuOptions};
use nobounce_storage::{ClientError, FileClient, FileMemory, FileRange, FileServer, ServerOptions};
use nobounce_transfer::{AgentOptions, View};

const SOON: Duration = Duration::from_secs(20);
const MIB: usize = 1 << 20;

/// A loopback address of its own, so that tests do not meet.
fn config() -> Config {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let addr = [127, 200 + high % 40, low, NEXT.fetch_add(1, Ordering::Relaxed)];
    Config { addr: addr.into(), ..Config::from_env().unwrap() }
}

fn device() -> Device {
    Device::open_with(&config()).unwrap()
}

/// A directory of files, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("storage-{name}-{}", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn add(&self, name: &str, len: usize) -> Vec<u8> {
        let word = |at: usize| (at as u64 ^ len as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(word).collect();
        bytes.truncate(len);
        fs::write(self.0.join(name), &bytes).unwrap();
        bytes
    }

    fn serve(&self, change: impl FnOnce(&mut ServerOptions)) -> FileServer {
        let mut options =
            ServerOptions { listen: "127.0.0.1:0".parse().unwrap(), ..ServerOptions::default() };
        change(&mut options);
        FileServer::start(&device(), &self.0, options).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn client(server: &FileServer) -> FileClient {
    FileClient::connect(&device(), server.local_addr(), SOON).unwrap()
}

fn bytes_of(memory: &FileMemory, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.view().region().read_at(at, &mut bytes).unwrap();
    bytes
}

fn range(offset: usize, len: usize, memory: usize) -> FileRange {
    FileRange { offset: offset as u64, len: len as u64, memory: memory as u64 }
}

#[test]
fn ranges_of_many_files() {
    let folder = Folder::new("many");
    let (a, b) = (folder.add("a", 9 * MIB + 13), folder.add("b", 70_000));
    folder.add("empty", 0);
    let server = folder.serve(|_| {});
    let client = client(&server);
    assert_eq!(client.stat("a", SOON).unwrap(), a.len() as u64);
    assert_eq!(client.stat("empty", SOON).unwrap(), 0);
    let memory = client.register(12 * MIB).unwrap();
    let list: Vec<_> = (0..1000).map(|at| range(at * 64, 60, 10 * MIB + at * 61)).collect();
    let files: [(&str, &[FileRange]); 3] =
        [("a", &[range(0, a.len(), 5)]), ("b", &list), ("empty", &[range(0, 0, 0)])];
    let bytes = client.read(&memory, &files).unwrap().wait(SOON).unwrap();
    assert_eq!(bytes, a.len() as u64 + 60_000);
    assert!(bytes_of(&memory, 5, a.len()) == a);
    for (at, piece) in list.iter().enumerate() {
        let found = bytes_of(&memory, usize::try_from(piece.memory).unwrap(), 60);
        assert!(found == b[at * 64..at * 64 + 60], "{at}");
    }
    // A file that changed is not taken from the cache.
    let b = folder.add("b", 80_000);
    client.read(&memory, &[("b", &[range(0, 80_000, 0)])]).unwrap().wait(SOON).unwrap();
    assert!(bytes_of(&memory, 0, 80_000) == b);
}

#[test]
fn short_reads_of_cached_files_are_answered_at_once() {
    let folder = Folder::new("short");
    let bytes = folder.add("a", 2 * MIB);
    let server = folder.serve(|_| {});
    let client = client(&server);
    let memory = client.register(2 * MIB).unwrap();
    let read = |ranges: &[FileRange]| client.read(&memory, &[("a", ranges)]).unwrap().wait(SOON);
    let short = [range(5, 70_000, 0), range(MIB, 100, 80_000)];
    assert_eq!(read(&short).unwrap(), 70_100);
    assert_eq!(server.answered_at_once(), 0, "it was not mapped yet");
    assert_eq!(read(&short).unwrap(), 70_100);
    assert_eq!(server.answered_at_once(), 1);
    assert!(bytes_of(&memory, 0, 70_000) == bytes[5..70_005]);
    assert!(bytes_of(&memory, 80_000, 100) == bytes[MIB..MIB + 100]);
    assert_eq!(read(&[range(0, 2 * MIB, 0)]).unwrap(), 2 << 20);
    assert!(read(&[range(2 * MIB, 1, 0)]).is_err());
    // More than are taken at a time.
    let tickets: Vec<_> =
        (0..500).map(|at| client.read(&memory, &[("a", &[range(at, 1, at)])]).unwrap()).collect();
    tickets.iter().for_each(|ticket| assert_eq!(ticket.wait(SOON).unwrap(), 1));
    assert!(bytes_of(&memory, 0, 500) == bytes[..500]);
    assert_eq!(server.answered_at_once(), 501, "the others are long, or refused");
    let changed = folder.add("a", MIB);
    assert_eq!(read(&short[..1]).unwrap(), 70_000);
    assert!(bytes_of(&memory, 0, 70_000) == changed[5..70_005], "a file that changed is not cached");
}

/// The first request for a huge file reads what it asks for.
#[test]
fn opening_a_file_does_not_read_it() {
    const LEN: usize = 1 << 30;
    let folder = Folder::new("huge");
    let file = fs::File::create(folder.0.join("a")).unwrap();
    file.set_len(LEN as u64).unwrap(); // sparse
    let server = folder.serve(|_| {});
    let client = client(&server);
    let memory = client.register(4096).unwrap();
    assert_eq!(client.read(&memory, &[("a", &[range(0, 4096, 0)])]).unwrap().wait(SOON).unwrap(), 4096);
    let cache = FileMapping::of(fs::File::open(folder.0.join("a")).unwrap().as_fd(), LEN).unwrap();
    assert!(cache.is_resident(0..4096));
    assert!(!cache.is_resident(LEN / 2..LEN / 2 + 1), "pages outside of the request were read");
}

#[test]
fn gpu_memory_is_written_without_a_copy_at_the_receiver() {
    let cuda = StandIn::load();
    let folder = Folder::new("gpu");
    let bytes = folder.add("weights", 3 * MIB + 5);
    let server = folder.serve(|_| {});
    let device = device();
    let client = FileClient::connect(&device, server.local_addr(), SOON).unwrap();
    let region = device.register_gpu_on(0, 4 * MIB, GpuOptions::default()).unwrap();
    let addr = region.addr();
    let memory = client.export(&View::of(region)).unwrap();
    client.read(&memory, &[("weights", &[range(0, bytes.len(), 7)])]).unwrap().wait(SOON).unwrap();
    assert!(cuda.peek(addr + 7, bytes.len()) == bytes);
    let paths = device.nic().path_counters().inbound;
    assert_eq!((paths.window.bytes, paths.staged.bytes), (bytes.len() as u64, 0));
}

#[test]
fn refusals_say_why_and_the_connection_stays() {
    let folder = Folder::new("refused");
    let bytes = folder.add("file", 1000);
    std::os::unix::fs::symlink("/etc/passwd", folder.0.join("link")).unwrap();
    let server = folder.serve(|_| {});
    let client = client(&server);
    let memory = client.register(4096).unwrap();
    let error = |files: &[(&str, &[FileRange])]| match client.read(&memory, files).map(|read| read.wait(SOON))
    {
        Err(error) | Ok(Err(error)) => error.to_string(),
        Ok(Ok(bytes)) => panic!("{bytes} bytes"),
    };
    for (path, expected) in [
        ("missing", "No such file"),
        ("../secret", "leads out of the served directory"),
        ("/etc/passwd", "leads out"),
        ("link", "leads out"),
        (".", "no regular file"),
    ] {
        let text = error(&[(path, &[range(0, 1, 0)])]);
        assert!(text.contains(expected), "{path}: {text}");
        let text = client.stat(path, SOON).unwrap_err().to_string();
        assert!(text.contains(expected), "{path}: {text}");
    }
    let text = error(&[("file", &[range(990, 11, 0)])]);
    assert!(text.contains("11 bytes at offset 990 are not inside of \"file\", which has 1000"), "{text}");
    let text = error(&[("file", &[range(usize::MAX, 1, 0)])]);
    assert!(text.contains("not inside"), "{text}");
    let text = error(&[("file", &[range(0, 5, 4092)])]);
    assert!(text.contains("5 bytes at offset 4092 are not inside of 4096 bytes of memory"), "{text}");
    let text =
        client.write(&memory, &[("file", &[range(0, 5, 0)])]).unwrap().wait(SOON).unwrap_err().to_string();
    assert!(text.contains("read-only"), "{text}");
    let long = "p".repeat(600);
    assert!(matches!(client.stat(&long, SOON), Err(ClientError::Path(600))));
    let many = vec![range(0, 1, 0); (1 << 16) + 1];
    assert!(matches!(client.read(&memory, &[("file", &many)]), Err(ClientError::TooMany(65_537))));
    // One range of many that fails moves nothing of its file.
    let text = error(&[("file", &[range(0, 10, 0), range(0, 2000, 0)])]);
    assert!(text.contains("2000 bytes"), "{text}");
    assert_eq!(bytes_of(&memory, 0, 10), [0; 10]);
    // Nor does one file of many move the bytes of the others.
    let other = folder.add("other", 100);
    for (path, bad, expected) in [
        ("other", range(0, 101, 20), "101 bytes at offset 0"),
        ("other", range(0, 100, 3997), "of 4096 bytes of memory"),
        ("missing", range(0, 1, 20), "No such file"),
    ] {
        let text = error(&[("file", &[range(0, 10, 0)]), (path, &[bad])]);
        assert!(text.contains(expected), "{text}");
        assert_eq!(bytes_of(&memory, 0, 10), [0; 10], "{path}");
    }
    client
        .read(&memory, &[("file", &[range(0, 10, 0)]), ("other", &[range(0, 100, 10)])])
        .unwrap()
        .wait(SOON)
        .unwrap();
    assert!(bytes_of(&memory, 0, 10) == bytes[..10] && bytes_of(&memory, 10, 100) == other);
    client.read(&memory, &[("file", &[range(0, 1000, 0)])]).unwrap().wait(SOON).unwrap();
    assert!(bytes_of(&memory, 0, 1000) == bytes);
}

#[test]
fn named_clients_may_write() {
    let folder = Folder::new("write");
    let server = folder.serve(|options| {
        options.is_writable = true;
        options.agent.allow = "127.0.0.0/8".parse().unwrap();
    });
    let client = client(&server);
    let memory = client.register(9 * MIB).unwrap();
    let bytes: Vec<u8> = (0..9 * MIB).map(|at| (at % 251).to_le_bytes()[0]).collect();
    memory.view().region().write_at(0, &bytes).unwrap();
    let ranges = [range(0, 8 * MIB + 3, 1), range(20 * MIB, 10, 0)];
    let written = client.write(&memory, &[("new/../file", &ranges)]).unwrap().wait(SOON);
    assert!(written.is_err(), "there is no such directory");
    let written = client.write(&memory, &[("file", &ranges)]).unwrap().wait(SOON).unwrap();
    assert_eq!(written, 8 * MIB as u64 + 13);
    let found = fs::read(folder.0.join("file")).unwrap();
    assert!(found[..8 * MIB + 3] == bytes[1..8 * MIB + 4] && found[20 * MIB..] == bytes[..10]);
    let error = client.write(&memory, &[("../outside", &ranges)]).unwrap().wait(SOON).unwrap_err();
    assert!(error.to_string().contains("leads out"), "{error}");
    // A second file that is refused leaves the first one as it is.
    let first = [range(0, 10, 100)];
    for (path, bad, expected) in
        [("../outside", range(0, 1, 0), "leads out"), ("other", range(usize::MAX, 1, 0), "not inside")]
    {
        let refused =
            client.write(&memory, &[("file", &first), (path, &[bad])]).map(|write| write.wait(SOON));
        let (Err(error) | Ok(Err(error))) = refused else { panic!("{path} was written") };
        assert!(error.to_string().contains(expected), "{error}");
        assert!(fs::read(folder.0.join("file")).unwrap() == found, "{path}");
    }
}

#[test]
fn others_are_not_admitted() {
    let folder = Folder::new("others");
    let server = folder.serve(|options| options.agent.allow = "192.0.2.0/24".parse().unwrap());
    let refused = FileClient::connect(&device(), server.local_addr(), Duration::from_secs(5));
    assert!(matches!(refused, Err(ClientError::Connect { .. })), "{refused:?}");
}

#[test]
fn requests_end_with_their_server() {
    let folder = Folder::new("ends");
    folder.add("file", MIB);
    let server = folder.serve(|_| {});
    let client = client(&server);
    let memory = client.register(MIB).unwrap();
    client.read(&memory, &[("file", &[range(0, MIB, 0)])]).unwrap().wait(SOON).unwrap();
    drop(server);
    let error = match client.read(&memory, &[("file", &[range(0, MIB, 0)])]) {
        Ok(read) => read.wait(SOON).unwrap_err(),
        Err(error) => error,
    };
    assert!(!matches!(error, ClientError::Timeout(_)), "{error}");
}

/// Clients that come and go, some in the middle of a request, leave nothing open.
#[test]
fn clients_that_leave_free_everything() {
    let folder = Folder::new("leave");
    folder.add("file", 8 * MIB);
    let server = folder.serve(|_| {});
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    let mut before = 0;
    for round in 0..12 {
        if round == 2 {
            before = descriptors();
        }
        let options = AgentOptions { silence: Duration::from_secs(2), ..AgentOptions::default() };
        let client = FileClient::connect_with(&device(), server.local_addr(), options, SOON).unwrap();
        let memory = client.register(8 * MIB).unwrap();
        for _ in 0..4 {
            let _ = client.read(&memory, &[("file", &[range(0, 8 * MIB, 0)])]).unwrap();
        }
        drop(client);
    }
    let deadline = std::time::Instant::now() + SOON;
    // Connections between devices of one user come and go.
    while descriptors() > before + 24 {
        assert!(std::time::Instant::now() < deadline, "{} descriptors, {before} before", descriptors());
        std::thread::sleep(Duration::from_millis(50));
    }
    let client = client(&server);
    assert_eq!(client.stat("file", SOON).unwrap(), 8 * MIB as u64);
}

/// More requests than the server takes at once, from several threads.
#[test]
fn requests_wait_for_room() {
    let folder = Folder::new("room");
    let bytes = folder.add("file", MIB);
    let server = folder.serve(|_| {});
    let client = client(&server);
    let memory = client.register(MIB).unwrap();
    let ranges: Vec<_> = (0..MIB / 64).map(|at| range(at * 64, 64, at * 64)).collect();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let all: Vec<_> =
                    (0..40).map(|_| client.read(&memory, &[("file", &ranges)]).unwrap()).collect();
                assert!(all.iter().all(|read| read.wait(SOON).unwrap() == MIB as u64));
            });
        }
    });
    assert!(bytes_of(&memory, 0, MIB) == bytes);
}
