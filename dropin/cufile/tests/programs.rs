//! A C program against cuFile's API, with our library and a stand-in for CUDA's driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A library as it was built for these tests.
fn library(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().with_file_name(name)
}

/// A folder for one test, with the library under its soname, and files. Removed at the end.
struct Folder(PathBuf);

impl Folder {
    /// On a real file system: tmpfs has no `O_DIRECT` on older kernels.
    fn new(name: &str) -> Self {
        let folder =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cufile-{name}-{}", std::process::id()));
        fs::create_dir_all(folder.join("report")).unwrap();
        std::os::unix::fs::symlink(library("libcufile.so"), folder.join("libcufile.so.0")).unwrap();
        Self(folder)
    }

    fn run(&self, case: &str, environment: &[(&str, &str)]) -> String {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/files.c");
        let program = self.0.join("files");
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-g", "-Wall", "-Werror", "-o"]).arg(&program).arg(source).arg("-ldl");
        let Output { status, stderr, .. } = cc.output().unwrap();
        assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
        let mut command = Command::new("timeout");
        command.arg("60").arg(&program).arg(case).arg(&self.0);
        command.env("LD_LIBRARY_PATH", &self.0).env("NOBOUNCE_CUDA", library("libfake_cuda.so"));
        command.env("NOBOUNCE_LOG", "debug").env("NOBOUNCE_REPORT", self.0.join("report"));
        command
            .env_remove("NOBOUNCE_WINDOW")
            .env_remove("NOBOUNCE_REQUIRE")
            .envs(environment.iter().copied());
        let Output { status, stdout, stderr } = command.output().unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(status.success() && said.contains(&format!("{case}: good")), "{case}: {status}: {said}");
        said
    }

    /// What the process left for `nobounce run`.
    fn report(&self) -> String {
        let entries = fs::read_dir(self.0.join("report")).unwrap().flatten();
        let files = entries.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "files"));
        files.map(|entry| fs::read_to_string(entry.path()).unwrap()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn good(case: &str) {
    Folder::new(case).run(case, &[]);
}

#[test]
fn registered_buffers_are_filled_through_their_window() {
    let folder = Folder::new("registered");
    folder.run("registered", &[]);
    let report = folder.report();
    assert!(report.contains("by window") && !report.contains("staged"), "{report}");
    assert!(!report.contains("not registered"), "{report}");
}

#[test]
fn buffers_that_are_not_registered_are_staged_and_reported() {
    let folder = Folder::new("unregistered");
    folder.run("unregistered", &[]);
    let report = folder.report();
    assert!(!report.contains("by window") && report.contains("were not registered"), "{report}");
}

#[test]
fn files_opened_with_o_direct_are_read_at_any_offset() {
    good("direct");
}

#[test]
fn reads_end_with_the_file() {
    good("ends");
}

#[test]
fn mistakes_have_cufiles_error_numbers() {
    good("misuse");
}

#[test]
fn the_driver_is_counted_and_has_properties() {
    good("driver");
}

#[test]
fn statistics_count_operations_and_end_where_older_programs_do() {
    good("counted");
}

#[test]
fn batches_report_every_entry_once() {
    good("batch");
}

#[test]
fn streams_order_reads_and_writes() {
    good("streams");
}

#[test]
fn a_direct_path_can_be_required() {
    let folder = Folder::new("required");
    folder.run("required", &[]);
    let report = folder.report();
    assert!(report.contains("by window") && !report.contains("staged"), "{report}");
}

#[test]
fn a_child_has_nothing_of_its_parents() {
    good("forked");
}

#[test]
fn memory_freed_while_registered_is_not_written() {
    let folder = Folder::new("freed");
    let said = folder.run("freed", &[]);
    assert!(said.contains("was freed while it was registered"), "{said}");
}

/// Programs that are linked with the library load it by this soname.
#[test]
fn its_name_and_its_functions_are_those_of_cufile() {
    let tool = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).arg(library("libcufile.so")).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(tool("readelf", &["-d", "--wide"]).contains("soname: [libcufile.so.0]"));
    let names = tool("nm", &["-D", "--defined-only"]);
    let exported: Vec<_> = names.split_whitespace().filter(|name| name.starts_with("cuFile")).collect();
    let wanted = include_str!("names.txt").split_whitespace();
    let missing: Vec<_> = wanted.filter(|name| !exported.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
