//! Recorded cases: lists of machines with one thing wrong, as changes to healthy ones.

use std::path::Path;

use nobounce_topology::facts::Facts;
use nobounce_topology::machines;
use serde::Deserialize;
use serde_json::Value;

use self::edit::edit;

#[path = "edit.rs"]
mod edit;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    /// The public thread it is taken from.
    pub(crate) thread: String,
    /// What was wrong there.
    pub(crate) says: String,
    pub(crate) base: String,
    #[serde(default)]
    pub(crate) set: Vec<(String, Value)>,
    #[serde(default)]
    pub(crate) remove: Vec<String>,
    /// `error peermem-not-loaded`, ...: all of them.
    pub(crate) finds: Vec<String>,
    /// The paths of GPUs with their best adapter: all kinds that occur.
    pub(crate) paths: Vec<String>,
    /// What NCCL does with them: all kinds that occur.
    #[serde(default)]
    pub(crate) nccl: Option<Vec<String>>,
    /// What UCX does with them.
    #[serde(default)]
    pub(crate) ucx: Option<Vec<String>>,
    /// Whether exit code 1 follows; where it is left out, it does if there is an error.
    #[serde(default)]
    pub(crate) lost: Option<bool>,
}

/// The facts of a case.
pub(crate) fn apply(case: &Case) -> Facts {
    let facts =
        machines::machine(&case.base).unwrap_or_else(|| panic!("{}: no machine {}", case.thread, case.base));
    edit(&facts, &case.remove, &case.set, &case.thread)
}

/// All cases, each with the name of its file.
pub(crate) fn all() -> Vec<(String, Case)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
        .iter()
        .flat_map(|path| {
            let text = std::fs::read_to_string(path).unwrap();
            let cases: Vec<Case> =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            cases.into_iter().map(move |case| (name.clone(), case))
        })
        .collect()
}
