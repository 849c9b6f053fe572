//! Compiles C programs against the system's headers and runs them with our library.

#![allow(dead_code)] // each test uses what it needs

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Why the tests cannot be run here, if they cannot.
pub(crate) fn waived() -> bool {
    let missing = !Path::new("/usr/include/infiniband/verbs.h").exists();
    if missing {
        assert!(std::env::var("REQUIRE").is_err(), "no infiniband/verbs.h here (Debian: libibverbs-dev)");
        eprintln!("waived: no infiniband/verbs.h here (Debian: libibverbs-dev)");
    }
    missing
}

/// The library as it was built for these tests.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().join("libibverbs.so")
}

/// A folder for one test, with the library under its soname. Removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("nobounce-ibverbs-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::os::unix::fs::symlink(library(), folder.join("libibverbs.so.1")).unwrap();
        Self(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Compiles `tests/c/NAME.c` with these further arguments.
    pub(crate) fn compile(&self, name: &str, arguments: &[&str]) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(format!("{name}.c"));
        let program = self.0.join(name);
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-g", "-Wall", "-Werror", "-pthread", "-o"])
            .arg(&program)
            .arg(source)
            .args(arguments);
        let output = cc.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        program
    }

    /// Compiles a program that links with the library.
    pub(crate) fn compile_client(&self, name: &str) -> PathBuf {
        let folder = format!("-L{}", self.0.display());
        self.compile(name, &[&folder, "-l:libibverbs.so.1", "-Wl,--allow-shlib-undefined"])
    }

    /// A program on this address.
    pub(crate) fn program(&self, program: &Path, address: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LD_LIBRARY_PATH", &self.0).env("NOBOUNCE_ADDR", address).env("NOBOUNCE_LOG", "debug");
        command
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a program, at most so many seconds; prints its output when it fails.
pub(crate) fn run(command: &mut Command, seconds: u64) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(seconds);
    let hangs = loop {
        if child.try_wait().unwrap().is_some() {
            break false;
        }
        if Instant::now() > end {
            child.kill().unwrap();
            break true;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success() && !hangs,
        "{command:?} {}: {}{}",
        if hangs { "does not end".to_owned() } else { output.status.to_string() },
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}
