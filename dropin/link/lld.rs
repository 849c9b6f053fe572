//! For build scripts of libraries with versioned symbols.

use std::env;
use std::path::PathBuf;
use std::process::Command;

/// Links with the lld of the Rust toolchain, which takes rustc's version script beside ours. It is
/// the default on x86_64; elsewhere GNU ld is, which takes one script.
pub(crate) fn link_with_lld() {
    if env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|architecture| architecture == "x86_64") {
        return;
    }
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let asked = Command::new(rustc).args(["--print", "sysroot"]).output();
    let sysroot = asked.ok().and_then(|said| String::from_utf8(said.stdout).ok()).unwrap_or_default();
    let host = env::var("HOST").unwrap_or_default();
    let folder = PathBuf::from(sysroot.trim()).join("lib/rustlib").join(host).join("bin/gcc-ld");
    // A toolchain of a distribution has none: then the linker of that name is the system's.
    if folder.join("ld.lld").exists() {
        println!("cargo::rustc-cdylib-link-arg=-B{}", folder.display());
    }
    println!("cargo::rustc-cdylib-link-arg=-fuse-ld=lld");
}
