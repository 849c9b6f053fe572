//! Several passes through a plan become one result for each case: the mean of the passes but for the extremes, and what each of them found.
//!
//! A case that is measured once for a while says how steady those moments were, not what the next run will find: machines change within
//! seconds, and some of it is drawn when a process starts (where its memory lies, which CPU it gets). So everything is measured several times
//! for a shorter while, all cases of one pass before the next one, between new processes each time.

use super::model::{CaseOutcome, KEPT_SAMPLES, rounded};
use super::stats::{middle, thin};

/// Passes of an ordinary run.
pub(super) const USUAL: u32 = 5;
/// Passes at the most: more would be an evening.
pub(super) const MAX: u32 = 100;

/// One result from those of all passes; none where there was no pass.
pub(super) fn merged(passes: Vec<CaseOutcome>) -> Option<CaseOutcome> {
    let mut one = passes.first()?.clone();
    if passes.len() == 1 {
        return Some(one);
    }
    let all = |of: fn(&CaseOutcome) -> Option<f64>| {
        middle(&passes.iter().filter_map(of).collect::<Vec<_>>()).map(rounded)
    };
    one.min_us = passes.iter().filter_map(|pass| pass.min_us).reduce(f64::min);
    one.p50_us = all(|pass| pass.p50_us);
    one.p99_us = all(|pass| pass.p99_us);
    one.p999_us = all(|pass| pass.p999_us);
    one.gbytes_per_s = all(|pass| pass.gbytes_per_s);
    one.mops = all(|pass| pass.mops);
    one.of_raw = all(|pass| pass.of_raw);
    one.passes = passes.iter().filter_map(headline).collect();
    one.iters = passes.iter().map(|pass| pass.iters).sum();
    let every: Vec<f64> = passes.iter().flat_map(|pass| pass.samples.iter().copied()).collect();
    one.samples = thin(&every, KEPT_SAMPLES);
    for other in &passes[1..] {
        match (&mut one.counted, &other.counted) {
            (Some(sum), Some(more)) => sum.add(more),
            (none, more) => *none = none.or(*more),
        }
    }
    if let Some(wrong) = passes.into_iter().find(|pass| !pass.verified) {
        (one.verified, one.fault) = (false, wrong.fault);
    }
    Some(one)
}

/// The figure a case is about.
fn headline(one: &CaseOutcome) -> Option<f64> {
    one.p50_us.or(one.gbytes_per_s).or(one.mops)
}

#[cfg(test)]
mod tests {
    use super::super::flow_tests::sample_report;
    use super::*;

    #[test]
    fn the_middle_of_the_passes_counts_and_each_is_kept() {
        let report = sample_report();
        let case = report.results.iter().find(|one| one.p50_us.is_some()).unwrap();
        let pass = |p50: f64| CaseOutcome { p50_us: Some(p50), min_us: Some(p50 / 2.0), ..case.clone() };
        let one = merged(vec![pass(5.0), pass(3.0), pass(40.0)]).unwrap();
        assert_eq!((one.p50_us, one.min_us), (Some(5.0), Some(1.5)));
        assert_eq!(one.passes, [5.0, 3.0, 40.0]);
        assert_eq!(one.iters, 3 * case.iters);
        assert!(one.samples.len() <= KEPT_SAMPLES && one.verified);
        assert_eq!(merged(vec![case.clone()]).unwrap(), *case);
        assert_eq!(merged(Vec::new()), None);
    }

    #[test]
    fn one_wrong_byte_in_any_pass_is_wrong() {
        let report = sample_report();
        let good = report.results[0].clone();
        let wrong = CaseOutcome { verified: false, fault: Some("byte 3".to_owned()), ..good.clone() };
        let one = merged(vec![good.clone(), wrong, good]).unwrap();
        assert!(!one.verified);
        assert_eq!(one.fault.as_deref(), Some("byte 3"));
    }
}
