//! Distributions and fairness.

use serde::Serialize;

use crate::units::{float, float_of, whole};

/// Buckets per power of two: values are exact to 1.6 %.
const STEPS_BITS: u32 = 6;
const STEPS: u64 = 1 << STEPS_BITS;

/// A histogram of whole numbers with logarithmic buckets.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum: u128,
    largest: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

impl Histogram {
    /// An empty one.
    pub fn new() -> Self {
        Self { counts: vec![0; bucket(u64::MAX) + 1], total: 0, sum: 0, largest: 0 }
    }

    /// Adds a value.
    pub fn record(&mut self, value: u64) {
        self.counts[bucket(value)] += 1;
        self.total += 1;
        self.sum += u128::from(value);
        self.largest = self.largest.max(value);
    }

    /// How many values it has.
    pub const fn count(&self) -> u64 {
        self.total
    }

    /// The largest value.
    pub const fn largest(&self) -> u64 {
        self.largest
    }

    /// Their mean; 0 without any.
    #[allow(clippy::cast_precision_loss)]
    pub fn mean(&self) -> f64 {
        if self.total == 0 { 0.0 } else { self.sum as f64 / float(self.total) }
    }

    /// The value that this share of all values does not exceed.
    pub fn quantile(&self, share: f64) -> u64 {
        let rank = whole((share * float(self.total)).ceil()).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return upper(bucket).min(self.largest);
            }
        }
        self.largest
    }
}

#[allow(clippy::cast_possible_truncation, reason = "at most 64 * 64")]
const fn bucket(value: u64) -> usize {
    if value < STEPS {
        return value as usize;
    }
    let power = value.ilog2() - STEPS_BITS;
    ((power as u64 + 1) * STEPS + ((value >> power) - STEPS)) as usize
}

const fn upper(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket;
    }
    let power = bucket / STEPS - 1;
    ((STEPS + bucket % STEPS) << power) + ((1 << power) - 1)
}

/// A distribution in a few numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Distribution {
    pub count: u64,
    pub mean: f64,
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Distribution {
    /// Of a histogram, each value times `scale`.
    pub fn of(histogram: &Histogram, scale: f64) -> Self {
        let quantile = |share| float(histogram.quantile(share)) * scale;
        Self {
            count: histogram.count(),
            mean: histogram.mean() * scale,
            p50: quantile(0.5),
            p99: quantile(0.99),
            p999: quantile(0.999),
            max: float(histogram.largest()) * scale,
        }
    }
}

/// Jain's index: 1 where all have the same, 1/n where one has everything.
pub fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (float_of(shares.len()) * squares) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_bucket() {
        let mut histogram = Histogram::new();
        for value in 1..=100_000 {
            histogram.record(value);
        }
        for share in [0.001, 0.5, 0.99, 0.999] {
            let (found, exact) = (float(histogram.quantile(share)), share * 100_000.0);
            assert!(found >= exact && found <= exact * 1.017, "{share}: {found}");
        }
        assert_eq!(histogram.quantile(1.0), 100_000);
        assert_eq!(histogram.mean(), 50_000.5);
        for bucket_of in [0, 63, 64, 65, 127, 128, 1 << 40, u64::MAX] {
            assert!(upper(bucket(bucket_of)) >= bucket_of);
        }
    }

    #[test]
    fn jain_knows_its_ends() {
        assert_eq!(jain(&[2.0; 8]), 1.0);
        assert_eq!(jain(&[1.0, 0.0, 0.0, 0.0]), 0.25);
        assert_eq!(jain(&[0.0; 3]), 1.0);
    }
}
