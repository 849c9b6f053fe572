//! C programs that find `cuMemCreate` in every way, with a libcuda of the test's own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nobounce_dropin::testing::built_library;

/// Handle types in the driver's calls: device memory without one, with the descriptor, with
/// a fabric handle; and host memory.
const EXPORTABLE: &str = "asked 1 of 1\nasked 1 of 1\nasked 9 of 1\nasked 0 of 2\n";
const UNCHANGED: &str = "asked 0 of 1\nasked 1 of 1\nasked 8 of 1\nasked 0 of 2\n";
/// The driver refuses each added type, and gets the program's own call.
const REFUSED: &str = "asked 1 of 1\nasked 0 of 1\nasked 1 of 1\nasked 9 of 1\nasked 8 of 1\nasked 0 of 2\n";

#[cfg(target_arch = "x86_64")]
const OLD: &str = "-DOLD=\"GLIBC_2.2.5\"";
#[cfg(not(target_arch = "x86_64"))]
const OLD: &str = "-DOLD=\"GLIBC_2.17\"";

fn library() -> PathBuf {
    built_library("libnobounce_vmm.so")
}

struct Programs(PathBuf);

impl Programs {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("vmm-test-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let programs = Self(folder);
        programs.compile(
            "libcuda",
            "libcuda.so.1",
            &["-shared", "-fPIC", "-Wl,-Bsymbolic,-soname,libcuda.so.1"],
        );
        programs.compile("client", "client", &["-ldl"]);
        programs
    }

    fn compile(&self, source: &str, to: &str, flags: &[&str]) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{source}.c"));
        let to = self.0.join(to);
        let made = Command::new("cc")
            .args(["-O1", "-Wall", "-Wextra", "-Werror", "-Wno-pedantic", "-o"])
            .arg(&to)
            .arg(source)
            .args(flags)
            .output()
            .expect("cc starts");
        assert!(made.status.success(), "{made:?}");
        to
    }

    /// Runs a program with libraries preloaded; its output.
    fn run(&self, program: &str, words: &[&str], preload: &[&Path], settings: &[(&str, &str)]) -> String {
        let list: Vec<_> = preload.iter().map(|path| path.to_str().unwrap()).collect();
        let ran = Command::new(self.0.join(program))
            .args(words)
            .env("LD_PRELOAD", list.join(":"))
            .env("LD_LIBRARY_PATH", &self.0)
            .env("LIBCUDA", self.0.join("libcuda.so.1"))
            .env_remove("NOBOUNCE_VMM_EXPORT")
            .envs(settings.iter().copied())
            .output()
            .expect("the program starts");
        let text = String::from_utf8(ran.stdout).unwrap();
        assert!(
            ran.status.success(),
            "{words:?}: {} {text} {}",
            ran.status,
            String::from_utf8_lossy(&ran.stderr)
        );
        text
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn memory_is_exportable_however_the_function_was_found() {
    let (programs, library) = (Programs::new("ways"), library());
    let cuda = programs.0.join("libcuda.so.1");
    programs.compile("client", "linked", &["-DLINKED", cuda.to_str().unwrap(), "-ldl"]);
    let ways =
        [("client", "dlsym"), ("client", "address"), ("client", "address of address"), ("linked", "linked")];
    for (program, way) in ways.into_iter().chain([("linked", "linked address"), ("linked", "dlsym")]) {
        assert_eq!(programs.run(program, &[way], &[], &[]), UNCHANGED, "{way}, without the library");
        assert_eq!(programs.run(program, &[way], &[&library], &[]), EXPORTABLE, "{way}");
        let refused = programs.run(program, &[way], &[&library], &[("REFUSE", "1")]);
        assert_eq!(refused, REFUSED, "{way}");
        let off = programs.run(program, &[way], &[&library], &[("NOBOUNCE_VMM_EXPORT", "off")]);
        assert_eq!(off, UNCHANGED, "{way}, switched off");
    }
}

/// libcuda is not among the libraries of the program, but of a module that it loads.
#[test]
fn modules_that_link_libcuda_find_it() {
    let (programs, library) = (Programs::new("module"), library());
    let cuda = programs.0.join("libcuda.so.1");
    let module = programs.compile("module", "module.so", &["-shared", "-fPIC", cuda.to_str().unwrap()]);
    let settings = [("MODULE", module.to_str().unwrap())];
    assert_eq!(programs.run("client", &["module"], &[], &settings), UNCHANGED);
    assert_eq!(programs.run("client", &["module"], &[&library], &settings), EXPORTABLE);
}

/// A library that wraps the function, and calls what it finds in libcuda.
#[test]
fn another_library_that_wraps_the_function_keeps_working() {
    let (programs, library) = (Programs::new("wrapper"), library());
    let wrapper = programs.compile("wrapper", "wrapper.so", &["-shared", "-fPIC"]);
    let cuda = programs.0.join("libcuda.so.1");
    programs.compile("client", "linked", &["-DLINKED", cuda.to_str().unwrap(), "-ldl"]);
    for settings in [&[][..], &[("LAZY", "1")]] {
        for order in [[&*library, &*wrapper], [&*wrapper, &*library]] {
            for (program, way) in [("client", "default"), ("client", "dlsym"), ("linked", "linked")] {
                let told = programs.run(program, &[way], &order, settings);
                assert!([EXPORTABLE, UNCHANGED].contains(&&*told), "{order:?}, {way}: {told}");
            }
        }
    }
}

#[test]
fn without_libcuda_nothing_is_found() {
    let programs = Programs::new("absent");
    assert_eq!(programs.run("client", &["absent"], &[&library()], &[]), "");
}

/// Behind ours it gets all lookups. In front of ours it asks the C library by the version of the
/// symbol, as such libraries do: then the memory stays as the program asks for it.
#[test]
fn another_library_that_interposes_dlsym_keeps_working() {
    let (programs, library) = (Programs::new("hook"), library());
    let hook = programs.compile("hook", "hook.so", &["-shared", "-fPIC", OLD, "-ldl"]);
    for (order, memory) in [([&*library, &*hook], EXPORTABLE), ([&*hook, &*library], UNCHANGED)] {
        for way in ["dlsym", "address", "address of address"] {
            let told = programs.run("client", &[way], &order, &[]);
            assert_eq!(told, format!("{memory}hook: asked\n"), "{order:?}, {way}");
        }
    }
}

/// Libraries that pass a call on to the next one, each from its own place in the order.
#[test]
fn the_next_library_is_that_of_the_caller() {
    let (programs, library) = (Programs::new("next"), library());
    for number in ["1", "2", "3"] {
        programs.compile(
            "next",
            &format!("libnext{number}.so"),
            &["-shared", "-fPIC", &format!("-DNUMBER={number}")],
        );
    }
    let places = ["libnext1.so", "libnext2.so", "libnext3.so"].map(|name| programs.0.join(name));
    let flags: Vec<_> = std::iter::once("-Wl,--no-as-needed")
        .chain(places.iter().map(|path| path.to_str().unwrap()))
        .collect();
    programs.compile("asks_next", "asks_next", &flags);
    for preload in [&[][..], &[&*library]] {
        assert_eq!(programs.run("asks_next", &[], preload, &[]), "123 123\n", "{preload:?}");
    }
}
