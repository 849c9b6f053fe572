//! Made by the test of tests/published.rs from the published figures.

/// Quotients of measured and predicted times by class and length.
pub(super) const TABLE: [[(f64, f64); 3]; 5] = [
    [(0.433, 2.308), (0.693, 1.442), (0.967, 1.113)],
    [(0.433, 2.308), (0.693, 1.442), (0.953, 1.268)],
    [(0.433, 2.308), (0.693, 1.442), (0.433, 2.308)],
    [(0.433, 2.308), (0.693, 1.442), (0.987, 1.307)],
    [(0.433, 2.308), (0.693, 1.442), (0.433, 2.308)],
];
