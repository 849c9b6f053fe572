//! Cases of the corpus: read, checked for their sources, scored.

use std::fmt;
use std::path::Path;

use nobounce_diagnose::finding::Severity;
use nobounce_diagnose::{diagnose, log};
use nobounce_topology::facts::{Facts, KIND, SCHEMA};
use serde::Deserialize;
use serde_json::Value;

/// One public thread.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    /// Its name: that of the file.
    #[serde(skip)]
    pub(crate) name: String,
    /// The thread's address.
    pub(crate) thread: String,
    /// What its author saw.
    pub(crate) problem: String,
    /// Paths of facts that the thread states; `*` stands for any part. A path covers all below it.
    pub(crate) quoted: Vec<String>,
    /// Paths of facts that the thread implies or that only give devices a place.
    #[serde(default)]
    pub(crate) assumed: Vec<String>,
    /// A facts file without its kind and schema; everything that the thread leaves out is absent.
    #[serde(default)]
    pub(crate) facts: Value,
    /// The log that its author posted.
    #[serde(default)]
    pub(crate) log: Option<Log>,
    /// What the thread's answer says.
    pub(crate) answer: Answer,
}

/// Lines of a log.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Log {
    /// `nccl`, `ucx` or `other`.
    pub(crate) program: String,
    pub(crate) lines: Vec<String>,
}

/// The cause, as the thread confirms it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Answer {
    pub(crate) cause: String,
    /// Who confirmed it: `author`, `maintainer`, `other user`.
    pub(crate) by: String,
    /// A finding names the cause if its name, title or reason has one of these. Nothing is wrong
    /// if there are none.
    pub(crate) named: Vec<String>,
    /// Its fix works if it has one of these.
    pub(crate) fix: Vec<String>,
}

/// How a diagnosis compares with the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Score {
    /// The first error or warning is the cause, with a working fix.
    Right,
    /// The cause is named, but not first, or without a working fix.
    Partly,
    /// Errors or warnings, none of them the cause.
    Wrong,
    /// No error, no warning, and the cause is not named.
    Silent,
}

impl Score {
    pub(crate) const ALL: [Self; 4] = [Self::Right, Self::Partly, Self::Wrong, Self::Silent];
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Right => "right",
            Self::Partly => "partly",
            Self::Wrong => "wrong",
            Self::Silent => "silent",
        })
    }
}

/// All cases of a set: `threads` or `unseen`.
pub(crate) fn cases(set: &str) -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(set);
    let mut files: Vec<_> =
        std::fs::read_dir(&folder).expect("a set of cases").map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|end| end == "json"));
    files.sort();
    let case = |path: &std::path::PathBuf| {
        let text = std::fs::read_to_string(path).unwrap();
        let mut case: Case =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        case.name = path.file_stem().unwrap().to_string_lossy().into_owned();
        case
    };
    files.iter().map(case).collect()
}

impl Case {
    /// The facts as `doctor --facts` would read them.
    pub(crate) fn facts(&self) -> Facts {
        let mut whole = self.facts.clone();
        if whole.is_null() {
            whole = Value::Object(serde_json::Map::new());
        }
        whole["kind"] = KIND.into();
        whole["schema"] = SCHEMA.into();
        Facts::from_json(&whole.to_string()).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// The score, and what was said first.
    pub(crate) fn score(&self) -> (Score, String) {
        let said = self.said();
        let loud: Vec<&Said> = said.iter().filter(|said| said.severity >= Severity::Warning).collect();
        let first = loud.first().map(|said| said.name.clone()).unwrap_or_default();
        let names = |said: &Said| has(&said.text, &self.answer.named);
        let fixes = |said: &Said| names(said) && has(&said.fix, &self.answer.fix);
        let score = match loud.first() {
            None if self.answer.named.is_empty() => Score::Right,
            Some(first) if names(first) && said.iter().any(fixes) => Score::Right,
            _ if said.iter().any(names) => Score::Partly,
            Some(_) => Score::Wrong,
            None => Score::Silent,
        };
        (score, first)
    }

    /// Everything that the doctor says, gravest first.
    fn said(&self) -> Vec<Said> {
        let facts = self.facts();
        let diagnosis = diagnose(&facts);
        let mut said: Vec<Said> = diagnosis
            .findings
            .iter()
            .map(|finding| Said {
                name: finding.id.to_owned(),
                severity: finding.severity,
                text: format!("{} {} {}", finding.id, finding.title, finding.why),
                fix: finding.fix.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"),
            })
            .collect();
        let Some(log) = &self.log else { return said };
        let text = log.lines.join("\n");
        let logs = log::read_any(text.as_bytes(), |_| {}).unwrap();
        match log.program.as_str() {
            "nccl" => said.extend(of_report(&log::join_nccl(&logs.nccl, &facts, &diagnosis))),
            "ucx" => said.extend(of_report(&log::join_ucx(&logs.ucx, &facts, &diagnosis))),
            _ => {
                said.extend(of_report(&log::join_fabric(&logs.fabric, &facts, &diagnosis)));
                said.extend(of_report(&log::join_other(&logs.other, &facts, &diagnosis)));
            }
        }
        said
    }
}

/// What a report of a log says.
fn of_report(report: &log::LogReport) -> Vec<Said> {
    let mut said = Vec::new();
    let line = |name: &str, severity, text: &str| Said {
        name: name.to_owned(),
        severity,
        text: text.to_owned(),
        fix: text.to_owned(),
    };
    // The first cause of a problem is the diagnosis; the others are named with it.
    let mut before = "";
    for cause in &report.causes {
        let severity = if cause.problem == before { Severity::Info } else { Severity::Warning };
        before = &cause.problem;
        let text = match severity {
            Severity::Info => cause.cause.to_owned(),
            _ => format!("{} {}", cause.problem, cause.cause),
        };
        let fix = cause.fix.to_string();
        said.push(Said { name: "log".to_owned(), severity, text, fix });
    }
    for fatal in &report.fatal {
        if !report.causes.iter().any(|cause| cause.problem.contains(fatal.name)) {
            // What was flushed follows from another error, and says so.
            let severity = if fatal.status == 5 { Severity::Info } else { Severity::Warning };
            said.push(line("log", severity, fatal.meaning));
        }
    }
    let explained = |meaning: &str| report.causes.iter().any(|cause| cause.problem == meaning);
    let plain = report.problems.iter().filter(|(meaning, _)| !explained(meaning));
    said.extend(plain.map(|(meaning, _)| line("log", Severity::Warning, meaning)));
    let reasons = report.not_direct.iter().flat_map(|row| &row.why);
    said.extend(reasons.map(|why| line("log", Severity::Info, why)));
    said.extend(report.notes.iter().map(|note| line("log", Severity::Info, note)));
    said
}

/// One statement of the doctor.
struct Said {
    name: String,
    severity: Severity,
    text: String,
    fix: String,
}

fn has(text: &str, phrases: &[String]) -> bool {
    let text = text.to_lowercase();
    phrases.iter().any(|phrase| text.contains(&phrase.to_lowercase()))
}
