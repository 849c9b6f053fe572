//! What the page shows: the machine, predictions, measurements.

use std::path::{Component, Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, bail};
use clap::Parser;
use nobounce_topology::facts::{Facts, hide_addresses};
use nobounce_topology::machines;
use serde_json::{Value, json};

use super::args::Shown;
use crate::doctor;
use crate::live::{self, LiveDevice, Redactor};
use crate::predict;
use crate::predict::args::PredictArgs;

/// The machine of the arguments, among the names that the page offers.
const THIS: &str = "this";

/// Options of `predict` that the page may set: none of them names a file.
const OPTIONS: [&str; 22] = [
    "machine",
    "link",
    "nic-slot",
    "gpu-slot",
    "distance",
    "rails",
    "mtu",
    "hops",
    "sharers",
    "memory",
    "op",
    "software",
    "platform",
    "max-payload",
    "max-read-request",
    "size",
    "nodes",
    "gpus-per-node",
    "nics-per-node",
    "bytes",
    "compute",
    "overlap",
];
/// And those without a value.
const FLAGS: [&str; 1] = ["strict-order"];

/// Fields of a measurement that are long and not drawn.
const NOT_DRAWN: [&str; 2] = ["samples", "counted"];
/// Fields of a measurement that name a machine, a peer or a file.
const NAMING: [&str; 5] = ["command", "host", "hostname", "peer", "address"];

/// All that was read at the start.
#[derive(Debug)]
pub(super) struct Data {
    facts: Facts,
    /// What the page calls the machine of these facts.
    label: String,
    /// Whether a report has the devices of this machine: they have addresses and names of programs.
    live: bool,
    bench: Vec<(String, Value)>,
    /// Renames live devices, if nothing may be named.
    redactor: Option<Mutex<Redactor>>,
}

#[derive(Debug, Parser)]
#[command(name = "predict", no_binary_name = true, disable_help_flag = true)]
struct PredictLine {
    #[command(flatten)]
    args: PredictArgs,
}

impl Data {
    pub(super) fn read(shown: &Shown) -> anyhow::Result<Self> {
        let mut facts = doctor::facts(&shown.source)?;
        if shown.anonymous {
            facts = facts.redacted();
        }
        let files = shown.bench.iter().map(|path| bench_file(path)).collect::<anyhow::Result<Vec<_>>>()?;
        let bench = if shown.anonymous {
            let named = files.into_iter().enumerate();
            named.map(|(nth, file)| (format!("measurement {}", nth + 1), redacted(file))).collect()
        } else {
            labels(&shown.bench).into_iter().zip(files).collect()
        };
        let doctor::args::Source { facts: file, root, example, .. } = &shown.source;
        let label = match (file.as_ref().or(root.as_ref()), example) {
            (Some(_), _) if shown.anonymous => "Recorded machine".to_owned(),
            (Some(path), _) => path.display().to_string(),
            (None, Some(name)) => format!("Example: {name}"),
            (None, None) => "This machine".to_owned(),
        };
        let is_here = file.is_none() && root.is_none() && example.is_none();
        let redactor = shown.anonymous.then(Mutex::default);
        Ok(Self { facts, label, live: is_here && !shown.anonymous, bench, redactor })
    }

    /// The data of a known machine.
    pub(super) fn example() -> Option<Self> {
        let facts = machines::machine("dgx-h100")?;
        Some(Self {
            facts,
            label: "Example: dgx-h100".to_owned(),
            live: false,
            bench: Vec::new(),
            redactor: None,
        })
    }

    /// The devices of this machine, for a report.
    pub(super) fn devices(&self) -> Vec<LiveDevice> {
        if self.live { live::devices() } else { Vec::new() }
    }

    /// An event of the live view.
    pub(super) fn event(&self) -> Value {
        self.event_of(live::devices(), live::trouble())
    }

    fn event_of(&self, devices: Vec<LiveDevice>, trouble: Option<String>) -> Value {
        let Some(redactor) = &self.redactor else { return live::event(&devices, trouble) };
        let mut redactor = redactor.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let trouble = trouble.map(|_| "The folder of live counters cannot be used.".to_owned());
        live::event(&redactor.redact(devices), trouble)
    }

    /// Findings, facts and topology of a known machine, or of this one.
    pub(super) fn machine(&self, name: &str) -> anyhow::Result<Value> {
        let known;
        let facts = if name == THIS {
            &self.facts
        } else {
            known = machines::machine(name).with_context(|| format!("unknown machine {name:?}"))?;
            &known
        };
        let mut found = doctor::json(facts)?;
        found["name"] = json!(name);
        let known = machines::NAMES.iter().map(|name| (*name, format!("Example: {name}")));
        found["machines"] = json!([(THIS, self.label.clone())].into_iter().chain(known).collect::<Vec<_>>());
        Ok(found)
    }

    /// What `predict --json` prints with these options.
    pub(super) fn predict(&self, options: &[(String, String)]) -> anyhow::Result<Value> {
        let mut line = vec!["--json".to_owned()];
        for (name, value) in options {
            if OPTIONS.contains(&name.as_str()) {
                line.push(format!("--{name}={value}"));
            } else if FLAGS.contains(&name.as_str()) && value == "true" {
                line.push(format!("--{name}"));
            } else {
                bail!("{name} cannot be set here");
            }
        }
        let parsed = PredictLine::try_parse_from(line).map_err(|error| {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            anyhow::anyhow!("{}", first.trim_start_matches("error: "))
        })?;
        predict::json(&parsed.args, &self.facts)
    }

    /// The measurements, the first one first.
    pub(super) fn bench_list(&self) -> Value {
        let files = self.bench.iter().map(|(name, file)| {
            json!({ "name": name, "schema": file["schema"], "started": file["started"], "machine": file["machine"] })
        });
        json!({ "files": files.collect::<Vec<_>>() })
    }

    pub(super) fn bench_file(&self, name: &str) -> Option<&Value> {
        self.bench.iter().find(|(known, _)| known == name).map(|(_, file)| file)
    }

    /// All measurements with their names.
    pub(super) fn bench_all(&self) -> Value {
        self.bench.iter().map(|(name, file)| json!({ "name": name, "json": file })).collect()
    }
}

fn bench_file(path: &Path) -> anyhow::Result<Value> {
    let text = doctor::read(path)?;
    let mut file: Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))?;
    if !file["schema"].as_str().is_some_and(|schema| schema.starts_with("nobounce-")) {
        bail!("{} is no file of `nobounce bench --json`", path.display());
    }
    for result in file["results"].as_array_mut().into_iter().flatten() {
        if let Some(fields) = result.as_object_mut() {
            NOT_DRAWN.iter().for_each(|name| drop(fields.remove(*name)));
        }
    }
    Ok(file)
}

/// A name for each file: the shortest end of its path that no other file has. A file that is given
/// twice gets a number.
fn labels(paths: &[PathBuf]) -> Vec<String> {
    let end = |path: &Path, parts: usize| {
        let all: Vec<_> = path.components().filter(|part| *part != Component::CurDir).collect();
        all[all.len().saturating_sub(parts)..].iter().collect::<PathBuf>()
    };
    let longest = paths.iter().map(|path| path.components().count()).max().unwrap_or(0);
    let mut labels: Vec<String> = Vec::new();
    for path in paths {
        let is_one =
            |parts: &usize| paths.iter().filter(|other| end(other, *parts) == end(path, *parts)).count() == 1;
        let parts = (1..=longest).find(is_one).unwrap_or(1);
        let label = end(path, parts).display().to_string();
        let numbered = (2..).map(|n| format!("{label} ({n})"));
        let free = std::iter::once(label.clone()).chain(numbered).find(|name| !labels.contains(name));
        labels.extend(free);
    }
    labels
}

/// A measurement without what names a machine: addresses stand in remarks, too.
fn redacted(file: Value) -> Value {
    match file {
        Value::String(text) => Value::String(hide_addresses(&text)),
        Value::Array(all) => all.into_iter().map(redacted).collect(),
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(name, _)| !NAMING.contains(&name.as_str()));
            kept.map(|(name, value)| (name, redacted(value))).collect()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn option(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
    }

    /// A folder with files, removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("node17-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn file(&self, name: &str, text: &str) -> PathBuf {
            let path = self.0.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn files_of_one_name_stay_apart() {
        let folder = Folder::new("names");
        let text = |started: &str| format!(r#"{{"schema": "nobounce-bench/1", "started": "{started}"}}"#);
        let bench = vec![folder.file("a/run.json", &text("one")), folder.file("b/run.json", &text("two"))];
        let shown = Shown { source: example(), bench, ..Shown::default() };
        let data = Data::read(&shown).unwrap();
        for (name, started) in [("a/run.json", "one"), ("b/run.json", "two")] {
            assert_eq!(data.bench_file(name).unwrap()["started"], started);
        }
        assert_eq!(data.bench_all().as_array().unwrap().len(), 2);
        let of = |paths: &[&str]| labels(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(of(&["x/a.json", "y/b.json"]), ["a.json", "b.json"]);
        assert_eq!(of(&["r.json", "./x/r.json", "/r.json"]), ["r.json", "x/r.json", "/r.json"]);
        assert_eq!(of(&["x/r.json", "x/r.json"]), ["r.json", "r.json (2)"]);
    }

    fn example() -> doctor::args::Source {
        doctor::args::Source { example: Some("dgx-h100".to_owned()), ..Default::default() }
    }

    #[test]
    fn anonymous_data_names_nothing() {
        let folder = Folder::new("anonymous");
        let mut facts = machines::machine("dgx-h100").unwrap();
        facts.host = Some("gpu-rack7".to_owned());
        let facts = folder.file("facts-of-rack7.json", &facts.to_json());
        let bench = folder.file(
            "to-10.1.2.3.json",
            r#"{"schema": "nobounce-bench/1", "command": "nobounce bench --peer 10.1.2.3", "notes": ["10.1.2.3: slow"],
            "machine": {"cpu": "Xeon", "host": "gpu-rack7"}, "results": [{"op": "write", "fault": "no answer of 10.1.2.3:7"}]}"#,
        );
        let source = doctor::args::Source { facts: Some(facts), ..Default::default() };
        let shown = |anonymous| Shown { source: source.clone(), bench: vec![bench.clone()], anonymous };
        let device = LiveDevice {
            pid: 31337,
            id: "31337-0".to_owned(),
            program: "my_model".to_owned(),
            address: "10.1.2.3".to_owned(),
            ..LiveDevice::default()
        };
        let told = |anonymous| {
            let data = Data::read(&shown(anonymous)).unwrap();
            let event = data.event_of(vec![device.clone()], Some("/run/user/31337 is open".to_owned()));
            format!("{} {} {event}", crate::ui::content(&data).unwrap(), data.bench_list())
        };
        let (open, hidden) = (told(false), told(true));
        for secret in ["10.1.2.3", "rack7", "node17", "31337", "my_model"] {
            assert!(open.contains(secret), "{secret} is told otherwise");
            assert!(!hidden.contains(secret), "{secret}");
        }
        assert!(hidden.contains("Recorded machine") && hidden.contains("Xeon"));
    }

    #[test]
    fn predictions_are_those_of_the_command_and_name_no_files() {
        let data = Data::example().unwrap();
        let found = data.predict(&[option("size", "8..1M"), option("rails", "2")]).unwrap();
        assert_eq!(found["schema"], "nobounce-predict/1");
        let cluster = data.predict(&[option("nodes", "4"), option("bytes", "1073741824")]).unwrap();
        assert_eq!(cluster["schema"], "nobounce-impact/1");
        for (name, value) in
            [("facts", "/etc/passwd"), ("plot", "/tmp/x"), ("calibration", "x"), ("strict-order", "--json")]
        {
            let refused = data.predict(&[option(name, value)]).unwrap_err().to_string();
            assert!(refused.contains("cannot be set"), "{refused}");
        }
        let wrong = data.predict(&[option("rails", "--plot=/tmp/x")]).unwrap_err().to_string();
        assert!(wrong.starts_with("invalid value"), "{wrong}");
    }
}
