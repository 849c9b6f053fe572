//! The report file that a device leaves at exit.
#![allow(clippy::cast_possible_wrap)] // process numbers

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::common::{child, outcome, pair, role};
use nobounce_nic::soft::last_snapshot;
use nobounce_nic::work::{Mtu, Operation, Remote, Status};

const MTU: Mtu = Mtu::Mtu1024;

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("nobounce-report-{}-{name}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    folder
}

/// Names (without the process number) and contents of the files there, each byte a character: not
/// all of them are text.
fn files(folder: &Path, pid: u32) -> BTreeMap<String, String> {
    let read = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let name = name.strip_prefix(&format!("{pid}-")).expect("of that process").to_owned();
        (name, std::fs::read(path).unwrap().into_iter().map(char::from).collect())
    };
    std::fs::read_dir(folder).unwrap().map(read).collect()
}

/// The names of the files that this test leaves when it runs in `what` role.
fn left_by(what: &str, test: &str) -> (Vec<String>, BTreeMap<String, String>) {
    let folder = folder(what);
    let mut process =
        child(&format!("report::{test}"), what).env("NOBOUNCE_REPORT", &folder).spawn().unwrap();
    let pid = process.id();
    let status = process.wait().unwrap();
    assert_eq!(status.success(), !what.starts_with("dies"), "{status}");
    let files = files(&folder, pid);
    std::fs::remove_dir_all(folder).unwrap();
    (files.keys().cloned().collect(), files)
}

fn field(report: &str, name: &str) -> String {
    let from = report.find(&format!("\"{name}\": ")).unwrap_or_else(|| panic!("no {name} in {report}"));
    let value = &report[from + name.len() + 4..];
    value.lines().next().unwrap().trim_end_matches(',').to_owned()
}

fn in_role(role: &str) {
    let (a, b) = pair("127.63.0.1", 4096, MTU);
    a.post(Operation::Write(b.remote(0)), 0, 4000);
    a.succeed(1);
    match role {
        "closes" => {
            a.post(Operation::Write(Remote { rkey: b.mr.rkey() ^ 1, ..b.remote(0) }), 0, 8);
            assert_eq!(a.status(), Status::RemoteAccess);
            b.post_recv(1, 0, 8); // flushed
        }
        "exits" => {
            std::mem::forget((a, b));
            std::process::exit(0);
        }
        "exits holding" => {
            // A thread polls without pause while the process ends.
            let a: &'static _ = Box::leak(Box::new(a));
            std::mem::forget(b);
            std::thread::spawn(|| {
                loop {
                    a.quiet();
                }
            });
            std::process::exit(0);
        }
        "forks" => {
            // SAFETY: the child calls exit, which runs what was registered for it: that is what is
            // tested.
            let child = unsafe { libc::fork() };
            if child == 0 {
                std::process::exit(0);
            }
            assert_eq!(outcome(child), 0);
            std::mem::forget((a, b));
            // SAFETY: ends the process without running anything: what is there by now was left by
            // the child.
            unsafe { libc::_exit(0) };
        }
        "dies later" => {
            // Long enough for both devices to write their reports; no thread polls.
            std::thread::sleep(std::time::Duration::from_secs(3));
            // SAFETY: no pointers.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        // SAFETY: no pointers.
        _ => unsafe {
            libc::raise(libc::SIGKILL);
        },
    }
}

#[test]
fn a_device_that_is_closed_leaves_its_totals() {
    const NAME: &str = "a_device_that_is_closed_leaves_its_totals";
    if let Some(role) = role() {
        return in_role(&role);
    }
    let (names, files) = left_by("closes", NAME);
    assert_eq!(names, ["0.json", "1.json"]);
    let (a, b) = (&files["0.json"], &files["1.json"]);
    for report in [a, b] {
        assert!(
            report.contains("\"version\": 1, \"pid\": ") && report.contains("\"address\": \"127.63.0.1\"")
        );
        assert!(report.contains("\"program\": \"nic-"), "{report}");
        assert_eq!(field(report, "retransmissions"), "0");
        assert_eq!(field(report, "staged_reason"), "[]");
    }
    assert!(
        field(a, "out").starts_with("{\"cpu\": {\"bytes\": 4008, \"operations\": 2}, \"window\": {"),
        "{a}"
    );
    assert!(field(b, "in").starts_with("{\"cpu\": {\"bytes\": 4000, \"operations\": 1}"), "{b}");
    assert_eq!(field(a, "errors"), "{\"RemoteAccess\": 1}");
    assert_eq!((field(b, "errors").as_str(), field(b, "flushed").as_str()), ("{}", "1"));
    assert_ne!(field(a, "packets_sent"), "0");
    assert!(field(b, "counters").contains("\"refused_access\": 1"), "{b}");
}

#[test]
fn a_program_that_exits_without_closing_reports_all_the_same() {
    const NAME: &str = "a_program_that_exits_without_closing_reports_all_the_same";
    if let Some(role) = role() {
        return in_role(&role);
    }
    for how in ["exits", "exits holding"] {
        let (names, files) = left_by(how, NAME);
        assert_eq!(names, ["0.json", "1.json"], "{how}");
        assert!(field(&files["1.json"], "in").starts_with("{\"cpu\": {\"bytes\": 4000, "), "{files:?}");
    }
}

#[test]
fn a_forked_child_reports_nothing_and_a_dead_process_leaves_its_marker() {
    const NAME: &str = "a_forked_child_reports_nothing_and_a_dead_process_leaves_its_marker";
    if let Some(role) = role() {
        return in_role(&role);
    }
    for how in ["forks", "dies"] {
        let (names, files) = left_by(how, NAME);
        assert_eq!(names, ["0.live", "0.open", "1.live", "1.open"], "{how}");
        assert!(files["0.open"].contains("\"program\": \"nic-"), "{files:?}");
    }
}

#[test]
fn what_a_killed_process_did_until_shortly_before_is_known() {
    const NAME: &str = "what_a_killed_process_did_until_shortly_before_is_known";
    if let Some(role) = role() {
        return in_role(&role);
    }
    let (names, files) = left_by("dies later", NAME);
    assert_eq!(names, ["0.live", "0.open", "1.live", "1.open"]);
    let last = |name: &str| {
        let bytes: Vec<u8> = files[name].chars().map(|c| u8::try_from(c).unwrap()).collect();
        std::str::from_utf8(last_snapshot(&bytes).unwrap()).unwrap().to_owned()
    };
    assert!(field(&last("0.live"), "out").starts_with("{\"cpu\": {\"bytes\": 4000, "), "{files:?}");
    assert!(field(&last("1.live"), "in").starts_with("{\"cpu\": {\"bytes\": 4000, "), "{files:?}");
}

/// Mounts a file system of two pages on the folder, for this thread and those it starts; false
/// where that is not permitted.
fn mount_tiny(folder: &Path) -> bool {
    let path = std::ffi::CString::new(folder.as_os_str().as_encoded_bytes()).unwrap();
    let nothing = std::ptr::null();
    // SAFETY: the strings are valid for the calls, which change the mounts of this thread only.
    unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(nothing, c"/".as_ptr(), nothing, libc::MS_REC | libc::MS_PRIVATE, nothing.cast())
                == 0
            && libc::mount(
                c"none".as_ptr(),
                path.as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                c"size=8192".as_ptr().cast(),
            ) == 0
    }
}

/// Without space there are no snapshots, and traffic goes on: a store into a file without blocks
/// would end the process by SIGBUS.
#[test]
fn a_full_file_system_does_not_end_the_program() {
    if role().is_some() {
        let folder = PathBuf::from(std::env::var_os("NOBOUNCE_REPORT").unwrap());
        if !mount_tiny(&folder) {
            println!("waived (this user may mount nothing)");
            return;
        }
        let (a, b) = pair("127.67.9.1", 4096, MTU);
        let begun = std::time::Instant::now();
        while begun.elapsed() < std::time::Duration::from_millis(800) {
            crate::common::check_write(&a, &b, 1, 4096);
        }
        return;
    }
    let folder = folder("full");
    let test = "report::a_full_file_system_does_not_end_the_program";
    let status = child(test, "full").env("NOBOUNCE_REPORT", &folder).status().unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    assert!(status.success(), "{status}");
}

/// A program that opens and closes devices one after the other, as test suites do: each leaves its
/// report.
#[test]
fn every_device_of_a_process_leaves_a_report() {
    if role().is_some() {
        for round in 0..3 {
            let (a, b) = pair(&format!("127.67.10.{}", round + 1), 4096, MTU);
            crate::common::check_write(&a, &b, 1, 4096);
        }
        return;
    }
    let (names, files) = left_by("opens", "every_device_of_a_process_leaves_a_report");
    let reports = names.iter().filter(|name| name.ends_with(".json")).count();
    assert_eq!((reports, names.len()), (6, 6), "{names:?}");
    let sent: u64 = files.values().map(|report| field(report, "packets_sent").parse::<u64>().unwrap()).sum();
    assert!(sent >= 6, "{sent}");
}
