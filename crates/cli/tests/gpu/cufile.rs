//! `nobounce doctor --storage --prove` with libcufiles that work, crash, hang, or are absent.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nobounce_dropin::testing::built_library;
use serde_json::Value;

use crate::{Folder, nobounce, output};

/// `doctor --storage --prove` of a file of 9 MiB and 5 bytes, with the libcufile that `make` puts
/// into a folder. The exit code, the proof, and the text.
fn proved_by_cufile(name: &str, make: impl FnOnce(&Path)) -> (Option<i32>, Value, String) {
    let folder = Folder::new(name);
    let file = folder.file("data");
    fs::write(&file, vec![3_u8; (9 << 20) + 5]).expect("a file of the test");
    make(&folder.file("libcufile.so.0"));
    let line = format!("doctor --prove --json --storage {}", file.display());
    let mut command = nobounce(&line);
    command.env("LD_LIBRARY_PATH", &folder.0).env("TMPDIR", &folder.0).current_dir(&folder.0);
    let (code, stdout, stderr) = output(&mut command);
    let told: Value =
        serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}\n{stderr}"));
    // Neither a log, nor a core file, nor the folder of the log.
    let mut left: Vec<_> = fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.retain(|name| !name.to_string_lossy().starts_with("libcufile"));
    assert_eq!(left, ["data"], "{stdout}");
    (code, told["storage"]["proof"].clone(), stdout)
}

/// What became of cuFile: the one read of that name.
fn by_cufile(proof: &Value) -> &Value {
    let reads = proof["reads"].as_array().expect("reads");
    // The others have worked, whatever cuFile does.
    let is_cufile = |read: &&Value| read["how"].as_str().is_some_and(|how| how.starts_with("cuFile"));
    assert!(reads.iter().filter(|read| !is_cufile(read)).all(|read| read["ok"] == true), "{proof}");
    let found: Vec<_> = reads.iter().filter(is_cufile).collect();
    let [read] = found[..] else { panic!("one read by cuFile is expected: {proof}") };
    read
}

/// A library of a few lines of C.
fn compile(source: &str, to: &Path) {
    let code = to.with_file_name("libcufile.c");
    fs::write(&code, source).unwrap();
    let cc = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(to).arg(&code).output().expect("cc");
    assert!(cc.status.success(), "{}", String::from_utf8_lossy(&cc.stderr));
}

/// The functions that doctor calls; `BROKEN` is what `cuFileRead` does first.
const STUB: &str = "
    #include <stdlib.h>
    #include <string.h>
    #include <stdio.h>
    #include <unistd.h>
    typedef struct { int err, cu_err; } status;
    status cuFileDriverOpen(void) {
        FILE *log = fopen(getenv(\"CUFILE_LOGFILE_PATH\"), \"w\");
        fprintf(log, \"1 ERROR  stub:1 out of order\\n\");
        fclose(log);
        printf(\"noise\\n\");
        return (status){OPENED, 0};
    }
    status cuFileHandleRegister(void **handle, const void *descr) { *handle = handle; return (status){0, 0}; }
    void cuFileHandleDeregister(void *handle) {}
    status cuFileBufRegister(const void *base, size_t len, int flags) { return (status){0, 0}; }
    status cuFileBufDeregister(const void *base) { return (status){0, 0}; }
    ssize_t cuFileRead(void *handle, void *base, size_t len, long at, long offset) { BROKEN; return len; }
";

fn stub(opened: u32, broken: &str) -> String {
    STUB.replace("OPENED", &opened.to_string()).replace("BROKEN", broken)
}

#[test]
fn doctor_reads_a_file_by_cufile_and_names_the_path() {
    let ours = |to: &Path| std::os::unix::fs::symlink(built_library("libcufile.so"), to).unwrap();
    let (code, proof, stdout) = proved_by_cufile("cufile-ours", ours);
    assert!(matches!(code, Some(0 | 1)), "{stdout}");
    let read = by_cufile(&proof);
    assert_eq!((&read["ok"], read["bytes"].as_u64()), (&true.into(), Some((9 << 20) + 5)), "{read}");
    assert!(read["gbs"].as_f64().is_some_and(|gbs| gbs > 0.0), "{read}");
    let (how, detail) = (read["how"].as_str().unwrap_or(""), read["detail"].as_str().unwrap_or(""));
    assert!(how.starts_with("cuFile into GPU"), "{read}");
    // A buffer that is registered has a window.
    assert!(detail.starts_with("by window (its own counters); opened with"), "{read}");
    assert!(detail.ends_with("the last piece was compared"), "{read}");
    let library = &proof["cufile"];
    assert_eq!((&library["is_nobounce"], &library["version"]), (&true.into(), &"1.19".into()), "{library}");
    assert!(library["path"].as_str().is_some_and(|path| path.ends_with("libcufile.so")), "{library}");
}

#[test]
fn doctor_goes_on_without_libcufile_and_says_what_to_install() {
    let (code, proof, stdout) = proved_by_cufile("cufile-none", |to| {
        // A system that has one would use it.
        fs::write(to, "no library").unwrap();
        fs::write(to.with_file_name("libcufile.so"), "no library").unwrap();
    });
    assert!(matches!(code, Some(0 | 1)), "{stdout}");
    assert_eq!(proof["cufile"], Value::Null);
    let told = proof["not_tried"].to_string();
    assert!(
        told.contains("cuFile: libcufile cannot be loaded (") && told.contains("libcufile.so.0"),
        "{told}"
    );
    assert!(told.contains("install nvidia-cufile"), "{told}");
}

#[test]
fn a_libcufile_that_crashes_hangs_or_lies_does_not_take_doctor_along() {
    for (name, source, expected) in [
        (
            "refuses",
            stub(5007, ""),
            "cuFileDriverOpen: cuFile error 5007: cuFile does not support this platform",
        ),
        ("lacks", "int cuFileDriverOpen;".to_owned(), "this libcufile lacks functions of cuFile"),
        ("crashes", stub(0, "abort()"), "ended in cuFileRead (signal: 6 (SIGABRT)"),
        ("exits", stub(0, "_exit(0)"), "ended in cuFileRead (exit status: 0)"),
        ("fails", stub(0, "return -5030"), "cuFileRead at offset 0: cuFile error 5030"),
        ("lies", stub(0, ""), "the GPU's memory does not hold what is in the file"),
        ("exceeds", stub(0, "return len + 1"), "bytes returned"),
        ("hangs", stub(0, "sleep(100)"), "was still in cuFileRead after 10 s, and was killed"),
    ] {
        let begun = Instant::now();
        let (code, proof, stdout) = proved_by_cufile(&format!("cufile-{name}"), |to| compile(&source, to));
        assert_eq!(code, Some(1), "{name}: {stdout}");
        let read = by_cufile(&proof);
        let detail = read["detail"].as_str().unwrap_or("");
        assert!(read["ok"] == false && detail.contains(expected), "{name}: {read}");
        // The stub has logged a reason.
        assert!(
            name == "lacks" || detail.ends_with("; its log: 1 ERROR  stub:1 out of order"),
            "{name}: {read}"
        );
        assert!(begun.elapsed() < Duration::from_secs(40), "{name}: {:?}", begun.elapsed());
    }
}
