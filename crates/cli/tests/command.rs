//! The command as people call it: exit codes, and sentences that say what to do.

use std::process::{Command, Output};

fn nobounce(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nobounce"));
    command.args(line.split_whitespace()).env_remove("NOBOUNCE_LOG");
    command
}

fn output(mut command: Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("the command starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the command prints UTF-8");
    (status.code(), text(stdout), text(stderr))
}

#[test]
fn wrong_usage_is_2_with_a_sentence() {
    for (line, told) in [
        ("bench --mtu 1500", "nobounce: invalid --mtu 1500"),
        ("bench --size 64Q", "invalid size \"64Q\""),
        ("bench --wait memory --op read", "--wait memory and --wait perftest need write latency"),
        ("bench --no-such-flag", "--no-such-flag"),
        ("no-such-command", "no-such-command"),
    ] {
        let (code, _, stderr) = output(nobounce(line));
        assert_eq!(code, Some(2), "{line}: {stderr}");
        assert!(stderr.contains(told), "{line}: {stderr}");
    }
}

/// In parentheses: the commit, or that it is a debug build.
#[test]
fn the_version_is_short_or_long() {
    let short = concat!("nobounce ", env!("CARGO_PKG_VERSION"));
    let (code, stdout, _) = output(nobounce("-V"));
    assert_eq!((code, stdout.trim_end()), (Some(0), short));
    let (code, stdout, _) = output(nobounce("--version"));
    assert_eq!(code, Some(0));
    let rest = stdout.trim_end().strip_prefix(short).expect("the long version begins with the short one");
    assert!(rest.is_empty() || rest.starts_with(" (") && rest.ends_with(')'), "{stdout}");
}

#[test]
fn a_log_level_that_is_none_is_2() {
    let mut command = nobounce("bench --explain");
    command.env("NOBOUNCE_LOG", "loud");
    let (code, _, stderr) = output(command);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("invalid NOBOUNCE_LOG=\"loud\""), "{stderr}");
}

#[test]
fn explaining_measures_nothing_and_is_0() {
    let (code, stdout, stderr) =
        output(nobounce("bench --explain --op write --kind bandwidth --size 1M --iters 7"));
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains("write 1 MiB bandwidth: 7 operations, MTU 4096"), "{stdout}");
}

#[test]
fn help_shows_examples_and_exit_codes() {
    let (code, stdout, _) = output(nobounce("bench --help"));
    assert_eq!(code, Some(0));
    for wanted in ["Examples:", "--compare <OLD.json>", "Exit codes: 0 success, 1 "] {
        assert!(stdout.contains(wanted), "{wanted} is missing in {stdout}");
    }
}

/// Both ends take the way that was asked for, and the result says which it was.
#[test]
fn the_link_is_the_one_asked_for() {
    for link in ["udp", "shm"] {
        let file = std::env::temp_dir().join(format!("nobounce-{}-{link}.json", std::process::id()));
        let line = format!(
            "bench --link {link} --op write --kind latency --size 8 --iters 100 --json {}",
            file.display()
        );
        let (code, _, stderr) = output(nobounce(&line));
        assert_eq!(code, Some(0), "{stderr}");
        let json = std::fs::read_to_string(&file).unwrap();
        let _ = std::fs::remove_file(&file);
        assert!(json.contains(&format!("\"link\":\"{link}\"")), "{json}");
    }
}

/// The process that the bench starts for the other end is let end by itself: one that is killed
/// leaves no report of what it did.
#[test]
fn both_ends_leave_their_reports() {
    let folder = std::env::temp_dir().join(format!("nobounce-{}-reports", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let mut command = nobounce("bench --op write --kind latency --size 8 --iters 100");
    command.env("NOBOUNCE_REPORT", &folder);
    let (code, _, stderr) = output(command);
    let mut endings: Vec<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path().extension().unwrap().to_string_lossy().into_owned())
        .collect();
    let _ = std::fs::remove_dir_all(&folder);
    endings.sort();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(endings.len() > 1 && endings.iter().all(|ending| ending == "json"), "{endings:?}");
}

/// No link is given: both ends are on this host, so shared memory is chosen. The rated cases also
/// run over the link that separate machines would use.
#[test]
fn the_link_is_chosen_by_itself_and_said() {
    let file = std::env::temp_dir().join(format!("nobounce-{}-auto.json", std::process::id()));
    let line = format!(
        "bench --addr 127.60.3.1 --op write --kind latency --size 8,64 --iters 100 --json {}",
        file.display()
    );
    let mut command = nobounce(&line);
    command.env_remove("NOBOUNCE_LINK");
    let (code, stdout, stderr) = output(command);
    assert_eq!(code, Some(0), "{stderr}");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let _ = std::fs::remove_file(&file);
    let links: Vec<_> = json["results"].as_array().unwrap().iter().map(|one| one["link"].clone()).collect();
    assert_eq!(links, ["shm", "udp", "shm"], "8 B twice");
    for wanted in [
        "link: shm, shared memory between processes of one machine; rows marked udp over udp",
        "write, udp",
        "write 8 B latency over shm, waiting on cq: ",
        "write 8 B latency over udp, waiting on cq: ",
    ] {
        assert!(stdout.contains(wanted), "{wanted} is missing in {stdout}");
    }
}

/// On memory, by itself and as perftest does: inline where it is short, and not where it is longer.
#[test]
fn both_ends_wait_on_memory_as_they_are_told() {
    for wait in ["memory", "perftest"] {
        let line =
            format!("bench --link udp --op write --kind latency --size 1,8,220,4K --iters 100 --wait {wait}");
        let (code, stdout, stderr) = output(nobounce(&line));
        assert_eq!(code, Some(0), "{stderr}");
        assert!(stdout.contains(&format!("write, {wait}")), "{stdout}");
        assert!(stdout.contains("bytes verified"), "{stdout}");
    }
}

/// The raw measurement with its real second process.
#[test]
fn plain_udp_is_measured_between_two_processes() {
    let (code, stdout, stderr) = output(nobounce("raw"));
    assert_eq!(code, Some(0), "{stderr}");
    let speed = stdout.split_once(" GB/s, half round trip ").and_then(|(speed, _)| speed.parse::<f64>().ok());
    assert!(speed.is_some_and(|speed| speed > 0.0), "{stdout}");
}

/// Three passes between new processes are three figures, and what a calibration says of them is
/// shown beside the residual.
#[test]
fn passes_are_kept_one_by_one() {
    let json = std::env::temp_dir().join(format!("nobounce-{}-passes.json", std::process::id()));
    let mut bench =
        nobounce("bench --link udp --op write --kind latency --size 1,64,4K --iters 60 --passes 3");
    bench.arg("--json").arg(&json);
    let (code, stdout, stderr) = output(bench);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    let run: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    for one in run["results"].as_array().unwrap() {
        assert_eq!((one["passes"].as_array().unwrap().len(), &one["iters"]), (3, &180.into()), "{one}");
    }
    let mut calibrate = nobounce("predict --calibrate");
    calibrate.arg(&json);
    let (code, stdout, stderr) = output(calibrate);
    let _ = std::fs::remove_file(&json);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains("write latency, host") && stdout.contains("(passes "), "{stdout}");
}

/// Beside a neighbour TCP is the yardstick, whichever thread drives the NIC, and nothing is left
/// behind.
#[test]
fn a_bench_beside_neighbours_is_set_against_tcp() {
    for mode in ["thread", "caller"] {
        let file = std::env::temp_dir().join(format!("nobounce-busy-{mode}-{}.json", std::process::id()));
        let line = format!(
            "bench --busy 1 --progress {mode} --link udp --op write --kind latency,bandwidth --size 8,64K --iters 100 --json {}",
            file.display()
        );
        let (code, out, err) = output(nobounce(&line));
        assert_eq!(code, Some(0), "{out}{err}");
        assert!(out.contains("1 busy process; TCP between the same two processes: "), "{out}");
        assert!(out.contains(&format!("progress: {mode}")) && out.contains("x tcp"), "{out}");
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(json["busy"], 1);
        assert!(json["tcp"]["gbytes_per_s"].as_f64().unwrap() > 0.0, "{json}");
        assert!(json.get("raw").is_none());
        for one in json["results"].as_array().unwrap() {
            for figure in ["of_tcp", "cpu_s_per_gb", "cpu_s_per_mop"] {
                assert!(one[figure].as_f64().is_some_and(|figure| figure > 0.0), "{figure}: {one}");
            }
        }
    }
}
