//! Regions that agents export by name, and their metadata as bytes.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use nobounce::RemoteRegion;
use serde::{Deserialize, Serialize};

use crate::frame::MAX_NAME;
use crate::memory::View;

/// First bytes of metadata.
const MAGIC: [u8; 4] = *b"nbm1";
/// Regions that one agent may export.
pub(crate) const MAX_EXPORTS: usize = 1 << 16;

/// What an agent exports.
#[derive(Debug, Default)]
pub(crate) struct Exports {
    /// Counts changes.
    version: u64,
    /// Each with the version that added it.
    by_name: BTreeMap<String, (u64, View)>,
}

impl Exports {
    pub(crate) fn add(&mut self, name: &str, view: View) -> RemoteRegion {
        let region = remote(&view);
        self.version += 1;
        self.by_name.insert(name.to_owned(), (self.version, view));
        region
    }

    pub(crate) fn remove(&mut self, name: &str) -> bool {
        let found = self.by_name.remove(name).is_some();
        self.version += u64::from(found);
        found
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, RemoteRegion)> {
        self.by_name.iter().map(|(name, (_, view))| (name.as_str(), remote(view)))
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Those that were added after `version`.
    pub(crate) fn since(&self, version: u64) -> Vec<(String, RemoteRegion)> {
        let new = self.by_name.iter().filter(|(_, (added, _))| *added > version);
        new.map(|(name, (_, view))| (name.clone(), remote(view))).collect()
    }
}

/// What a peer needs to reach the view.
fn remote(view: &View) -> RemoteRegion {
    let region = view.region().remote();
    RemoteRegion { addr: view.addr(), len: view.len(), ..region }
}

/// Metadata of an agent: who it is, where it listens, what it exports. They travel by any channel.
/// A holder can reach the exported memory: keep them as private as the memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) name: String,
    pub(crate) generation: u64,
    pub(crate) addr: Option<SocketAddr>,
    /// Version of the exports after these.
    pub(crate) version: u64,
    pub(crate) exports: Vec<(String, RemoteRegion)>,
}

impl Metadata {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(postcard::to_stdvec(self).expect("writing into a vector does not fail"));
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let found: Self = postcard::from_bytes(bytes.strip_prefix(&MAGIC)?).ok()?;
        let is_short = |name: &str| name.len() <= MAX_NAME;
        let fits = found.exports.len() <= MAX_EXPORTS
            && is_short(&found.name)
            && found.exports.iter().all(|(name, _)| is_short(name));
        fits.then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn metadata_survive_the_way_and_damage_is_seen() {
        let region = RemoteRegion { addr: 1 << 40, len: 4096, rkey: 7, closed: false };
        let addr = Some("10.0.0.1:4000".parse().unwrap());
        let exports = vec![("kv".to_owned(), region)];
        let metadata = Metadata { name: "prefill".to_owned(), generation: 9, addr, version: 3, exports };
        let bytes = metadata.encode();
        assert_eq!(Metadata::decode(&bytes).as_ref(), Some(&metadata));
        for cut in 0..bytes.len() {
            assert_eq!(Metadata::decode(&bytes[..cut]), None);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_metadata_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Metadata::decode(&[&MAGIC[..], &bytes].concat());
        }
    }
}
