//! Fault-injection settings.

use std::str::FromStr;

/// What a fault link does to the packets sent through it. Written `loss=0.01,delay=50us,seed=7`.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct FaultConfig {
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Probability that a packet is sent twice.
    pub dup: f64,
    /// Probability that later packets overtake a packet.
    pub reorder: f64,
    /// Probability that one bit of a packet is flipped.
    pub corrupt: f64,
    /// Probability that a packet arrives with a congestion mark.
    pub mark: f64,
    /// Nanoseconds that every packet is held back.
    pub delay_ns: u64,
    /// Jitter: up to this many nanoseconds more, at random; packets may then overtake each other.
    pub jitter_ns: u64,
    /// Where the random numbers begin: the same seed does the same to the same packets.
    pub seed: u64,
}

impl FaultConfig {
    /// Whether nothing is to be done at all.
    pub fn is_none(&self) -> bool {
        Self { seed: 0, ..*self } == Self::default()
    }
}

/// The text does not say what shall go wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseFaultError {
    /// Not one of ours.
    #[error(
        "unknown fault `{0}`: loss, dup, reorder, corrupt, mark, delay, jitter and seed can be set, as in `loss=0.01,delay=50us,seed=7`"
    )]
    Unknown(String),
    /// A name alone.
    #[error("`{0}` has no value: write `{0}=...`, as in `loss=0.01,delay=50us,seed=7`")]
    NoValue(String),
    /// A probability that is none.
    #[error("`{name}={value}`: a probability is a number from 0 to 1, such as 0.01, 1e-4 or 1%")]
    Probability {
        /// Which.
        name: String,
        /// As written.
        value: String,
    },
    /// A time that is none.
    #[error(
        "`{name}={value}`: a time is a number with a unit (ns, us, ms or s) of at most 10 s, such as 50us"
    )]
    Time {
        /// Which.
        name: String,
        /// As written.
        value: String,
    },
    /// A seed that is none.
    #[error("`seed={0}`: a seed is a whole number below 2^64")]
    Seed(String),
}

impl FromStr for FaultConfig {
    type Err = ParseFaultError;

    fn from_str(text: &str) -> Result<Self, ParseFaultError> {
        let mut config = Self::default();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (name, value) =
                part.split_once('=').ok_or_else(|| ParseFaultError::NoValue(part.to_owned()))?;
            let (name, value) = (name.trim(), value.trim());
            match name {
                "loss" => config.loss = probability(name, value)?,
                "dup" => config.dup = probability(name, value)?,
                "reorder" => config.reorder = probability(name, value)?,
                "corrupt" => config.corrupt = probability(name, value)?,
                "mark" => config.mark = probability(name, value)?,
                "delay" => config.delay_ns = time(name, value)?,
                "jitter" => config.jitter_ns = time(name, value)?,
                "seed" => config.seed = value.parse().map_err(|_| ParseFaultError::Seed(value.to_owned()))?,
                _ => return Err(ParseFaultError::Unknown(name.to_owned())),
            }
        }
        Ok(config)
    }
}

fn probability(name: &str, value: &str) -> Result<f64, ParseFaultError> {
    let share = match value.strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().ok().map(|p| p / 100.0),
        None => value.parse().ok(),
    };
    share
        .filter(|p| (0.0..=1.0).contains(p))
        .ok_or_else(|| ParseFaultError::Probability { name: name.to_owned(), value: value.to_owned() })
}

/// Nanoseconds of a time such as `50us`, at most 10 s.
fn time(name: &str, value: &str) -> Result<u64, ParseFaultError> {
    let split = value.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(value.len());
    let (number, unit) = value.split_at(split);
    let scale = match unit.trim() {
        "ns" => Some(1.0),
        "us" => Some(1e3),
        "ms" => Some(1e6),
        "s" => Some(1e9),
        _ => None,
    };
    let ns = scale.and_then(|scale| Some(number.trim().parse::<f64>().ok()? * scale));
    match ns {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // between 0 and 10^10
        Some(ns) if (0.0..=1e10).contains(&ns) => Ok(ns.round() as u64),
        _ => Err(ParseFaultError::Time { name: name.to_owned(), value: value.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_can_be_written() {
        let config: FaultConfig =
            "loss=1%, dup=0.001,reorder=0.5,delay=50us,jitter=1.5ms,corrupt=1e-4,mark=0.25,seed=7"
                .parse()
                .unwrap();
        let want = FaultConfig {
            loss: 0.01,
            dup: 0.001,
            reorder: 0.5,
            corrupt: 1e-4,
            mark: 0.25,
            delay_ns: 50_000,
            jitter_ns: 1_500_000,
            seed: 7,
        };
        assert_eq!(config, want);
        assert!("".parse::<FaultConfig>().unwrap().is_none());
        assert!("seed=3".parse::<FaultConfig>().unwrap().is_none());
        assert!(!"delay=1ns".parse::<FaultConfig>().unwrap().is_none());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, named) in [
            ("lost=1", "unknown fault `lost`"),
            ("loss", "`loss` has no value"),
            ("loss=2", "`loss=2`"),
            ("loss=nan", "from 0 to 1"),
            ("loss=101%", "`loss=101%`"),
            ("dup=-1", "`dup=-1`"),
            ("delay=50", "a number with a unit"),
            ("delay=50parsecs", "`delay=50parsecs`"),
            ("jitter=11s", "at most 10 s"),
            ("seed=x", "`seed=x`"),
        ] {
            let error = text.parse::<FaultConfig>().unwrap_err().to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}
