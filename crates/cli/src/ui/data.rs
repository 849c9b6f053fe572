//! What the page shows: the machine, predictions, measurements.

use std::path::Path;

use anyhow::{Context, bail};
use clap::Parser;
use nobounce_topology::facts::Facts;
use nobounce_topology::machines;
use serde_json::{Value, json};

use super::args::Shown;
use crate::doctor;
use crate::live::{self, Device};
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

/// All that was read at the start.
#[derive(Debug)]
pub(super) struct Data {
    facts: Facts,
    /// What the page calls the machine of these facts.
    label: String,
    /// Whether a report has the devices of this machine: they have addresses and names of programs.
    live: bool,
    bench: Vec<(String, Value)>,
}

#[derive(Debug, Parser)]
#[command(name = "predict", no_binary_name = true, disable_help_flag = true)]
struct Line {
    #[command(flatten)]
    args: PredictArgs,
}

impl Data {
    pub(super) fn read(shown: &Shown) -> anyhow::Result<Self> {
        let mut facts = doctor::facts(&shown.source)?;
        if shown.anonymous {
            facts = facts.redacted();
        }
        let bench = shown.bench.iter().map(|path| bench_file(path)).collect::<anyhow::Result<_>>()?;
        let doctor::args::Source { facts: file, root, example, .. } = &shown.source;
        let label = match (file.as_ref().or(root.as_ref()), example) {
            (Some(path), _) => path.display().to_string(),
            (None, Some(name)) => format!("Example: {name}"),
            (None, None) => "This machine".to_owned(),
        };
        let is_here = file.is_none() && root.is_none() && example.is_none();
        Ok(Self { facts, label, live: is_here && !shown.anonymous, bench })
    }

    /// The data of a known machine.
    pub(super) fn example() -> Option<Self> {
        let facts = machines::machine("dgx-h100")?;
        Some(Self { facts, label: "Example: dgx-h100".to_owned(), live: false, bench: Vec::new() })
    }

    /// The devices of this machine, for a report.
    pub(super) fn devices(&self) -> Vec<Device> {
        if self.live { live::devices() } else { Vec::new() }
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
        let parsed = Line::try_parse_from(line).map_err(|error| {
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

fn bench_file(path: &Path) -> anyhow::Result<(String, Value)> {
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
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    Ok((name, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn option(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
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
