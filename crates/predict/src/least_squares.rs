//! Non-negative least squares of relative errors.
//!
//! A row holds the factors of the constants for one figure, divided by the figure: a perfect fit
//! sums to 1.

/// Errors beyond this share weigh no more than this share: one stalled size must not bend the
/// others.
///
/// Two runs of the same bench on a quiet machine of 16 CPUs differed by 7 % (UDP) and 9 % (shared
/// memory). That is the root mean square of 54 cases; a larger error is not the fit's.
const LARGE: f64 = 0.1;

/// Rounds in which the weights settle.
const ROUNDS: u32 = 20;

/// Robust least squares; returns the constants and the remaining cost.
pub(super) fn robust<const TERMS: usize>(rows: &[[f64; TERMS]]) -> ([f64; TERMS], f64) {
    let error = |row: &[f64; TERMS], constants: &[f64; TERMS]| sum(row, constants) - 1.0;
    let mut weights = vec![1.0; rows.len()];
    let mut constants = non_negative(rows, &weights);
    for _ in 0..ROUNDS {
        for (weight, row) in weights.iter_mut().zip(rows) {
            *weight = (LARGE / error(row, &constants).abs().max(LARGE)).powi(2);
        }
        constants = non_negative(rows, &weights);
    }
    // Huber cost: large errors do not bend the fit, but still count. Of two fits, the one that
    // sacrifices a size is worse.
    let cost = |error: f64| if error <= LARGE { error * error } else { LARGE * (2.0 * error - LARGE) };
    let left = rows.iter().map(|row| cost(error(row, &constants).abs())).sum();
    (constants, left)
}

fn sum<const TERMS: usize>(row: &[f64; TERMS], constants: &[f64; TERMS]) -> f64 {
    row.iter().zip(constants).map(|(term, constant)| term * constant).sum()
}

/// The non-negative constants whose sums come nearest to 1 in every row.
///
/// The Lawson-Hanson algorithm: constants enter the active set one by one, the most useful first.
/// If one in the set would become negative, all move only as far as none does, and it leaves the
/// set.
fn non_negative<const TERMS: usize>(rows: &[[f64; TERMS]], weights: &[f64]) -> [f64; TERMS] {
    // Terms differ in scale as much as a message and a byte: normalise each by its largest.
    let scale: [f64; TERMS] =
        std::array::from_fn(|at| rows.iter().map(|row| row[at].abs()).fold(f64::MIN_POSITIVE, f64::max));
    let scaled: Vec<[f64; TERMS]> =
        rows.iter().map(|row| std::array::from_fn(|at| row[at] / scale[at])).collect();
    let weighted = |of: &dyn Fn(&[f64; TERMS]) -> f64| {
        scaled.iter().zip(weights).map(|(row, w)| w * of(row)).sum::<f64>()
    };
    let wanted: [f64; TERMS] = std::array::from_fn(|at| weighted(&|row| row[at]));
    let products: [[f64; TERMS]; TERMS] =
        std::array::from_fn(|at| std::array::from_fn(|other| weighted(&|row| row[at] * row[other])));

    let mut constants = [0.0; TERMS];
    let (mut inside, mut useless): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
    // Each enters a few times at most; the bound guards against NaN.
    for _ in 0..10 * TERMS {
        let gain = |at: &usize| wanted[*at] - sum(&products[*at], &constants);
        let is_new = |at: &usize| !inside.contains(at) && !useless.contains(at);
        let helps = (0..TERMS).filter(|at| is_new(at) && gain(at) > 1e-12);
        let Some(next) = helps.max_by(|a, b| gain(a).total_cmp(&gain(b))) else { break };
        inside.push(next);
        loop {
            let Some(best) = solve(&products, &wanted, &inside) else {
                inside.retain(|at| *at != next);
                useless.push(next);
                break;
            };
            let step = inside
                .iter()
                .zip(&best)
                .filter(|(_, value)| **value <= 0.0)
                .map(|(at, value)| constants[*at] / (constants[*at] - value))
                .fold(1.0, f64::min);
            for (at, value) in inside.iter().zip(&best) {
                constants[*at] += step * (value - constants[*at]);
            }
            if step >= 1.0 {
                break;
            }
            inside.retain(|at| constants[*at] > 1e-15);
        }
        for (at, constant) in constants.iter_mut().enumerate() {
            if !inside.contains(&at) {
                *constant = 0.0;
            }
        }
    }
    std::array::from_fn(|at| constants[at].max(0.0) / scale[at])
}

/// Unconstrained solution for the active set; `None` if the system is singular.
fn solve<const TERMS: usize>(
    products: &[[f64; TERMS]; TERMS],
    wanted: &[f64; TERMS],
    inside: &[usize],
) -> Option<Vec<f64>> {
    let count = inside.len();
    let mut system: Vec<Vec<f64>> = inside
        .iter()
        .map(|at| inside.iter().map(|other| products[*at][*other]).chain([wanted[*at]]).collect())
        .collect();
    for column in 0..count {
        let pivot =
            (column..count).max_by(|a, b| system[*a][column].abs().total_cmp(&system[*b][column].abs()))?;
        system.swap(column, pivot);
        let head = system[column].clone();
        if head[column].abs() < 1e-14 {
            return None;
        }
        for row in (0..count).filter(|row| *row != column) {
            let share = system[row][column] / head[column];
            for (value, above) in system[row].iter_mut().zip(&head) {
                *value -= share * above;
            }
        }
    }
    Some((0..count).map(|at| system[at][count] / system[at][at]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_made_the_rows_is_found_and_what_did_not_stays_out() {
        let rows: Vec<[f64; 3]> = [1.0, 2.0, 5.0, 9.0, 1e6]
            .iter()
            .map(|size| [1.0, *size, 0.0].map(|term: f64| term / (3.0 + 0.5 * size)))
            .collect();
        let (constants, left) = robust(&rows);
        assert!((constants[0] - 3.0).abs() < 1e-6 && (constants[1] - 0.5).abs() < 1e-9, "{constants:?}");
        assert!(constants[2] == 0.0 && left < 1e-12);
    }

    #[test]
    fn none_is_negative_where_a_negative_one_would_fit_better() {
        let rows: Vec<[f64; 2]> =
            [1.0, 2.0, 3.0].iter().map(|size| [1.0, *size].map(|term: f64| term / (4.0 - size))).collect();
        let (constants, _) = robust(&rows);
        assert!(constants[0] > 0.0 && constants[1] == 0.0, "{constants:?}");
    }

    #[test]
    fn terms_that_cannot_be_told_apart_are_fitted_as_one() {
        let rows: Vec<[f64; 2]> = [[0.25, 0.25], [0.25, 0.25]].to_vec();
        let (constants, left) = robust(&rows);
        assert!((constants[0] + constants[1] - 4.0).abs() < 1e-9 && left < 1e-12, "{constants:?}");
    }
}
