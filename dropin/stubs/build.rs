//! Turns a stub's names.txt into exported symbols: one line `VERSION ENDING NAME` for each.
//!
//! rustc does not version the symbols of a cdylib. A trampoline in assembly with `.symver` and a
//! version script of empty nodes does; it needs lld.

use std::fmt::Write;
use std::path::PathBuf;
use std::{env, fs};

#[path = "../link/lld.rs"]
mod lld;

fn main() {
    lld::link_with_lld();
    let here = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(variable("OUT_DIR"));
    let names = fs::read_to_string(here.join("names.txt")).expect("names.txt beside Cargo.toml");
    let rows: Vec<[&str; 3]> = names
        .lines()
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.try_into().unwrap_or_else(|_| panic!("names.txt: {line:?} is not VERSION ENDING NAME"))
        })
        .collect();

    let jump = if variable("CARGO_CFG_TARGET_ARCH") == "aarch64" { "b" } else { "jmp" };
    let mut exports = String::new();
    for (at, [version, ending, name]) in rows.iter().enumerate() {
        let function = match *ending {
            "own" => (*name).to_owned(),
            "errno" | "null" | "minus" | "zero" => format!("endings::{ending}"),
            other => panic!("names.txt: {other:?} is no ending"),
        };
        // The last version of a name is the one that new programs are linked with.
        let later = rows[at + 1..].iter().any(|row| row[2] == *name);
        let tie = if later { "@" } else { "@@" };
        let local = format!("nb.{name}.{version}");
        writeln!(
            exports,
            "core::arch::global_asm!(\".pushsection .text.nb_export,\\\"ax\\\",@progbits\", \".globl {local}\", \
             \".type {local},@function\", \"{local}:\", \"{jump} {{f}}\", \".size {local}, .-{local}\", \
             \".symver {local}, {name}{tie}{version}\", \".popsection\", f = sym {function});"
        )
        .expect("a string takes everything");
    }
    fs::write(out.join("exports.rs"), exports).expect("OUT_DIR is ours");

    let mut nodes = String::new();
    let mut before = None;
    for [version, ..] in &rows {
        if before == Some(*version) {
            continue;
        }
        writeln!(nodes, "{version} {{ }} {};", before.unwrap_or_default())
            .expect("a string takes everything");
        before = Some(*version);
    }
    // Linkers that take one version script only must find in it that all else is local. In a node
    // of its own: in another one it would hide old versions of that node's symbols.
    nodes.push_str("LOCAL_ONLY { local: *; };\n");
    let map = out.join("nodes.map");
    fs::write(&map, nodes).expect("OUT_DIR is ours");

    let library = variable("CARGO_PKG_NAME").replace("nobounce-", "lib").replace("stub-", "");
    println!("cargo::rerun-if-changed=names.txt");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={}", map.display());
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{library}.so.1");
    // Threads may run in it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The unwinder is linked in.
    let link = here.ancestors().map(|folder| folder.join("link")).find(|link| link.is_dir());
    println!("cargo::rustc-link-search=native={}", link.expect("dropin/link").display());
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
