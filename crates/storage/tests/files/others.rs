//! Short reads of files that belong to another user than the server's: `mincore` calls all of their
//! pages present, so the server asks in another way which of them it can send at once.

use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use nobounce_storage::{FileServer, ServerOptions};

use crate::{Folder, MIB, SOON, bytes_of, client, device, range};

/// Any other user.
const OTHER: u32 = 65534;
const SHORT: usize = 64 << 10;

fn waive(name: &str, reason: &str) {
    let required = std::env::var("REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|required| required == name), "{name} is required, but {reason}");
    if let Some(path) = std::env::var_os("NOBOUNCE_WAIVERS") {
        let file = fs::OpenOptions::new().create(true).append(true).open(path);
        file.unwrap().write_all(format!("{name}: {reason}\n").as_bytes()).unwrap();
    }
}

/// Starts a server whose threads may only read the files of other users, as those of any user but
/// root. Its sockets belong to the user of the clients' sockets, which share the port.
fn serve_without_privileges(folder: &Folder) -> FileServer {
    let options = ServerOptions { listen: "127.0.0.1:0".parse().unwrap(), ..ServerOptions::default() };
    let device = device();
    std::thread::scope(|scope| {
        let start = || {
            drop_file_privileges();
            FileServer::start(&device, &folder.0, options).unwrap()
        };
        scope.spawn(start).join().unwrap()
    })
}

/// Of this thread, and of those that it starts: the rights to write every file, and to act as its
/// owner. With either, `mincore` tells the truth.
fn drop_file_privileges() {
    const VERSION_3: u32 = 0x2008_0522;
    const DAC_OVERRIDE: u32 = 1 << 1;
    const FOWNER: u32 = 1 << 3;
    let header = [VERSION_3, 0];
    // Effective, permitted and inheritable ones, in two halves.
    let mut sets = [0_u32; 6];
    // SAFETY: the structures have the layout of this version; 0 is this thread.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()), 0);
        sets[0] &= !(DAC_OVERRIDE | FOWNER);
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()), 0);
    }
}

/// How many pages of a part of the file are in the page cache; the file's owner is told.
fn present(file: &fs::File, at: usize, len: usize) -> usize {
    let (fd, offset) = (file.as_raw_fd(), libc::off_t::try_from(at).unwrap());
    let mut pages = vec![0_u8; len / 4096];
    // SAFETY: a fresh mapping, which nothing else knows, and a byte for each of its pages.
    unsafe {
        let base = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, offset);
        assert_ne!(base, libc::MAP_FAILED);
        assert_eq!(libc::mincore(base, len, pages.as_mut_ptr().cast()), 0);
        libc::munmap(base, len);
    }
    pages.into_iter().filter(|page| page & 1 == 1).count()
}

/// Takes the file's pages out of the page cache: first out of the server's mapping, which keeps
/// them there.
fn cool(file: &fs::File, path: &Path) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path = path.display().to_string();
    for line in maps.lines().filter(|line| line.ends_with(&path)) {
        let bounds = line.split([' ', '-']).take(2).map(|bound| usize::from_str_radix(bound, 16).unwrap());
        let [start, end] = bounds.collect::<Vec<_>>()[..] else { panic!("{line}") };
        let base = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: a shared mapping of a file: its pages come back as they were.
        assert_eq!(unsafe { libc::madvise(base, end - start, libc::MADV_DONTNEED) }, 0);
    }
    // SAFETY: advice about a descriptor.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

#[test]
fn short_reads_of_another_users_file_are_answered_at_once_where_it_is_cached() {
    const PLACES: usize = 16;
    let folder = Folder::new("another-user");
    let bytes = folder.add("file", (PLACES + 1) * MIB);
    let path = folder.0.join("file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let file = fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    if let Err(error) = chown(&path, Some(OTHER), None) {
        return waive("root", &format!("this process cannot give a file to another user: {error}"));
    }
    let server = serve_without_privileges(&folder);
    let client = client(&server);
    let memory = client.register(SHORT).unwrap();
    // Whether it was answered at once; the bytes are right in both cases.
    let read = |at: usize| {
        let before = server.answered_at_once();
        let moved = client.read(&memory, &[("file", &[range(at, SHORT, 0)])]).unwrap().wait(SOON).unwrap();
        assert_eq!(moved, SHORT as u64);
        assert!(bytes_of(&memory, 0, SHORT) == bytes[at..at + SHORT], "{at}");
        server.answered_at_once() - before == 1
    };
    let places = || (1..=PLACES).map(|number| number * MIB);
    assert!(!read(0), "it was not mapped yet");
    assert!(places().all(&read), "it was just written");
    // Reading ahead fetches megabytes: each place is cooled by itself.
    let (mut cold, mut at_once) = (0, 0);
    for at in places() {
        cool(&file, &path);
        if present(&file, at, SHORT) == 0 {
            cold += 1;
            at_once += u32::from(read(at));
            assert_eq!(present(&file, at, SHORT), SHORT / 4096);
            assert!(read(at), "it was read");
        }
    }
    if cold == 0 {
        return waive("disk", "the file stays in memory");
    }
    // The question itself starts to fetch a page, which a quick disk has at once.
    assert!(at_once <= cold / 2, "{at_once} of {cold} reads that need the disk were answered at once");
}
