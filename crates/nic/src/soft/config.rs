//! Device configuration.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use nobounce_protocol::seal::SealMode;

use crate::allow::{AllowList, AllowListError};
use crate::interfaces;
use crate::links::fault::{FaultConfig, ParseFaultError};
use crate::links::sealed::{KeyFileError, KeySource, SealKeys};
use crate::links::udp::LocalPorts;
use crate::links::{LinkChoice, UnknownLink};
use crate::process::cpu::allowed_cpus;
use crate::soft::port_speed::PortSpeed;

/// How to open a device. [`Config::from_env`] reads the environment.
#[derive(Clone, Debug)]
pub struct Config {
    /// The device's address. Default: loopback, which accepts no packets from the network.
    pub addr: IpAddr,
    /// Faults to inject into sent packets.
    pub fault: Option<FaultConfig>,
    /// Where to write a capture of everything sent and received.
    pub pcap: Option<PathBuf>,
    /// Segmented sends (GSO), if the kernel has them.
    pub gso: bool,
    /// Merged receives (GRO), if the kernel has them.
    pub gro: bool,
    /// The link that packets take.
    pub link: LinkChoice,
    /// How many engines drive the device at most, each with its own thread (1 to 8). `None`: by the
    /// CPUs that this process may run on, see [`Config::engines`].
    pub engines: Option<usize>,
    /// Which thread drives the engines.
    pub progress: Progress,
    /// Source ports from which packets of this host are taken.
    pub local_ports: LocalPorts,
    /// How often peers that are reached by UDP are asked whether they live; one that answered
    /// before and is silent for three intervals is dead. `None`: never.
    pub keep_alive: Option<Duration>,
    /// How lost packets are sent again to peers that are reached by UDP.
    pub retransmit: Retransmit,
    /// The speed that the port states.
    pub speed: PortSpeed,
    /// The secrets that packets of the network are sealed under.
    pub key: Option<SealKeys>,
    /// Peers whose packets are taken from the network.
    pub peers: AllowList,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            addr: Ipv4Addr::LOCALHOST.into(),
            fault: None,
            pcap: None,
            gso: true,
            gro: true,
            link: LinkChoice::default(),
            engines: None,
            progress: Progress::default(),
            local_ports: LocalPorts::default(),
            keep_alive: None,
            retransmit: Retransmit::default(),
            speed: PortSpeed::default(),
            key: None,
            peers: AllowList::default(),
        }
    }
}

/// The secrets that `NOBOUNCE_KEY` names.
fn key_from_env() -> Result<Option<SealKeys>, ConfigError> {
    let text = |name| std::env::var_os(name).map(|text| text.to_string_lossy().trim().to_owned());
    let (named, mode) = (text("NOBOUNCE_KEY"), text("NOBOUNCE_KEY_MODE").filter(|mode| !mode.is_empty()));
    match (named, mode.as_deref()) {
        (None, None) => Ok(None),
        // A variable that was not set where its value came from must not switch protection off.
        (None, Some(_)) => Err(ConfigError::NoKey("NOBOUNCE_KEY_MODE is set, but NOBOUNCE_KEY is not")),
        (Some(named), _) if named.is_empty() => Err(ConfigError::NoKey("NOBOUNCE_KEY is set, but empty")),
        (Some(_), Some(other)) if !["encrypt", "authenticate"].contains(&other) => {
            Err(ConfigError::KeyMode(other.to_owned()))
        }
        (Some(named), mode) => {
            let mode = if mode == Some("authenticate") { SealMode::Authenticate } else { SealMode::Encrypt };
            Ok(Some(SealKeys::read(KeySource::from_text(&named), mode)?))
        }
    }
}

/// How lost packets of reliable queue pairs are sent again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Retransmit {
    /// Selectively where the peer can do so, which each device asks its peers. Otherwise as the
    /// standard has it.
    #[default]
    Auto,
    /// As the standard has it: everything from the lost packet on. No peer is asked.
    GoBackN,
}

impl FromStr for Retransmit {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text.trim() {
            "" | "auto" => Ok(Self::Auto),
            "go-back-n" => Ok(Self::GoBackN),
            _ => Err(ConfigError::Retransmit(text.to_owned())),
        }
    }
}

/// Seconds between two keep-alives, or `off`.
fn parse_keep_alive(text: &str) -> Result<Option<Duration>, ConfigError> {
    let invalid = || ConfigError::KeepAlive(text.to_owned());
    match text.trim() {
        "" | "off" => Ok(None),
        seconds => {
            let seconds: f64 = seconds.parse().map_err(|_| invalid())?;
            if (0.01..=3600.0).contains(&seconds) {
                Ok(Some(Duration::from_secs_f64(seconds)))
            } else {
                Err(invalid())
            }
        }
    }
}

/// The number of engines for this many allowed CPUs. With shared memory both ends run on these
/// CPUs. The threads of both must find a free one while half of them are busy. By UDP a byte costs
/// several times as much, and the peer is most likely on another host.
fn engines_for(cpus: usize, by_udp: bool) -> usize {
    match cpus {
        0..8 => 1,
        8..16 if by_udp => 2,
        16.. if by_udp => 4,
        8..32 => 1,
        32.. => 2,
    }
}

/// Engines per device, at most.
pub(crate) const MAX_ENGINES: usize = 8;

/// Which thread drives the engines of a device, as configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    /// [`Thread`](Self::Thread) where the process may run on 4 CPUs or more, otherwise
    /// [`Caller`](Self::Caller). Decided once, when the device opens.
    #[default]
    Auto,
    /// The engine thread alone. Posting enqueues, polling reads the completion queue; neither makes
    /// a system call while the engine thread is awake.
    Thread,
    /// The thread that posts or polls. The engine thread takes over when a completion queue is
    /// armed or polls stop.
    Caller,
}

impl FromStr for Progress {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text.trim() {
            "auto" => Ok(Self::Auto),
            "thread" => Ok(Self::Thread),
            "caller" => Ok(Self::Caller),
            _ => Err(ConfigError::Progress(text.to_owned())),
        }
    }
}

/// An invalid environment variable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// NOBOUNCE_ADDR.
    #[error(
        "{0:?} is neither an IP address nor an interface of this machine with one (NOBOUNCE_ADDR or --addr)"
    )]
    Addr(String),
    /// NOBOUNCE_LINK.
    #[error(transparent)]
    Link(#[from] UnknownLink),
    /// NOBOUNCE_ENGINES.
    #[error("invalid number of engines {0:?}: expected 1 to {MAX_ENGINES} (NOBOUNCE_ENGINES or --engines)")]
    Engines(String),
    /// NOBOUNCE_PROGRESS.
    #[error("invalid progress mode {0:?}: expected auto, thread or caller (NOBOUNCE_PROGRESS or --progress)")]
    Progress(String),
    /// NOBOUNCE_LOCAL_PORTS.
    #[error("invalid NOBOUNCE_LOCAL_PORTS {0:?}: expected own or any")]
    LocalPorts(String),
    /// NOBOUNCE_KEEPALIVE.
    #[error("invalid NOBOUNCE_KEEPALIVE {0:?}: expected off, or seconds from 0.01 to 3600")]
    KeepAlive(String),
    /// NOBOUNCE_RETRANSMIT.
    #[error("invalid NOBOUNCE_RETRANSMIT {0:?}: expected auto or go-back-n")]
    Retransmit(String),
    /// NOBOUNCE_SPEED.
    #[error("invalid NOBOUNCE_SPEED {0:?}: expected 10, 25, 40, 50, 100, 200 or 400 (Gb/s)")]
    Speed(String),
    /// NOBOUNCE_KEY.
    #[error(transparent)]
    Key(#[from] KeyFileError),
    /// NOBOUNCE_KEY without a key.
    #[error("{0}: packets would leave unprotected. Name a file with the key, or unset both variables")]
    NoKey(&'static str),
    /// NOBOUNCE_KEY_MODE.
    #[error("invalid NOBOUNCE_KEY_MODE {0:?}: expected encrypt or authenticate")]
    KeyMode(String),
    /// NOBOUNCE_PEERS.
    #[error("NOBOUNCE_PEERS: {0}")]
    Peers(#[from] AllowListError),
    /// NOBOUNCE_FAULT.
    #[error("NOBOUNCE_FAULT: {0}")]
    Fault(#[from] ParseFaultError),
}

impl Config {
    /// The default, changed by `NOBOUNCE_ADDR` (the first address of the list), `NOBOUNCE_FAULT`,
    /// `NOBOUNCE_PCAP`, `NOBOUNCE_LINK`, `NOBOUNCE_ENGINES`, `NOBOUNCE_PROGRESS`,
    /// `NOBOUNCE_LOCAL_PORTS`, `NOBOUNCE_KEEPALIVE`, `NOBOUNCE_RETRANSMIT`, `NOBOUNCE_SPEED`,
    /// `NOBOUNCE_KEY`, `NOBOUNCE_KEY_MODE` and `NOBOUNCE_PEERS`.
    ///
    /// # Errors
    /// Reports which variable is invalid, and why.
    pub fn from_env() -> Result<Self, ConfigError> {
        let mut config = Self::default();
        if let Ok(list) = std::env::var("NOBOUNCE_ADDR") {
            let first = list.split(',').next().unwrap_or_default();
            config.addr = resolve_addr(first.trim())?;
        }
        if let Ok(fault) = std::env::var("NOBOUNCE_FAULT") {
            config.fault = Some(fault.parse()?);
        }
        if let Ok(link) = std::env::var("NOBOUNCE_LINK") {
            config.link = link.parse()?;
        }
        if let Ok(engines) = std::env::var("NOBOUNCE_ENGINES") {
            config.engines = Some(parse_engines(&engines)?);
        }
        if let Ok(progress) = std::env::var("NOBOUNCE_PROGRESS") {
            config.progress = progress.parse()?;
        }
        if let Ok(ports) = std::env::var("NOBOUNCE_LOCAL_PORTS") {
            config.local_ports = match ports.trim() {
                "" | "own" => LocalPorts::Own,
                "any" => LocalPorts::Any,
                _ => return Err(ConfigError::LocalPorts(ports)),
            };
        }
        if let Ok(text) = std::env::var("NOBOUNCE_KEEPALIVE") {
            config.keep_alive = parse_keep_alive(&text)?;
        }
        if let Ok(retransmit) = std::env::var("NOBOUNCE_RETRANSMIT") {
            config.retransmit = retransmit.parse()?;
        }
        if let Ok(speed) = std::env::var("NOBOUNCE_SPEED") {
            config.speed = speed.parse()?;
        }
        config.key = key_from_env()?;
        if let Ok(peers) = std::env::var("NOBOUNCE_PEERS")
            && !peers.trim().is_empty()
        {
            config.peers = peers.parse()?;
        }
        config.pcap = std::env::var_os("NOBOUNCE_PCAP").map(PathBuf::from);
        Ok(config)
    }

    /// How many engines drive the device at most. A configured number wins. Otherwise: 1 if the
    /// process may run on fewer than 32 CPUs, else 2. For UDP peers: 1 below 8 CPUs, 2 below 16,
    /// else 4.
    pub fn engines(&self) -> usize {
        // A device that is reachable from other hosts most likely has peers there.
        let by_udp = !self.link.shares_memory() || !self.addr.is_loopback();
        self.engines.unwrap_or_else(|| engines_for(allowed_cpus(), by_udp)).clamp(1, MAX_ENGINES)
    }

    /// The addresses of `NOBOUNCE_ADDR`, a list with commas between them: one device each, `nb0`,
    /// `nb1`, ... in that order.
    ///
    /// # Errors
    /// One of them is neither an address nor an interface.
    pub fn addrs_from_env() -> Result<Vec<IpAddr>, ConfigError> {
        let Ok(list) = std::env::var("NOBOUNCE_ADDR") else { return Ok(vec![Self::default().addr]) };
        list.split(',').map(|addr| resolve_addr(addr.trim())).collect()
    }

    /// The name of the device at an address: `nb0`, `nb1`, ... by its place in `NOBOUNCE_ADDR`.
    pub fn device_name(addr: IpAddr) -> String {
        let place = Self::addrs_from_env().ok().and_then(|all| all.iter().position(|one| *one == addr));
        format!("nb{}", place.unwrap_or(0))
    }

    /// The same with another address: an IP address, or the name of an interface.
    ///
    /// # Errors
    /// It is neither.
    pub fn at(self, addr: &str) -> Result<Self, ConfigError> {
        Ok(Self { addr: resolve_addr(addr)?, ..self })
    }
}

/// Parses a number of engines.
fn parse_engines(text: &str) -> Result<usize, ConfigError> {
    let engines = text.trim().parse().ok().filter(|count| (1..=MAX_ENGINES).contains(count));
    engines.ok_or_else(|| ConfigError::Engines(text.to_owned()))
}

/// An address as such, or the first address of an interface (IPv4 before IPv6).
fn resolve_addr(text: &str) -> Result<IpAddr, ConfigError> {
    if let Ok(addr) = text.parse() {
        return Ok(addr);
    }
    let wrong = || ConfigError::Addr(text.to_owned());
    let here = interfaces::addresses().into_iter().filter(|here| here.name == text);
    let mut found: Vec<IpAddr> = here.map(|here| here.addr).collect();
    // A link-local address is ambiguous without its interface, which a packet does not carry.
    found.retain(|addr| !matches!(addr, IpAddr::V6(v6) if v6.is_unicast_link_local()));
    found.sort_by_key(IpAddr::is_ipv6);
    found.first().copied().ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_by_the_cpus_or_by_a_number() {
        let cpus = [1, 2, 4, 7, 8, 15, 16, 31, 32, 192];
        assert_eq!(cpus.map(|cpus| engines_for(cpus, false)), [1, 1, 1, 1, 1, 1, 1, 1, 2, 2]);
        assert_eq!(cpus.map(|cpus| engines_for(cpus, true)), [1, 1, 1, 1, 2, 2, 4, 4, 4, 4]);
        assert_eq!(parse_engines(" 3").unwrap(), 3);
        for wrong in ["0", "9", "-1", "two", ""] {
            let error = parse_engines(wrong).unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong:?}")) && error.contains("NOBOUNCE_ENGINES"), "{error}");
        }
    }

    #[test]
    fn the_link_is_automatic_unless_it_is_named() {
        assert_eq!(Config::default().link, LinkChoice::Auto);
        let choices = ["udp", "shm", "auto"].map(|text| text.parse::<LinkChoice>().unwrap());
        assert_eq!(choices, [LinkChoice::Udp, LinkChoice::Auto, LinkChoice::Auto]);
        let error = "tcp".parse::<LinkChoice>().unwrap_err().to_string();
        assert!(error.contains("tcp") && error.contains("NOBOUNCE_LINK"), "{error}");
    }

    #[test]
    fn an_address_or_an_interface() {
        assert_eq!(resolve_addr("127.0.0.9").unwrap(), "127.0.0.9".parse::<IpAddr>().unwrap());
        assert_eq!(resolve_addr("::1").unwrap(), "::1".parse::<IpAddr>().unwrap());
        assert!(resolve_addr("lo").unwrap().is_loopback());
        let error = resolve_addr("no-such-interface").unwrap_err().to_string();
        assert!(error.contains("no-such-interface") && error.contains("NOBOUNCE_ADDR"), "{error}");
    }

    #[test]
    fn modes_by_their_names() {
        let modes = ["auto", "thread", " caller"].map(|text| text.parse::<Progress>().unwrap());
        assert_eq!(modes, [Progress::Auto, Progress::Thread, Progress::Caller]);
        let error = "fast".parse::<Progress>().unwrap_err().to_string();
        assert!(error.contains("\"fast\"") && error.contains("NOBOUNCE_PROGRESS"), "{error}");
    }
}
