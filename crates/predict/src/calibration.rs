//! Constants of one machine, fitted from a bench run on it.
//!
//! The time of a message is a sum, as everywhere in the model: a base, the bytes of the first
//! packet, a step for a second one. Bytes beyond the first packet and bytes beyond the cache add to
//! it. A lone message waits for its second cache line; in a stream it costs more if it is posted by
//! itself and not in a list. The fit minimises relative errors; no constant may be negative.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::least_squares::robust;
pub use super::measured::{Bench, LISTED_BELOW, Measured, Series, Split, is_between_machines, middle};
use super::route::float;
use super::seen::{self, MeasuredPoint};

/// The constants of one series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// What it is about.
    pub series: Series,
    /// Microseconds of the shortest message.
    pub base_us: f64,
    /// Nanoseconds for each byte of the first packet.
    pub first_byte_ns: f64,
    /// Extra microseconds of a lone message with more than [`ONE_LINE`] bytes: it also waits for
    /// the other core's second cache line.
    #[serde(default)]
    pub lines_us: f64,
    /// Extra microseconds of each message of a stream from [`LISTED_BELOW`] bytes on: posted by
    /// itself, with a completion of its own.
    #[serde(default)]
    pub lone_us: f64,
    /// Extra microseconds of messages with several packets.
    pub step_us: f64,
    /// Nanoseconds for each byte beyond the first packet.
    pub byte_ns: f64,
    /// Nanoseconds more for each byte beyond the cache.
    pub far_byte_ns: f64,
    /// Bytes of a message that the cache is assumed to hold: the best fit of [`CACHES`].
    #[serde(default = "one_mebibyte")]
    pub cache_bytes: u64,
    /// Path MTU: where the step is.
    pub mtu: u32,
    /// How far each size is from the fit.
    pub residuals: Vec<FitResidual>,
}

/// One size of a fit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FitResidual {
    /// Bytes.
    pub size: u64,
    /// Microseconds, measured.
    pub measured_us: f64,
    /// Microseconds, by the constants.
    pub fitted_us: f64,
    /// Residual microseconds that are kept, because the passes agree on them; negative if it took
    /// less.
    #[serde(default)]
    pub seen_us: f64,
    /// Microseconds of the fastest and the slowest pass, where there were several: the run-to-run
    /// spread of this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passes_us: Option<(f64, f64)>,
}

impl FitResidual {
    /// Measured against the constants, as a share: positive where it took longer.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.measured_us / self.fitted_us - 1.0
    }

    /// Microseconds that are expected.
    #[must_use]
    pub fn expected_us(&self) -> f64 {
        self.fitted_us + self.seen_us
    }

    /// Measured against expected, as a share: what is left of the error.
    #[must_use]
    pub fn left(&self) -> f64 {
        self.measured_us / self.expected_us() - 1.0
    }

    /// Whether the expectation lies between the fastest and the slowest pass.
    #[must_use]
    pub fn is_within_passes(&self) -> bool {
        self.passes_us.is_some_and(|(quickest, slowest)| (quickest..=slowest).contains(&self.expected_us()))
    }
}

/// Bytes of a message that share one cache line with all headers. Of 64 bytes in a shared-memory
/// ring 20 are the ring's. A WRITE with immediate data, the longest, has 36 of headers and ICRC.
pub const ONE_LINE: u64 = 8;

/// Bytes beyond which a message may fall out of a core's own cache: 512 KiB (Zen) to 2 MiB
/// (Sapphire Rapids), of which the message has half, its copy being the other.
pub const CACHES: [u64; 3] = [1 << 20, 1 << 19, 1 << 18];

/// Microseconds below which no machine posts and completes a message.
const LEAST_BASE: f64 = 0.001;

/// The cache of files that do not name it.
fn one_mebibyte() -> u64 {
    CACHES[0]
}

impl Fit {
    /// Microseconds of a message: by the constants, and what was seen beyond them.
    #[must_use]
    pub fn microseconds(&self, size: u64) -> f64 {
        self.fitted(size) + self.seen(size)
    }

    /// Microseconds that this machine was seen to take beyond the constants; negative where it took
    /// less. Nothing where passes said nothing.
    #[must_use]
    pub fn seen(&self, size: u64) -> f64 {
        seen::at(self, size)
    }

    /// Microseconds by the constants alone.
    #[must_use]
    pub fn fitted(&self, size: u64) -> f64 {
        terms(size, self.series.is_stream(), self.mtu, self.cache_bytes)
            .iter()
            .zip(self.constants())
            .map(|(term, constant)| term * constant)
            .sum()
    }

    fn constants(&self) -> [f64; TERMS] {
        let [first, byte, far] = [self.first_byte_ns, self.byte_ns, self.far_byte_ns].map(|ns| ns / 1000.0);
        [self.base_us, first, self.lines_us, self.lone_us, self.step_us, byte, far]
    }

    /// The largest residual of the constants.
    #[must_use]
    pub fn worst(&self) -> f64 {
        self.residuals.iter().map(|one| one.error().abs()).fold(0.0, f64::max)
    }

    /// The largest of what is left when what was seen is added.
    #[must_use]
    pub fn worst_left(&self) -> f64 {
        self.residuals.iter().map(|one| one.left().abs()).fold(0.0, f64::max)
    }

    /// How far off a size may be as far as this run says: among the sizes that were measured what
    /// is left, beyond them what the constants leave.
    #[must_use]
    pub fn uncertainty(&self, size: u64) -> f64 {
        let ends = self.residuals.first().zip(self.residuals.last());
        let is_among = ends.is_some_and(|(first, last)| (first.size..=last.size).contains(&size));
        if is_among { self.worst_left() } else { self.worst() }
    }
}

/// Constants of a fit.
const TERMS: usize = 7;

/// What the constants are multiplied with.
fn terms(size: u64, is_stream: bool, mtu: u32, cache: u64) -> [f64; TERMS] {
    let (bytes, packet) = (float(size), f64::from(mtu));
    let beyond = |limit: f64| (bytes - limit).max(0.0);
    let [lines, lone, several] =
        [!is_stream && size > ONE_LINE, is_stream && size >= LISTED_BELOW, bytes > packet]
            .map(|is_so| if is_so { 1.0 } else { 0.0 });
    [1.0, bytes.min(packet), lines, lone, several, beyond(packet), beyond(float(cache))]
}

/// The constants of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// One fit for each series that was measured at three sizes or more.
    pub fits: Vec<Fit>,
}

/// Name and version of the file.
pub const SCHEMA: &str = "nobounce-calibration/1";

/// A run that nothing can be learnt from.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// Not a run.
    #[error("not a run of `nobounce bench --json`: {0}")]
    NotBench(String),
    /// Not constants.
    #[error("not a calibration of `nobounce predict --save-calibration`: {0}")]
    NotCalibration(String),
    /// Nothing to part.
    #[error(
        "a case of this run has only one pass; run `nobounce bench --passes N --json FILE` with at least 2, better 40"
    )]
    OnePass,
    /// Too little.
    #[error("no operation has three or more sizes; run `nobounce bench --json FILE` without --size")]
    TooFew,
}

impl Calibration {
    /// Constants from runs: of several the median of each case counts.
    ///
    /// # Errors
    /// There are too few sizes.
    pub fn of(runs: &[Bench]) -> Result<Self, CalibrationError> {
        let mut all: Vec<Series> = Vec::new();
        for one in runs.iter().flat_map(|run| &run.results) {
            if one.microseconds().is_some() && !all.contains(&one.series()) {
                all.push(one.series());
            }
        }
        let fits: Vec<Fit> = all.into_iter().filter_map(|series| fit(&series, runs)).collect();
        if fits.is_empty() {
            return Err(CalibrationError::TooFew);
        }
        Ok(Self { schema: SCHEMA.to_owned(), fits })
    }

    /// Constants from the text of a file.
    ///
    /// # Errors
    /// It is something else.
    pub fn from_json(text: &str) -> Result<Self, CalibrationError> {
        let wrong = CalibrationError::NotCalibration;
        let found: Self = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        if found.schema != SCHEMA {
            return Err(wrong(format!("unexpected schema {:?}", found.schema)));
        }
        let finite = |fit: &Fit| {
            fit.constants().iter().all(|value| value.is_finite() && *value >= 0.0) && fit.base_us > 0.0
        };
        if found.fits.is_empty() || !found.fits.iter().all(finite) {
            return Err(wrong("invalid constants".to_owned()));
        }
        if !found.fits.iter().all(seen::is_possible) {
            return Err(wrong("invalid residual correction".to_owned()));
        }
        Ok(found)
    }

    /// The constants alone, for a machine that is like this one: what was seen on this one is left
    /// out.
    #[must_use]
    pub fn constants_only(mut self) -> Self {
        for one in self.fits.iter_mut().flat_map(|fit| &mut fit.residuals) {
            one.seen_us = 0.0;
        }
        self
    }

    /// The fit of a series.
    #[must_use]
    pub fn fit(&self, series: &Series) -> Option<&Fit> {
        self.fits.iter().find(|fit| &fit.series == series)
    }

    /// What the run measured that the constants were fitted to.
    #[must_use]
    pub fn measured_before(&self, series: &Series, size: u64) -> Option<f64> {
        let same = |one: &&FitResidual| one.size == size;
        self.fit(series)?.residuals.iter().find(same).map(|one| one.measured_us)
    }

    /// Another run against these constants: what was measured, and what was expected.
    #[must_use]
    pub fn against(&self, bench: &Bench) -> Vec<(Series, FitResidual)> {
        bench
            .results
            .iter()
            .filter_map(|one| {
                let fit = self.fit(&one.series())?;
                let residual = FitResidual {
                    size: one.size,
                    measured_us: one.microseconds()?,
                    fitted_us: fit.fitted(one.size),
                    seen_us: fit.seen(one.size),
                    passes_us: range(&one.times_of_passes()),
                };
                Some((one.series(), residual))
            })
            .collect()
    }
}

fn fit(series: &Series, runs: &[Bench]) -> Option<Fit> {
    let mut by_size: BTreeMap<u64, Times> = BTreeMap::new();
    let mut mtu = None;
    for one in runs.iter().flat_map(|run| &run.results).filter(|one| &one.series() == series) {
        if let Some(time) = one.microseconds() {
            mtu = mtu.or(Some(one.mtu));
            let point = by_size.entry(one.size).or_default();
            point.times.push(time);
            point.passes.extend(one.times_of_passes());
        }
    }
    if by_size.len() < 3 {
        return None;
    }
    let mtu = mtu?;
    let points: Vec<(u64, f64, Vec<f64>)> =
        by_size.into_iter().map(|(size, point)| (size, median(point.times), point.passes)).collect();
    let with = |cache: u64| {
        let row = |(size, time, _): &(u64, f64, _)| {
            terms(*size, series.is_stream(), mtu, cache).map(|term| term / time)
        };
        let (constants, cost) = robust(&points.iter().map(row).collect::<Vec<_>>());
        (cache, constants, cost)
    };
    let (cache_bytes, [base_us, first, lines_us, lone_us, step_us, byte, far], _) =
        CACHES.into_iter().map(with).min_by(|a, b| a.2.total_cmp(&b.2))?;
    let mut fit = Fit {
        series: series.clone(),
        // A message of no bytes takes some time, even where the bytes of the shortest explain all
        // of theirs.
        base_us: base_us.max(LEAST_BASE),
        first_byte_ns: first * 1000.0,
        lines_us,
        lone_us,
        step_us,
        byte_ns: byte * 1000.0,
        far_byte_ns: far * 1000.0,
        cache_bytes,
        mtu,
        residuals: Vec::new(),
    };
    let seen = seen::kept(
        &points
            .iter()
            .map(|(size, time, passes)| MeasuredPoint {
                fitted: fit.fitted(*size),
                measured: *time,
                passes: passes.clone(),
            })
            .collect::<Vec<_>>(),
    );
    fit.residuals = points
        .iter()
        .zip(seen)
        .map(|((size, time, passes), seen_us)| FitResidual {
            size: *size,
            measured_us: *time,
            fitted_us: fit.fitted(*size),
            seen_us,
            passes_us: range(passes),
        })
        .collect();
    Some(fit)
}

/// One size of all runs.
#[derive(Default)]
struct Times {
    times: Vec<f64>,
    passes: Vec<f64>,
}

/// The smallest and the largest, where there are several.
fn range(times: &[f64]) -> Option<(f64, f64)> {
    let ends = |(low, high): (f64, f64), time: &f64| (low.min(*time), high.max(*time));
    (times.len() > 1).then(|| times.iter().fold((f64::INFINITY, 0.0), ends))
}

/// The middle of a list that has something in it.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    if values.len() % 2 == 1 { values[half] } else { f64::midpoint(values[half - 1], values[half]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(times: impl Fn(u64) -> f64) -> Bench {
        run_of("latency", times)
    }

    fn run_of(kind: &str, times: impl Fn(u64) -> f64) -> Bench {
        let results = [1, 8, 64, 512, 4096, 32768, 262_144, 1 << 20, 8 << 20]
            .map(|size| Measured::write(kind, size, times(size), &[]))
            .to_vec();
        Bench { schema: "nobounce-bench/1".to_owned(), results, ..Bench::default() }
    }

    #[test]
    fn constants_that_made_the_figures_are_found_again() {
        let made = |size: u64| 3.5 + if size > 4096 { 5.0 } else { 0.0 } + 0.00025 * float(size);
        let calibration = Calibration::of(&[run(made)]).unwrap();
        let fit = &calibration.fits[0];
        assert!(fit.worst() < 0.01, "{fit:?}");
        assert!((fit.base_us - 3.5).abs() < 0.05 && (fit.byte_ns - 0.25).abs() < 0.01, "{fit:?}");
        let text = serde_json::to_string(&calibration).unwrap();
        assert_eq!(Calibration::from_json(&text).unwrap().fits.len(), 1);
        let slower = calibration.against(&run(|size| made(size) * 1.5));
        assert!(slower.iter().all(|(_, one)| (one.error() - 0.5).abs() < 0.02));
    }

    #[test]
    fn messages_that_a_stream_posts_one_by_one_cost_more() {
        // As on 16 CPUs over UDP: flat in lists, then a jump, which is no matter of bytes.
        let made = |size: u64| 1.0 + if size >= LISTED_BELOW { 3.0 } else { 0.0 } + 0.0003 * float(size);
        let calibration = Calibration::of(&[run_of("bandwidth", made)]).unwrap();
        let fit = &calibration.fits[0];
        assert!(fit.worst() < 0.01 && (fit.lone_us - 3.0).abs() < 0.1, "{fit:?}");
        assert!((fit.microseconds(2048) / made(2048) - 1.0).abs() < 0.02, "a size that was not measured");
        // One message at a time is posted alone at every size: there such a jump is not explained.
        let alone = Calibration::of(&[run(made)]).unwrap();
        assert!(alone.fits[0].lone_us == 0.0 && alone.fits[0].worst() > 0.1, "{:?}", alone.fits[0]);
    }

    #[test]
    fn a_message_alone_waits_for_its_second_line() {
        let made = |size: u64| 1.2 + if size > ONE_LINE { 0.25 } else { 0.0 } + 0.0002 * float(size);
        let calibration = Calibration::of(&[run(made)]).unwrap();
        let fit = &calibration.fits[0];
        assert!(fit.worst() < 0.01 && (fit.lines_us - 0.25).abs() < 0.01, "{fit:?}");
    }

    #[test]
    fn constants_that_were_kept_before_there_were_these_are_read() {
        let calibration = Calibration::of(&[run(|size| 4.0 + 0.0003 * float(size))]).unwrap();
        let mut json = serde_json::to_value(&calibration).unwrap();
        let fit = json["fits"][0].as_object_mut().unwrap();
        assert!(fit.remove("lines_us").is_some() && fit.remove("lone_us").is_some());
        let read = Calibration::from_json(&json.to_string()).unwrap();
        assert!((read.fits[0].microseconds(4096) - calibration.fits[0].microseconds(4096)).abs() < 1e-3);
    }

    #[test]
    fn noise_stays_in_the_residuals() {
        let mut sign = -1.0;
        let mut bench = run(|size| 4.0 + 0.0003 * float(size));
        for one in &mut bench.results {
            sign = -sign;
            one.p50_us = one.p50_us.map(|time| time * (1.0 + 0.08 * sign));
        }
        let calibration = Calibration::of(&[bench]).unwrap();
        assert!((0.01..0.15).contains(&calibration.fits[0].worst()));
    }

    #[test]
    fn a_cache_that_ends_early_is_found() {
        let made = |size: u64| 1.7 + 0.000_13 * float(size) + 0.000_06 * (float(size) - 262_144.0).max(0.0);
        let calibration = Calibration::of(&[run(made)]).unwrap();
        assert_eq!(calibration.fits[0].cache_bytes, 1 << 18);
        assert!(calibration.fits[0].worst() < 0.01, "{:?}", calibration.fits[0]);
    }

    #[test]
    fn the_longest_size_is_not_given_up_for_a_cache_that_ends_early() {
        // READ over shared memory on two cores: 1 MiB is a little slower than a line, 8 MiB half as
        // fast.
        let measured = [2.22, 2.21, 2.38, 2.72, 3.80, 8.35, 36.6, 159.0, 1868.0];
        let mut bench = run(|_| 1.0);
        for (one, time) in bench.results.iter_mut().zip(measured) {
            one.p50_us = Some(time);
        }
        let calibration = Calibration::of(&[bench]).unwrap();
        assert!(calibration.fits[0].worst() < 0.1, "{:?}", calibration.fits[0]);
    }

    #[test]
    fn one_size_that_stalled_bends_no_other() {
        let mut bench = run(|size| 4.0 + 0.0003 * float(size));
        let stalled = bench.results.iter_mut().find(|one| one.size == 4096).unwrap();
        stalled.p50_us = stalled.p50_us.map(|time| time * 7.0);
        let calibration = Calibration::of(&[bench]).unwrap();
        for one in &calibration.fits[0].residuals {
            assert!(one.size == 4096 || one.error().abs() < 0.03, "{one:?}");
        }
    }

    #[test]
    fn passes_say_how_far_runs_differ_by_themselves() {
        let mut bench = run(|size| 4.0 + 0.0003 * float(size));
        bench.results[0].passes = vec![3.0, 5.0, 4.0];
        let calibration = Calibration::of(&[bench.clone()]).unwrap();
        let [first, second, ..] = &calibration.fits[0].residuals[..] else { panic!("no residuals") };
        assert_eq!((first.passes_us, second.passes_us), (Some((3.0, 5.0)), None));
        assert!(first.is_within_passes() && !second.is_within_passes());
        let before = |size| calibration.measured_before(&bench.results[0].series(), size);
        assert_eq!((before(1), before(2)), (Some(first.measured_us), None));
        let other =
            Bench { results: vec![Measured { link: "shm".to_owned(), ..bench.results[0].clone() }], ..bench };
        assert_eq!(calibration.against(&other), [], "another link is another series");
    }

    #[test]
    fn what_is_no_run_is_said() {
        assert!(Bench::from_json("{}").unwrap_err().to_string().contains("bench --json"));
        let other = r#"{"schema": "other", "results": []}"#;
        assert!(Bench::from_json(other).unwrap_err().to_string().contains("other"));
        let few = Bench { results: Vec::new(), ..run(|_| 1.0) };
        assert!(matches!(Calibration::of(&[few]), Err(CalibrationError::TooFew)));
        assert!(Calibration::from_json("[]").is_err());
    }
}
