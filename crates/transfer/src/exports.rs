//! Regions that agents export by name, and their metadata as bytes.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use nobounce::{Device, Region, RegisterError, RemoteRegion};
use serde::{Deserialize, Serialize};

use crate::frame::{MAX_EXPORTS, MAX_NAME};
use crate::memory::View;

/// First bytes of metadata.
const MAGIC: [u8; 4] = *b"nbm1";

/// An export: registered for itself, so that its key opens nothing else, and ends with it.
#[derive(Debug)]
pub(crate) struct Export {
    /// The change that added it.
    version: u64,
    // Dropped before the view, which keeps the memory.
    region: Region,
    _view: View,
}

impl Export {
    /// Registers the memory for peers.
    pub(crate) fn new(device: &Device, view: &View) -> Result<Self, RegisterError> {
        Ok(Self { version: 0, region: view.register_again(device)?, _view: view.clone() })
    }
}

/// What an agent exports.
#[derive(Debug, Default)]
pub(crate) struct Exports {
    /// Counts changes.
    version: u64,
    by_name: BTreeMap<String, Export>,
}

impl Exports {
    /// The number of the change, what a peer needs to reach the memory, and what had this name
    /// before.
    pub(crate) fn add(&mut self, name: &str, export: Export) -> (u64, RemoteRegion, Option<Export>) {
        self.version += 1;
        let remote = export.region.remote();
        let old = self.by_name.insert(name.to_owned(), Export { version: self.version, ..export });
        (self.version, remote, old)
    }

    /// The number of the change, and what it ends; `None` if there is no such export.
    pub(crate) fn remove(&mut self, name: &str) -> Option<(u64, Export)> {
        let old = self.by_name.remove(name)?;
        self.version += 1;
        Some((self.version, old))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, u64, RemoteRegion)> {
        self.by_name.iter().map(|(name, export)| (name.as_str(), export.version, export.region.remote()))
    }

    pub(crate) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Those that were added after `version`.
    pub(crate) fn since(&self, version: u64) -> Vec<(String, u64, RemoteRegion)> {
        let new = self.all().filter(|(_, added, _)| *added > version);
        new.map(|(name, version, region)| (name.to_owned(), version, region)).collect()
    }
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
    pub(crate) exports: Vec<(String, u64, RemoteRegion)>,
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
            && found.exports.iter().all(|(name, _, _)| is_short(name));
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
        let exports = vec![("kv".to_owned(), 2, region)];
        let metadata = Metadata { name: "prefill".to_owned(), generation: 9, addr, version: 3, exports };
        let bytes = metadata.encode();
        assert_eq!(Metadata::decode(&bytes).as_ref(), Some(&metadata));
        for cut in 0..bytes.len() {
            assert_eq!(Metadata::decode(&bytes[..cut]), None);
        }
    }

    #[test]
    fn the_key_of_a_part_is_not_the_key_of_the_rest() {
        let device = Device::open().unwrap();
        let whole = View::of(device.register(8192).unwrap());
        let mut exports = Exports::default();
        let mut export = |name| {
            let export = Export::new(&device, &whole.part(4096, 4096).unwrap()).unwrap();
            exports.add(name, export).1
        };
        let part = export("part");
        assert_eq!((part.addr, part.len), (whole.addr() + 4096, 4096));
        let again = export("again");
        let keys = [part.rkey, again.rkey, whole.region().mr().rkey()];
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2], "{keys:?}");
    }

    proptest! {
        #[test]
        fn arbitrary_metadata_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Metadata::decode(&[&MAGIC[..], &bytes].concat());
        }
    }
}
