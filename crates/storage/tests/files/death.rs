//! Clients that are killed while bytes move between their memory and the server's files.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fake_cuda::client::StandIn;
use nobounce::GpuOptions;
use nobounce_storage::{FileClient, FileServer};
use nobounce_transfer::View;

use crate::{Folder, MIB, SOON, client, device, range};

/// The server's address.
const SERVER: &str = "STORAGE_TEST_SERVER";
/// `read` or `write`, and `host` or `gpu`.
const WORK: &str = "STORAGE_TEST_WORK";
const CLIENTS: usize = 4;

/// Another process, which ends with the test.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The other process: reads or writes again and again.
#[test]
fn other_process() {
    let (Ok(server), Ok(work)) = (std::env::var(SERVER), std::env::var(WORK)) else { return };
    let device = device();
    let client = FileClient::connect(&device, server.as_str(), SOON).unwrap();
    let memory = if work.ends_with("gpu") {
        let _ = StandIn::load();
        let region = device.register_gpu_on(0, 8 * MIB, GpuOptions::default()).unwrap();
        client.export(&View::of(region)).unwrap()
    } else {
        client.register(8 * MIB).unwrap()
    };
    let all = [range(0, 8 * MIB, 0)];
    let end = Instant::now() + SOON;
    for round in 0.. {
        let request = || match work.starts_with("read") {
            true => client.read(&memory, &[("file", &all)]).unwrap(),
            false => client.write(&memory, &[("written", &all)]).unwrap(),
        };
        let tickets = [request(), request(), request(), request()];
        if round == 1 {
            println!("under way");
        }
        tickets.iter().for_each(|ticket| _ = ticket.wait(SOON));
        if Instant::now() > end {
            return;
        }
    }
}

/// What the server's process holds: descriptors, mappings of files and shared memory, and lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    descriptors: usize,
    mappings: usize,
    lanes: usize,
}

impl Held {
    fn now(server: &FileServer) -> Self {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        // Anonymous memory is the allocator's.
        let is_file = |line: &&str| line.split_whitespace().nth(4).is_some_and(|inode| inode != "0");
        Self {
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
            mappings: maps.lines().filter(is_file).count(),
            lanes: server.agent().lanes(),
        }
    }

    fn exceeds(&self, other: &Self) -> bool {
        self.lanes > other.lanes || self.descriptors > other.descriptors || self.mappings > other.mappings
    }
}

/// Starts a client, and kills it when its bytes are on their way.
fn kill_one(server: &FileServer, work: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "death::other_process", "--nocapture"]);
    command.env(SERVER, server.local_addr().to_string()).env(WORK, work).stdout(Stdio::piped());
    let mut other = Other(command.spawn().unwrap());
    let mut lines = BufReader::new(other.0.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "under way"), "the client does nothing");
    assert!(server.agent().lanes() > 0, "a lane is not counted");
}

fn wait(server: &FileServer, what: &str, is_over: impl Fn(&Held) -> bool) -> Held {
    let deadline = Instant::now() + SOON;
    loop {
        let held = Held::now(server);
        if is_over(&held) {
            return held;
        }
        assert!(Instant::now() < deadline, "{what}: {held:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn nothing_is_left_of_clients_that(work: &str) {
    let folder = Folder::new(&format!("killed-{}", work.replace(' ', "-")));
    folder.add("file", 8 * MIB);
    let server = folder.serve(|options| {
        options.is_writable = true;
        options.agent.allow = "127.0.0.0/8".parse().unwrap();
    });
    // What a client leaves when its lanes are gone.
    let left = || {
        kill_one(&server, work);
        wait(&server, work, |held| held.lanes == 0)
    };
    // The first clients bring threads, tables and a cached file, which stay; from then on each
    // leaves the same.
    let mut before = left();
    let deadline = Instant::now() + SOON;
    loop {
        let next = left();
        if next == before {
            break;
        }
        assert!(Instant::now() < deadline, "{work}: clients leave more and more: {before:?}, {next:?}");
        before = next;
    }
    (0..CLIENTS).for_each(|_| kill_one(&server, work));
    wait(&server, &format!("{work}, more than {before:?}"), |held| !held.exceeds(&before));
    let client = client(&server);
    assert_eq!(client.stat("file", SOON).unwrap(), 8 * MIB as u64);
}

#[test]
fn killed_clients_leave_nothing_behind() {
    nothing_is_left_of_clients_that("read host");
}

#[test]
fn killed_clients_with_gpu_memory_leave_nothing_behind() {
    nothing_is_left_of_clients_that("read gpu");
}

#[test]
fn killed_clients_that_write_files_leave_nothing_behind() {
    nothing_is_left_of_clients_that("write host");
}

#[test]
fn killed_clients_that_write_files_from_gpu_memory_leave_nothing_behind() {
    nothing_is_left_of_clients_that("write gpu");
}
