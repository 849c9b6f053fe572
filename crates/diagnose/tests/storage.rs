//! Paths after public threads about GPUDirect Storage: the verdict for a machine of that thread.
//!
//! `storage/*.json` hold the facts of a path that is ready for P2PDMA, and cases. A case names a
//! machine of `nobounce_topology::machines`, of which the first GPU stays unless it says `all`, and
//! changes facts as in `cases.rs`. `quoted` says which facts are the thread's; the others are ours.

#[path = "common/edit.rs"]
mod edit;

use std::collections::{BTreeMap, BTreeSet};

use nobounce_diagnose::finding::Severity;
use nobounce_diagnose::finding::{Fix, FixPart, Side};
use nobounce_diagnose::storage_verdict::{Route, State, StorageDiagnosis};
use nobounce_diagnose::{Style, diagnose, storage_report};
use nobounce_topology::facts::{Facts, Read, Storage};
use nobounce_topology::machines;
use serde::Deserialize;
use serde_json::Value;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    /// The public thread it is taken from, or `none`.
    thread: String,
    says: String,
    /// Facts that the thread tells.
    quoted: String,
    /// Facts that are assumed.
    assumed: String,
    machine: String,
    /// `p2pdma` or `nvidia-fs`: what works before the changes.
    ready: String,
    #[serde(default)]
    all: bool,
    #[serde(default)]
    set: Vec<(String, Value)>,
    #[serde(default)]
    remove: Vec<String>,
    /// The first finding, with its severity.
    first: String,
    /// Others that must be there.
    #[serde(default)]
    also: Vec<String>,
    /// The route of the first GPU.
    route: String,
    /// nobounce's own method there.
    #[serde(default)]
    own: Option<String>,
}

fn cases() -> Vec<Case> {
    serde_json::from_str(include_str!("storage/cases.json")).unwrap()
}

/// A machine with a path that one of the direct routes reaches.
fn ready(machine: &str, route: &str, all: bool) -> Facts {
    let mut facts = machines::machine(machine).unwrap_or_else(|| panic!("no machine {machine}"));
    let mut storage: Storage = serde_json::from_str(include_str!("storage/base.json")).unwrap();
    if !all {
        facts.gpus.truncate(1);
    }
    // The drive is where the machine has one: below the switch of the first GPU.
    let drive = facts.pci.iter().find(|device| device.is_nvme()).map(|device| device.address.clone());
    if let Read::Yes(devices) = &mut storage.devices {
        devices[1].controllers[0].pci = drive;
    }
    if route == "nvidia-fs" {
        let node = |n: u32| nobounce_topology::facts::DeviceNode {
            path: format!("/dev/nvidia-fs{n}"),
            open: nobounce_topology::facts::Probe::worked(""),
        };
        storage.registry_dwords = Read::Yes(None);
        storage.nvidia_fs.version = Read::Yes("2.26".to_owned());
        storage.nvidia_fs.clients = Read::Yes(vec!["nvme".to_owned()]);
        storage.nvidia_fs.nodes = Read::Yes((0..16).map(node).collect());
        if let Read::Yes(Some(config)) = &mut storage.cufile.config {
            config.properties.insert("use_pci_p2pdma".to_owned(), "false".to_owned());
        }
        if let Read::Yes(symbols) = &mut storage.kernel_symbols {
            symbols.push("nvme_v1_register_nvfs_dma_ops".to_owned());
        }
        if let Read::Yes(modules) = &mut facts.kernel.modules {
            modules.insert("nvidia_fs".to_owned(), nobounce_topology::facts::Module::default());
        }
    }
    facts.storage = Some(storage);
    facts
}

fn of(case: &Case) -> Facts {
    edit::edit(&ready(&case.machine, &case.ready, case.all), &case.remove, &case.set, &case.thread)
}

fn found(facts: &Facts) -> StorageDiagnosis {
    diagnose(facts).storage.unwrap()
}

fn kind<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_value(value).unwrap().as_str().unwrap().to_owned()
}

fn ids(found: &StorageDiagnosis) -> Vec<String> {
    found.findings.iter().map(|finding| format!("{} {}", finding.severity, finding.id)).collect()
}

const STYLE: Style = Style { color: false, width: 110, all: true };

/// What must hold for any facts: a route is claimed only if all of its links are known to be ok.
fn consistent(facts: &Facts, found: &StorageDiagnosis, what: &str) {
    for verdict in &found.verdicts {
        let links: Vec<_> = found.chain.iter().chain(&verdict.links).collect();
        let all = |of: &dyn Fn(&nobounce_diagnose::storage_verdict::ChainLink) -> State| {
            links.iter().all(|link| matches!(of(link), State::Ok | State::NotNeeded))
        };
        match verdict.route {
            Route::P2pdma => assert!(all(&|link| link.p2pdma), "{what}: {links:?}"),
            Route::NvidiaFs => assert!(all(&|link| link.nvidia_fs), "{what}: {links:?}"),
            Route::Compat | Route::Fails => assert!(
                links.iter().any(|link| link.p2pdma == State::Blocks)
                    && links.iter().any(|link| link.nvidia_fs == State::Blocks),
                "{what}: {links:?}"
            ),
            Route::Unknown => {}
        }
        assert!(!verdict.reasons.is_empty() && !verdict.own_reason.is_empty(), "{what}");
        // What is not direct for a reason that can be repaired has a finding above information.
        if !verdict.route.is_direct() {
            assert!(found.findings.iter().any(|f| f.severity > Severity::Info), "{what}: {:?}", ids(found));
        }
    }
    for finding in &found.findings {
        assert!(!finding.why.is_empty() && !finding.evidence.is_empty(), "{what}: {finding:?}");
        assert!(
            !finding.fix.is_empty() && finding.fix.iter().all(|fix| !fix.parts().is_empty()),
            "{what}: {finding:?}"
        );
        // A fix can be pasted: remarks are comments of the shell.
        assert!(
            !finding.fix.iter().map(ToString::to_string).any(|fix| fix.contains("  (") || fix.contains('\n')),
            "{what}: {finding:?}"
        );
        assert!(nobounce_diagnose::explain::text(finding.id).is_some());
    }
    let text = storage_report(facts, facts.storage.as_ref().unwrap(), found, STYLE);
    assert!(text.contains("chain") && text.lines().count() > found.chain.len(), "{what}: {text}");
}

#[test]
fn each_case_gives_its_first_finding_and_its_route() {
    let mut wrong = Vec::new();
    for case in cases() {
        let facts = of(&case);
        let found = found(&facts);
        consistent(&facts, &found, &case.thread);
        let ids = ids(&found);
        let route = found.verdicts.first().map(|verdict| kind(&verdict.route)).unwrap_or_default();
        let own = found.verdicts.first().map(|verdict| kind(&verdict.own));
        let fine = ids.first().map(String::as_str).unwrap_or_default() == case.first
            && case.also.iter().all(|also| ids.contains(also))
            && route == case.route
            && case.own.as_ref().is_none_or(|wanted| Some(wanted) == own.as_ref());
        if !fine {
            wrong.push(format!(
                "{} ({}):\n  wanted {} {:?} {} {:?}\n  found  {route} {own:?} {ids:?}\n  {:?}",
                case.thread,
                case.says,
                case.first,
                case.also,
                case.route,
                case.own,
                found.verdicts.first().map(|v| &v.reasons)
            ));
        }
        let lost = matches!(route.as_str(), "compat" | "fails") && case.first.starts_with("error");
        if found.direct_is_lost != lost {
            wrong.push(format!("{}: lost {} {ids:?}", case.thread, found.direct_is_lost));
        }
        let anonymous = self::found(&facts.clone().redacted());
        if self::ids(&anonymous) != ids
            || anonymous.verdicts.first().map(|v| v.route) != found.verdicts.first().map(|v| v.route)
        {
            wrong.push(format!("{}: without names {:?}", case.thread, self::ids(&anonymous)));
        }
    }
    assert!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn there_are_enough_cases_each_with_its_thread() {
    let cases = cases();
    let mut threads: BTreeSet<&str> = BTreeSet::new();
    for case in cases.iter().filter(|case| case.thread != "none") {
        assert!(case.thread.contains('/') && case.thread.contains('#'), "{case:?}");
        assert!(case.says.len() > 10 && case.quoted.len() >= 3 && case.assumed.len() >= 3, "{case:?}");
        threads.insert(&case.thread);
    }
    assert!(threads.len() >= 20, "only {} threads", threads.len());
    // Every check has a case, or is reached by the tests below.
    let told: BTreeSet<&str> = cases
        .iter()
        .flat_map(|case| case.also.iter().chain([&case.first]))
        .filter_map(|t| t.split(' ').nth(1))
        .collect();
    let missing: Vec<&str> = nobounce_diagnose::explain::ALL
        .iter()
        .map(|explanation| explanation.id)
        .filter(|id| id.starts_with("storage-") && !told.contains(id))
        .collect();
    assert!(missing.is_empty(), "no case for {missing:?}");
}

#[test]
fn a_ready_machine_is_direct_and_a_dgx_only_below_one_switch() {
    for route in ["p2pdma", "nvidia-fs"] {
        let facts = ready("dgx-h100", route, false);
        let found = found(&facts);
        assert_eq!(kind(&found.verdicts[0].route), route, "{found:?}");
        assert!(!found.direct_is_lost && found.findings.iter().all(|f| f.severity <= Severity::Warning));
        consistent(&facts, &found, route);
    }
    let found = found(&ready("dgx-h100", "p2pdma", true));
    let routes: BTreeMap<&str, String> =
        found.verdicts.iter().map(|v| (v.gpu.as_str(), kind(&v.route))).collect();
    assert_eq!(routes.values().filter(|route| *route == "p2pdma").count(), 1, "{routes:?}");
    assert_eq!(routes.values().filter(|route| *route == "unknown").count(), 7, "{routes:?}");
}

/// Takes every fact away in turn, and all of them: what is unknown never becomes direct, and no
/// cause appears that nothing shows.
#[test]
fn facts_that_are_missing_never_become_direct() {
    fn paths(value: &Value, at: &str, out: &mut Vec<String>) {
        if let Value::Object(fields) = value {
            for (name, field) in fields {
                out.push(format!("{at}/{name}"));
                paths(field, &format!("{at}/{name}"), out);
            }
        }
    }
    for route in ["p2pdma", "nvidia-fs"] {
        let facts = ready("dgx-h100", route, false);
        let before = ids(&found(&facts)).into_iter().collect::<BTreeSet<_>>();
        let mut all = Vec::new();
        paths(&serde_json::to_value(&facts.storage).unwrap(), "/storage", &mut all);
        assert!(all.len() > 20);
        for path in all {
            let mut json: Value = serde_json::from_str(&facts.to_json()).unwrap();
            let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
            let (last, front) = parts.split_last().unwrap();
            let parent = front.iter().fold(&mut json, |value, part| &mut value[*part]);
            parent.as_object_mut().unwrap().remove(*last);
            let Ok(blind) = Facts::from_json(&json.to_string()) else { continue };
            let found = found(&blind);
            consistent(&blind, &found, &path);
            let new: Vec<String> = ids(&found)
                .into_iter()
                .filter(|id| !before.contains(id) && id.starts_with("error"))
                .collect();
            // Settings that are not there have their defaults.
            let default = path.contains("/properties") || path.ends_with("/registry_dwords");
            assert!(new.is_empty() || default || path.contains("config"), "{path}: {new:?}");
        }
        let mut blind = facts.clone();
        blind.storage = Some(Storage { path: "/data/x".to_owned(), ..Storage::default() });
        let found = found(&blind);
        consistent(&blind, &found, "nothing");
        assert!(found.verdicts.iter().all(|verdict| verdict.route == Route::Unknown), "{found:?}");
        assert!(!found.direct_is_lost);
    }
}

#[test]
fn a_path_on_a_machine_without_a_gpu_has_a_chain_and_loses_nothing() {
    let mut facts = ready("dgx-h100", "p2pdma", false);
    facts.gpus.clear();
    facts.kernel.nvidia = Read::Yes(None);
    let found = found(&facts);
    assert!(found.verdicts.is_empty() && !found.direct_is_lost && found.chain.len() > 8);
    assert!(found.findings.iter().all(|finding| finding.severity < Severity::Error), "{:?}", ids(&found));
    consistent(&facts, &found, "no GPU");
}

#[test]
fn old_facts_are_read_and_say_nothing_of_storage() {
    let facts = machines::machine("dgx-h100").unwrap();
    assert!(!facts.to_json().contains("\"storage\""));
    let diagnosis = diagnose(&Facts::from_json(&facts.to_json()).unwrap());
    assert!(diagnosis.storage.is_none());
    assert!(!serde_json::to_string(&diagnosis).unwrap().contains("storage"));
}

#[test]
fn names_of_paths_are_quoted_for_the_shell_and_cleaned_for_terminals() {
    let mut facts = ready("dgx-h100", "p2pdma", false);
    if let Some(storage) = &mut facts.storage {
        storage.path = "/da ta/it's\u{1b}[2J".to_owned();
        storage.mount = Read::Yes(nobounce_topology::facts::Mount {
            kind: "tmpfs".to_owned(),
            point: "/da ta".to_owned(),
            ..Default::default()
        });
    }
    let found = found(&facts);
    let fix = found.findings[0].fix[0].to_string();
    assert!(fix.contains(r"'/da ta/it'\''s"), "{fix}");
    let text = storage_report(&facts, facts.storage.as_ref().unwrap(), &found, STYLE);
    assert!(!text.contains('\u{1b}'), "{text:?}");
}

/// The lines that a fix gives to a shell: a single command with its comment, or each command and
/// option of its own.
fn lines(fix: &Fix) -> Vec<String> {
    let of_part = |part: &FixPart| match part {
        FixPart::EngineOption(text) => Some(format!("docker run {text}")),
        part => part.paste(),
    };
    let mut lines: Vec<String> = fix.parts().iter().filter_map(of_part).collect();
    let text = fix.to_string();
    if lines.len() == 1 && text.starts_with(&lines[0]) {
        lines.push(text);
    }
    lines
}

fn parses(line: &str) {
    let parsed = std::process::Command::new("sh").args(["-n", "-c", "--", line]).output().unwrap();
    assert!(parsed.status.success(), "{line}: {}", String::from_utf8_lossy(&parsed.stderr));
}

#[test]
fn every_fix_has_lines_that_a_shell_parses() {
    let mut all: BTreeSet<String> = BTreeSet::new();
    for case in cases() {
        for fix in found(&of(&case)).findings.into_iter().flat_map(|finding| finding.fix) {
            let lines = lines(&fix);
            assert!(!lines.is_empty(), "{fix}");
            all.extend(lines);
        }
    }
    assert!(all.len() > 50, "{}", all.len());
    all.iter().for_each(|line| parses(line));
}

#[test]
fn fixes_in_a_container_name_the_host() {
    let mut named = 0;
    for case in cases() {
        let mut facts = of(&case);
        facts.process.container = Read::Yes(Some("docker".to_owned()));
        for finding in found(&facts).findings {
            for fix in &finding.fix {
                lines(fix).iter().for_each(|line| parses(line));
                let of_host = fix.side() == Side::Host;
                let fix = fix.to_string();
                let is_told = fix.contains("on the host, not in the container");
                assert_eq!(is_told, of_host, "{}: {fix}", finding.id);
                named += u32::from(of_host);
            }
        }
    }
    assert!(named > 20, "{named} fixes name the host");
}
