//! What a path does to packets, and how that is written.

use std::fmt;
use std::str::FromStr;

use nobounce_nic::links::fault::{FaultConfig, ParseFaultError};

/// MTU of both devices unless another is given.
pub const DEFAULT_MTU: u32 = 1500;
/// Bytes of the queue in front of a limited rate unless another is given.
pub const DEFAULT_QUEUE: u64 = 256 << 10;
/// The smallest MTU on which IPv6 works.
const MIN_MTU: u32 = 1280;
const MAX_MTU: u32 = 65_535;

/// What a path does, in each direction. Written `rate=500M,delay=100us,loss=1%,mtu=9000`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathConfig {
    /// Delay, loss, reordering and so on, as `--fault` has them.
    pub faults: FaultConfig,
    /// Bits per second, IP headers included; `None` for no limit.
    pub rate: Option<u64>,
    /// Bytes that wait for a limited rate at most; a packet that finds no room is dropped.
    pub queue: u64,
    /// Bytes of the queue above which packets of ECN-capable senders are marked.
    pub ecn: Option<u64>,
    /// MTU of the devices at both ends.
    pub mtu: u32,
    /// Longer packets are dropped inside the path.
    pub path_mtu: Option<u32>,
    /// Whether their senders get an ICMP message; without it the path is a black hole.
    pub icmp: bool,
}

impl Default for PathConfig {
    fn default() -> Self {
        Self {
            faults: FaultConfig::default(),
            rate: None,
            queue: DEFAULT_QUEUE,
            ecn: None,
            mtu: DEFAULT_MTU,
            path_mtu: None,
            icmp: true,
        }
    }
}

/// The text does not describe a path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParsePathError {
    /// A setting of [`FaultConfig`] is wrong.
    #[error(transparent)]
    Fault(ParseFaultError),
    /// No setting has that name.
    #[error(
        "unknown setting `{0}`: rate, queue, ecn, mtu, path-mtu, icmp, loss, dup, reorder, corrupt, mark, delay, jitter and seed \
         can be set, as in `rate=500M,delay=100us,loss=1%`"
    )]
    Unknown(String),
    /// A value that the setting cannot have.
    #[error("`{name}={value}`: expected {expected}")]
    Value {
        /// The setting.
        name: &'static str,
        /// As written.
        value: String,
        /// What it can be.
        expected: &'static str,
    },
}

const RATE: &str = "bits per second, at least 1k, such as 500M or 2.5G";
const BYTES: &str = "bytes, such as 64K or 1M";
const MTU: &str = "bytes from 1280 to 65535";

impl FromStr for PathConfig {
    type Err = ParsePathError;

    fn from_str(text: &str) -> Result<Self, ParsePathError> {
        let mut config = Self::default();
        let mut faults = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').map_or((part, ""), |(n, v)| (n.trim(), v.trim()));
            let wrong = |name, expected| ParsePathError::Value { name, value: value.to_owned(), expected };
            match name {
                "rate" => config.rate = Some(rate(value).ok_or_else(|| wrong("rate", RATE))?),
                "queue" => config.queue = bytes(value).ok_or_else(|| wrong("queue", BYTES))?,
                "ecn" => config.ecn = Some(bytes(value).ok_or_else(|| wrong("ecn", BYTES))?),
                "mtu" => config.mtu = mtu(value).ok_or_else(|| wrong("mtu", MTU))?,
                "path-mtu" => config.path_mtu = Some(mtu(value).ok_or_else(|| wrong("path-mtu", MTU))?),
                "icmp" => {
                    config.icmp = match value {
                        "yes" => true,
                        "no" => false,
                        _ => return Err(wrong("icmp", "yes or no")),
                    }
                }
                _ => faults.push(part),
            }
        }
        config.faults = faults.join(",").parse().map_err(|error| match error {
            ParseFaultError::Unknown(name) => ParsePathError::Unknown(name),
            other => ParsePathError::Fault(other),
        })?;
        Ok(config)
    }
}

/// A number with a suffix, each step of which multiplies by `step`.
fn scaled(text: &str, step: f64) -> Option<u64> {
    let (number, scale) = match text.chars().last()? {
        'k' | 'K' => (&text[..text.len() - 1], step),
        'M' => (&text[..text.len() - 1], step * step),
        'G' => (&text[..text.len() - 1], step * step * step),
        _ => (text, 1.0),
    };
    let value = number.trim().parse::<f64>().ok()? * scale;
    // in the range of the next line
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    (1.0..=1e15).contains(&value).then(|| value.round() as u64)
}

fn rate(text: &str) -> Option<u64> {
    scaled(text, 1000.0).filter(|rate| *rate >= 1000)
}

fn bytes(text: &str) -> Option<u64> {
    scaled(text, 1024.0)
}

fn mtu(text: &str) -> Option<u32> {
    text.parse().ok().filter(|mtu| (MIN_MTU..=MAX_MTU).contains(mtu))
}

impl fmt::Display for PathConfig {
    /// As it is written, without what is at its default.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { faults, rate, queue, ecn, mtu, path_mtu, icmp } = *self;
        let FaultConfig { loss, dup, reorder, corrupt, mark, delay_ns, jitter_ns, seed } = faults;
        write!(f, "mtu={mtu}")?;
        if let Some(rate) = rate {
            write!(f, ",rate={rate},queue={queue}")?;
        }
        if let Some(ecn) = ecn {
            write!(f, ",ecn={ecn}")?;
        }
        for (name, ns) in [("delay", delay_ns), ("jitter", jitter_ns)] {
            match ns {
                0 => {}
                ns if ns.is_multiple_of(1000) => write!(f, ",{name}={}us", ns / 1000)?,
                ns => write!(f, ",{name}={ns}ns")?,
            }
        }
        let shares =
            [("loss", loss), ("dup", dup), ("reorder", reorder), ("corrupt", corrupt), ("mark", mark)];
        for (name, share) in shares {
            if share > 0.0 {
                write!(f, ",{name}={share}")?;
            }
        }
        if let Some(path_mtu) = path_mtu {
            write!(f, ",path-mtu={path_mtu}{}", if icmp { "" } else { ",icmp=no" })?;
        }
        if seed > 0 { write!(f, ",seed={seed}") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_read_and_written_back() {
        let text = "mtu=9000,rate=2500000000,queue=65536,ecn=32768,delay=100us,jitter=1500ns,loss=0.01,dup=0.001,\
                    reorder=0.5,corrupt=0.25,mark=0.125,path-mtu=1400,icmp=no,seed=7";
        let config: PathConfig = text.parse().unwrap();
        assert_eq!(config.to_string(), text);
        let same: PathConfig =
            "rate=2.5G, queue=64K,ecn=32K,delay=100us,jitter=1.5us,loss=1%,dup=0.1%,reorder=0.5,corrupt=25%,mark=0.125,mtu=9000,\
             path-mtu=1400,icmp=no,seed=7"
                .parse()
                .unwrap();
        assert_eq!(same, config);
        assert_eq!("".parse(), Ok(PathConfig::default()));
        assert_eq!(PathConfig::default().to_string(), "mtu=1500");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, named) in [
            ("rat=1", "unknown setting `rat`: rate, queue"),
            ("rate=0", "`rate=0`: expected bits per second"),
            ("rate", "`rate=`: expected"),
            ("rate=1T", "`rate=1T`"),
            ("queue=-1", "`queue=-1`: expected bytes"),
            ("mtu=1000", "`mtu=1000`: expected bytes from 1280"),
            ("path-mtu=x", "`path-mtu=x`"),
            ("icmp=maybe", "expected yes or no"),
            ("loss=101%", "`loss=101%`: a probability"),
            ("delay=5", "a number with a unit"),
        ] {
            let error = text.parse::<PathConfig>().unwrap_err().to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}
