//! Amounts of bytes as people write them, up to a tebibyte.

use std::str::FromStr;

use nobounce_predict::report::MAX_SIZE;

use crate::size::doubling;

/// One amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByteAmount(pub(crate) u64);

/// One `--size` argument: a size, or a range walked in powers of two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PredictSizes(pub(crate) Vec<u64>);

impl FromStr for ByteAmount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let wrong = || {
            format!(
                "invalid size {text:?}: expected a number of bytes with an optional K, M, G or T, such as 64K"
            )
        };
        let shift = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(wrong()),
        };
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let size = number.checked_mul(1 << shift).filter(|size| *size <= MAX_SIZE);
        size.map(Self).ok_or_else(|| format!("size {text:?} is more than 1T, the maximum"))
    }
}

impl FromStr for PredictSizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((from, to)) = text.split_once("..") else {
            return Ok(Self(vec![text.parse::<ByteAmount>()?.0]));
        };
        let (from, to) = (from.parse::<ByteAmount>()?.0, to.parse::<ByteAmount>()?.0);
        if from > to || from == 0 {
            return Err(format!(
                "invalid range {text:?}: expected the smaller size first, and not 0, such as 1..8M"
            ));
        }
        Ok(Self(doubling(from, to)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_and_ranges() {
        assert_eq!("1T".parse(), Ok(ByteAmount(1 << 40)));
        assert_eq!("0".parse(), Ok(ByteAmount(0)));
        assert_eq!("4..10".parse(), Ok(PredictSizes(vec![4, 8, 10])));
        for wrong in ["2T", "-1", "x", "8..4", "0..4", "99999999999999999999", ""] {
            assert!(wrong.parse::<PredictSizes>().is_err(), "{wrong:?}");
        }
    }
}
