//! Public threads: facts from the question, the cause from the answer, and how many are diagnosed.

#[path = "common/corpus.rs"]
mod corpus;

use std::collections::{BTreeMap, BTreeSet};

use corpus::{Case, Score, cases};
use serde_json::Value;

/// Cases of `threads` that are diagnosed right. None is diagnosed wrong.
const RIGHT: usize = 107;

#[test]
fn every_fact_is_quoted_or_assumed() {
    for case in cases("threads").iter().chain(&cases("unseen")) {
        assert_eq!(unsourced(case), Vec::<String>::new(), "{}", case.name);
        let both: Vec<_> = case.quoted.iter().filter(|path| case.assumed.contains(path)).collect();
        assert!(both.is_empty(), "{}: {both:?} is quoted and assumed", case.name);
        assert!(case.log.is_some() || !case.quoted.is_empty(), "{}: nothing is quoted", case.name);
    }
}

#[test]
fn every_case_names_its_thread_and_its_answer() {
    let mut threads = BTreeSet::new();
    for case in cases("threads").iter().chain(&cases("unseen")) {
        assert!(case.thread.starts_with("https://"), "{}: {}", case.name, case.thread);
        assert!(threads.insert(case.thread.clone()), "{}: its thread has another case", case.name);
        assert!(case.problem.len() > 10 && case.answer.cause.len() > 10, "{}", case.name);
        assert_eq!(case.answer.named.is_empty(), case.answer.fix.is_empty(), "{}", case.name);
        assert!(["author", "maintainer", "other user"].contains(&&*case.answer.by), "{}", case.name);
        if let Some(log) = &case.log {
            assert!(
                ["nccl", "ucx", "other"].contains(&&*log.program) && !log.lines.is_empty(),
                "{}",
                case.name
            );
        }
        // Read as the command would read them.
        let _ = case.facts();
    }
}

#[test]
fn the_same_is_found_without_names() {
    let mut wrong = Vec::new();
    for case in cases("threads").iter().chain(&cases("unseen")) {
        let facts = case.facts();
        let wanted = nobounce_diagnose::diagnose(&facts).ids();
        let found = nobounce_diagnose::diagnose(&facts.redacted()).ids();
        if found != wanted {
            wrong.push(format!("{}: {found:?}, not {wanted:?}", case.name));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_score_does_not_fall() {
    let mut totals: BTreeMap<Score, Vec<String>> = BTreeMap::new();
    for case in cases("threads") {
        let (score, first) = case.score();
        totals.entry(score).or_default().push(format!("{} ({first})", case.name));
    }
    let count = |score| totals.get(&score).map_or(0, Vec::len);
    assert_eq!(Score::ALL.map(count).iter().sum::<usize>(), cases("threads").len());
    assert!(count(Score::Right) >= RIGHT, "{} are right, {RIGHT} were: {totals:#?}", count(Score::Right));
    assert_eq!(count(Score::Wrong), 0, "{totals:#?}");
}

/// Paths of facts without a source, and sources without a fact.
fn unsourced(case: &Case) -> Vec<String> {
    let mut leaves = Vec::new();
    paths(&case.facts, "", &mut leaves);
    let sources: BTreeSet<&String> = case.quoted.iter().chain(&case.assumed).collect();
    let lone = leaves.iter().filter(|leaf| !sources.iter().any(|source| covers(source, leaf))).cloned();
    let empty = sources.iter().filter(|source| !leaves.iter().any(|leaf| covers(source, leaf)));
    lone.chain(empty.map(|source| format!("{source} (no such fact)"))).collect()
}

/// Paths of all values that are no objects and no lists of objects.
fn paths(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, field) in fields {
                paths(field, &format!("{at}/{}", name.replace('/', "~1")), found);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            for (index, item) in items.iter().enumerate() {
                paths(item, &format!("{at}/{index}"), found);
            }
        }
        Value::Null if at.is_empty() => {}
        _ => found.push(at.to_owned()),
    }
}

/// Whether a source covers a fact: the same path or one above it.
fn covers(source: &str, leaf: &str) -> bool {
    let mut parts = leaf.split('/');
    source.split('/').all(|wanted| parts.next().is_some_and(|part| wanted == "*" || wanted == part))
}
