//! Scores the diagnoses of the corpus: `score [threads|unseen]`.

#[expect(dead_code, reason = "the example checks no sources")]
#[path = "../tests/common/corpus.rs"]
mod corpus;

use std::collections::BTreeMap;

fn main() {
    let set = std::env::args().nth(1).unwrap_or_else(|| "threads".to_owned());
    let mut totals: BTreeMap<corpus::Score, usize> = BTreeMap::new();
    let cases = corpus::cases(&set);
    for case in &cases {
        let (score, first) = case.score();
        *totals.entry(score).or_default() += 1;
        println!("{score:<6}  {:<40}  {first:<24}  {}", case.name, case.answer.cause);
    }
    for score in corpus::Score::ALL {
        let count = totals.get(&score).copied().unwrap_or(0);
        println!("{score:<6}  {count:>3} of {}", cases.len());
    }
}
