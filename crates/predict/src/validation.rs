//! Leave-one-source-out validation: the fitted constants and the intervals come from all sources
//! but one, whose figures are then predicted.

use std::collections::BTreeMap;

use serde::Serialize;

use super::fitted::{Fitted, RANGES};
use super::interval::{Class, Interval, Length};
use super::parts::Software;
use super::published::{KINDS, PublishedRow, rows};

/// Share of the sources whose quotients an interval covers.
const COVERED: f64 = 0.8;
/// Fewer sources than this say nothing of a class: those of other classes are added.
const FEWEST_SOURCES: usize = 5;
/// What a class with too few sources may be off at least, either way.
const LEAST_UNKNOWN: f64 = 2.0;
/// An error is counted up to so many times its bound, so that a fault of one source decides
/// nothing.
const MOST_BOUNDS: f64 = 4.0;

/// One published figure, predicted from the other sources.
#[derive(Clone, Debug, Serialize)]
pub struct HeldOutFigure {
    /// The row's name.
    pub row: String,
    /// What was measured.
    pub what: String,
    /// Its source.
    pub source: String,
    /// Bytes.
    pub size: u64,
    /// `latency`, `stream`, `collective` or `staged`.
    pub kind: &'static str,
    /// us or GB/s.
    pub unit: &'static str,
    /// The published figure.
    pub measured: f64,
    /// Whether the source says "more than".
    pub at_least: bool,
    /// What is predicted; none if it is not.
    pub predicted: Option<Predicted>,
    /// Why the point is not scored; empty if it is.
    pub unscored: String,
}

/// A prediction of a figure that the model was not fitted to.
#[derive(Clone, Debug, Serialize)]
pub struct Predicted {
    /// The expectation.
    pub expected: f64,
    /// The interval, from its lower to its upper end.
    pub interval: (f64, f64),
    /// Quotient of prediction and measurement, less 1.
    pub error: f64,
    /// Whether the error is within 5 % from 1 MiB on, and 20 % below.
    pub within: bool,
    /// Whether the interval holds the figure.
    pub inside: bool,
    /// Whether the limiting factor is the one that the source names, if it names one.
    pub binds_right: Option<bool>,
    #[serde(skip)]
    optimistic: bool,
}

/// The score of the model on sources it was not fitted to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Score {
    /// Figures that the model predicts.
    pub predicted: usize,
    /// Sources of them.
    pub sources: usize,
    /// Figures that it does not predict for lack of a basis.
    pub no_basis: usize,
    /// Figures that a setting has to be assumed for.
    pub assumed: usize,
    /// Those of them that have a prediction with that setting, their share within these limits and
    /// their share inside the interval.
    pub guessed: (usize, f64, f64),
    /// Figures that no option describes.
    pub inexpressible: usize,
    /// Share within 5 % from 1 MiB on, and 20 % below.
    pub within: f64,
    /// Share inside the interval.
    pub inside: f64,
    /// The same as the mean of the sources' shares.
    pub inside_by_source: f64,
    /// Median of the errors' amounts.
    pub median_error: f64,
    /// Figures whose source names the limiting factor.
    pub named: usize,
    /// Share of them with the right one.
    pub binds_right: f64,
    /// Share of figures that are predicted to be better than they are.
    pub optimistic: f64,
    /// The same among those out of bounds.
    pub optimistic_misses: f64,
    /// Median of the errors with their sign, towards too fast.
    pub bias: f64,
    /// The same of the kinds of figures that are scored, with their number.
    pub bias_of: Vec<(&'static str, f64, usize)>,
}

/// Everything that validation finds.
#[derive(Clone, Debug, Serialize)]
pub struct Validation {
    /// The score.
    pub score: Score,
    /// Every figure.
    pub points: Vec<HeldOutFigure>,
    /// Intervals from all sources, by class and length.
    #[serde(skip)]
    pub table: Vec<Vec<(f64, f64)>>,
    /// The constants that all sources together choose.
    #[serde(skip)]
    pub fitted: Fitted,
}

/// A quotient of a measured and a predicted time, as a logarithm.
struct LogRatio<'a> {
    source: &'a str,
    class: Class,
    length: Length,
    log: f64,
}

/// Holds out every source in turn.
#[must_use]
pub fn validate() -> Validation {
    let rows = rows();
    let scored: Vec<&PublishedRow> = rows.iter().filter(|row| row.is_scored()).collect();
    let all = fit(&scored);
    let mut without: BTreeMap<&str, Fitted> = BTreeMap::new();
    for row in &scored {
        let source = row.source.as_str();
        without.entry(source).or_insert_with(|| {
            let others: Vec<&PublishedRow> =
                scored.iter().copied().filter(|row| row.source != source).collect();
            fit(&others)
        });
    }
    let residuals: Vec<LogRatio<'_>> =
        scored.iter().flat_map(|row| residuals(row, &without[row.source.as_str()])).collect();
    let points: Vec<HeldOutFigure> = rows
        .iter()
        .flat_map(|row| {
            let held: Vec<&LogRatio<'_>> = residuals.iter().filter(|one| one.source != row.source).collect();
            let fitted = without.get(row.source.as_str()).unwrap_or(&all);
            row.points
                .iter()
                .map(|(size, value)| point(row, *size, *value, fitted, &held))
                .collect::<Vec<_>>()
        })
        .collect();
    // One source more: what is printed keeps its rule while any one source is held out.
    let every: Vec<&LogRatio<'_>> = residuals.iter().collect();
    let table = Class::ALL
        .map(|class| {
            Length::ALL.map(|length| rounded(interval(&every, class, length, FEWEST_SOURCES + 1))).to_vec()
        })
        .to_vec();
    Validation { score: score(&points), points, table, fitted: all }
}

fn rounded(interval: Interval) -> (f64, f64) {
    ((interval.low * 1000.0).floor() / 1000.0, (interval.high * 1000.0).ceil() / 1000.0)
}

/// The constants that explain most sources: one after the other, twice, from the middle of their
/// ranges.
fn fit(rows: &[&PublishedRow]) -> Fitted {
    let mut found = Fitted::unknown();
    for _ in 0..2 {
        for range in RANGES {
            let about: Vec<&PublishedRow> =
                rows.iter().copied().filter(|row| row.uses(software_of(range.name))).collect();
            let start = *(range.place)(&mut found);
            let mut best = (loss(&about, &found), start);
            for value in range.values {
                *(range.place)(&mut found) = *value;
                let now = loss(&about, &found);
                if now < best.0 - 1e-9 {
                    best = (now, *value);
                }
            }
            *(range.place)(&mut found) = best.1;
        }
    }
    found
}

/// The library that a constant is of.
fn software_of(name: &str) -> Option<Software> {
    match name.split_once('_').map_or(name, |(first, _)| first) {
        "VERBS" => Some(Software::Verbs),
        "MPI" | "DEVICE" => Some(Software::Mpi),
        "NIXL" => Some(Software::Nixl),
        _ => None,
    }
}

/// Mean of the sources' mean errors, in multiples of the bound.
fn loss(rows: &[&PublishedRow], fitted: &Fitted) -> f64 {
    let mut sources: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for row in rows {
        for (size, value) in &row.points {
            let Ok(said) = row.predict(*size, fitted) else { continue };
            let log = (said.expected / row.measured(*value)).ln();
            let log = if row.bound.is_some() { log.min(0.0) } else { log };
            let sum = sources.entry(row.source.as_str()).or_default();
            sum.0 += (log.abs() / PublishedRow::limit(*size)).min(MOST_BOUNDS);
            sum.1 += 1.0;
        }
    }
    let (sum, count) =
        sources.values().fold((0.0, 0.0), |(sum, count), (one, points)| (sum + one / points, count + 1.0));
    if count > 0.0 { sum / count } else { 0.0 }
}

fn residuals<'a>(row: &'a PublishedRow, fitted: &Fitted) -> Vec<LogRatio<'a>> {
    let of_point = |(size, value): &(u64, f64)| {
        let said = row.predict(*size, fitted).ok()?;
        let log = (row.measured(*value) / said.expected).ln();
        let log = if row.is_time() { log } else { -log };
        // A figure that is only known to be exceeded is met by everything above it.
        let log = if row.bound.is_some() { log.max(0.0) } else { log };
        Some(LogRatio { source: &row.source, class: row.class(*size), length: Length::of(*size), log })
    };
    row.points.iter().filter_map(of_point).collect()
}

/// The interval that these residuals give to a class. With too few sources of class and length it
/// is the largest quotient that was seen, either way: of that length, or of all, and a factor of
/// two at the least, as few figures agree by chance.
fn interval(residuals: &[&LogRatio<'_>], class: Class, length: Length, fewest: usize) -> Interval {
    let enough = |is_in: &dyn Fn(&LogRatio<'_>) -> bool| {
        let found: Vec<&LogRatio<'_>> = residuals.iter().copied().filter(|one| is_in(one)).collect();
        let mut sources: Vec<&str> = found.iter().map(|one| one.source).collect();
        sources.sort_unstable();
        sources.dedup();
        (sources.len() >= fewest).then_some(found)
    };
    if let Some(pool) = enough(&|one| one.class == class && one.length == length) {
        let tail = (1.0 - COVERED) / 2.0;
        return Interval { low: (-upper(&pool, tail, -1.0)).exp(), high: upper(&pool, tail, 1.0).exp() };
    }
    let pool = enough(&|one| one.length == length).unwrap_or_else(|| residuals.to_vec());
    let most = upper(&pool, 0.0, -1.0).max(upper(&pool, 0.0, 1.0)).exp().max(LEAST_UNKNOWN);
    Interval { low: 1.0 / most, high: most }
}

/// The amount that all but `tail` of the sources stay below; every source weighs the same, and so
/// does the one to come, of which nothing is known.
fn upper(residuals: &[&LogRatio<'_>], tail: f64, sign: f64) -> f64 {
    let mut count: BTreeMap<&str, f64> = BTreeMap::new();
    for one in residuals {
        *count.entry(one.source).or_default() += 1.0;
    }
    let mut sorted: Vec<(f64, f64)> =
        residuals.iter().map(|one| (sign * one.log, 1.0 / count[one.source])).collect();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let all: f64 = sorted.iter().map(|(_, weight)| weight).sum();
    let wanted = (1.0 - tail) * (all + 1.0);
    let mut sum = 0.0;
    for (log, weight) in &sorted {
        sum += weight;
        if sum >= wanted {
            return log.max(0.0);
        }
    }
    sorted.last().map_or(0.0, |(log, _)| log.max(0.0))
}

fn point(
    row: &PublishedRow,
    size: u64,
    value: f64,
    fitted: &Fitted,
    residuals: &[&LogRatio<'_>],
) -> HeldOutFigure {
    let measured = row.measured(value);
    let said = row.predict(size, fitted);
    let unscored = match (&row.inexpressible, row.assumes.as_slice(), &said) {
        (Some(why), ..) => why.clone(),
        (None, [], Ok(_)) => String::new(),
        (None, [], Err(why)) => why.clone(),
        (None, assumed, _) => format!("assumed: {}", assumed.join(", ")),
    };
    let at_least = row.bound.is_some();
    let predicted = said.ok().map(|said| {
        let interval = interval(residuals, row.class(size), Length::of(size), FEWEST_SOURCES);
        let band = if row.is_time() {
            interval.of_time(said.expected)
        } else {
            interval.of_rate(said.expected, said.most)
        };
        let (low, high) = (band.low, band.high);
        let error = said.expected / measured - 1.0;
        let met = at_least && error >= 0.0;
        Predicted {
            expected: said.expected,
            interval: (low, high),
            error,
            within: met || error.abs() <= PublishedRow::limit(size),
            inside: (at_least || low <= measured) && measured <= high,
            binds_right: (!row.binds.is_empty())
                .then(|| said.binds.is_some_and(|found| row.binds.contains(&found))),
            optimistic: (error > 0.0) != row.is_time(),
        }
    });
    HeldOutFigure {
        row: row.id.clone(),
        what: row.what.clone(),
        source: row.source.clone(),
        size,
        kind: row.kind(),
        unit: if row.is_time() { "us" } else { "GB/s" },
        measured,
        at_least,
        predicted,
        unscored,
    }
}

#[allow(clippy::cast_precision_loss, reason = "hundreds of figures")]
fn score(points: &[HeldOutFigure]) -> Score {
    let scored: Vec<(&HeldOutFigure, &Predicted)> = points
        .iter()
        .filter(|one| one.unscored.is_empty())
        .filter_map(|one| Some((one, one.predicted.as_ref()?)))
        .collect();
    let share = |is_so: &dyn Fn(&Predicted) -> bool, among: &dyn Fn(&Predicted) -> bool| {
        let among: Vec<_> = scored.iter().filter(|(_, one)| among(one)).collect();
        if among.is_empty() {
            1.0
        } else {
            among.iter().filter(|(_, one)| is_so(one)).count() as f64 / among.len() as f64
        }
    };
    let mut sources: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for (point, one) in &scored {
        let sum = sources.entry(point.source.as_str()).or_default();
        sum.0 += f64::from(u8::from(one.inside));
        sum.1 += 1.0;
    }
    let unscored = |is_it: &dyn Fn(&HeldOutFigure) -> bool| {
        points.iter().filter(|one| !one.unscored.is_empty() && is_it(one)).count()
    };
    let guesses = points.iter().filter(|one| one.unscored.starts_with("assumed: "));
    let guesses: Vec<&Predicted> = guesses.filter_map(|one| one.predicted.as_ref()).collect();
    let of_guesses = |is_so: fn(&Predicted) -> bool| {
        guesses.iter().filter(|one| is_so(one)).count() as f64 / guesses.len().max(1) as f64
    };
    // What is only known to be exceeded has no error to speak of.
    let exact = || scored.iter().filter(|(point, _)| !point.at_least);
    let amounts = exact().map(|(_, one)| one.error.abs()).collect();
    let signed = |kind: Option<&str>| -> Vec<f64> {
        exact()
            .filter(|(point, _)| kind.is_none_or(|kind| point.kind == kind))
            .map(|(_, one)| if one.optimistic { one.error.abs() } else { -one.error.abs() })
            .collect()
    };
    let of_kind = |kind: &&'static str| {
        let signed = signed(Some(kind));
        (!signed.is_empty()).then(|| (*kind, signed.len(), median(signed)))
    };
    let bias_of = KINDS.iter().filter_map(of_kind).map(|(kind, count, bias)| (kind, bias, count)).collect();
    Score {
        predicted: scored.len(),
        sources: sources.len(),
        no_basis: unscored(&|one| one.unscored.starts_with("not predicted: ")),
        assumed: unscored(&|one| one.unscored.starts_with("assumed: ")),
        guessed: (guesses.len(), of_guesses(|one| one.within), of_guesses(|one| one.inside)),
        inexpressible: unscored(&|one| {
            !["not predicted: ", "assumed: "].iter().any(|kind| one.unscored.starts_with(kind))
        }),
        within: share(&|one| one.within, &|_| true),
        inside: share(&|one| one.inside, &|_| true),
        inside_by_source: sources.values().map(|(inside, all)| inside / all).sum::<f64>()
            / sources.len().max(1) as f64,
        median_error: median(amounts),
        named: scored.iter().filter(|(_, one)| one.binds_right.is_some()).count(),
        binds_right: share(&|one| one.binds_right == Some(true), &|one| one.binds_right.is_some()),
        optimistic: share(&|one| one.optimistic, &|_| true),
        optimistic_misses: share(&|one| one.optimistic, &|one| !one.within),
        bias: median(signed(None)),
        bias_of,
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

impl Score {
    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let bias_of: Vec<String> = self
            .bias_of
            .iter()
            .map(|(kind, bias, count)| format!("{kind} {:+.1} % ({count})", bias * 100.0))
            .collect();
        format!(
            "{} of {} expressible figures of {} sources, each predicted without its source\n\
             not predicted: {} without a basis, {} with an assumed setting, {} that no option describes\n\
             within 5 % from 1 MiB on and 20 % below: {}\n\
             inside the printed interval: {}; mean of the sources: {}\n\
             median error: {}; median of the signed errors: {:+.1} %\n\
             of each kind: {}\n\
             limiting factor as the source names it: {} of {} figures\n\
             too optimistic: {}; of those out of bounds: {}\n\
             with an assumed setting: {} predicted, {} within, {} inside\n",
            self.predicted,
            self.predicted + self.no_basis + self.assumed,
            self.sources,
            self.no_basis,
            self.assumed,
            self.inexpressible,
            percent(self.within),
            percent(self.inside),
            percent(self.inside_by_source),
            percent(self.median_error),
            self.bias * 100.0,
            bias_of.join(", "),
            percent(self.binds_right),
            self.named,
            percent(self.optimistic),
            percent(self.optimistic_misses),
            self.guessed.0,
            percent(self.guessed.1),
            percent(self.guessed.2),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule of an interval that is printed is the rule that held-out figures are scored with:
    /// with five sources, four remain, and the widest interval applies.
    #[test]
    fn printed_intervals_keep_their_rule_without_one_source() {
        let names = ["a", "b", "c", "d", "e", "f"];
        let one = |source| LogRatio { source, class: Class::Collective, length: Length::Long, log: 0.01 };
        let all: Vec<LogRatio<'_>> = names.into_iter().map(one).collect();
        let width = |count: usize, fewest| {
            let some: Vec<&LogRatio<'_>> = all.iter().take(count).collect();
            interval(&some, Class::Collective, Length::Long, fewest).high
        };
        for count in [5, 6] {
            let (printed, held) = (width(count, FEWEST_SOURCES + 1), width(count - 1, FEWEST_SOURCES));
            assert!((printed - held).abs() < 1e-9, "{count} sources: {printed}, held out {held}");
        }
        assert!(width(5, FEWEST_SOURCES + 1) >= LEAST_UNKNOWN);
    }

    /// The score names the figures that an option describes, scored or not.
    #[test]
    fn the_score_says_of_how_many_figures() {
        let point = |unscored: &str| HeldOutFigure {
            row: String::new(),
            what: String::new(),
            source: "one".to_owned(),
            size: 8,
            kind: "latency",
            unit: "us",
            measured: 1.0,
            at_least: false,
            predicted: None,
            unscored: unscored.to_owned(),
        };
        let points = ["not predicted: TCP", "assumed: mtu", "one machine"].map(point);
        assert!(score(&points).text().starts_with("0 of 2 expressible figures"), "{}", score(&points).text());
    }
}
