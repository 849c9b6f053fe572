//! Message sizes as people write them: `1`, `64K`, `1M`, `1..8M`.

use std::fmt;

/// The largest RDMA message, 2^31 bytes.
pub(crate) const MAX: u64 = 1 << 31;

/// A number of bytes, shown as `8 B`, `64 KiB`, `1.5 MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        let text = match units.iter().find(|(unit, _)| self.0 >= *unit) {
            None => format!("{} B", self.0),
            Some((unit, name)) if self.0.is_multiple_of(*unit) => format!("{} {name}", self.0 / unit),
            Some((unit, name)) => {
                // Tenths, in integers: a size needs no floating point.
                let tenths = u128::from(self.0) * 10 / u128::from(*unit);
                format!("{}.{} {name}", tenths / 10, tenths % 10)
            }
        };
        f.pad(&text)
    }
}

/// Bytes that were moved, or a rate: three digits and a decimal unit, as the bench's. Rounded in
/// integers, half up, as the page does it: in floating point a tie depends on the language.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a float saturates")]
pub(crate) fn decimal(value: f64) -> String {
    let bytes = value.round() as u128;
    let (mut scale, mut unit) = (1, "B");
    for next in ["kB", "MB", "GB", "TB", "PB"] {
        // 999.5 of a unit is 1.00 of the next one.
        if 2 * bytes < 1999 * scale {
            break;
        }
        (scale, unit) = (scale * 1000, next);
    }
    let rounded = |parts: u128| (bytes * parts + scale / 2) / scale;
    match (rounded(100), rounded(10)) {
        _ if scale == 1 => format!("{bytes} B"),
        (hundredths, _) if hundredths < 1000 => {
            format!("{}.{:02} {unit}", hundredths / 100, hundredths % 100)
        }
        (_, tenths) if tenths < 1000 => format!("{}.{} {unit}", tenths / 10, tenths % 10),
        _ => format!("{} {unit}", rounded(1)),
    }
}

/// One `--size` argument: a size, or a range walked in powers of two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sizes(pub(crate) Vec<u64>);

/// Why a `--size` was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SizeError {
    /// Not a number with an optional unit.
    #[error(
        "invalid size {0:?}: expected a number of bytes with an optional K, M or G, such as 64, 64K or 1M"
    )]
    Malformed(String),
    /// Beyond what RDMA allows.
    #[error("size {0:?} exceeds the largest RDMA message (2G, 2147483648 bytes)")]
    TooLarge(String),
    /// A range that runs downwards.
    #[error("invalid range {0:?}: expected the smaller size first, such as 1..8M")]
    Backwards(String),
    /// Doubling never leaves zero.
    #[error("invalid range {0:?}: a range doubles, so it cannot start at 0; use --size 0 and a range from 1")]
    FromZero(String),
}

impl std::str::FromStr for Sizes {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let Some((from, to)) = text.split_once("..") else { return Ok(Self(vec![one(text)?])) };
        let (from, to) = (one(from)?, one(to)?);
        if from > to {
            return Err(SizeError::Backwards(text.to_owned()));
        }
        if from == 0 {
            return Err(SizeError::FromZero(text.to_owned()));
        }
        Ok(Self(doubling(from, to)))
    }
}

/// From one size, not 0, to another in powers of two. Both were named, so both are there even when
/// doubling steps over the upper one.
pub(crate) fn doubling(from: u64, to: u64) -> Vec<u64> {
    let mut sizes: Vec<u64> = std::iter::successors(Some(from), |size| size.checked_mul(2))
        .take_while(|size| *size <= to)
        .collect();
    if sizes.last() != Some(&to) {
        sizes.push(to);
    }
    sizes
}

fn one(text: &str) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed(text.to_owned());
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    if number.is_empty() {
        return Err(malformed());
    }
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return Err(malformed()),
    };
    let too_large = || SizeError::TooLarge(text.to_owned());
    let number: u64 = number.parse().map_err(|_| too_large())?;
    number.checked_mul(1 << shift).filter(|size| *size <= MAX).ok_or_else(too_large)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<u64>, SizeError> {
        text.parse::<Sizes>().map(|sizes| sizes.0)
    }

    #[test]
    fn sizes_as_people_write_them() {
        assert_eq!(parse("0"), Ok(vec![0]));
        assert_eq!(parse("1"), Ok(vec![1]));
        assert_eq!(parse("64K"), Ok(vec![65536]));
        assert_eq!(parse("64 KiB"), Ok(vec![65536]));
        assert_eq!(parse("1m"), Ok(vec![1 << 20]));
        assert_eq!(parse("2G"), Ok(vec![MAX]));
    }

    #[test]
    fn ranges_double_and_keep_both_ends() {
        assert_eq!(parse("1..8"), Ok(vec![1, 2, 4, 8]));
        assert_eq!(parse("3..10"), Ok(vec![3, 6, 10]));
        assert_eq!(parse("1..8M").unwrap().len(), 24);
        assert_eq!(parse("64..64"), Ok(vec![64]));
    }

    #[test]
    fn wrong_sizes_are_refused_by_cause() {
        for text in ["", "K", "-1", "1.5M", "12Q", "1..", "..8"] {
            assert!(matches!(parse(text), Err(SizeError::Malformed(_))), "{text:?}");
        }
        for text in ["3G", "99999999999999999999", "18446744073709551615K"] {
            assert!(matches!(parse(text), Err(SizeError::TooLarge(_))), "{text:?}");
        }
        assert!(matches!(parse("8..1"), Err(SizeError::Backwards(_))));
        assert!(matches!(parse("0..8"), Err(SizeError::FromZero(_))));
    }

    #[test]
    fn sizes_are_shown_with_the_largest_fitting_unit() {
        let shown = [0, 8, 1023, 1024, 1536, 65536, 1 << 20, 8 << 20, 1 << 31].map(|n| Bytes(n).to_string());
        let wanted = ["0 B", "8 B", "1023 B", "1 KiB", "1.5 KiB", "64 KiB", "1 MiB", "8 MiB", "2 GiB"];
        assert_eq!(shown, wanted);
    }

    /// The page's tests read the same file.
    #[test]
    #[allow(clippy::cast_precision_loss, reason = "the numbers are exact")]
    fn sizes_are_rounded_as_on_the_page() {
        let cases: Vec<(u64, String)> =
            serde_json::from_str(include_str!("../../../tests/decimal-sizes.json")).unwrap();
        for (bytes, shown) in cases {
            assert_eq!(decimal(bytes as f64), shown);
        }
    }

    #[test]
    fn sizes_have_three_digits() {
        let shown = [0.0, 999.0, 1e3, 65_536.0, 999_499.0, 999_500.0, 327_680_000.0].map(decimal);
        assert_eq!(shown, ["0 B", "999 B", "1.00 kB", "65.5 kB", "999 kB", "1.00 MB", "328 MB"]);
    }
}
