//! A device with moods: its port goes down and no event says so, its GID is of another network. Our
//! own drop-in, behind a libibverbs of the test's own (`moody.c`) that changes what it says. Each
//! test is a process of its own, for a libibverbs is loaded once.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, fs};

use crate::common::{SOON, device, is_dropin, is_hardware, pair, pattern, waive};
use nobounce::{ConnectOptions, RailError, Rails, WaitError};

/// Where the moods are, in the process that has them.
const FOLDER: &str = "MOODY_FOLDER";

struct Moods(PathBuf);

impl Moods {
    fn here() -> Self {
        Self(env::var_os(FOLDER).unwrap().into())
    }

    fn set(&self, mood: &str) {
        fs::write(self.0.join(mood), "").unwrap();
    }

    fn end(&self, mood: &str) {
        fs::remove_file(self.0.join(mood)).unwrap();
    }
}

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn build(real: &Path, folder: &Path) -> PathBuf {
    let library = folder.join("libmoody.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/library/moody.c");
    let real = real.to_str().unwrap();
    let built = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-Wl,--no-as-needed"])
        .args([&format!("-DREAL=\"{real}\""), source, real, "-ldl"])
        .arg(format!("-Wl,-rpath,{}", Path::new(real).parent().unwrap().display()))
        .arg("-o")
        .arg(&library)
        .output()
        .expect("cc");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library
}

/// Runs a test again as a process whose device has moods; whether this is that process.
fn in_the_mood(test: &str, more: &[(&str, &str)]) -> bool {
    if env::var_os(FOLDER).is_some() {
        return true;
    }
    if !is_hardware() {
        // the software NIC has no port that goes, and `make test-hardware` runs all of this on the
        // drop-in
        return false;
    }
    let real = env::var_os("NOBOUNCE_VERBS").filter(|_| is_dropin());
    let Some(real) = real else {
        waive(test, "moods are played on our own drop-in (make test-hardware)");
        return false;
    };
    let folder = Folder(env::temp_dir().join(format!("nobounce-{test}-{}", std::process::id())));
    fs::create_dir_all(&folder.0).unwrap();
    let library = build(Path::new(&real), &folder.0);
    let run = Command::new(env::current_exe().unwrap())
        .args(["--exact", &format!("moods::{test}"), "--nocapture"])
        .env("NOBOUNCE_VERBS", library)
        .env(FOLDER, &folder.0)
        .envs(more.iter().copied())
        .output()
        .unwrap();
    let words = [run.stdout, run.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(run.status.success(), "{words}");
    assert!(words.contains("1 passed"), "{words}");
    false
}

#[test]
fn a_port_that_goes_down_without_an_event_is_told_and_the_rail_named() {
    if !in_the_mood("a_port_that_goes_down_without_an_event_is_told_and_the_rail_named", &[]) {
        return;
    }
    let moods = Moods::here();
    let (a, b) = pair("127.9.252.1", &ConnectOptions::default());
    let (local, target) = (a.device().register(4096).unwrap(), b.device().register(4096).unwrap());
    let fine = a.write(&local, 0..8, &target.remote(), 0).unwrap();
    a.wait(fine, SOON).unwrap();
    moods.set("down");
    let start = Instant::now();
    let stuck = a.write(&local, 0..8, &target.remote(), 0).unwrap();
    let error = a.wait(stuck, SOON).unwrap_err();
    let took = start.elapsed();
    assert!(matches!(error, WaitError::PortLost { pending: 1, .. }), "{error}");
    assert!(error.to_string().contains("the port of nb0 is down"), "{error}");
    // A second of silence, and then longer than a hiccup lasts.
    assert!(took > Duration::from_secs(1) && took < Duration::from_secs(5), "{took:?}");
    // It is reported once each time.
    let again = a.wait(stuck, Duration::from_millis(1500)).unwrap_err();
    assert!(matches!(again, WaitError::Timeout { .. }), "{again}");
    // Polling reports it as well. A port that is back counts as healthy, even without an event.
    let polled = Instant::now();
    let told = loop {
        assert!(polled.elapsed() < SOON);
        match b.poll() {
            Ok(None) => {}
            Ok(Some(done)) => panic!("{done:?}"),
            Err(error) => break error,
        }
    };
    assert!(matches!(told, WaitError::PortLost { .. }), "{told}");
    moods.end("down");
    let fine = b.write(&target, 0..8, &local.remote(), 0).unwrap();
    b.wait(fine, SOON).unwrap();
    let quiet = Instant::now();
    while quiet.elapsed() < Duration::from_millis(1500) {
        b.check_device().unwrap();
    }

    // The same under rails: what never ends is no mere timeout, and the rail is named.
    let rails = Rails::new(vec![a]).unwrap();
    let ours = rails.register(4096).unwrap();
    let remote = vec![target.remote()];
    rails.write(&ours, 0..4096, &remote, 0, SOON).unwrap();
    moods.set("down");
    let error = rails.write(&ours, 0..4096, &remote, 0, Duration::from_secs(3)).unwrap_err();
    let lost = matches!(&error, RailError::Failed { rail: 0, error: WaitError::PortLost { .. }, .. });
    assert!(lost && error.to_string().starts_with("rail 0 (nb0 to "), "{error}");
    moods.end("down");
}

#[test]
fn a_gid_of_another_network_is_named_when_nothing_ever_came_back() {
    let index = [("NOBOUNCE_GID_INDEX", "0")];
    if !in_the_mood("a_gid_of_another_network_is_named_when_nothing_ever_came_back", &index) {
        return;
    }
    let moods = Moods::here();
    // One end by a GID that is not this machine's, though it is in the table and was asked for.
    let listener = device("127.9.252.1").listen("127.0.0.1:0").unwrap();
    let at = listener.local_addr();
    moods.set("elsewhere");
    let wrong = device("127.9.252.1");
    let active = std::thread::spawn(move || wrong.connect(at, &ConnectOptions::default()).unwrap());
    let b = listener.accept(SOON).unwrap();
    let a = active.join().unwrap();
    // Nothing is sent: not even an answer would have to leave this machine.
    moods.set("unanswered");
    let (local, target) = (a.device().register(4096).unwrap(), b.device().register(4096).unwrap());
    let lost = a.write(&local, 0..8, &target.remote(), 0).unwrap();
    let error = a.wait(lost, SOON).unwrap_err();
    assert!(matches!(&error, WaitError::WrongGid { ticket, .. } if *ticket == lost), "{error}");
    let words = error.to_string();
    for part in ["127.9.252.1 never answered", "GID 0, 203.0.113.7, is of no interface", "NOBOUNCE_GID_INDEX"]
    {
        assert!(words.contains(part), "{part}: {words}");
    }
    assert_eq!(error.ticket(), Some(lost));
}

#[test]
fn few_bytes_go_with_the_request_and_more_are_fetched() {
    if !in_the_mood("few_bytes_go_with_the_request_and_more_are_fetched", &[]) {
        return;
    }
    let moods = Moods::here();
    let (a, b) = pair("127.9.252.1", &ConnectOptions::default());
    let (local, target) = (a.device().register(4096).unwrap(), b.device().register(4096).unwrap());
    let most = a.qp(0).limits().inline.min(220);
    local.write_at(0, &pattern(4096, 3)).unwrap();
    moods.set("watched");
    for len in [8, most, most + 1, 0] {
        let write = a.write(&local, 5..5 + len, &target.remote(), 9).unwrap();
        a.wait(write, SOON).unwrap();
        let mut found = vec![0; len];
        target.read_at(9, &mut found).unwrap();
        assert!(found == pattern(4096, 3)[5..5 + len], "{len} bytes");
        target.fill(0..4096, 0).unwrap();
    }
    let receive = b.recv(&target, 0..64).unwrap();
    let send = a.send(&local, 0..64).unwrap();
    a.wait(send, SOON).unwrap();
    b.wait(receive, SOON).unwrap();
    let read = a.read(&local, 0..8, &target.remote(), 0).unwrap();
    a.wait(read, SOON).unwrap();
    moods.end("watched");
    let posted = fs::read_to_string(moods.0.join("posted")).unwrap();
    let expected = [
        "8 inline".to_owned(),
        format!("{most} inline"),
        format!("{} fetched", most + 1),
        "0 fetched".to_owned(),
        "64 inline".to_owned(),
        "8 fetched".to_owned(),
    ];
    assert_eq!(posted.lines().collect::<Vec<_>>(), expected);
}
