//! Both libraries preloaded, and no launcher: the files of sysfs are made at first use.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{Folder, library, run, waived};

/// Of the libraries that this test was built with.
fn paths() -> PathBuf {
    library().with_file_name("libnobounce_paths.so")
}

fn preloaded(runtime: &Path, program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env("LD_PRELOAD", format!("{}:{}", paths().display(), library().display()))
        .env("XDG_RUNTIME_DIR", runtime)
        .env("NOBOUNCE_ADDR", "127.41.0.61,127.41.0.62")
        .env("NOBOUNCE_LOG", "error")
        .env_remove("NOBOUNCE_VIEW")
        .env_remove("NOBOUNCE_REPORT");
    command
}

/// The library of paths, alone, in a folder as it is installed.
fn paths_alone(folder: &Folder, with_verbs: bool) -> PathBuf {
    let installed = folder.path().join(if with_verbs { "both" } else { "one" });
    fs::create_dir(&installed).unwrap();
    fs::copy(paths(), installed.join("libnobounce-paths.so")).unwrap();
    if with_verbs {
        fs::copy(library(), installed.join("libibverbs.so.1")).unwrap();
    }
    installed.join("libnobounce-paths.so")
}

fn output(command: &mut Command) -> (String, Output) {
    let ran = command.output().expect("the program starts");
    (String::from_utf8_lossy(&ran.stdout).into_owned(), ran)
}

fn made(runtime: &Path) -> usize {
    fs::read_dir(runtime).unwrap().count()
}

/// Common images have no newer one, and small ones no libgcc_s.so.1.
#[test]
fn glibc_2_34_is_enough() {
    for library in [library(), paths()] {
        let listed =
            Command::new("readelf").args(["--version-info"]).arg(&library).output().expect("readelf");
        let text = String::from_utf8_lossy(&listed.stdout);
        assert!(text.contains("GLIBC_2."), "{}", library.display());
        let newer = (35..60).find(|minor| text.contains(&format!("GLIBC_2.{minor}")));
        assert_eq!(newer, None, "{}", library.display());
        let needed = Command::new("readelf").arg("--dynamic").arg(&library).output().expect("readelf");
        assert!(!String::from_utf8_lossy(&needed.stdout).contains("libgcc_s"), "{}", library.display());
    }
}

#[test]
fn the_library_of_paths_finds_the_other_beside_it() {
    if waived() {
        return;
    }
    let folder = Folder::new("alone");
    let runtime = folder.path().join("runtime");
    fs::create_dir(&runtime).unwrap();
    let listing = |paths: &Path, program: &str, arguments: &[&str]| {
        let mut command = preloaded(&runtime, program, arguments);
        let (text, ran) = output(command.env("LD_PRELOAD", paths));
        (text, String::from_utf8_lossy(&ran.stderr).into_owned())
    };
    let alone = paths_alone(&folder, true);
    let (text, said) = listing(&alone, "ls", &["/sys/class/infiniband"]);
    assert_eq!(text, "nb0\nnb1\n", "{said}");
    // rdma-core's own, which the program is linked with, stays without a device, and the reason is
    // given.
    let (text, said) = listing(&alone, "ibv_devices", &[]);
    assert!(!text.contains("nb0") && said.contains("another libibverbs"), "{text} {said}");
    assert_eq!(made(&runtime), 1);
    let (text, _) = listing(&paths_alone(&folder, false), "ls", &["/sys/class/infiniband"]);
    assert!(!text.contains("nb0"), "{text}");
}

/// NCCL opens libibverbs by dlopen: the loader does not show its functions to other libraries.
#[test]
fn the_library_of_paths_finds_one_that_was_opened_locally() {
    if waived() {
        return;
    }
    let folder = Folder::new("local");
    let runtime = folder.path().join("runtime");
    fs::create_dir(&runtime).unwrap();
    let text = "#include <dlfcn.h>\n#include <stdio.h>\n#include <unistd.h>\n\
                static int seen(void) { return access(\"/sys/class/infiniband/nb0/node_type\", R_OK) == 0; }\n\
                int main(int count, char **names) {\n\
                int early = count > 2 && seen(), opened = dlopen(names[1], RTLD_NOW | RTLD_LOCAL) != 0;\n\
                int then = seen();\n\
                printf(\"%d %d %d %d\", early, opened, then, seen());\n}\n";
    let (source, program) = (folder.path().join("source.c"), folder.path().join("program"));
    fs::write(&source, text).unwrap();
    let built = Command::new("cc").arg("-o").arg(&program).arg(&source).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let sees = |paths: &Path, arguments: &[&str]| {
        let mut command = preloaded(&runtime, program.to_str().unwrap(), arguments);
        let (text, ran) = output(command.env("LD_PRELOAD", paths));
        (text, String::from_utf8_lossy(&ran.stderr).into_owned())
    };
    let ours = folder.path().join("libibverbs.so.1");
    let ours = ours.to_str().unwrap();
    let alone = paths_alone(&folder, false);
    assert_eq!(sees(&alone, &[ours]), ("0 1 1 1".to_owned(), String::new()));
    // A program that looks before it has one may look again.
    let (text, said) = sees(&alone, &[ours, "early"]);
    assert_eq!(text, "0 1 1 1", "{said}");
    assert_eq!(said.matches("no libibverbs of nobounce").count(), 1, "{said}");
    // rdma-core's own.
    let (text, said) = sees(&alone, &["libibverbs.so.1"]);
    assert_eq!((text.as_str(), said.matches("another libibverbs").count()), ("0 1 0 0", 1), "{said}");
    let (text, said) = sees(&paths_alone(&folder, true), &["libibverbs.so.1"]);
    assert_eq!((text.as_str(), said.matches("another libibverbs").count()), ("0 1 0 0", 1), "{said}");
}

#[test]
fn programs_find_the_devices() {
    if waived() {
        return;
    }
    let folder = Folder::new("preloaded");
    let runtime = folder.path().join("runtime");
    fs::create_dir(&runtime).unwrap();
    // Programs that do not look for devices make nothing.
    let (text, ran) = output(&mut preloaded(&runtime, "realpath", &["/usr/bin", "/sys/class"]));
    assert_eq!((text.as_str(), made(&runtime)), ("/usr/bin\n/sys/class\n", 0), "{ran:?}");
    // Many at one time make one view.
    let gid = ["/sys/class/infiniband/nb1/ports/1/gids/0"];
    let all: Vec<_> = std::thread::scope(|scope| {
        let cat = || output(&mut preloaded(&runtime, "cat", &gid));
        let all: Vec<_> = (0..8).map(|_| scope.spawn(cat)).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    for (text, ran) in all {
        assert_eq!(text, "0000:0000:0000:0000:0000:ffff:7f29:003e\n", "{ran:?}");
    }
    assert_eq!(made(&runtime), 1);
    let (text, ran) = output(&mut preloaded(&runtime, "ls", &["/dev/infiniband", "/sys/class/infiniband"]));
    assert!(text.contains("uverbs0") && text.contains("nb1"), "{ran:?}");
    let program = folder.compile_client("names");
    let names = run(&mut preloaded(&runtime, program.to_str().unwrap(), &[]), 20);
    let names = String::from_utf8(names.stdout).unwrap();
    assert!(names.starts_with("nb0 uverbs0 /sys/class/infiniband_verbs/uverbs0 "), "{names}");
}

/// Programs load libraries by their development names, too, and from folders of their own.
#[test]
fn development_names_lead_to_the_preloaded_libraries() {
    if waived() {
        return;
    }
    let folder = Folder::new("development");
    let at = |name: &str| folder.path().join(name);
    let compile = |arguments: &[&str], text: &str| {
        let source = at("source.c");
        fs::write(&source, text).unwrap();
        let built =
            Command::new("cc").args(arguments).arg(&source).current_dir(folder.path()).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    };
    // A file of the development package, and a library that only a RUNPATH leads to.
    fs::create_dir(at("system")).unwrap();
    fs::create_dir(at("private")).unwrap();
    compile(&["-shared", "-fPIC", "-o", "system/libibverbs.so"], "int other;");
    compile(&["-shared", "-fPIC", "-o", "private/libprivate.so"], "int own;");
    let text = "#include <dlfcn.h>\n#include <stdio.h>\nint main(void) {\n\
                void *verbs = dlopen(\"libibverbs.so\", RTLD_NOW), *own = dlopen(\"libprivate.so\", RTLD_NOW);\n\
                printf(\"%d %d %d %d\", verbs && dlsym(verbs, \"ibv_open_device\"), own && dlsym(own, \"own\"),\n\
                dlopen(0, RTLD_NOW) != 0, dlopen(\"libnone.so\", RTLD_NOW) != 0);\n}\n";
    compile(&["-o", "program", "-Wl,--enable-new-dtags,-rpath,$ORIGIN/private", "-x", "c"], text);
    let program = at("program");
    let mut command = preloaded(folder.path(), program.to_str().unwrap(), &[]);
    let (printed, ran) = output(command.env("LD_LIBRARY_PATH", at("system")));
    assert_eq!(printed, "1 1 1 0", "{ran:?}");
}

#[test]
fn where_nothing_can_be_written_the_reason_is_said() {
    if waived() {
        return;
    }
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return; // a mount namespace needs root
    }
    let folder = Folder::new("nothing");
    // An address of its own: no other test has made this view.
    let script = "for one in /dev/shm /tmp /var/tmp /run; do mount -t tmpfs -o ro none $one; done; \
                  cat /sys/class/infiniband/nb0/node_type";
    let libraries = format!("{}:{}", paths().display(), library().display());
    let (text, ran) = output(
        Command::new("unshare")
            .args(["-m", "env", &format!("LD_PRELOAD={libraries}"), "NOBOUNCE_ADDR=127.41.0.63"])
            .args(["NOBOUNCE_LOG=error", "sh", "-c", script])
            .env("TMPDIR", folder.path().join("absent"))
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("NOBOUNCE_VIEW"),
    );
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(text.is_empty() && said.contains("do not find nb0") && said.contains("/dev/shm"), "{ran:?}");
}
