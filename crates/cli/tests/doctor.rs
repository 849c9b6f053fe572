//! `nobounce doctor` and `nobounce topo` as people call them.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A folder that goes when the test does.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nobounce-doctor-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn nobounce(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nobounce"));
    // Whatever the machine of the tests has set, and its GPU if it has one, is not what is tested.
    for name in ["NCCL_IB_DISABLE", "UCX_TLS", "NO_COLOR"] {
        command.env_remove(name);
    }
    command.args(words).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_healthy_machine_ends_with_0_and_a_sick_one_with_1() {
    let healthy = nobounce(&["doctor", "--example", "dgx-h100"]);
    assert_eq!(healthy.status.code(), Some(0), "{}", err(&healthy));
    assert!(out(&healthy).contains("8 direct; 0 errors, 0 warnings, 0 unknown"), "{}", out(&healthy));
    let sick = nobounce(&["doctor", "--example", "container"]);
    assert_eq!(sick.status.code(), Some(1));
    assert!(out(&sick).contains("error   no-dev-infiniband"), "{}", out(&sick));
    assert!(out(&sick).contains("--device /dev/infiniband --cap-add"), "{}", out(&sick));
    assert!(out(&sick).lines().count() < 40, "the report is not short:\n{}", out(&sick));
}

#[test]
fn a_program_is_run_and_what_it_logged_explained() {
    let run = |script: &str| nobounce(&["doctor", "--example", "dgx-h100", "--", "sh", "-c", script]);
    let line = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0";
    let ended = run(&format!("echo '{line}/GDRDMA'; echo $NCCL_DEBUG"));
    assert_eq!(ended.status.code(), Some(0), "{}", out(&ended));
    assert!(out(&ended).contains("\nINFO\n"), "NCCL is told to log: {}", out(&ended));
    assert!(out(&ended).contains("NCCL log, 1 lines: 1 direct (GPUDirect)"), "{}", out(&ended));
    // Staged connections are exit code 1; a program's own failure comes first.
    assert_eq!(run(&format!("echo '{line}' >&2")).status.code(), Some(1));
    assert_eq!(run(&format!("echo '{line}'; exit 3")).status.code(), Some(3));
    let silent = run("echo hello");
    assert_eq!(silent.status.code(), Some(0));
    assert!(out(&silent).contains("none of the 1 lines"), "{}", out(&silent));
    assert_eq!(nobounce(&["doctor", "--example", "dgx-h100", "--", "/nowhere"]).status.code(), Some(2));
}

#[test]
fn a_program_that_succeeds_ends_as_the_diagnosis_does() {
    let code = |words: &[&str]| nobounce(words).status.code();
    assert_eq!(code(&["doctor", "--example", "dgx-h100", "--", "true"]), Some(0));
    assert_eq!(code(&["doctor", "--example", "container", "--", "true"]), Some(1));
    assert_eq!(code(&["doctor", "--example", "container", "--", "sh", "-c", "exit 7"]), Some(7));
    // Logs and the facts of a peer count here, too.
    let folder = Folder::new("program");
    let line = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n";
    let log = folder.file("job.log", line);
    let told = nobounce(&["doctor", "--example", "dgx-h100", "--nccl-log", &log, "--", "true"]);
    assert_eq!(told.status.code(), Some(1), "{}", err(&told));
    assert!(
        out(&told).contains("warning log-not-direct") && out(&told).contains("NET/Socket"),
        "{}",
        out(&told)
    );
    let absent = nobounce(&["doctor", "--example", "dgx-h100", "--peer-facts", "/no/such", "--", "true"]);
    assert_eq!(absent.status.code(), Some(2));
}

#[test]
fn an_error_in_a_facts_file_names_the_field() {
    let folder = Folder::new("field");
    let text = out(&nobounce(&["doctor", "--example", "dgx-a100", "--save", "-"]));
    let path = folder.file("facts.json", &text.replacen("\"lanes\": 4", "\"lanes\": \"four\"", 1));
    let refused = nobounce(&["doctor", "--facts", &path]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        err(&refused).contains("nics[0].ports[0].lanes") && err(&refused).contains("expected u32"),
        "{}",
        err(&refused)
    );
}

#[test]
fn facts_are_saved_replayed_and_made_anonymous() {
    let folder = Folder::new("save");
    let path = folder.0.join("facts.json");
    let path = path.to_str().unwrap();
    let saved = nobounce(&["doctor", "--example", "hgx-h100-roce", "--anonymous", "--save", path]);
    assert_eq!(saved.status.code(), Some(0), "{}", err(&saved));
    let text = fs::read_to_string(path).unwrap();
    assert!(!text.contains("\"host\"") && !text.contains("ffff:0a00:0001") && text.contains("::ffff:ipv4"));
    let replayed = nobounce(&["doctor", "--facts", path, "--json"]);
    assert_eq!(replayed.status.code(), Some(0), "{}", err(&replayed));
    let json: serde_json::Value = serde_json::from_str(&out(&replayed)).unwrap();
    assert_eq!(json["verdicts"].as_array().unwrap().len(), 64);
    assert_eq!(json["direct_is_lost"], false);

    let cut = folder.file("cut.json", &text[..text.len() / 2]);
    let refused = nobounce(&["doctor", "--facts", &cut]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(err(&refused).contains("cut off"), "{}", err(&refused));
    let other = folder.file("other.json", "{\"kind\": \"something\"}");
    assert!(err(&nobounce(&["doctor", "--facts", &other])).contains("no facts file"));
    assert_eq!(nobounce(&["doctor", "--facts", "nowhere.json"]).status.code(), Some(2));
    assert_eq!(nobounce(&["doctor", "--root", folder.0.to_str().unwrap()]).status.code(), Some(2));
}

#[test]
fn every_check_is_explained() {
    let list = nobounce(&["doctor", "--explain", "all"]);
    let ids: Vec<String> =
        out(&list).lines().filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect();
    assert!(ids.len() > 80, "{}", ids.len());
    let one = nobounce(&["doctor", "--explain", "acs-redirect"]);
    assert!(out(&one).contains("lspci") && one.status.success());
    let none = nobounce(&["doctor", "--explain", "nothing"]);
    assert_eq!(none.status.code(), Some(2));
}

#[test]
fn this_very_machine_can_be_read() {
    let here = nobounce(&["doctor", "--no-probe"]);
    assert!(matches!(here.status.code(), Some(0 | 1)), "{}{}", out(&here), err(&here));
    let facts = nobounce(&["doctor", "--no-probe", "--save", "-"]);
    let json: serde_json::Value = serde_json::from_str(&out(&facts)).unwrap();
    assert_eq!(json["kind"], "nobounce facts");
    assert!(nobounce(&["topo"]).status.success());
}

#[test]
fn a_log_of_nccl_is_joined_with_the_findings() {
    let folder = Folder::new("log");
    let log = folder.file(
        "job.log",
        "h:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>\n\
         h:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 15000 commId 0x2 - Init COMPLETE\n\
         h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\n",
    );
    let told = nobounce(&["doctor", "--example", "dgx-h100", "--nccl-log", &log]);
    assert_eq!(told.status.code(), Some(1), "{}", out(&told));
    assert!(out(&told).contains("1 staged through host memory"), "{}", out(&told));
    assert!(out(&told).contains("rank 0, GPU 0, mlx5_0 via NET/IB"), "{}", out(&told));
    let json = nobounce(&["doctor", "--example", "dgx-h100", "--nccl-log", &log, "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out(&json)).unwrap();
    assert_eq!(json["logs"][0]["totals"]["staged"], 1);
    assert_eq!(
        nobounce(&["doctor", "--example", "dgx-h100", "--nccl-log", "nowhere"]).status.code(),
        Some(2)
    );
}

#[test]
fn bytes_are_moved_and_their_way_is_what_was_promised() {
    let proved = nobounce(&["doctor", "--prove", "--json"]);
    let json: serde_json::Value =
        serde_json::from_str(&out(&proved)).unwrap_or_else(|_| panic!("{}{}", out(&proved), err(&proved)));
    let proofs = json["proofs"].as_array().unwrap();
    assert!(!proofs.is_empty());
    for proof in proofs {
        assert_eq!((&proof["verified"], &proof["kept"]), (&true.into(), &true.into()), "{proof}");
    }
    // A facts file has what was moved, but no reads of a file.
    let saved = nobounce(&["doctor", "--prove", "--save", "-"]);
    assert_eq!(saved.status.code(), Some(0), "{}", err(&saved));
    let facts = nobounce_topology::facts::Facts::from_json(&out(&saved)).unwrap();
    assert_eq!(facts.transfers.is_empty(), facts.gpus.is_empty(), "{:?}", facts.transfers);
    let refused = nobounce(&["doctor", "--prove", "--storage", ".", "--save", "-"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(err(&refused).contains("without --save"), "{}", err(&refused));
}

#[test]
fn a_picture_is_drawn() {
    let folder = Folder::new("svg");
    let path = folder.0.join("topo.svg");
    let path = path.to_str().unwrap();
    let drawn = nobounce(&["topo", "--example", "dgx-a100", "--svg", path]);
    assert!(drawn.status.success(), "{}", err(&drawn));
    let text = fs::read_to_string(path).unwrap();
    assert!(text.starts_with("<svg") && text.ends_with("</svg>\n") && text.contains("mlx5_7"));
    let tree = nobounce(&["topo", "--example", "dgx-a100"]);
    assert!(
        out(&tree).contains("GPU 3: NVIDIA A100-SXM4-80GB") && out(&tree).contains("PIX"),
        "{}",
        out(&tree)
    );
    let json = nobounce(&["topo", "--example", "dgx-a100", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out(&json)).unwrap();
    assert_eq!(json["matrix"]["gpus"][5]["best"], "mlx5_5");
}

#[test]
fn a_path_of_this_machine_has_a_route_and_a_chain_and_is_read() {
    let folder = Folder::new("storage");
    let file = folder.file("data", &"x".repeat(3 << 20));
    let told = nobounce(&["doctor", "--no-probe", "--storage", &file]);
    assert!(matches!(told.status.code(), Some(0 | 1)), "{}{}", out(&told), err(&told));
    let text = out(&told);
    assert!(text.contains("chain") && text.contains("filesystem") && text.contains("libcufile"), "{text}");
    assert!(!text.contains("adapter  "), "the report on adapters is not asked for:\n{text}");
    let proved = nobounce(&["doctor", "--no-probe", "--prove", "--json", "--storage", &file]);
    let json: serde_json::Value = serde_json::from_str(&out(&proved)).unwrap();
    let proof = &json["storage"]["proof"];
    assert!(!proof["not_tried"].as_array().unwrap().is_empty());
    let reads = proof["reads"].as_array().unwrap();
    assert!(reads.len() >= 2, "{proof}");
    for read in reads {
        assert_eq!((&read["ok"], read["bytes"].as_u64()), (&true.into(), Some(3 << 20)), "{read}");
    }
    // A route that is unknown or not there is never called direct.
    for verdict in json["storage"]["verdicts"].as_array().unwrap() {
        assert!(verdict["reasons"].as_array().is_some_and(|reasons| !reasons.is_empty()), "{verdict}");
    }
}

#[test]
fn facts_of_a_path_are_saved_and_shown_again_and_others_are_refused() {
    let folder = Folder::new("storage-facts");
    let file = folder.file("data", "some bytes");
    let saved = folder.0.join("facts.json");
    let saved = saved.to_str().unwrap();
    let save = nobounce(&["doctor", "--no-probe", "--storage", &file, "--anonymous", "--save", saved]);
    assert_eq!(save.status.code(), Some(0), "{}", err(&save));
    let text = fs::read_to_string(saved).unwrap();
    assert!(!text.contains("storage-facts") && text.contains("\"storage\""), "the path is in the facts");
    let again = nobounce(&["doctor", "--facts", saved, "--storage"]);
    assert!(out(&again).contains("chain"), "{}{}", out(&again), err(&again));
    // Without --storage the facts of the path are left alone.
    let plain = nobounce(&["doctor", "--facts", saved, "--json"]);
    assert!(!out(&plain).contains("\"storage\""));
    let without = folder.0.join("without.json");
    let without = without.to_str().unwrap();
    nobounce(&["doctor", "--example", "dgx-h100", "--save", without]);
    let refused = nobounce(&["doctor", "--facts", without, "--storage"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(err(&refused).contains("--storage PATH --save"), "{}", err(&refused));
    let missing = nobounce(&["doctor", "--no-probe", "--storage", "/does/not/exist"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(err(&missing).contains("cannot find /does/not/exist"), "{}", err(&missing));
    let odd = nobounce(&["doctor", "--no-probe", "--storage", "/dev/null"]);
    assert_eq!(odd.status.code(), Some(2));
    assert_eq!(nobounce(&["doctor", "--example", "dgx-h100", "--storage", "/"]).status.code(), Some(2));
}
