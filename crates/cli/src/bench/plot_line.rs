//! A curve of a plot: figures by message size.

use plotters::style::RGBColor;

use super::model::{BenchReport, CaseOutcome};

/// A named curve.
#[derive(Debug)]
pub(crate) struct Line {
    pub(super) name: String,
    pub(super) color: RGBColor,
    /// The main figure of an operation is drawn strong with points, its companion thin.
    pub(super) strong: bool,
    /// (size, figure), by size.
    pub(super) points: Vec<(u64, f64)>,
}

impl Line {
    pub(crate) fn new(name: String, color: RGBColor, strong: bool, points: Vec<(u64, f64)>) -> Self {
        Self { name, color, strong, points }
    }
}

/// The curve of a figure over the results on the main link, or none without a point.
pub(super) fn line(
    report: &BenchReport,
    name: String,
    color: RGBColor,
    strong: bool,
    value: impl Fn(&CaseOutcome) -> Option<f64>,
) -> Option<Line> {
    // A logarithmic axis has no zero: skip empty messages and missing figures.
    let usable = |one: &CaseOutcome| {
        value(one)
            .filter(|value| value.is_finite() && *value > 0.0 && one.size > 0)
            .map(|value| (one.size, value))
    };
    let mut points: Vec<(u64, f64)> = report.on_main_link().filter_map(usable).collect();
    points.sort_by_key(|(size, _)| *size);
    (!points.is_empty()).then_some(Line { name, color, strong, points })
}
