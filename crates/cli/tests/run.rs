//! `nobounce run` as people call it: exit codes, signals, what the command sees, and that nothing
//! is left behind.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nobounce_dropin::testing::built_library;

/// A drop-in folder with the real preload library and no verbs library behind its name, and a place
/// for temporary files.
struct Rig {
    folder: PathBuf,
}

impl Rig {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("run-test-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("tmp")).unwrap();
        fs::create_dir_all(folder.join("dropin")).unwrap();
        fs::copy(preload(), folder.join("dropin/libnobounce-paths.so")).unwrap();
        // Any library will do that can be preloaded.
        for name in ["libibverbs.so.1", "libnobounce-vmm.so"] {
            std::os::unix::fs::symlink("libnobounce-paths.so", folder.join("dropin").join(name)).unwrap();
        }
        Self { folder: folder.canonicalize().unwrap() }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nobounce"));
        command
            .arg("run")
            .args(arguments)
            .env("TMPDIR", self.tmp())
            .env("NOBOUNCE_DROPIN", self.folder.join("dropin"));
        for name in ["NOBOUNCE_LOG", "NOBOUNCE_ADDR", "LD_PRELOAD", "LD_LIBRARY_PATH"] {
            command.env_remove(name);
        }
        command
    }

    fn run(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let Output { status, stdout, stderr } = self.command(arguments).output().expect("the command starts");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        (status.code(), text(stdout), text(stderr))
    }

    fn tmp(&self) -> PathBuf {
        self.folder.join("tmp")
    }

    fn left_behind(&self) -> Vec<PathBuf> {
        fs::read_dir(self.tmp()).unwrap().map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn preload() -> PathBuf {
    built_library("libnobounce_paths.so")
}

fn send(child: &Child, signal: &str) {
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill");
    assert!(sent.success());
}

/// Starts it and waits for the first line of its output.
fn start(mut command: Command) -> (Child, String) {
    // A command that reads stdin blocks: the pipe stays open while the child is held. The test's
    // own stdin may be at end of file.
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("the command starts");
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    (child, line.trim_end().to_owned())
}

#[test]
fn the_exit_code_is_the_commands_own() {
    let rig = Rig::new("code");
    let file = rig.folder.join("no-program");
    fs::write(&file, "").unwrap();
    let file = file.to_str().unwrap();
    for (arguments, wanted) in [
        (&["--", "true"][..], 0),
        (&["--", "sh", "-c", "exit 42"], 42),
        (&["sh", "-c", "kill -KILL $$"], 137),
        (&["--", "/no/such/program"], 127),
        (&["--", "no-such-program-in-path"], 127),
        (&["--", file], 126),
        (&[], 2),
        (&["--no-such-flag", "--", "true"], 2),
        (&["--addr", "no-such-interface", "--", "true"], 2),
        (&["--addr", "192.0.2.1", "--", "true"], 2),
        (&["--fault", "nonsense", "--", "true"], 2),
        (&["--log", "loud", "--", "true"], 2),
        (&["--pcap", "/no/such/folder/x.pcap", "--", "true"], 2),
    ] {
        let (code, _, stderr) = rig.run(arguments);
        assert_eq!(code, Some(wanted), "{arguments:?}: {stderr}");
        assert!(
            wanted < 2 || wanted == 42 || wanted == 137 || stderr.len() > 20,
            "{arguments:?} fails without a sentence"
        );
    }
    assert!(rig.left_behind().is_empty());
}

#[test]
fn the_command_sees_its_devices() {
    let rig = Rig::new("view");
    let script = "ls /sys/class/infiniband /dev/infiniband; cat /sys/class/infiniband/nb1/ports/1/gids/0; echo $NOBOUNCE_ADDR";
    let (code, stdout, stderr) = rig.run(&["--addr", "127.0.0.1,127.0.0.2", "--", "sh", "-c", script]);
    assert_eq!(code, Some(0), "{stderr}");
    for wanted in
        ["nb0\nnb1\n", "uverbs", "0000:0000:0000:0000:0000:ffff:7f00:0002\n", "127.0.0.1,127.0.0.2\n"]
    {
        assert!(stdout.contains(wanted), "{wanted:?} is missing in {stdout}");
    }
}

#[test]
fn one_line_at_the_end_unless_quiet() {
    let rig = Rig::new("line");
    let (_, _, stderr) = rig.run(&["--", "true"]);
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.starts_with("nobounce: no process opened a device"), "{stderr}");
    let (_, _, stderr) = rig.run(&["--quiet", "--", "true"]);
    assert_eq!(stderr, "");
}

#[test]
fn signals_reach_the_command_and_nothing_is_left() {
    let rig = Rig::new("signals");
    for (signal, wanted) in [("-TERM", 11), ("-HUP", 12), ("-INT", 13), ("-USR1", 14)] {
        let script = "trap 'exit 11' TERM; trap 'exit 12' HUP; trap 'exit 13' INT; trap 'exit 14' USR1; \
                      echo ready; while :; do sleep 0.01; done";
        let (mut child, line) = start(rig.command(&["--quiet", "--", "sh", "-c", script]));
        assert_eq!(line, "ready");
        send(&child, signal);
        assert_eq!(child.wait().unwrap().code(), Some(wanted), "{signal}");
        assert!(rig.left_behind().is_empty(), "{signal}");
    }
}

/// A program that does not care about signals ends by them: none may be blocked when it starts.
#[test]
fn the_command_starts_with_no_signal_blocked() {
    let rig = Rig::new("mask");
    let (_, stdout, _) = rig.run(&["--", "grep", "SigBlk", "/proc/self/status"]);
    assert_eq!(stdout.trim_end(), "SigBlk:\t0000000000000000");
}

#[test]
fn what_a_killed_run_leaves_goes_with_the_next() {
    let rig = Rig::new("killed");
    let (mut child, line) = start(rig.command(&["--", "sh", "-c", "echo $NOBOUNCE_VIEW; read x"]));
    assert!(Path::new(&line).is_dir(), "{line}");
    send(&child, "-KILL");
    child.wait().unwrap();
    assert_eq!(rig.left_behind().len(), 1);
    assert_eq!(rig.run(&["--", "true"]).0, Some(0));
    assert!(rig.left_behind().is_empty());
}

#[test]
fn a_missing_dropin_folder_is_said() {
    let rig = Rig::new("dropin");
    let mut command = rig.command(&["--", "true"]);
    command.env("NOBOUNCE_DROPIN", "/no/such/folder");
    let Output { status, stderr, .. } = command.output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(2));
    assert!(stderr.contains("/no/such/folder") && stderr.contains("make build"), "{stderr}");
}

/// What [`look_past_the_c_library`] is to open.
const LOOK: &str = "RUN_TEST_LOOK";

/// Run by the test below as the command: opens files as a program does that makes its system calls
/// by hand.
#[test]
fn look_past_the_c_library() {
    let Ok(paths) = std::env::var(LOOK) else { return };
    for path in paths.split(':') {
        let name = std::ffi::CString::new(path).unwrap();
        let (at, read) = (libc::AT_FDCWD, libc::O_RDONLY);
        // SAFETY: the path ends with a NUL; the process ends soon, with what it has open.
        let file = unsafe { libc::syscall(libc::SYS_openat, at, name.as_ptr(), read, 0) };
        println!("{path} {}", if file >= 0 { "is there" } else { "is not there" });
    }
}

#[test]
fn with_mounts_the_view_is_there_for_system_calls_too() {
    let rig = Rig::new("mounts");
    let me = std::env::current_exe().unwrap();
    let ours = [
        "/sys/class/infiniband/nb0/ports/1/gids/0",
        "/sys/class/infiniband/nb0/device/vendor",
        "/sys/class/infiniband_verbs/abi_version",
    ];
    let theirs = ["/dev/null", "/sys/class/net/lo/mtu", "/sys/devices/virtual/net/lo/mtu"];
    let theirs: Vec<_> = theirs.into_iter().filter(|path| Path::new(path).exists()).collect();
    let look = |options: &[&str]| {
        let mut command = rig.command(options);
        command.arg(&me).args(["--exact", "look_past_the_c_library", "--nocapture"]);
        let paths: Vec<_> = ours.iter().chain(&theirs).copied().collect();
        let Output { status, stdout, stderr } = command.env(LOOK, paths.join(":")).output().unwrap();
        (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
    };
    let (code, seen, told) = look(&["--mounts", "--"]);
    if code == Some(2) && told.contains("User namespaces may be disabled") {
        println!("waived: {told}");
        return;
    }
    assert_eq!(code, Some(0), "{told}");
    for path in ours.iter().chain(&theirs) {
        assert!(seen.contains(&format!("{path} is there")), "{seen}{told}");
    }
    let (_, seen, told) = look(&["--"]);
    assert!(seen.contains(&format!("{} is not there", ours[0])), "{seen}{told}");
    assert!(seen.contains("/dev/null is there"), "{seen}{told}");

    // The command keeps its user ID, signals and exit codes work as usual, and no mount or file is
    // left behind.
    let script = "id -u; exit 42";
    let (code, inside, told) = rig.run(&["--mounts", "--", "sh", "-c", script]);
    let outside = Command::new("id").arg("-u").output().unwrap().stdout;
    assert_eq!((code, inside.as_bytes()), (Some(42), &outside[..]), "{told}");
    assert_eq!(rig.run(&["--mounts", "--", "/no/such/program"]).0, Some(127));
    let (mut child, _) = start(rig.command(&["--mounts", "--", "sh", "-c", "echo ready; exec sleep 60"]));
    send(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
    let mounted = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounted.contains(rig.folder.to_str().unwrap()), "{mounted}");
    assert!(rig.left_behind().is_empty());
}

/// NCCL prefers the environment to its files: what we set there would take the user's word back.
#[test]
fn what_nccl_s_own_file_says_is_left_to_it() {
    let rig = Rig::new("nccl-conf");
    fs::write(rig.folder.join(".nccl.conf"), "NCCL_NET_GDR_LEVEL=PHB\nNCCL_PROTO=LL128\n").unwrap();
    let say = |home: &Path| {
        let mut command =
            rig.command(&["--", "sh", "-c", "echo level=$NCCL_NET_GDR_LEVEL gin=$NCCL_GIN_TYPE"]);
        for name in ["NCCL_NET_GDR_LEVEL", "NCCL_GIN_TYPE", "NCCL_PROTO", "NCCL_CONF_FILE"] {
            command.env_remove(name);
        }
        let Output { stdout, stderr, .. } = command.env("HOME", home).output().expect("the command starts");
        (String::from_utf8(stdout).expect("UTF-8"), String::from_utf8(stderr).expect("UTF-8"))
    };
    let (said, warned) = say(&rig.folder);
    assert_eq!(said, "level= gin=2\n");
    assert!(warned.contains("LL128"), "{warned}");
    let (said, warned) = say(&rig.tmp());
    assert_eq!(said, "level=SYS gin=2\n");
    assert!(!warned.contains("LL128"), "{warned}");
}
