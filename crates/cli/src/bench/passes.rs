//! Merges several passes into one result per case: the trimmed mean, and the figure of each pass.
//!
//! One long measurement shows how steady that moment was, not what the next run will find. Machines
//! drift within seconds, and some factors are fixed at process start (memory placement, CPU). So
//! every case is measured several times for a shorter time. A pass covers all cases, and each pass
//! uses fresh processes.

use nobounce_predict::calibration::middle;

use super::model::{CaseOutcome, KEPT_SAMPLES};
use super::numbers::rounded;
use super::stats::thin;

/// Passes of an ordinary run.
pub(super) const USUAL: u32 = 5;
/// Passes at the most: more would be an evening.
pub(super) const MAX: u32 = 400;

/// Merges the results of all passes; `None` without a pass.
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
    one.mean_us = all(|pass| pass.mean_us);
    one.p99_us = all(|pass| pass.p99_us);
    one.p999_us = all(|pass| pass.p999_us);
    one.gbytes_per_s = all(|pass| pass.gbytes_per_s);
    one.mops = all(|pass| pass.mops);
    one.of_raw = all(|pass| pass.of_raw);
    one.of_tcp = all(|pass| pass.of_tcp);
    one.cpu_s_per_gb = all(|pass| pass.cpu_s_per_gb);
    one.cpu_s_per_mop = all(|pass| pass.cpu_s_per_mop);
    one.link = links(&passes);
    one.passes = passes.iter().filter_map(headline).collect();
    one.compared = passes.iter().map(|pass| pass.compared).sum();
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

/// The link of a case; if passes differ, how many used which.
fn links(passes: &[CaseOutcome]) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for pass in passes {
        match counts.iter_mut().find(|(link, _)| *link == pass.link) {
            Some((_, count)) => *count += 1,
            None => counts.push((&pass.link, 1)),
        }
    }
    match counts[..] {
        [(link, _)] => link.to_owned(),
        _ => {
            let each = |(link, count): &(&str, usize)| format!("{link} in {count} of {}", passes.len());
            format!("{} passes", counts.iter().map(each).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Why packets used a slower link, one line per reason; reasons of some passes only name those
/// passes.
pub(super) fn fallbacks(passes: &[Vec<String>]) -> Vec<String> {
    let mut reasons: Vec<&String> = Vec::new();
    for reason in passes.iter().flatten() {
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    let line = |reason: &String| {
        let of: Vec<String> = (1..)
            .zip(passes)
            .filter(|(_, pass)| pass.contains(reason))
            .map(|(at, _)| at.to_string())
            .collect();
        if of.len() == passes.len() {
            return reason.clone();
        }
        format!("in pass {} of {}: {reason}", of.join(", "), passes.len())
    };
    reasons.into_iter().map(line).collect()
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
    fn a_pass_that_took_another_link_is_said() {
        let case = sample_report().results[0].clone();
        let pass = |link: &str| CaseOutcome { link: link.to_owned(), ..case.clone() };
        let link = |links: &[&str]| merged(links.iter().map(|link| pass(link)).collect()).unwrap().link;
        assert_eq!(link(&["shm", "shm", "shm"]), "shm");
        assert_eq!(link(&["shm", "udp", "shm"]), "shm in 2 of 3, udp in 1 of 3 passes");
        assert_eq!(link(&["udp", "shm"]), "udp in 1 of 2, shm in 1 of 2 passes");
    }

    #[test]
    fn the_reasons_of_every_pass_are_kept_and_say_of_which_they_are() {
        let pass = |reasons: &[&str]| reasons.iter().map(|reason| (*reason).to_owned()).collect::<Vec<_>>();
        assert_eq!(fallbacks(&[pass(&["no room"])]), ["no room"]);
        assert_eq!(fallbacks(&[pass(&["no room"]), pass(&["no room"])]), ["no room"]);
        let one = fallbacks(&[pass(&[]), pass(&["no room"]), pass(&[])]);
        assert_eq!(one, ["in pass 2 of 3: no room"]);
        let two = fallbacks(&[pass(&["no room"]), pass(&["another user"]), pass(&["no room"])]);
        assert_eq!(two, ["in pass 1, 3 of 3: no room", "in pass 2 of 3: another user"]);
        assert!(fallbacks(&[pass(&[]), pass(&[])]).is_empty());
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
