//! `nobounce predict` as people call it.

use std::process::{Command, Output};

fn predict(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nobounce")).arg("predict").args(words).output().unwrap()
}

fn text(words: &[&str]) -> String {
    let output = predict(words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refused(words: &[&str]) -> String {
    let output = predict(words);
    assert_eq!(output.status.code(), Some(2), "{words:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn file(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("nobounce-predict-{}-{name}", std::process::id()))
}

#[test]
fn a_known_machine_is_predicted_and_what_binds_is_named() {
    let text = text(&["--machine", "dgx-h100", "--size", "8,1M,1G"]);
    for wanted in
        ["GPU 0", "InfiniBand NDR", "PCIe reads", "the network link", "an upgrade:", "faster at every size"]
    {
        assert!(text.contains(wanted), "{wanted} is missing in\n{text}");
    }
}

#[test]
fn this_machine_and_single_parts_are_predicted() {
    assert!(text(&["--size", "8"]).contains("us"));
    let parts = text(&["--link", "rocev2:100", "--mtu", "1024", "--memory", "host", "--size", "1M"]);
    assert!(parts.contains("RoCEv2 100G") && !parts.contains("staged"), "{parts}");
    let strict = text(&[
        "--machine",
        "dgx-h100",
        "--distance",
        "NODE",
        "--platform",
        "emerald-rapids",
        "--strict-order",
    ]);
    assert!(strict.contains("strict ordering") && strict.contains("a setting: relaxed ordering"), "{strict}");
    let json = text(&["--machine", "dgx-b200", "--size", "1M", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["schema"], "nobounce-predict/1");
    assert!(json["rows"][0]["direct"]["gbytes_per_s"]["expected"].as_f64().unwrap() > 40.0);
    assert!(text(&["--constants"]).lines().count() > 30);
}

#[test]
fn saved_facts_are_read() {
    let path = file("facts.json");
    let saved = Command::new(env!("CARGO_BIN_EXE_nobounce"))
        .args(["doctor", "--example", "gh200", "--save", path.to_str().unwrap()])
        .status()
        .unwrap();
    assert!(saved.success());
    let text = text(&["--facts", path.to_str().unwrap(), "--size", "1M"]);
    std::fs::remove_file(&path).unwrap();
    assert!(text.contains("GH200") && text.contains("coherent"), "{text}");
}

#[test]
fn a_cluster_shows_time_hours_and_money() {
    let words =
        ["--machine", "dgx-h100", "--nodes", "8", "--bytes", "14G", "--compute", "400", "--price", "2.5"];
    let text = text(&words);
    for wanted in ["all-reduce, ring", "all-to-all", "KV hand-over", "band", "money/month", "assumptions:"] {
        assert!(text.contains(wanted), "{wanted} is missing in\n{text}");
    }
    let json: serde_json::Value =
        serde_json::from_str(&self::text(&[&words[..], &["--json"]].concat())).unwrap();
    let direct = &json["impact"][0]["direct"];
    let [low, expected, high] =
        ["exchange_low_ms", "exchange_ms", "exchange_high_ms"].map(|name| direct[name].as_f64().unwrap());
    assert!(low <= expected && expected < high, "{direct}");
    assert!(json["not_predicted"].is_null());
    assert_eq!(json["unvalidated"], serde_json::json!([]));
    // Staging is bound by host memory, which was not stated: listed once.
    assert_eq!(text.matches("host memory of").count(), 1, "{text}");
    let given =
        self::text(&["--link", "ib:ndr", "--distance", "PIX", "--nodes", "8", "--bytes", "14G", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&given).unwrap();
    assert!(json["not_predicted"].as_str().unwrap().contains("add --dram"), "{json}");
    let efa = [
        "--link",
        "efa:400",
        "--distance",
        "PIX",
        "--dram",
        "400",
        "--nodes",
        "8",
        "--bytes",
        "14G",
        "--json",
    ];
    let json: serde_json::Value = serde_json::from_str(&self::text(&efa)).unwrap();
    assert_eq!(json["unvalidated"], serde_json::json!(["EFA"]));
}

/// A refusal of a cluster is said once, and in every form of output.
#[test]
fn a_cluster_that_is_not_predicted_says_why() {
    let path = file("refused.svg");
    let words =
        ["--machine", "dgx-h100", "--bytes", "100K", "--nodes", "2", "--plot", path.to_str().unwrap()];
    let text = text(&words);
    assert_eq!(text.matches("LL128").count(), 1, "{text}");
    assert!(text.contains("not predicted: below 1 MiB"), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&self::text(&[&words[..], &["--json"]].concat())).unwrap();
    assert!(json["not_predicted"].as_str().unwrap().contains("LL128"), "{json}");
    assert!(json["impact"].as_array().unwrap().is_empty());
    let drawn = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(drawn.contains("not predicted: below 1 MiB"), "{drawn}");
}

#[test]
fn what_is_not_known_is_not_predicted() {
    for words in [
        vec!["--link", "tcp:100"],
        vec!["--link", "efa:100", "--size", "8"],
        vec!["--link", "ib:ndr", "--distance", "SYS"],
        vec!["--link", "ib:ndr", "--memory", "host", "--rails", "8"],
        vec!["--link", "ib:ndr", "--software", "gpu-initiated"],
        vec!["--link", "ib:ndr", "--software", "nccl", "--size", "8"],
        vec!["--machine", "dual-socket"],
    ] {
        assert!(text(&words).contains("not predicted: "), "{words:?}");
        let json: serde_json::Value =
            serde_json::from_str(&text(&[words.clone(), vec!["--json"]].concat())).unwrap();
        assert!(json["rows"][0]["not_predicted"].is_string(), "{words:?}");
    }
    let score = text(&["--validation"]);
    assert!(
        score.contains("inside the printed interval") && score.contains("of each kind: latency"),
        "{score}"
    );
    let staged = ["--link", "ib:xdr", "--size", "8"];
    let missing = text(&staged);
    assert!(
        missing.contains("staged, 8 B: not predicted: ") && missing.contains("widest band:"),
        "{missing}"
    );
    let json: serde_json::Value = serde_json::from_str(&text(&[&staged[..], &["--json"]].concat())).unwrap();
    assert!(json["rows"][0]["staged_not_predicted"].is_string(), "{json}");
    let soft = text(&["--machine", "dgx-h100", "--software", "nobounce", "--size", "8"]);
    assert!(soft.contains("assumed: ") && soft.contains("calibrate for better figures"), "{soft}");
}

#[test]
fn pictures_and_titles_say_what_was_changed() {
    let path = file("cluster.svg");
    let name = path.to_str().unwrap().to_owned();
    let words =
        ["--machine", "dgx-h100", "--nodes", "4", "--bytes", "1G", "--distance", "NODE", "--plot", &name];
    let text = text(&words);
    assert!(text.contains("changed: distance NODE") && !text.contains(", PIX"), "{text}");
    assert!(text.contains("bus GB/s") && text.contains("direct is limited by"), "{text}");
    assert!(std::fs::read_to_string(&path).unwrap().contains("all-reduce, ring"));
    std::fs::remove_file(&path).unwrap();
    assert!(refused(&["--machine", "dgx-h100", "--plot", "h100.png"]).contains("ends in .svg"));
}

#[test]
fn what_cannot_be_is_explained() {
    for (words, wanted) in [
        (vec!["--link", "ib:ndr", "--nic-slot", "gen5x32"], "PCIe lanes 32"),
        (vec!["--link", "ib:zdr"], "invalid link"),
        (vec!["--link", "ib:ndr", "--rails", "0"], "invalid --rails 0"),
        (vec!["--link", "ib:ndr", "--mtu", "1500"], "1024"),
        (vec!["--link", "ib:ndr", "--dram", "1e300"], "at most 100000 GB/s"),
        (vec!["--link", "ib:ndr", "--size", "2T"], "more than 1T"),
        (vec!["--machine", "cray-1"], "unknown machine"),
        (vec!["--machine", "dgx-h100", "--gpu", "8"], "no GPU 8"),
        (vec!["--machine", "dgx-h100", "--nodes", "1", "--bytes", "1G"], "at least two nodes"),
        (
            vec!["--machine", "dgx-h100", "--nodes", "4", "--bytes", "1G", "--price", "-1"],
            "invalid --price -1",
        ),
        (
            vec!["--machine", "dgx-h100", "--nodes", "4", "--bytes", "1G", "--nics-per-node", "0"],
            "invalid --nics-per-node 0",
        ),
        (vec!["--calibrate", "/dev/null"], "not a run of `nobounce bench --json`"),
    ] {
        let found = refused(&words);
        assert!(found.contains(wanted), "{words:?}: {found}");
    }
}

#[test]
fn a_run_calibrates_and_another_is_held_against_it() {
    let run = |factor: f64| {
        let results: Vec<String> = [1_u32, 8, 512, 4096, 32768, 262_144, 1_048_576]
            .into_iter()
            .flat_map(|size| {
                let time = factor * (3.5 + if size > 4096 { 5.0 } else { 0.0 } + 0.00025 * f64::from(size));
                let rate = f64::from(size) / time / 1000.0;
                let common = r#""op": "write", "qps": 1, "memory": "host", "path": "direct", "mtu": 4096, "wait": "cq""#;
                [
                    format!(r#"{{"kind": "latency", "size": {size}, "p50_us": {time}, {common}}}"#),
                    format!(r#"{{"kind": "bandwidth", "size": {size}, "gbytes_per_s": {rate}, {common}}}"#),
                ]
            })
            .collect();
        format!(r#"{{"schema": "nobounce-bench/1", "results": [{}]}}"#, results.join(","))
    };
    let [first, second, third, kept] = ["a.json", "b.json", "c.json", "kept.json"].map(file);
    for (path, factor) in [(&first, 1.0), (&second, 1.1), (&third, 1.4)] {
        std::fs::write(path, run(factor)).unwrap();
    }
    let name = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let fitted = text(&["--calibrate", &name(&first), "--save-calibration", &name(&kept)]);
    assert!(fitted.contains("worst residual") && fitted.contains("measured"), "{fitted}");
    let near = text(&["--calibration", &name(&kept), "--against", &name(&second)]);
    assert!(near.contains("14 of 14 within 15 %"), "{near}");
    let far = predict(&["--calibrate", &name(&first), "--against", &name(&third)]);
    assert_eq!(far.status.code(), Some(1));
    let used = text(&[
        "--link",
        "loopback:1000",
        "--memory",
        "host",
        "--software",
        "nobounce",
        "--size",
        "1M",
        "--calibration",
        &name(&kept),
    ]);
    assert!(used.contains("271") && !used.contains("calibrate for better figures"), "{used}");
    for path in [first, second, third, kept] {
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn the_passes_of_one_run_are_parted_into_two() {
    // Twice as fast in the second half: in turns both halves see it, one after the other do not.
    let results: Vec<String> = [1_u32, 8, 512, 4096, 32768, 262_144, 1_048_576]
        .into_iter()
        .map(|size| {
            let time = 3.5 + 0.00025 * f64::from(size);
            let passes = [time, time, time, time, time / 2.0, time / 2.0, time / 2.0, time / 2.0];
            format!(
                r#"{{"op": "write", "kind": "latency", "size": {size}, "p50_us": {time}, "passes": {passes:?}, "qps": 1, "memory": "host", "path": "direct", "mtu": 4096, "wait": "cq"}}"#
            )
        })
        .collect();
    let path = file("passes.json");
    std::fs::write(&path, format!(r#"{{"schema": "nobounce-bench/1", "results": [{}]}}"#, results.join(",")))
        .unwrap();
    let name = path.to_str().unwrap();
    let turns = text(&["--calibrate", name, "--split", "turns"]);
    assert!(
        turns.contains("7 of 7 within 15 %") && turns.contains("agree within the same tolerance in 7 of 7"),
        "{turns}"
    );
    let halves = predict(&["--calibrate", name, "--split", "halves"]);
    let shown = String::from_utf8_lossy(&halves.stdout).into_owned();
    assert_eq!(halves.status.code(), Some(1));
    assert!(
        shown.contains("0 of 7 within 15 %") && shown.contains("off (difference between the runs: -50.0 %)"),
        "{shown}"
    );
    for words in [&["--split", "turns", "--against", name][..], &["--tolerance", "0.1"]] {
        refused(&[&["--calibrate", name], words].concat());
    }
    assert!(refused(&["--calibrate", name, name, "--split", "turns"]).contains("exactly one run"));
    std::fs::remove_file(&path).unwrap();
}

/// SEND streams of 256 KiB on two cores: no constant has it, all passes found it, and so will the
/// next run.
#[test]
fn what_no_constant_explains_is_kept_and_named() {
    let results: Vec<String> = [1_u32, 8, 512, 4096, 32768, 262_144, 1_048_576, 8_388_608]
        .into_iter()
        .flat_map(|size| {
            let time = (3.5 + 0.00025 * f64::from(size)) * if size == 262_144 { 1.3 } else { 1.0 };
            let rate = f64::from(size) / time / 1000.0;
            let passes = |figure: f64| [0.98, 0.99, 1.01, 1.0, 1.0, 0.99, 1.02, 1.01].map(|factor| factor * figure);
            let common = r#""op": "write", "qps": 1, "memory": "host", "path": "direct", "mtu": 4096, "wait": "cq""#;
            [
                format!(r#"{{"kind": "latency", "size": {size}, "p50_us": {time}, "passes": {:?}, {common}}}"#, passes(time)),
                format!(r#"{{"kind": "bandwidth", "size": {size}, "gbytes_per_s": {rate}, "passes": {:?}, {common}}}"#, passes(rate)),
            ]
        })
        .collect();
    let [run, kept] = ["seen.json", "seen-kept.json"].map(file);
    std::fs::write(&run, format!(r#"{{"schema": "nobounce-bench/1", "results": [{}]}}"#, results.join(",")))
        .unwrap();
    let [run, kept] = [&run, &kept].map(|path| path.to_str().unwrap().to_owned());
    let halves = text(&["--calibrate", &run, "--split", "turns", "--save-calibration", &kept]);
    for wanted in [
        "with the residual correction",
        "; correction +",
        "(includes a correction of +",
        "16 of 16 within 15 %",
        "without the residual correction: 14 of 16",
    ] {
        assert!(halves.contains(wanted), "{wanted} is missing in\n{halves}");
    }
    let here =
        ["--link", "loopback:1000", "--memory", "host", "--software", "nobounce", "--calibration", &kept];
    let table = text(&[&here[..], &["--size", "8,256K"]].concat());
    assert!(table.contains("residual correction of this machine") && table.contains("256 KiB +"), "{table}");
    let found: serde_json::Value =
        serde_json::from_str(&text(&[&here[..], &["--size", "256K", "--json"]].concat())).unwrap();
    let direct = &found["rows"][0]["direct"];
    let seen = direct["shares"].as_array().unwrap().iter().find(|share| share["factor"] == "seen").unwrap();
    assert!(seen["microseconds"].as_f64().unwrap() > 5.0 && direct["binds"] == "soft-nic", "{direct}");
    assert!(direct["stream_seen_us"].as_f64().unwrap() > 5.0, "{direct}");

    // None of it is reported for another machine, and nothing at all for one with an adapter.
    let other = text(&[&["--machine", "dual-socket", "--size", "256K"], &here[..]].concat());
    assert!(!other.contains("residual correction"), "{other}");
    let refusal = refused(&["--machine", "dgx-h100", "--calibration", &kept]);
    assert!(refusal.contains("software NIC") && refusal.contains("omit it"), "{refusal}");
    for path in [run, kept] {
        std::fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_plot_is_drawn() {
    let path = file("plot.svg");
    let name = path.to_str().unwrap();
    text(&["--machine", "dgx-a100", "--plot", name]);
    let drawn = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.contains("Bandwidth") && !drawn.contains("NaN"));
}
