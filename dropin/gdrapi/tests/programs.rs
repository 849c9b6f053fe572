//! C programs against GDRCopy's API, with our library and a stand-in for CUDA's driver.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A library as it was built for these tests.
fn library(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.with_file_name(name)
}

/// A folder for one test, with the library under its soname. Removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("nobounce-gdrapi-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::os::unix::fs::symlink(library("libgdrapi.so"), folder.join("libgdrapi.so.2")).unwrap();
        Self(folder)
    }

    fn compile(&self, name: &str, arguments: &[&str]) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(format!("{name}.c"));
        let program = self.0.join(name);
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-g", "-Wall", "-Werror", "-Wno-unused-function", "-pthread", "-o"])
            .arg(&program)
            .arg(source)
            .args(arguments)
            .arg("-ldl");
        let output = cc.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        program
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", &self.0)
            .env("NOBOUNCE_CUDA", library("libfake_cuda.so"))
            .env("NOBOUNCE_LOG", "warn")
            .env_remove("NOBOUNCE_WINDOW");
        command
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a program, at most a minute; prints its output when it fails, and returns it otherwise.
fn run(command: &mut Command) -> String {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
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
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success() && !hangs, "{command:?} {status}, hangs: {hangs}: {said}");
    said
}

fn life(name: &str) -> String {
    life_with_log(name, "warn")
}

fn life_with_log(name: &str, level: &str) -> String {
    let folder = Folder::new(name);
    let program = folder.compile("lives", &[]);
    run(folder.command(&program).arg(name).env("NOBOUNCE_LOG", level))
}

#[test]
fn every_function_is_there_and_structures_have_their_layout() {
    life("facts");
}

#[test]
fn bytes_of_every_length_and_alignment_arrive() {
    life("copies");
}

#[test]
fn small_allocations_are_pinned_by_their_page() {
    life("small");
}

#[test]
fn overlapping_pins_are_independent() {
    life("overlap");
}

#[test]
fn what_was_unmapped_faults_until_it_is_mapped_again() {
    life("unmapped");
}

#[test]
fn only_what_was_asked_for_is_mapped() {
    life("part");
}

#[test]
fn mistakes_are_refused_with_a_reason_and_harm_nothing() {
    let said = life_with_log("misuse", "debug");
    for words in
        ["is already mapped", "unknown handle", "another gdr_t", "host memory", "managed", "write-combined"]
    {
        assert!(said.contains(words), "{words:?} is not among: {said}");
    }
}

#[test]
fn memory_freed_while_mapped_stays_apart_from_what_is_allocated_next() {
    life("freed");
}

#[test]
fn a_child_has_nothing_of_its_parents() {
    let said = life_with_log("forked", "debug");
    assert!(said.contains("belongs to the parent process"), "{said}");
}

#[test]
fn many_threads_at_once() {
    life("threads");
}

#[test]
fn exits_with_everything_open() {
    life("exits");
}

fn vmm(case: &str) -> String {
    let folder = Folder::new(&format!("vmm-{case}"));
    let program = folder.compile("vmm", &[]);
    run(folder.command(&program).arg(case))
}

#[test]
fn memory_created_exportable_is_pinned_mapped_and_outlives_its_owner() {
    vmm("exportable");
}

/// The stand-in's dma-bufs can be mapped, like those of newer drivers; otherwise the same program
/// expects the refusal.
#[test]
fn memory_created_without_a_handle_type_is_pinned_or_refused() {
    assert!(vmm("private").contains("pinned: "));
}

/// A process that ends by method `way` with buffers in five eighths of a BAR1 of 64 MiB, as the
/// stand-in for NVML reports it.
fn death(way: &str, kept_mib: &str) -> Output {
    let folder = Folder::new(&format!("deaths-{way}-{kept_mib}"));
    let nvml = folder.compile("nvml", &["-shared", "-fPIC"]);
    std::fs::rename(nvml, folder.0.join("libnvidia-ml.so.1")).unwrap();
    let program = folder.compile("deaths", &[]);
    folder.command(&program).args([way, "4"]).env("NVML_KEEPS", kept_mib).output().unwrap()
}

#[test]
fn a_process_that_dies_while_pinned_leaves_nothing_behind() {
    for way in ["killed", "returns", "quits"] {
        let output = death(way, "0");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let wrong = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{way}: {said}{wrong}");
        assert!(said.matches("pinned and mapped 10 buffers of 4 MiB").count() == 2, "{said}");
        assert!(said.contains("NVML: as before") && said.contains(&format!("{way}: good")), "{said}");
    }
}

/// The check itself: a GPU that keeps 100 MiB more with every question is noticed.
#[test]
fn bar1_that_stays_in_use_is_noticed() {
    let output = death("quits", "100");
    let wrong = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && wrong.contains("FAILED: is_as(before, after)"), "{wrong}");
}

/// One process covers the whole life cycle.
#[test]
fn one_after_the_other() {
    life("all");
}

#[test]
fn the_speed_program_of_the_gpu_check_runs() {
    let folder = Folder::new("speed");
    let program = folder.compile("speed", &[]);
    let said = run(folder.command(&program).arg("32"));
    assert!(
        said.contains("all bytes were right") && said.contains("figure 64 B write, mean of 1000"),
        "{said}"
    );
}

/// Without CUDA, or where windows are switched off, open fails at once, and programs continue
/// without.
#[test]
fn it_does_not_open_where_nothing_can_be_pinned() {
    let folder = Folder::new("closed");
    let program = folder.compile("lives", &[]);
    let said = run(folder
        .command(&program)
        .arg("closed")
        .env("NOBOUNCE_CUDA", "/no/such/libcuda.so")
        .env("NOBOUNCE_LOG", "info"));
    assert!(said.contains("/no/such/libcuda.so"), "{said}");
    let said = run(folder.command(&program).arg("closed").env("NOBOUNCE_WINDOW", "off"));
    assert!(said.contains("NOBOUNCE_WINDOW=off"), "{said}");
}

/// A driver that refuses every mapping: the same error as gdrdrv's, and the reason is logged even
/// without a log level.
#[test]
fn no_window_is_an_error_with_its_reason() {
    let folder = Folder::new("refused");
    let program = folder.compile("refused", &[]);
    let said = run(folder
        .command(&program)
        .env_remove("NOBOUNCE_LOG")
        .env("NOBOUNCE_REPORT", folder.0.join("report")));
    assert!(said.contains("dma-buf") && said.contains("/dev/gdrdrv"), "{said}");
    let silent = run(folder.command(&program).env_remove("NOBOUNCE_LOG"));
    assert!(silent.is_empty(), "{silent}");
}

/// Programs that are linked with the library load it by this soname.
#[test]
fn its_name_is_that_of_gdrcopys() {
    let output =
        Command::new("readelf").args(["-d", "--wide"]).arg(library("libgdrapi.so")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("soname: [libgdrapi.so.2]"), "{said}");
}
