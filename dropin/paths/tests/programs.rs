//! A C program, and tools of the system, see the view where it exists and the system everywhere
//! else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nobounce_dropin::testing::built_library;

fn library() -> PathBuf {
    built_library("libnobounce_paths.so")
}

struct View(PathBuf);

impl View {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("paths-test-{name}-{}", std::process::id()));
        fs::create_dir_all(root.join("sys/class/infiniband/nb0")).unwrap();
        fs::create_dir_all(root.join("sys/devices/virtual/nobounce/nb1")).unwrap();
        fs::create_dir_all(root.join("sys/kernel/mm/memory_peers/nv_mem")).unwrap();
        fs::write(root.join("sys/devices/virtual/nobounce/nb1/fw_ver"), "1.3\n").unwrap();
        std::os::unix::fs::symlink(
            "../../devices/virtual/nobounce/nb1",
            root.join("sys/class/infiniband/nb1"),
        )
        .unwrap();
        fs::create_dir_all(root.join("dev/infiniband")).unwrap();
        fs::write(root.join("sys/class/infiniband/nb0/fw_ver"), "1.2\n").unwrap();
        std::os::unix::fs::symlink("nb0", root.join("sys/class/infiniband/link")).unwrap();
        std::os::unix::fs::symlink("/dev/null", root.join("dev/infiniband/uverbs0")).unwrap();
        Self(root.canonicalize().unwrap())
    }

    fn run(&self, program: impl AsRef<Path>, arguments: &[&str]) -> Output {
        Command::new(program.as_ref())
            .args(arguments)
            .env("LD_PRELOAD", library())
            .env("NOBOUNCE_VIEW", &self.0)
            .output()
            .expect("the program starts")
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn every_call_sees_the_view() {
    let view = View::new("calls");
    for flags in [&["-O0"][..], &["-O2", "-D_FORTIFY_SOURCE=2"], &["-D_FILE_OFFSET_BITS=64"]] {
        let program = view.0.join("calls");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/calls.c");
        let built = Command::new("cc").args(flags).arg("-o").arg(&program).arg(source).output().expect("cc");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let ran = view.run(&program, &[]);
        assert!(ran.status.success(), "{flags:?}: {}", String::from_utf8_lossy(&ran.stdout));
    }
}

#[test]
fn tools_of_the_system_see_it() {
    let view = View::new("tools");
    let listed = view.run("ls", &["-l", "/sys/class/infiniband/nb0", "/dev/infiniband"]);
    let text = String::from_utf8_lossy(&listed.stdout);
    assert!(listed.status.success() && text.contains("fw_ver") && text.contains("uverbs0"), "{listed:?}");
    assert_eq!(view.run("cat", &["/sys/class/infiniband/link/fw_ver"]).stdout, b"1.2\n");
    assert!(view.run("ls", &["/sys/kernel/mm/memory_peers/nv_mem"]).status.success());
}

/// The C library's resolution, that of coreutils and Python, which follow each link themselves, and
/// the shell's give one path, and it can be opened.
#[test]
fn paths_are_resolved_as_on_sysfs() {
    let view = View::new("resolved");
    let (link, real) = ("/sys/class/infiniband/nb1", "/sys/devices/virtual/nobounce/nb1\n");
    let script = format!("import os; print(os.path.realpath('{link}'))");
    let shell = format!("cd {link} && cat fw_ver && cd /sys/class/infiniband && cd nb1 && cat fw_ver");
    for (program, arguments, expected) in [
        ("realpath", &[link][..], real),
        ("readlink", &["-f", link], real),
        ("python3", &["-c", &script], real),
        ("cat", &["/sys/devices/virtual/nobounce/nb1/fw_ver"], "1.3\n"),
        ("bash", &["-c", &shell], "1.3\n1.3\n"),
        ("dash", &["-c", &shell], "1.3\n1.3\n"),
    ] {
        let ran = view.run(program, arguments);
        assert_eq!(String::from_utf8_lossy(&ran.stdout), expected, "{program}: {ran:?}");
    }
}

#[test]
fn without_a_view_nothing_changes() {
    let view = View::new("none");
    let ran = Command::new("cat")
        .arg("/sys/class/infiniband/nb0/fw_ver")
        .env("LD_PRELOAD", library())
        .env_remove("NOBOUNCE_VIEW")
        .output()
        .expect("cat starts");
    assert!(!ran.status.success(), "{ran:?}");
    drop(view);
}

/// A program with rdma-core linked in reads the list of devices itself: its file is noted.
#[test]
fn who_looks_for_verbs_devices_is_noted() {
    let view = View::new("noted");
    fs::create_dir_all(view.0.join("sys/class/infiniband_verbs")).unwrap();
    let ls = Command::new("sh").args(["-c", "readlink -f $(command -v ls)"]).output().unwrap().stdout;
    let looks = |paths: &[&str]| {
        let report = view.0.join("report");
        fs::create_dir_all(&report).unwrap();
        let ran = Command::new("ls")
            .args(paths)
            .env("LD_PRELOAD", library())
            .env("NOBOUNCE_VIEW", &view.0)
            .env("NOBOUNCE_REPORT", &report)
            .output()
            .unwrap();
        assert!(ran.status.success(), "{ran:?}");
        let files: Vec<_> = fs::read_dir(&report).unwrap().map(|entry| entry.unwrap().path()).collect();
        let noted = files.iter().map(|file| (file.extension().unwrap().to_owned(), fs::read(file).unwrap()));
        let noted: Vec<_> = noted.collect();
        fs::remove_dir_all(&report).unwrap();
        noted
    };
    assert_eq!(looks(&["/sys/class/infiniband/nb0", "/tmp"]), []);
    let twice = ["/sys/class/infiniband_verbs", "/sys/class/infiniband_verbs/"];
    let [(extension, noted)] = looks(&twice).try_into().unwrap();
    assert_eq!(extension, "verbs");
    assert!(noted.split_inclusive(|byte| *byte == b'\n').all(|line| line == ls), "{noted:?}");
}

fn compile(source: &str, arguments: &[&str], to: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    let built = Command::new("cc").args(arguments).arg("-o").arg(to).arg(source).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

#[test]
fn a_child_does_not_wait_for_the_thread_of_its_parent() {
    let folder = std::env::temp_dir().join(format!("paths-fork-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let (maker, program) = (folder.join("maker.so"), folder.join("program"));
    compile("fork.c", &["-DLIBRARY", "-shared", "-fPIC"], &maker);
    compile("fork.c", &["-pthread"], &program);
    let ran = Command::new(&program)
        .env("LD_PRELOAD", format!("{}:{}", library().display(), maker.display()))
        .env("NOBOUNCE_LOG", "error")
        .env_remove("NOBOUNCE_VIEW")
        .output()
        .unwrap();
    fs::remove_dir_all(folder).unwrap();
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "at once\nthe view\n", "{ran:?}");
    let said = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(said.matches("forked while").count(), 1, "{said}");
}

#[test]
fn a_path_that_is_too_long_is_said() {
    let ran = Command::new("cat")
        .arg("/sys/class/infiniband/nb0/fw_ver")
        .env("LD_PRELOAD", library())
        .env("NOBOUNCE_VIEW", format!("/{}", "x".repeat(512)))
        .env("NOBOUNCE_LOG", "error")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(said.contains("it is too long") && said.contains("NOBOUNCE_VIEW=/xx"), "{said}");
}
