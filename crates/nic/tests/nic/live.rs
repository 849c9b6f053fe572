//! The counters that devices publish in the user's runtime directory.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, SystemTime};

use crate::common::{child, pair, role, until, waive};
use nobounce_nic::soft::{last_snapshot, live_folder};
use nobounce_nic::work::{Mtu, Operation};

fn runtime(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("nobounce-live-{}-{name}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    folder
}

fn start(what: &str, runtime: &Path) -> Child {
    let test = "live::counters_are_published_while_a_device_is_open_and_kept_after_it";
    let addresses = "127.63.9.2,127.63.9.1";
    child(test, what).env("XDG_RUNTIME_DIR", runtime).env("NOBOUNCE_ADDR", addresses).spawn().unwrap()
}

fn named(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|found| found == ending)).collect()
}

/// Moves bytes until it is killed, or for a moment.
fn in_role(role: &str) {
    let (a, b) = pair("127.63.9.1", 4096, Mtu::Mtu1024);
    if role == "fills" {
        let rest = PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR").unwrap()).join("rest");
        let mut rest = std::fs::File::create(rest).unwrap();
        // Page by page: a long write ends before the last ones.
        let filled = (0..1000).find(|_| rest.write_all(&[1; 4096]).is_err());
        assert!(filled.is_some(), "the file system is full now");
    }
    let until = SystemTime::now() + Duration::from_millis(if role == "goes on" { 20_000 } else { 600 });
    while SystemTime::now() < until {
        a.post(Operation::Write(b.remote(0)), 0, 4000);
        a.succeed(1);
        std::thread::sleep(Duration::from_millis(1));
    }
    // The first device closes first: the other one's end would free a page for its report.
    drop(a);
    drop(b);
}

#[test]
fn counters_are_published_while_a_device_is_open_and_kept_after_it() {
    if let Some(role) = role() {
        return in_role(&role);
    }
    let runtime = runtime("published");
    let folder = runtime.join("nobounce");
    let mut process = start("goes on", &runtime);
    let moved = || {
        let texts = named(&folder, "live").into_iter().filter_map(|path| std::fs::read(path).ok());
        let texts: Vec<_> = texts.filter_map(|file| last_snapshot(&file).map(<[u8]>::to_vec)).collect();
        let found = texts
            .iter()
            .map(|text| String::from_utf8_lossy(text))
            .find(|text| !text.contains("\"placed_bytes\": 0,"));
        found.map(|text| {
            let from = text.find("\"placed_bytes\": ").unwrap() + 16;
            text[from..].split(',').next().unwrap().parse::<u64>().unwrap()
        })
    };
    until("the first snapshot", || moved().is_some());
    let first = moved();
    until("the next one", || moved() > first);
    let mode = std::fs::metadata(&folder).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700, "others see nothing");
    assert_eq!(named(&folder, "open").len(), 2);
    for marker in named(&folder, "open") {
        let text = std::fs::read_to_string(&marker).unwrap();
        assert!(text.contains("\"device\": \"nb1\", \"address\": \"127.63.9.1\""), "{text}");
    }
    assert!(named(&folder, "open").iter().all(|marker| live_folder::is_alive(marker)));
    process.kill().unwrap();
    process.wait().unwrap();
    // Its last counters stay, and it is known to be gone.
    assert!(named(&folder, "open").iter().all(|marker| !live_folder::is_alive(marker)));
    assert!(moved() >= first);
    // However long it ran, it is kept from its end on.
    let long_ago = SystemTime::now() - Duration::from_secs(3600);
    for path in ["open", "live"].iter().flat_map(|ending| named(&folder, ending)) {
        std::fs::File::open(&path).unwrap().set_modified(long_ago).unwrap();
    }
    live_folder::prune(&folder);
    assert_eq!((named(&folder, "open").len(), named(&folder, "dead").len()), (0, 2));
    assert!(moved() >= first);

    assert!(start("ends", &runtime).wait().unwrap().success());
    assert_eq!(named(&folder, "json").len(), 2, "reports");
    live_folder::prune(&folder);
    assert_eq!((named(&folder, "json").len(), named(&folder, "dead").len()), (2, 2), "not yet");
    for path in ["json", "dead", "live"].iter().flat_map(|ending| named(&folder, ending)) {
        std::fs::File::open(&path).unwrap().set_modified(long_ago).unwrap();
    }
    live_folder::prune(&folder);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    std::fs::remove_dir_all(runtime).unwrap();
}

/// A device on a file system of its own: 64 KiB that are free, full from the start, full later, or
/// read-only.
#[test]
fn traffic_goes_on_where_nothing_can_be_written() {
    let test = "live::counters_are_published_while_a_device_is_open_and_kept_after_it";
    let refused = Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "none", "/tmp"]).output();
    if !refused.as_ref().is_ok_and(|output| output.status.success()) {
        return waive("live-folder", "a tmpfs cannot be mounted in a namespace of its own (unshare -m)");
    }
    for (what, prepare, role) in [
        ("small", "true", "ends"),
        ("full", "head -c 1M /dev/zero >\"$0/rest\"; true", "ends"),
        ("filled", "true", "fills"),
        ("read-only", "mkdir -m 700 \"$0/nobounce\" && mount -o remount,ro \"$0\"", "ends"),
    ] {
        let runtime = runtime(what);
        let script = format!(
            "mount -t tmpfs -o size=64k,mode=700 none \"$0\" && {{ {prepare}; }} && \"$@\" >&2 && ls \"$0/nobounce\""
        );
        let program = child(test, role);
        let mut command = Command::new("unshare");
        command
            .args(["-m", "sh", "-c", &script])
            .arg(&runtime)
            .arg(program.get_program())
            .args(program.get_args());
        let set = program.get_envs().filter_map(|(name, value)| Some((name, value?)));
        let addresses = "127.63.9.2,127.63.9.1";
        let output =
            command.envs(set).env("XDG_RUNTIME_DIR", &runtime).env("NOBOUNCE_ADDR", addresses).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
        let left = String::from_utf8_lossy(&output.stdout).into_owned();
        let reports = left.lines().filter(|name| name.ends_with(".json")).count();
        assert_eq!(reports, left.lines().count(), "{what}: only reports are left: {left}");
        assert_eq!(reports > 0, what == "small", "{what}: {left}");
        std::fs::remove_dir(runtime).unwrap();
    }
}

#[test]
fn files_that_would_block_a_reader_are_left_alone() {
    let runtime = runtime("fifo");
    for name in ["1-0.open", "2-0.dead", "3-0.json"] {
        assert!(Command::new("mkfifo").arg(runtime.join(name)).status().unwrap().success());
        assert!(!live_folder::is_alive(&runtime.join(name)));
        assert_eq!(live_folder::read(&runtime.join(name)), None);
    }
    std::os::unix::fs::symlink("/dev/zero", runtime.join("4-0.json")).unwrap();
    assert_eq!(live_folder::read(&runtime.join("4-0.json")), None);
    live_folder::prune(&runtime);
    assert_eq!(named(&runtime, "open").len(), 1);
    std::fs::remove_dir_all(runtime).unwrap();
}

#[test]
fn a_marker_that_its_process_has_yet_to_lock_is_left_alone() {
    let runtime = runtime("begun");
    std::fs::write(runtime.join("1-0.open"), "").unwrap();
    std::fs::write(runtime.join("1-1.open"), "{}").unwrap();
    live_folder::prune(&runtime);
    assert_eq!(named(&runtime, "open"), [runtime.join("1-0.open")]);
    assert_eq!(named(&runtime, "dead"), [runtime.join("1-1.dead")]);
    std::fs::remove_dir_all(runtime).unwrap();
}

#[test]
fn traffic_needs_no_runtime_directory() {
    for what in ["absent", "a file", "of others"] {
        let runtime = runtime(&what.replace(' ', "-"));
        match what {
            "absent" => std::fs::remove_dir(&runtime).unwrap(),
            "a file" => std::fs::write(runtime.join("nobounce"), "").unwrap(),
            _ => {
                std::fs::create_dir(runtime.join("nobounce")).unwrap();
                let open = std::fs::Permissions::from_mode(0o755);
                std::fs::set_permissions(runtime.join("nobounce"), open).unwrap();
            }
        }
        assert!(start("ends", &runtime).wait().unwrap().success(), "{what}");
        assert_eq!(named(&runtime.join("nobounce"), "json").len(), 0, "{what}");
        let _ = std::fs::remove_dir_all(runtime); // the first is absent
    }
}
