//! Clients that are killed while the server writes into their memory.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nobounce_storage::FileClient;

use crate::{Folder, MIB, SOON, client, device, range};

const ROLE: &str = "STORAGE_TEST_SERVER";

/// Another process, which ends with the test.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The other process: reads again and again.
#[test]
fn other_process() {
    let Ok(server) = std::env::var(ROLE) else { return };
    let client = FileClient::connect(&device(), server.as_str(), SOON).unwrap();
    let memory = client.register(8 * MIB).unwrap();
    let end = Instant::now() + SOON;
    for round in 0.. {
        let read = || client.read(&memory, &[("file", &[range(0, 8 * MIB, 0)])]).unwrap();
        let tickets = [read(), read(), read(), read()];
        if round == 1 {
            println!("reading");
        }
        tickets.iter().for_each(|ticket| _ = ticket.wait(SOON));
        if Instant::now() > end {
            return;
        }
    }
}

/// Descriptors of this process, and its mappings of the served file.
fn held(folder: &Folder) -> (usize, usize) {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let file = folder.0.join("file").display().to_string();
    (descriptors, maps.lines().filter(|line| line.contains(&file)).count())
}

#[test]
fn killed_clients_leave_nothing_behind() {
    const ROUNDS: usize = 10;
    let folder = Folder::new("killed");
    folder.add("file", 8 * MIB);
    let server = folder.serve(|_| {});
    let mut before = (0, 0);
    for round in 0..ROUNDS + 2 {
        // Threads and tables that the first clients need stay.
        if round == 2 {
            std::thread::sleep(Duration::from_millis(500));
            before = held(&folder);
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "death::other_process", "--nocapture"]);
        command.env(ROLE, server.local_addr().to_string()).stdout(Stdio::piped());
        let mut other = Other(command.spawn().unwrap());
        let mut lines = BufReader::new(other.0.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "reading"), "the client reads nothing");
    }
    let deadline = Instant::now() + SOON;
    // Less than one for each client.
    while held(&folder).0 > before.0 + ROUNDS / 2 || held(&folder).1 > before.1 {
        assert!(Instant::now() < deadline, "{:?}, {before:?} before", held(&folder));
        std::thread::sleep(Duration::from_millis(50));
    }
    let client = client(&server);
    assert_eq!(client.stat("file", SOON).unwrap(), 8 * MIB as u64);
}
