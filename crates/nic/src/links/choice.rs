//! The links that a device can be opened with, by name.

use std::str::FromStr;

use nobounce_protocol::seal::OVERHEAD;

use super::peers_only::PeersOnlyLink;
use super::sealed::{SealKeys, SealedLink};
use super::shm::ShmLink;
use super::udp::{UdpConfig, UdpLink};
use super::{Link, OpenError};
use crate::allow::AllowList;

/// What a device demands of packets from the wire.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guards {
    /// They are sealed under one of these secrets.
    pub(crate) keys: Option<SealKeys>,
    /// They come from these peers.
    pub(crate) peers: AllowList,
}

/// The link that packets take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkChoice {
    /// UDP, for every peer.
    Udp,
    /// Shared memory to same-host peers. UDP to other hosts, and where the kernel or a container
    /// forbids shared memory (see [`Device::fallbacks`](crate::soft::Device::fallbacks)).
    #[default]
    Auto,
}

impl LinkChoice {
    /// Every name, and its choice. No setup works with shared memory alone, so `shm` is `auto`.
    const NAMED: [(&'static str, Self); 3] = [("udp", Self::Udp), ("shm", Self::Auto), ("auto", Self::Auto)];

    /// The names.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::NAMED.into_iter().map(|(name, _)| name)
    }

    /// Whether same-host peers are reached through shared memory.
    pub(crate) fn shares_memory(self) -> bool {
        self == Self::Auto
    }

    /// Opens the link, on the wire that is configured so.
    pub(crate) fn open(self, wire: &UdpConfig, guards: &Guards) -> Result<Box<dyn Link>, OpenError> {
        let added = if guards.keys.is_some() { OVERHEAD } else { 0 };
        let mut udp: Box<dyn Link> = Box::new(UdpLink::prepare(&UdpConfig { added, ..*wire })?);
        if !guards.peers.is_open() {
            udp = Box::new(PeersOnlyLink::new(udp, guards.peers.clone()));
        }
        if let Some(keys) = &guards.keys {
            udp = Box::new(SealedLink::new(udp, keys)?);
        }
        match self {
            Self::Udp => Ok(udp),
            Self::Auto => {
                let os = |source| OpenError::Os { addr: wire.addr, call: "opening shared memory", source };
                Ok(Box::new(ShmLink::new(udp).map_err(os)?))
            }
        }
    }
}

/// There is no link of that name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid link {0:?}: expected {names} (NOBOUNCE_LINK or --link)", names = LinkChoice::names().collect::<Vec<_>>().join(", "))]
pub struct UnknownLink(pub String);

impl FromStr for LinkChoice {
    type Err = UnknownLink;

    fn from_str(text: &str) -> Result<Self, UnknownLink> {
        let named = Self::NAMED.into_iter().find(|(name, _)| *name == text);
        named.map(|(_, choice)| choice).ok_or_else(|| UnknownLink(text.to_owned()))
    }
}
