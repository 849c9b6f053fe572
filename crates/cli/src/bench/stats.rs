//! Statistics of samples: percentiles, median, spread, and a bounded choice of samples to keep.

/// The order statistics of a latency test.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Percentiles {
    /// The smallest sample.
    pub(crate) min: f64,
    /// Half of the samples are at or below this.
    pub(crate) p50: f64,
    /// 99 % of the samples are at or below this.
    pub(crate) p99: f64,
    /// 99.9 % of the samples are at or below this.
    pub(crate) p999: f64,
}

impl Percentiles {
    /// Exact order statistics (nearest rank); `None` without samples.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let sorted = sorted(samples);
        let min = *sorted.first()?;
        let at = |per_mille| rank(&sorted, per_mille);
        Some(Self { min, p50: at(500)?, p99: at(990)?, p999: at(999)? })
    }
}

/// The middle sample (the mean of the two middle ones); `None` without samples.
pub(crate) fn median(samples: &[f64]) -> Option<f64> {
    let sorted = sorted(samples);
    let upper = *sorted.get(sorted.len() / 2)?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    sorted.get(sorted.len() / 2 - 1).map(|lower| f64::midpoint(*lower, upper))
}

/// Median absolute deviation: a spread that is robust against outliers.
pub(crate) fn mad(samples: &[f64]) -> Option<f64> {
    let middle = median(samples)?;
    let distances: Vec<f64> = samples.iter().map(|sample| (sample - middle).abs()).collect();
    median(&distances)
}

/// At most `limit` samples, evenly chosen in order, so that drift stays visible.
pub(crate) fn thin(samples: &[f64], limit: usize) -> Vec<f64> {
    if samples.len() <= limit {
        return samples.to_vec();
    }
    (0..limit).map(|index| samples[index * samples.len() / limit]).collect()
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted
}

/// Nearest rank: the smallest sample with at least `per_mille` / 1000 of all at or below it.
fn rank(sorted: &[f64], per_mille: usize) -> Option<f64> {
    let position = (sorted.len() * per_mille).div_ceil(1000).saturating_sub(1);
    sorted.get(position).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let samples: Vec<f64> = (1..=1000u32).rev().map(f64::from).collect();
        let found = Percentiles::of(&samples).unwrap();
        assert_eq!(found, Percentiles { min: 1.0, p50: 500.0, p99: 990.0, p999: 999.0 });
    }

    #[test]
    fn one_sample_is_every_percentile_and_none_is_none() {
        let found = Percentiles::of(&[7.0]).unwrap();
        assert_eq!(found, Percentiles { min: 7.0, p50: 7.0, p99: 7.0, p999: 7.0 });
        assert_eq!(Percentiles::of(&[]), None);
        assert_eq!(median(&[]), None);
        assert_eq!(mad(&[]), None);
    }

    #[test]
    fn median_of_even_and_odd_counts() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
    }

    #[test]
    fn mad_ignores_one_wild_sample_and_may_be_zero() {
        assert_eq!(mad(&[1.0, 2.0, 3.0, 4.0, 1000.0]), Some(1.0));
        assert_eq!(mad(&[5.0, 5.0, 5.0, 9.0]), Some(0.0));
    }

    #[test]
    fn thinning_keeps_order_and_bound() {
        let samples: Vec<f64> = (0..10_000u32).map(f64::from).collect();
        let kept = thin(&samples, 4096);
        assert_eq!(kept.len(), 4096);
        assert!(kept.is_sorted());
        assert_eq!(kept[0], 0.0);
        assert!(*kept.last().unwrap() > 9_990.0);
        assert_eq!(thin(&samples[..3], 4096), vec![0.0, 1.0, 2.0]);
    }
}
