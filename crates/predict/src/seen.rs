//! Residuals of a machine beyond the fitted constants: a factor of its own, for each measured size.
//!
//! Constants describe what is common to all sizes. A machine handles some sizes better or worse for
//! reasons that no constant covers. Residuals that the passes of a run agree on are kept as a named
//! time, positive or negative. They are bounded, follow the fitted curve between sizes, and vanish
//! a factor of eight beyond the measured sizes. They never make a longer message faster than a
//! shorter one.

use super::calibration::Fit;
use super::measured::middle;
use super::route::float;

/// Fewest passes that give a spread. Fewer may have met one stall, and nothing is kept of them.
const ENOUGH: usize = 3;

/// Prior error of a pass, as a share: few passes that agree by chance count for less.
const SURMISE: f64 = 0.1;

/// Bounds of a residual as a share of the fitted time, upwards and downwards.
const MOST: (f64, f64) = (1.0, 0.5);

/// Smaller residuals, as a share of the fitted time, are dropped.
const LEAST: f64 = 0.01;

/// Range of validity: up to this multiple of the largest measured size, and down to this fraction
/// of the smallest.
const REACH: u64 = 8;

/// One size that was measured.
#[derive(Clone, Debug)]
pub(super) struct MeasuredPoint {
    /// Microseconds by the constants.
    pub(super) fitted: f64,
    /// Microseconds that were measured.
    pub(super) measured: f64,
    /// Microseconds of every pass.
    pub(super) passes: Vec<f64>,
}

impl MeasuredPoint {
    /// Run-to-run uncertainty of the trimmed mean of such passes, as a share; `None` with too few
    /// passes.
    fn uncertainty(&self) -> Option<f64> {
        let logs: Vec<f64> = self.passes.iter().map(|time| time.ln()).collect();
        let count = u32::try_from(logs.len()).ok().filter(|_| logs.len() >= ENOUGH).map(f64::from)?;
        let mean = middle(&logs)?;
        let spread = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() + SURMISE * SURMISE;
        Some(spread.sqrt() / count)
    }

    /// Microseconds with shrinkage: half of a residual as large as the uncertainty is kept, little
    /// of a smaller one, nearly all of a much larger one.
    fn expected(&self) -> f64 {
        let Some(uncertainty) = self.uncertainty() else { return self.fitted };
        let share = self.measured / self.fitted - 1.0;
        let part = share * share / (share * share + uncertainty * uncertainty);
        let kept = (share * part).clamp(-MOST.1, MOST.0);
        if kept.abs() < LEAST { self.fitted } else { self.fitted * (1.0 + kept) }
    }
}

/// Microseconds beyond the fitted ones that are kept of each size, in the order of sizes.
pub(super) fn kept(points: &[MeasuredPoint]) -> Vec<f64> {
    let expected = rising(points.iter().map(MeasuredPoint::expected));
    points.iter().zip(expected).map(|(point, expected)| expected - point.fitted).collect()
}

/// Isotonic regression: the nearest non-decreasing list; falling neighbours share their mean.
fn rising(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut pools: Vec<(f64, u32)> = Vec::new();
    for value in values {
        pools.push((value, 1));
        while let [.., (before, many), (after, more)] = pools[..] {
            if before <= after {
                break;
            }
            pools.truncate(pools.len() - 2);
            let all = many + more;
            pools.push(((before * f64::from(many) + after * f64::from(more)) / f64::from(all), all));
        }
    }
    pools.into_iter().flat_map(|(value, count)| (0..count).map(move |_| value)).collect()
}

/// Whether what a file says was kept can have been.
pub(super) fn is_possible(fit: &Fit) -> bool {
    let rises = fit.residuals.is_sorted_by(|a, b| a.size < b.size);
    let bounded = fit.residuals.iter().all(|one| {
        let share = one.seen_us / fit.fitted(one.size);
        (-MOST.1 - 1e-6..=MOST.0 + 1e-6).contains(&share)
    });
    rises && bounded
}

/// A size with its time by the constants, and by all that is known.
#[derive(Clone, Copy)]
struct Knot {
    size: u64,
    fitted: f64,
    expected: f64,
}

/// Microseconds beyond the fitted ones, of a message of any size.
pub(super) fn at(fit: &Fit, size: u64) -> f64 {
    let Some((first, last)) = fit.residuals.first().zip(fit.residuals.last()) else { return 0.0 };
    if fit.residuals.iter().all(|one| one.seen_us == 0.0) {
        return 0.0;
    }
    let knot = |at: usize| {
        let one = &fit.residuals[at];
        let fitted = fit.fitted(one.size);
        Knot { size: one.size, fitted, expected: fitted + one.seen_us }
    };
    let fitted = fit.fitted(size);
    let above = fit.residuals.partition_point(|one| one.size <= size);
    if above == 0 {
        let far = fit.fitted(first.size / REACH);
        let start = Knot { size: first.size / REACH, fitted: far, expected: far.min(knot(0).expected) };
        let expected =
            if size <= start.size { fitted.min(start.expected) } else { between(fit, start, knot(0), size) };
        return expected - fitted;
    }
    let below = knot(above - 1);
    if above < fit.residuals.len() {
        return between(fit, below, knot(above), size) - fitted;
    }
    let size_far = last.size.saturating_mul(REACH);
    let far = fit.fitted(size_far);
    let end = Knot { size: size_far, fitted: far, expected: far.max(below.expected) };
    let expected = if size >= end.size { fitted.max(end.expected) } else { between(fit, below, end, size) };
    expected - fitted
}

/// As far between two sizes as the fitted time is; by the doublings where that is the same at both.
fn between(fit: &Fit, low: Knot, high: Knot, size: u64) -> f64 {
    let rise = high.fitted - low.fitted;
    let way = if rise > 1e-9 * high.fitted {
        (fit.fitted(size) - low.fitted) / rise
    } else {
        let doublings = |size: u64| (float(size) + 1.0).log2();
        (doublings(size) - doublings(low.size)) / (doublings(high.size) - doublings(low.size)).max(1e-9)
    };
    low.expected + (high.expected - low.expected) * way.clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::super::calibration::{Bench, Calibration, Fit};
    use super::super::measured::Measured;
    use super::*;

    const SIZES: [u64; 9] = [1, 8, 64, 512, 4096, 32768, 262_144, 1 << 20, 8 << 20];

    /// A fit to passes that found `times` times these factors, in turn.
    fn fit(kind: &str, times: impl Fn(u64) -> f64, factors: &[f64]) -> Fit {
        let one = |size: u64| {
            let time = times(size);
            Measured::write(kind, size, time, &factors.iter().map(|factor| factor * time).collect::<Vec<_>>())
        };
        let bench = Bench {
            schema: "nobounce-bench/1".to_owned(),
            results: SIZES.map(one).to_vec(),
            ..Bench::default()
        };
        Calibration::of(&[bench]).unwrap().fits.remove(0)
    }

    const STEADY: [f64; 6] = [0.98, 1.0, 1.02, 0.99, 1.0, 1.01];

    fn line(size: u64) -> f64 {
        4.0 + 0.0003 * float(size)
    }

    /// SEND streams of 256 KiB over UDP on two cores: 16 % slower than the constants say, and all
    /// passes agree.
    fn bump(size: u64) -> f64 {
        line(size) * if size == 262_144 { 1.3 } else { 1.0 }
    }

    #[test]
    fn what_the_constants_cannot_say_is_kept_for_its_size_where_passes_agree() {
        for kind in ["latency", "bandwidth"] {
            let fit = fit(kind, bump, &STEADY);
            assert!(fit.worst() > 0.15, "the constants alone: {fit:?}");
            assert!(fit.worst_left() < 0.05, "{fit:?}");
            assert!(
                fit.seen(262_144) > 0.1 * bump(262_144) && fit.seen(64).abs() < 0.02 * bump(64),
                "{fit:?}"
            );
            assert!((fit.fitted(262_144) + fit.seen(262_144) - fit.microseconds(262_144)).abs() < 1e-9);
        }
    }

    #[test]
    fn passes_that_do_not_agree_are_believed_by_half() {
        let wild = [0.5, 1.6, 0.7, 1.3, 0.8, 1.25];
        let (steady, wild) = (fit("latency", bump, &STEADY), fit("latency", bump, &wild));
        let (sure, unsure) = (steady.seen(262_144), wild.seen(262_144));
        assert!(unsure > 0.0 && unsure < 0.85 * sure, "{sure} and {unsure} us");
    }

    #[test]
    fn a_pass_or_two_may_be_a_stall_and_nothing_is_kept_of_them() {
        for passes in [&[][..], &[1.0], &[1.0, 1.01]] {
            let fit = fit("latency", bump, passes);
            assert!(SIZES.iter().all(|size| fit.seen(*size) == 0.0), "{fit:?}");
        }
    }

    #[test]
    fn it_is_never_more_than_the_constants_say_nor_less_than_half() {
        for (factor, limit) in [(9.0, 2.0), (0.1, 0.5)] {
            let point = MeasuredPoint {
                fitted: 10.0,
                measured: factor * 10.0,
                passes: STEADY.map(|one| one * factor * 10.0).to_vec(),
            };
            assert!((point.expected() / 10.0 - limit).abs() < 1e-9);
            let odd = |size: u64| line(size) * if size == 32768 { factor } else { 1.0 };
            let fit = fit("bandwidth", odd, &STEADY);
            for size in 0..200_000 {
                let share = fit.microseconds(size) / fit.fitted(size);
                assert!((0.5 - 1e-9..=2.0 + 1e-9).contains(&share), "{size} B: {share}");
            }
        }
    }

    #[test]
    fn it_ends_beyond_what_was_measured() {
        let slow = |size: u64| line(size) * if size == 8 << 20 { 1.2 } else { 1.0 };
        let mut fit = fit("latency", slow, &STEADY);
        assert!(fit.uncertainty(1 << 20) <= fit.uncertainty(1 << 30));
        // Whatever the constants have taken of it: seen at the end.
        fit.residuals[8].seen_us = 0.2 * fit.fitted(8 << 20);
        let share = |size: u64| fit.seen(size) / fit.fitted(size);
        assert!((share(8 << 20) - 0.2).abs() < 1e-9);
        assert!((0.01..0.15).contains(&share(16 << 20)) && share(32 << 20) < share(16 << 20));
        assert_eq!([64 << 20, 1 << 40].map(|size| fit.seen(size)), [0.0, 0.0]);
        assert_eq!(fit.seen(0), 0.0);
        // Sizes from 4 KiB on: an eighth of it is as far as it goes.
        fit.residuals.drain(..4);
        fit.residuals[0].seen_us = 0.5;
        assert!(fit.seen(2048) > 0.0 && fit.seen(512) == 0.0 && fit.seen(8) == 0.0);
    }

    #[test]
    fn neighbours_that_would_fall_share_their_mean() {
        assert_eq!(rising([1.0, 3.0, 2.0, 4.0].into_iter()), [1.0, 2.5, 2.5, 4.0]);
        assert_eq!(rising([3.0, 2.0, 1.0].into_iter()), [2.0, 2.0, 2.0]);
        assert_eq!(rising(std::iter::empty()), [0.0; 0]);
    }

    #[test]
    fn a_file_that_says_what_cannot_have_been_seen_is_refused() {
        let kept = Calibration {
            schema: super::super::calibration::SCHEMA.to_owned(),
            fits: vec![fit("latency", bump, &STEADY)],
        };
        let json = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut json = serde_json::to_value(&kept).unwrap();
            change(&mut json["fits"][0]["residuals"]);
            Calibration::from_json(&json.to_string())
        };
        let seen = |of: &Calibration| of.fits[0].microseconds(262_144);
        assert!((seen(&json(&|_| ()).unwrap()) - seen(&kept)).abs() < 1e-6);
        for wrong in [-1e9, 1e9] {
            let found = json(&|residuals| residuals[2]["seen_us"] = wrong.into());
            assert!(found.unwrap_err().to_string().contains("invalid residual correction"), "{wrong}");
        }
        let double = json(&|residuals| residuals[2]["size"] = 8.into());
        assert!(double.is_err(), "two entries of one size");
        // Older files have no such figure.
        let old = json(&|residuals| {
            for one in residuals.as_array_mut().unwrap() {
                one.as_object_mut().unwrap().remove("seen_us");
            }
        });
        assert!((seen(&old.unwrap()) - seen(&kept.clone().constants_only())).abs() < 1e-6);
    }
}
