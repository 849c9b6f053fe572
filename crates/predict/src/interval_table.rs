//! Made by the test of tests/published.rs from the published figures.

/// Quotients of measured and predicted times by class and length.
pub(super) const TABLE: [[(f64, f64); 3]; 4] = [
    [(0.829, 1.474), (0.691, 1.973), (0.964, 1.113)],
    [(0.829, 1.474), (0.691, 1.973), (0.939, 1.04)],
    [(0.829, 1.474), (0.691, 1.973), (0.69, 1.206)],
    [(0.829, 1.474), (0.691, 1.973), (0.69, 1.206)],
];
