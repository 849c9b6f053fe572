//! Made by the test of tests/published.rs from the published figures.

/// Quotients of measured and predicted times by class and length.
pub(super) const TABLE: [[(f64, f64); 3]; 5] = [
    [(0.5, 2.0), (0.5, 2.0), (0.987, 1.113)],
    [(0.5, 2.0), (0.5, 2.0), (0.975, 1.47)],
    [(0.5, 2.0), (0.5, 2.0), (0.5, 2.0)],
    [(0.5, 2.0), (0.5, 2.0), (0.5, 2.0)],
    [(0.5, 2.0), (0.5, 2.0), (0.5, 2.0)],
];
