//! Where the facts of recorded cases are from.
//!
//! `provenance.json` lists, by the address of a thread, the changed facts that it states
//! (`quoted`), and how the case departs from it (`differs`). A changed fact that is not listed is
//! assumed; so is everything of the base machine. A thread without an entry has not been compared.

#[expect(dead_code, reason = "what cases give is another test's")]
#[path = "common/cases.rs"]
mod cases;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

/// Threads without an entry: their cases are made after the thread, and not compared with its text.
/// A new case needs an entry.
const NOT_COMPARED: usize = 3;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Origin {
    quoted: Vec<String>,
    #[serde(default)]
    differs: Option<String>,
}

/// `OWNER/NAME#NUMBER` of the address of a thread.
fn short(address: &str) -> Option<String> {
    let (repository, rest) = address
        .strip_prefix("https://github.com/")?
        .split_once("/issues/")
        .or_else(|| address.strip_prefix("https://github.com/")?.split_once("/pull/"))?;
    Some(format!("{repository}#{rest}"))
}

#[test]
fn quoted_facts_are_facts_of_their_cases() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/provenance.json");
    let origins: BTreeMap<String, Origin> =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(origins.len() >= 75, "{}", origins.len());
    let all = cases::all();
    for (address, origin) in &origins {
        let thread = short(address).unwrap_or_else(|| panic!("{address} is no thread"));
        let cases: Vec<_> = all.iter().filter(|(_, case)| case.thread == thread).collect();
        assert!(!cases.is_empty(), "{address}: no case is taken from it");
        for path in &origin.quoted {
            let changes =
                cases.iter().flat_map(|(_, case)| case.set.iter().map(|(path, _)| path).chain(&case.remove));
            assert!(changes.into_iter().any(|change| change == path), "{address}: no case changes {path}");
        }
        assert!(origin.differs.as_ref().is_none_or(|text| text.len() > 10), "{address}");
    }
    let compared: BTreeSet<String> = origins.keys().filter_map(|address| short(address)).collect();
    let threads: BTreeSet<&String> = all.iter().map(|(_, case)| &case.thread).collect();
    let open: Vec<_> =
        threads.into_iter().filter(|thread| *thread != "none" && !compared.contains(*thread)).collect();
    assert!(open.len() <= NOT_COMPARED, "{} threads are not compared: {open:#?}", open.len());
}
