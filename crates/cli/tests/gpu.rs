//! `nobounce bench --memory gpu` as people call it, with the stand-in driver in the place of
//! libcuda.

#[path = "gpu/cufile.rs"]
mod cufile;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use fake_cuda::client::StandIn;
use nobounce::memory::gpu::kernel::pattern_word;
use serde_json::Value;

/// Small enough for a busy machine with two processors.
const SMALL: &str = "bench --memory gpu --quick --iters 20";

fn nobounce(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nobounce"));
    command.args(line.split_whitespace());
    for ours in [
        "NOBOUNCE_LOG",
        "NOBOUNCE_WINDOW",
        "NOBOUNCE_REQUIRE",
        "NOBOUNCE_BENCH_SPOIL",
        "CUDA_VISIBLE_DEVICES",
    ] {
        command.env_remove(ours);
    }
    command.env("NOBOUNCE_CUDA", StandIn::path());
    // Over UDP by default: the table of cases and links (`make test-matrix`) has both.
    if std::env::var_os("NOBOUNCE_LINK").is_none() {
        command.env("NOBOUNCE_LINK", "udp");
    }
    command
}

fn output(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().expect("the command starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the command prints UTF-8");
    (status.code(), text(stdout), text(stderr))
}

/// A folder of the test's own that vanishes with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nobounce-gpu-test-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder for the test");
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("the JSON is there")).expect("the JSON is JSON")
}

/// Bytes that an end counted, both directions together.
fn bytes(result: &Value, end: &str, way: &str) -> u64 {
    ["inbound", "outbound"].iter().map(|d| result["counted"][end][d][way]["bytes"].as_u64().unwrap()).sum()
}

#[test]
fn direct_staged_naive_and_host_in_one_run() {
    let folder = Folder::new("all");
    let line = format!(
        "{SMALL} --json {} --plot {}",
        folder.file("run.json").display(),
        folder.file("run.svg").display()
    );
    let (code, stdout, stderr) = output(&mut nobounce(&line));
    assert_eq!(code, Some(0), "{stdout}\n{stderr}");
    for wanted in [
        "STAND-IN for a GPU: host memory",
        "skipped: gpu-visible",
        "calibration: ",
        "write, stand-in direct",
        "write, stand-in staged",
        "write, stand-in naive",
        "write, host",
        "latency of 8 B: direct ",
        "both ways, 1 MiB: direct ",
        "direct / host to host",
        "bytes by path, counted by the NIC at the peer: in cpu ",
        "bytes verified, 16 cases: ",
    ] {
        assert!(stdout.contains(wanted), "{wanted} is missing in {stdout}");
    }
    let run = json(&folder.file("run.json"));
    assert_eq!(run["machine"]["gpu"]["stand_in"], true);
    let results = run["results"].as_array().unwrap();
    assert_eq!(results.len(), 16);
    for one in results {
        let path = one["path"].as_str().unwrap();
        // Each in a place of its own, in two rounds on the GPU: 64 short ones, and several of the
        // long ones, too.
        let (compared, rounds) = (one["compared"].as_u64().unwrap(), if path == "direct" { 1 } else { 2 });
        assert!(compared >= rounds * 8, "{compared} messages were compared: {one}");
        let staged = bytes(one, "here", "staged") + bytes(one, "there", "staged");
        let window = bytes(one, "here", "window") + bytes(one, "there", "window");
        let cpu = bytes(one, "here", "cpu");
        match (one["memory"].as_str().unwrap(), path) {
            ("stand-in", "direct") => assert!(staged == 0 && window > 0 && cpu == 0, "{one}"),
            ("stand-in", "staged (staging was asked for)") => assert!(staged > 0 && window == 0, "{one}"),
            ("stand-in", "naive staging") | ("host", "direct") => {
                assert!(staged + window == 0 && cpu > 0, "{one}")
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(fs::read_to_string(folder.file("run.svg")).unwrap().contains("STAND-IN for a GPU (host memory)"));
}

#[test]
fn without_the_window_everything_is_staged_or_refused() {
    let folder = Folder::new("off");
    let line = format!(
        "bench --memory gpu --kind latency --size 8 --op write --iters 20 --json {}",
        folder.file("run.json").display()
    );
    let (code, stdout, stderr) = output(nobounce(&line).env("NOBOUNCE_WINDOW", "off"));
    assert_eq!(code, Some(0), "{stdout}\n{stderr}");
    assert!(stdout.contains("no direct figures"), "{stdout}");
    let run = json(&folder.file("run.json"));
    let gpu = run["results"].as_array().unwrap().iter().filter(|one| one["memory"] != "host");
    for one in gpu {
        let path = one["path"].as_str().unwrap();
        assert!(path.starts_with("staged (") || path == "naive staging", "{path}");
    }
    let (code, stdout, stderr) =
        output(nobounce(&line).env("NOBOUNCE_WINDOW", "off").env("NOBOUNCE_REQUIRE", "direct"));
    assert_eq!(code, Some(2), "{stdout}");
    assert!(stderr.contains("a direct path is required") && stderr.contains("switched off"), "{stderr}");
    assert_eq!(stdout, "", "nothing was measured");
}

#[test]
fn where_direct_is_required_only_direct_is_measured() {
    let line = "bench --memory gpu --kind latency --size 8 --op write --iters 20";
    let (code, stdout, stderr) = output(nobounce(line).env("NOBOUNCE_REQUIRE", "direct"));
    assert_eq!(code, Some(0), "{stdout}\n{stderr}");
    assert!(stdout.contains("skipped: staged and naive") && stdout.contains("2 cases"), "{stdout}");
}

#[test]
fn other_operations_and_lists_of_queue_pairs() {
    for line in [
        "bench --memory gpu --op read,send,atomic --kind latency --iters 20 --size 8,100000",
        "bench --memory gpu --op write --kind bandwidth,rate --qps 1,3 --iters 20 --size 5000",
    ] {
        let (code, stdout, stderr) = output(&mut nobounce(line));
        assert_eq!(code, Some(0), "{line}\n{stdout}\n{stderr}");
        assert!(stdout.contains("bytes verified"), "{stdout}");
    }
}

/// The word with which message number `slot` of a round begins, as the default seed has it.
fn first_word(round: u64, slot: u64) -> u64 {
    pattern_word(1 ^ (round << 40) ^ (slot << 32), 0)
}

/// One message of several is lost or changed on its way, and its completion comes as if all were
/// well: the row fails, and says which byte. What is lost behind the first message of its place, in
/// the timed part, is not seen there; so this is done in the checked rounds, which come after the
/// six others of a case.
#[test]
fn a_message_that_is_lost_or_changed_fails_its_row() {
    let line =
        |size: &str| format!("bench --memory gpu --op write --kind bandwidth --size {size} --iters 20");
    for (how, round, size, told) in [
        ("lose", 6, "8", "round 6, message 3 of 16 with separate buffers: it did not arrive"),
        ("lose", 7, "1M", "round 7, message 3 of 8 with separate buffers: byte 0 of 1048576 is 0xa5"),
        ("flip", 7, "4K", "round 7, message 3 of 16 with separate buffers: byte 2048 of 4096 is "),
    ] {
        // Both ends put it into their own memory first: that is let pass.
        let spoil = format!("{how}:{:x}:1", first_word(round, 2));
        let (code, stdout, stderr) = output(nobounce(&line(size)).env("FAKE_CUDA_SPOIL", spoil));
        assert_eq!(code, Some(1), "{how} {size}: {stdout}\n{stderr}");
        let told_of = |name: &str| {
            let row = format!("WRONG BYTES: write, {name}");
            stdout.lines().find(|line| line.starts_with(&row)).map(str::to_owned)
        };
        let staged = told_of("stand-in staged").expect(&stdout);
        assert!(staged.contains(told), "{staged}");
        // These rows make no copy to the device. (A naive program's does, of what it puts into its
        // own memory.)
        assert_eq!((told_of("stand-in direct"), told_of("host")), (None, None), "{stdout}");
        assert!(!stdout.contains("bytes verified"), "{stdout}");
    }
}

/// The same where the path cannot be made to lose something (a window, a real GPU): what arrived is
/// spoilt before it is compared, at whichever end it arrived.
#[test]
fn every_row_sees_what_is_spoilt() {
    for (how, told, line, rows) in [
        ("byte", "byte 2500 of 5000 is ", "--op write --kind latency,bidirectional", 8),
        ("byte", "byte 2500 of 5000 is ", "--op read,send --kind bandwidth", 6),
        ("message", "it did not arrive", "--op write --kind bandwidth", 4),
    ] {
        let line = format!("bench --memory gpu --size 5000 --iters 20 {line}");
        let (code, stdout, stderr) = output(nobounce(&line).env("NOBOUNCE_BENCH_SPOIL", how));
        assert_eq!(code, Some(1), "{line}: {stdout}\n{stderr}");
        let wrong: Vec<_> = stdout.lines().filter(|line| line.contains("WRONG BYTES")).collect();
        assert_eq!(wrong.len(), rows, "{line}: {stdout}");
        assert!(wrong.iter().all(|line| line.contains(told)), "{line}: {stdout}");
    }
    // An unknown word is an error: it would inject nothing, and the check would look blind.
    let (code, _, stderr) =
        output(nobounce("bench --memory gpu --quick --iters 20").env("NOBOUNCE_BENCH_SPOIL", "bytes"));
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("invalid NOBOUNCE_BENCH_SPOIL 'bytes'"), "{stderr}");
}

/// Over two links, each result says which; reads and sends have their yardsticks beside them.
#[test]
fn another_link_and_all_operations_are_compared() {
    let folder = Folder::new("links");
    let line = format!(
        "bench --memory gpu --link udp,shm --kind latency --size 8 --iters 20 --json {}",
        folder.file("run.json").display()
    );
    let (code, stdout, stderr) = output(nobounce(&line).env_remove("NOBOUNCE_LINK"));
    assert_eq!(code, Some(0), "{stdout}\n{stderr}");
    let run = json(&folder.file("run.json"));
    let seen: Vec<_> = run["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            let word = |key: &str| one[key].as_str().unwrap().split(' ').next().unwrap().to_owned();
            (word("op"), word("link"), word("memory"), word("path"))
        })
        .collect();
    let named = |op: &str, link: &str, ways: &[(&str, &str)]| -> Vec<_> {
        let own = |word: &str| word.to_owned();
        ways.iter().map(|(memory, path)| (own(op), own(link), own(memory), own(path))).collect()
    };
    let [direct, staged, naive, host] =
        [("stand-in", "direct"), ("stand-in", "staged"), ("stand-in", "naive"), ("host", "direct")];
    let wanted = [
        named("write", "udp", &[direct, staged, naive, host]),
        named("read", "udp", &[direct, staged, host]),
        named("send", "udp", &[direct, staged, host]),
        named("write", "shm", &[direct, staged, host]),
    ];
    assert_eq!(seen, wanted.concat());
    for wanted in
        ["READ latency direct / staged", "SEND latency direct / staged", "share over shm: WRITE latency"]
    {
        assert!(stdout.contains(wanted), "{wanted} is missing in {stdout}");
    }
}

#[test]
fn no_gpu_is_one_line_and_2() {
    let (code, stdout, stderr) = output(nobounce(SMALL).env("NOBOUNCE_CUDA", "/nonexistent/libcuda.so"));
    assert_eq!((code, stdout.as_str()), (Some(2), ""), "{stderr}");
    assert!(
        stderr.starts_with("nobounce: no GPU to measure: ") && stderr.contains("nobounce bench"),
        "{stderr}"
    );
    assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
}

/// The named GPU is the one that is measured, at both ends; a missing one is an error.
#[test]
fn the_gpu_that_is_named_is_measured() {
    let folder = Folder::new("second");
    let (one, few) =
        ("bench --memory gpu --op write --kind latency --size 8 --iters 20", "FAKE_CUDA_DEVICES");
    let line = format!("{one} --gpu 1 --json {}", folder.file("run.json").display());
    let (code, stdout, stderr) = output(nobounce(&line).env(few, "2"));
    assert_eq!(code, Some(0), "{stdout}\n{stderr}");
    assert_eq!(json(&folder.file("run.json"))["machine"]["gpu"]["pci_address"], "ffff:fb:00.0");
    let (code, _, stderr) = output(nobounce(&format!("{one} --gpu 2")).env(few, "2"));
    assert_eq!(code, Some(2), "{stderr}");
    assert!(stderr.contains("--gpu 2: CUDA shows 2 GPUs to this process, counted from 0"), "{stderr}");
    let (code, stdout, stderr) =
        output(nobounce("bench --memory gpu --gpu 1 --explain-device").env(few, "2"));
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains("adapters for memory of GPU 1, in the order of --device auto"), "{stdout}");
}

#[test]
fn wrong_usage_is_2_with_a_sentence() {
    for (line, told) in [
        ("bench --gpu 1", "add --memory gpu"),
        ("bench --kind gpu-visible", "add --memory gpu"),
        ("bench --memory gpu --wait memory", "use --kind gpu-visible"),
        ("bench --memory gpu --kind gpu-visible --iters 5", "nothing to measure"),
        ("bench --memory tape", "tape"),
    ] {
        let (code, _, stderr) = output(&mut nobounce(line));
        assert_eq!(code, Some(2), "{line}: {stderr}");
        assert!(stderr.contains(told), "{line}: {stderr}");
    }
}

/// MPS is started in a folder of its own, and ended when it turns out to be of no use; nothing is
/// left behind.
#[test]
fn mps_is_started_and_ended() {
    let folder = Folder::new("mps");
    let control = folder.file("nvidia-cuda-mps-control");
    let log = folder.file("calls");
    let script = format!(
        "#!/bin/sh\nif [ \"$1\" = -d ]; then echo \"start $CUDA_MPS_PIPE_DIRECTORY\" >> {0}; else read word; echo \"$word $CUDA_MPS_PIPE_DIRECTORY\" >> {0}; fi\n",
        log.display()
    );
    fs::write(&control, script).unwrap();
    fs::set_permissions(&control, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.0.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = nobounce(SMALL);
    // No driver is named, and no GPU is shown: the process that tries the service fails.
    command.env_remove("NOBOUNCE_CUDA").env("CUDA_VISIBLE_DEVICES", "").env("PATH", path);
    command.env("CUDA_MPS_PIPE_DIRECTORY", folder.file("none")).env("TMPDIR", &folder.0);
    let (code, _, stderr) = output(&mut command);
    assert_eq!(code, Some(2), "{stderr}");
    let start = Instant::now();
    let ended = || fs::read_to_string(&log).unwrap_or_default().lines().count() >= 2;
    while !ended() {
        assert!(start.elapsed() < Duration::from_secs(20), "it was not ended: {stderr}");
        std::thread::yield_now();
    }
    let calls = fs::read_to_string(&log).unwrap();
    let [started, ended] = calls.lines().collect::<Vec<_>>()[..] else { panic!("{calls}") };
    assert!(started.starts_with("start ") && started.contains("nobounce-mps-"), "{calls}");
    assert_eq!(ended.strip_prefix("quit "), started.strip_prefix("start "), "{calls}");
}

#[test]
fn doctor_reads_a_file_into_the_memory_of_a_gpu() {
    let folder = Folder::new("storage");
    let file = folder.file("data");
    fs::write(&file, vec![3_u8; (9 << 20) + 5]).expect("a file of the test");
    let line = format!("doctor --prove --json --storage {}", file.display());
    let (code, stdout, stderr) = output(&mut nobounce(&line));
    assert!(matches!(code, Some(0 | 1)), "{stdout}\n{stderr}");
    let told: Value = serde_json::from_str(&stdout).expect("the JSON is JSON");
    let storage = &told["storage"];
    // A stand-in has no PCI path: nothing about it is claimed to be direct.
    let verdicts = storage["verdicts"].as_array().expect("verdicts");
    assert!(!verdicts.is_empty(), "{stdout}");
    for verdict in verdicts {
        assert!(!matches!(verdict["route"].as_str(), Some("p2pdma" | "nvidia-fs")), "{verdict}");
    }
    let reads = storage["proof"]["reads"].as_array().expect("reads");
    // Once through the window, once as long reads of what is not cached are staged.
    let gpu: Vec<_> = reads
        .iter()
        .filter(|read| read["how"].as_str().is_some_and(|how| how.starts_with("into GPU")))
        .collect();
    let [window, staged] = gpu[..] else { panic!("two reads into the one GPU are expected: {stdout}") };
    for (read, suffix, path) in [(window, "", "by window;"), (staged, ", staged", "by staged;")] {
        assert_eq!((&read["ok"], read["bytes"].as_u64()), (&true.into(), Some((9 << 20) + 5)), "{read}");
        let (how, detail) = (read["how"].as_str().unwrap_or(""), read["detail"].as_str().unwrap_or(""));
        assert!(how.ends_with(suffix) && how.contains("staged") != suffix.is_empty(), "{read}");
        assert!(detail.starts_with(path), "{read}");
    }
    let own = verdicts[0]["own_reason"].as_str().unwrap_or("");
    assert!(own.contains("staged") || own.contains("no O_DIRECT"), "{own}");
}

#[test]
fn doctor_takes_attributes_that_the_driver_does_not_know_as_unknown() {
    let mut command = nobounce("doctor --save - --no-probe");
    let (code, stdout, stderr) = output(command.env("FAKE_CUDA_UNKNOWN_ATTRIBUTES", "116,124"));
    assert_eq!(code, Some(0), "{stderr}");
    let facts: Value = serde_json::from_str(&stdout).expect("facts are JSON");
    let gpus = facts["gpus"].as_array().expect("GPUs");
    let gpu = gpus.iter().find(|gpu| gpu["name"].as_str().is_some_and(|name| name.contains("stand-in")));
    let gpu = gpu.unwrap_or_else(|| panic!("no stand-in: {stdout}"));
    assert_eq!(gpu["gpudirect_rdma"]["unread"], "the driver does not know attribute 116", "{gpu}");
    assert_eq!(gpu["dma_buf"]["unread"], "the driver does not know attribute 124", "{gpu}");
    assert_eq!(gpu["gpudirect_rdma_vmm"], true, "{gpu}");
}
