//! An axis over logarithms whose ticks are where we say.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::Ranged;

use crate::size::Bytes;

/// The largest power of two an axis of sizes shows.
const MAX_POWER: u32 = 31;

/// A linear axis with ticks of our choice.
#[derive(Clone)]
pub(crate) struct Axis {
    inner: RangedCoordf64,
    ticks: Vec<f64>,
}

impl std::fmt::Debug for Axis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Axis").field("range", &self.inner.range()).field("ticks", &self.ticks).finish()
    }
}

impl Axis {
    /// Sizes on a log2 axis; ticks at powers of two, thinned so that labels do not collide.
    pub(crate) fn of_sizes(range: Range<f64>) -> Self {
        // Steps of 5 and 10 hit 1 B, 1 KiB, 1 MiB and their midpoints.
        let step = [1, 2, 5, 10].into_iter().find(|step| (range.end - range.start) / f64::from(*step) <= 9.0);
        let ticks = (0..=MAX_POWER).step_by(usize::try_from(step.unwrap_or(10)).unwrap_or(1)).map(f64::from);
        Self { ticks: ticks.filter(|tick| range.contains(tick)).collect(), inner: range.into() }
    }

    /// Figures on a log10 axis; ticks at 1, 2, 5 in each decade, or at 1 only over many decades.
    pub(crate) fn of_figures(range: Range<f64>) -> Self {
        let steps: &[f64] = if range.end - range.start > 4.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let decades = (-9..=9).map(|decade| 10f64.powi(decade));
        let ticks = decades.flat_map(|decade| steps.iter().map(move |step| (decade * step).log10()));
        Self { ticks: ticks.filter(|tick| range.contains(tick)).collect(), inner: range.into() }
    }
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.inner.map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.inner.range()
    }
}

/// The name of a tick of [`Axis::of_sizes`].
pub(crate) fn size_label(log: f64) -> String {
    let nearest = (0..=MAX_POWER).find(|power| (f64::from(*power) - log).abs() < 0.01);
    nearest.map_or(String::new(), |power| Bytes(1 << power).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_sparse_and_human() {
        let labels = |range| Axis::of_sizes(range).ticks.into_iter().map(size_label).collect::<Vec<_>>();
        assert_eq!(labels(-0.5..23.5), ["1 B", "32 B", "1 KiB", "32 KiB", "1 MiB"]);
        assert_eq!(labels(11.5..14.5), ["4 KiB", "8 KiB", "16 KiB"]);
        let figures: Vec<f64> =
            Axis::of_figures(0.0..1.1).ticks.iter().map(|log| 10f64.powf(*log).round()).collect();
        assert_eq!(figures, [1.0, 2.0, 5.0, 10.0]);
        assert_eq!(Axis::of_figures(-3.5..2.5).ticks.len(), 6);
    }
}
