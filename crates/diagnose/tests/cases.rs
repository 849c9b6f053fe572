//! Machines with one thing wrong, after public threads: each is a healthy machine changed, and all
//! that is found is written down.
//!
//! `cases/*.json` hold lists of cases. `base` names a machine of `nobounce_topology::machines`;
//! `set` and `remove` change its facts by path, where `*` means all, `name=mlx5_0` those with that
//! field, `-` a new one at the end; `finds` is the complete set of findings. What a thread does not
//! tell (versions, models, the rest of the machine) is the base's or ours.

#[path = "common/cases.rs"]
mod cases;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use nobounce_diagnose::diagnose;
use nobounce_diagnose::finding::FixPart;
use nobounce_topology::machines;

use cases::{all, apply};

fn kind<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_value(value).unwrap().as_str().unwrap().to_owned()
}

#[test]
fn each_case_gives_its_findings_and_no_others() {
    let mut wrong = Vec::new();
    for (file, case) in all() {
        let facts = apply(&case);
        let diagnosis = diagnose(&facts);
        let found: Vec<String> =
            diagnosis.ids().into_iter().map(|(id, severity)| format!("{severity} {id}")).collect();
        let mut wanted = case.finds.clone();
        wanted.sort();
        let mut sorted = found.clone();
        sorted.sort();
        let best: Vec<_> = diagnosis.verdicts.iter().filter(|verdict| verdict.best).collect();
        let paths: BTreeSet<String> = best.iter().map(|verdict| kind(&verdict.path)).collect();
        let nccl: BTreeSet<String> = best.iter().map(|verdict| kind(&verdict.nccl.kind)).collect();
        let ucx: BTreeSet<String> = best.iter().map(|verdict| kind(&verdict.ucx.kind)).collect();
        let set = |list: &[String]| list.iter().cloned().collect::<BTreeSet<_>>();
        let fine = sorted == wanted
            && paths == set(&case.paths)
            && case.nccl.as_deref().is_none_or(|wanted| nccl == set(wanted))
            && case.ucx.as_deref().is_none_or(|wanted| ucx == set(wanted));
        if !fine {
            wrong.push(format!(
                "{file} {} ({}):\n  wanted {wanted:?} {:?} {:?} {:?}\n  found  {sorted:?} {paths:?} {nccl:?} {ucx:?}",
                case.thread, case.says, case.paths, case.nccl, case.ucx
            ));
        }
        let errors = found.iter().any(|text| text.starts_with("error")) && !facts.gpus.is_empty();
        if diagnosis.direct_is_lost != case.lost.unwrap_or(errors) {
            wrong.push(format!(
                "{file} {} ({}): lost {}, {found:?} {paths:?} {nccl:?} {ucx:?}",
                case.thread, case.says, diagnosis.direct_is_lost
            ));
        }
        let anonymous = diagnose(&facts.clone().redacted());
        if anonymous.ids() != diagnosis.ids() || anonymous.direct_is_lost != diagnosis.direct_is_lost {
            wrong.push(format!(
                "{file} {} ({}): without names {:?}",
                case.thread,
                case.says,
                anonymous.ids()
            ));
        }
        // Every finding has all of its parts.
        for finding in &diagnosis.findings {
            assert!(!finding.why.is_empty() && !finding.evidence.is_empty(), "{}: {finding:?}", case.thread);
        }
    }
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn there_are_enough_cases_each_with_its_thread() {
    // A case that no thread stands behind says "none".
    let cases: Vec<_> = all().into_iter().filter(|(_, case)| case.thread != "none").collect();
    assert!(cases.len() >= 60, "{}", cases.len());
    let mut threads: BTreeMap<String, u32> = BTreeMap::new();
    for (_, case) in &cases {
        assert!(case.thread.contains('#') && case.says.len() > 10, "{case:?}");
        *threads.entry(case.thread.clone()).or_default() += 1;
    }
    assert!(threads.len() >= 60, "only {} threads", threads.len());
}

#[test]
fn facts_that_are_missing_never_become_fine() {
    // Remove each readable fact of a healthy machine: the verdict may become unknown, but no new
    // claim may appear.
    for name in machines::NAMES {
        let facts = machines::machine(name).unwrap();
        let before: BTreeSet<_> = diagnose(&facts).ids().into_iter().collect();
        let mut blind = facts.clone();
        blind.devices = nobounce_topology::facts::Read::no("Permission denied");
        for device in &mut blind.pci {
            device.config = nobounce_topology::facts::Read::no("only the first 64 bytes");
            device.iommu = nobounce_topology::facts::Read::no("Permission denied");
        }
        for gpu in &mut blind.gpus {
            gpu.dma_buf = nobounce_topology::facts::Read::default();
            gpu.export_probe = nobounce_topology::facts::Read::default();
            gpu.gpudirect_rdma = nobounce_topology::facts::Read::default();
        }
        for nic in &mut blind.nics {
            nic.dma_buf_probe = nobounce_topology::facts::Read::default();
            nic.open_probe = nobounce_topology::facts::Read::default();
        }
        blind.kernel.modules = nobounce_topology::facts::Read::no("Permission denied");
        blind.kernel.peer_memory_clients = nobounce_topology::facts::Read::no("Permission denied");
        let diagnosis = diagnose(&blind);
        let after: BTreeSet<_> = diagnosis.ids().into_iter().collect();
        let new: Vec<_> = after.difference(&before).collect();
        assert!(
            new.iter().any(|(_, severity)| *severity == nobounce_diagnose::finding::Severity::Unknown),
            "{name}: nothing is said to be unknown: {after:?}"
        );
        assert!(
            !diagnosis.verdicts.iter().any(|v| v.path == nobounce_diagnose::verdict::PathKind::Direct),
            "{name}: a path is called direct although nothing shows it"
        );
    }
}

/// Words that begin a command: in a remark they would have no copy button.
const COMMANDS: [&str; 22] = [
    "sudo ",
    "docker run",
    "nobounce ",
    "ibv_",
    "mlxlink",
    "mlnx_qos",
    "mlxconfig -",
    "show_gids",
    "numactl",
    "ls -",
    "unset ",
    "apt ",
    "ulimit",
    "nvidia-smi",
    "setpci",
    "systemctl",
    "modprobe ",
    "echo ",
    "rdma ",
    "cat /",
    "lspci ",
    "ip link",
];

/// Options of the start of a container.
const OPTIONS: [&str; 8] =
    ["--device ", "--ulimit", "--network", "--ipc", "--gpus", "--cap-add", "--security-opt", "--pid"];

/// A command in a remark.
fn hidden_command(remark: &str) -> Option<&'static str> {
    let begins = |word: &str| {
        remark
            .match_indices(word)
            .any(|(at, _)| !remark[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || "-_/.".contains(c)))
    };
    COMMANDS.into_iter().find(|word| begins(word))
}

/// Whether all words are assignments.
fn is_assignment(text: &str) -> bool {
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_uppercase())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    text.split(' ').all(|word| word.split_once('=').is_some_and(|(name, _)| is_name(name)))
}

/// Files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// As they are written, so that those of rare findings and of logs are among them.
#[test]
fn no_remark_hides_a_command() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut written = 0;
    let mut wrong = Vec::new();
    for path in files(&source.join("checks")).into_iter().chain(files(&source.join("log"))) {
        let text = std::fs::read_to_string(&path).unwrap();
        for call in text.split("emark(").skip(1) {
            let call = call.trim_start();
            let call = call.strip_prefix("format!(").unwrap_or(call).trim_start();
            let Some(literal) = call.strip_prefix('"') else { continue };
            let literal = literal.replace("\\\"", "'");
            let literal = literal.split('"').next().unwrap();
            let option = OPTIONS.iter().any(|option| literal.contains(option));
            // Options of the kernel's build and of firmware are no variables.
            let is_bare = literal.split(' ').any(is_assignment)
                && !["CONFIG_", "with mlxconfig"].iter().any(|words| literal.contains(words));
            if literal.contains('`') || option || is_bare || hidden_command(literal).is_some() {
                wrong.push(format!("{}: {literal}", path.display()));
            }
            written += 1;
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(written > 150, "{written} remarks");
}

/// As they are reported: every command and assignment can be pasted as printed.
#[test]
fn every_command_of_a_fix_can_be_copied() {
    let mut lines = BTreeSet::new();
    let facts = all().into_iter().map(|(_, case)| apply(&case));
    for facts in facts.chain(machines::NAMES.iter().filter_map(|name| machines::machine(name))) {
        for fix in diagnose(&facts).findings.into_iter().flat_map(|finding| finding.fix) {
            assert!(!fix.parts().is_empty() && !fix.to_string().contains('`'), "{fix}");
            let is_action = |part: &&FixPart| !matches!(part, FixPart::Remark(_));
            let actions: Vec<&FixPart> = fix.parts().iter().filter(is_action).collect();
            if let [one] = actions.as_slice()
                && let Some(line) = one.paste()
            {
                // The whole line can be pasted: what follows the command is a comment.
                let whole = fix.to_string();
                let rest = whole.strip_prefix(&line);
                assert!(rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("   # ")), "{whole}");
                assert!(!whole.ends_with(" then") && !whole.ends_with(" or"), "{whole}");
            }
            for part in fix.parts() {
                match part {
                    FixPart::Remark(text) => assert_eq!(hidden_command(text), None, "{fix}"),
                    FixPart::EngineOption(text) => assert!(text.starts_with('-'), "{fix}"),
                    FixPart::Assignment(text) => assert!(is_assignment(text), "{fix}"),
                    FixPart::Line { file, text } => assert!(file.starts_with('/') && !text.is_empty()),
                    FixPart::Command(text) => {
                        assert!(!text.starts_with('-') && !is_assignment(text) && !text.is_empty(), "{fix}");
                        // With real names, and nothing left to fill in.
                        let blanks = ["DEVICE", "INTERFACE", "ADDRESS", "PROGRAM", "NAME"];
                        let mut words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                        let blank = words.find(|word| blanks.contains(word) || text.contains("..."));
                        assert_eq!(blank, None, "{text}");
                        assert!(!text.contains("   "), "{text}");
                    }
                }
                lines.extend(part.paste());
            }
        }
    }
    for line in &lines {
        let parsed = std::process::Command::new("sh").args(["-n", "-c", "--", line]).output().unwrap();
        assert!(parsed.status.success(), "{line}: {}", String::from_utf8_lossy(&parsed.stderr));
    }
    let wanted = [
        "numactl --cpunodebind=0 --membind=0",
        "ibv_devinfo -v",
        "mlxlink -d 0000:e1:00.0",
        "export NCCL_NET_GDR_LEVEL=SYS",
    ];
    for wanted in wanted {
        assert!(lines.contains(wanted), "{wanted}: {lines:#?}");
    }
}
