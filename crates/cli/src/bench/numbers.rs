//! Numbers as reports and tables have them.

/// Counts and sizes become floats; the loss beyond 2^53 is below any clock's resolution.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn float(count: u64) -> f64 {
    count as f64
}

/// Six digits: more than any clock gives here, a third of the file size, and a stable round trip.
pub(crate) fn rounded(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

/// Three digits that matter.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 || size == 0.0 => format!("{value:.2}"),
        size if size >= 0.001 => format!("{value:.4}"),
        _ => format!("{value:.1e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_keep_three_digits_that_matter() {
        let shown = [0.0, 0.00001, 0.0123, 0.62, 4.127, 42.05, 1234.5].map(figure);
        assert_eq!(shown, ["0.00", "1.0e-5", "0.0123", "0.62", "4.13", "42.0", "1234"]);
    }
}
