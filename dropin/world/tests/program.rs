//! `libnobounce.so` as a C program uses it.

use std::path::{Path, PathBuf};
use std::process::Command;

use nobounce_dropin::testing::built_library;

fn library() -> PathBuf {
    built_library("libnobounce_world.so")
}

#[test]
fn a_c_program_joins_or_reads_the_reason() {
    let (here, folder) = (Path::new(env!("CARGO_MANIFEST_DIR")), Path::new(env!("CARGO_TARGET_TMPDIR")));
    // Under the name that programs ask for.
    let (program, linked) = (folder.join("join"), folder.join("libnobounce.so.1"));
    std::fs::copy(library(), &linked).unwrap();
    let status = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-std=c99", "-o"])
        .arg(&program)
        .arg(here.join("tests/c/join.c"))
        .arg("-I")
        .arg(here.join("include"))
        .arg(&linked)
        .arg(format!("-Wl,-rpath,{}", folder.display()))
        .status();
    assert!(status.unwrap().success());
    let say = |argument: &str| {
        let ran = Command::new(&program)
            .arg(argument)
            .env("NOBOUNCE_CUDA", "/nowhere/libcuda.so.1")
            .output()
            .unwrap();
        assert!(ran.status.success(), "{ran:?}");
        String::from_utf8(ran.stdout).unwrap()
    };
    let said = say("127.0.0.1:0");
    assert!(said.starts_with("refused: ") && said.contains("/nowhere/libcuda.so.1"), "{said}");
    assert!(say("none").contains("no rendezvous"));
    assert!(say("somewhere").contains("rendezvous \"somewhere\" is no address and port"));
}

/// As NCCL looks for a plugin of its newest interface, and of the one before.
#[test]
fn nccl_finds_its_plugin() {
    let listed = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output().expect("nm");
    let symbols = String::from_utf8_lossy(&listed.stdout).into_owned();
    for version in [13, 14] {
        assert!(symbols.contains(&format!(" D ncclGinPlugin_v{version}\n")), "{symbols}");
    }
}
