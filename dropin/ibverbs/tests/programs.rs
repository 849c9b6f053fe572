//! C programs that misuse the library, exit in every manner, use many threads, and see real devices
//! beside ours.

mod common;

use std::path::Path;
use std::process::Command;

use common::{Folder, library, run, waived};

fn life(name: &str, address: &str) {
    if waived() {
        return;
    }
    let folder = Folder::new(name);
    let program = folder.compile_client("lives");
    run(folder.program(&program, address).arg(name), 60);
}

#[test]
fn mistakes_are_refused_and_harm_nothing() {
    if waived() {
        return;
    }
    let folder = Folder::new("misuse");
    let program = folder.compile_client("misuse");
    run(&mut folder.program(&program, "127.41.0.1"), 60);
}

#[test]
fn memory_windows_are_bound_by_every_call() {
    if waived() {
        return;
    }
    let folder = Folder::new("windows");
    let program = folder.compile_client("windows");
    run(&mut folder.program(&program, "127.41.0.34"), 60);
}

#[test]
fn memory_on_demand_of_the_device_of_none_and_by_handle() {
    if waived() {
        return;
    }
    let folder = Folder::new("memories");
    let program = folder.compile_client("memories");
    run(&mut folder.program(&program, "127.41.0.37"), 60);
}

#[test]
fn thread_domains_parent_domains_and_completion_times() {
    if waived() {
        return;
    }
    let folder = Folder::new("domains");
    let program = folder.compile_client("domains");
    run(&mut folder.program(&program, "127.41.0.38"), 60);
}

/// With one engine: another one that starts later needs threads, which is an error of its own.
#[test]
fn a_program_that_runs_out_of_memory_gets_errors() {
    if waived() {
        return;
    }
    let folder = Folder::new("exhausted");
    let program = folder.compile_client("exhausted");
    let mut command = folder.program(&program, "127.41.0.39");
    run(command.env("NOBOUNCE_LOG", "error").env("NOBOUNCE_ENGINES", "1"), 120);
}

#[test]
fn extended_reliable_connections() {
    if waived() {
        return;
    }
    let folder = Folder::new("xrc");
    let program = folder.compile_client("xrc");
    run(&mut folder.program(&program, "127.41.0.40"), 60);
}

#[test]
fn limits_are_what_a_query_says() {
    if waived() {
        return;
    }
    let folder = Folder::new("limits");
    let program = folder.compile_client("limits");
    run(folder.program(&program, "127.41.0.33").env_remove("NOBOUNCE_LOG"), 60);
}

#[test]
fn forked_children() {
    life("forked", "127.41.0.2");
}

#[test]
fn exits_with_everything_open() {
    life("exits", "127.41.0.3");
}

#[test]
fn exits_in_a_signal_handler_that_interrupted_malloc() {
    life("interrupted", "127.41.0.41");
}

#[test]
fn cancelled_threads() {
    life("cancelled", "127.41.0.4");
}

#[test]
fn a_signal_ends_a_wait() {
    life("signalled", "127.41.0.5");
}

#[test]
fn a_signal_that_restarts_calls_does_not_end_a_wait() {
    life("restarted", "127.41.0.31");
}

#[test]
fn leaving_with_everything_open_does_not_leave_the_peer_in_the_dark() {
    life("leaves", "127.41.0.32");
}

#[test]
fn unloaded_with_everything_open() {
    if waived() {
        return;
    }
    let folder = Folder::new("unload");
    let program = folder.compile("unload", &["-D_GNU_SOURCE"]);
    run(&mut folder.program(&program, "127.41.0.6"), 60);
}

#[test]
fn threads_on_shared_objects() {
    if waived() {
        return;
    }
    let folder = Folder::new("threads");
    let program = folder.compile_client("threads");
    run(&mut folder.program(&program, "127.41.0.7"), 120);
}

/// With a stand-in for the system's library.
#[test]
fn real_devices_stand_in_beside_ours() {
    if waived() {
        return;
    }
    let folder = Folder::new("passthrough");
    let standin = folder.compile("standin_system", &["-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1"]);
    let program = folder.compile_client("passthrough");
    run(folder.program(&program, "127.41.0.8").env("NOBOUNCE_SYSTEM_VERBS", standin), 60);
}

#[test]
fn several_devices_and_nothing_said_unless_asked() {
    if waived() || Command::new("ibv_devices").output().is_err() {
        eprintln!("waived: no ibv_devices here (Debian: ibverbs-utils)");
        return;
    }
    let folder = Folder::new("devices");
    let mut command = folder.program("ibv_devices".as_ref(), "127.41.0.9,127.41.0.10,::1");
    let output = run(command.env_remove("NOBOUNCE_LOG"), 20);
    let listed = String::from_utf8(output.stdout).unwrap();
    let names: Vec<_> = listed.lines().skip(2).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["nb0", "nb1", "nb2"]);
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A program on a stand-in for CUDA's driver.
fn on_stand_in(folder: &Folder, program: &Path, addr: &str) -> Command {
    let mut command = folder.program(program, addr);
    command.env("NOBOUNCE_CUDA", library().with_file_name("libfake_cuda.so"));
    command
}

#[test]
fn gpu_memory_stand_in_by_address_and_by_descriptor() {
    if waived() {
        return;
    }
    let folder = Folder::new("gpu");
    let program = folder.compile_client("gpu");
    run(&mut on_stand_in(&folder, &program, "127.41.0.12"), 60);
}

/// A path that is not direct where one is required, and an address that no GPU knows: the log has
/// the reason.
#[test]
fn gpu_memory_stand_in_is_refused_with_the_reason() {
    if waived() {
        return;
    }
    let folder = Folder::new("gpu-refused");
    let program = folder.compile_client("gpu");
    let mut command = on_stand_in(&folder, &program, "127.41.0.34");
    command.arg("refused").env("NOBOUNCE_LOG", "warn");
    command.env("NOBOUNCE_WINDOW", "off").env("NOBOUNCE_REQUIRE", "direct");
    let said = String::from_utf8(run(&mut command, 60).stderr).unwrap();
    let lines: Vec<_> = said.lines().collect();
    println!("{said}");
    assert_eq!(lines.len(), 3, "{said}");
    for (line, call) in lines.iter().zip(["ibv_reg_mr", "ibv_reg_dmabuf_mr"]) {
        assert!(line.starts_with(&format!("nobounce: {call}: a direct path is required for ")), "{said}");
        assert!(line.contains("NOBOUNCE_WINDOW=off"), "{said}");
    }
    assert!(lines[2].starts_with("nobounce: ibv_reg_dmabuf_mr: "), "{said}");
}

/// Bytes that never reach the GPU fail their queue pair, and the log says whether CUDA or the GPU
/// is stuck.
#[test]
fn gpu_memory_stand_in_that_stands_still_is_told_of() {
    if waived() {
        return;
    }
    let folder = Folder::new("gpu-stuck");
    let program = folder.compile_client("gpu");
    let (calls, queue) =
        ("CUDA has not come back from a call for ", "the GPU has the copy and does not get to it: ");
    std::thread::scope(|scope| {
        for (knob, addr, why) in [
            ("fake_cuda_hold_calls", "127.41.0.35", calls),
            ("fake_cuda_set_copy_delay_us", "127.41.0.36", queue),
        ] {
            let mut command = on_stand_in(&folder, &program, addr);
            command.arg(knob).env("NOBOUNCE_LOG", "warn").env("NOBOUNCE_WINDOW", "off");
            scope.spawn(move || {
                let said = String::from_utf8(run(&mut command, 60).stderr).unwrap();
                let line = format!("nobounce: bytes that arrived were not placed in the GPU in 10s: {why}");
                assert!(said.lines().any(|said| said.starts_with(&line)), "{knob}: {said}");
            });
        }
    });
}

#[test]
fn names_and_paths_follow_the_view() {
    if waived() {
        return;
    }
    let folder = Folder::new("names");
    let program = folder.compile_client("names");
    let names = |view: &str| {
        let mut command = folder.program(&program, "127.41.0.13,127.41.0.14");
        String::from_utf8(run(command.env("NOBOUNCE_VIEW", view), 20).stdout).unwrap()
    };
    assert_eq!(
        names(""),
        "nb0 uverbs0 /sys/class/infiniband_verbs/uverbs0 /sys/class/infiniband/nb0 027f29fffe000d01\n\
         nb1 uverbs1 /sys/class/infiniband_verbs/uverbs1 /sys/class/infiniband/nb1 027f29fffe000e01\n"
    );
    // Beside a real device, which takes the first numbers.
    let view = folder.path().join("view");
    for (node, device) in [("uverbs0", "mlx5_0"), ("uverbs1", "nb0"), ("uverbs2", "nb1")] {
        let place = view.join("sys/class/infiniband_verbs").join(node);
        std::fs::create_dir_all(&place).unwrap();
        std::fs::write(place.join("ibdev"), format!("{device}\n")).unwrap();
    }
    let view = view.to_str().unwrap();
    let listed = names(view);
    assert!(listed.starts_with(&format!(
        "nb0 uverbs1 {view}/sys/class/infiniband_verbs/uverbs1 {view}/sys/class/infiniband/nb0 "
    )));
    assert!(listed.contains("\nnb1 uverbs2 "), "{listed}");
}
