//! A progress bar, on a terminal only: logs and pipes get none.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::case::Case;

/// Steps of the bar per case, so that a long case moves it too.
const STEPS: u64 = 100;

/// How far the run is.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar on stderr for this many cases; indicatif hides it where stderr is no terminal.
    pub(crate) fn on_terminal(cases: usize) -> Self {
        let cases = u64::try_from(cases).unwrap_or(u64::MAX / STEPS);
        let bar = ProgressBar::with_draw_target(Some(cases * STEPS), ProgressDrawTarget::stderr());
        // The template is a constant; were it wrong, the plain bar would do.
        if let Ok(style) =
            ProgressStyle::with_template("{wide_bar:.cyan/dim} {percent:>3}% {eta:>4}  {msg:<42}")
        {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_secs(1));
        Self { bar }
    }

    /// No bar at all.
    #[cfg(test)]
    pub(crate) fn hidden() -> Self {
        Self { bar: ProgressBar::hidden() }
    }

    /// Says what is being done before the first case.
    pub(crate) fn note(&self, what: &'static str) {
        self.bar.set_message(what);
    }

    /// Starts a case and returns a callback for its finished share, 0 to 1.
    pub(crate) fn case(&self, index: usize, case: &Case) -> impl Fn(f64) {
        self.bar.set_message(case.to_string());
        let start = u64::try_from(index).unwrap_or(0) * STEPS;
        move |share: f64| self.bar.set_position(start + steps(share))
    }

    /// Takes the bar away so that the table stands alone.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Whole steps of a share, clamped so that the bar stays within its case.
fn steps(share: f64) -> u64 {
    (0..=STEPS)
        .rev()
        .find(|step| super::numbers::float(*step) <= share * super::numbers::float(STEPS))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_share_stays_within_the_case() {
        let found = [-1.0, 0.0, 0.005, 0.5, 1.0, 7.0, f64::INFINITY, f64::NAN].map(steps);
        assert_eq!(found, [0, 0, 0, 50, 100, 100, 100, 0]);
    }
}
