//! Mapped and registered files of a server.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};

use nobounce_memory::FileMapping;
use nobounce_transfer::{Agent, Foreign, View};

use crate::root::Root;

/// Files that stay mapped when no request uses them.
pub(crate) const MAX_CACHED: usize = 64;

/// Which contents a mapping shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

/// A file whose page cache is registered.
#[derive(Debug)]
pub(crate) struct Mapped {
    identity: Identity,
    pub(crate) mapping: Arc<FileMapping>,
    /// `None` for an empty file.
    pub(crate) view: Option<View>,
}

impl Mapped {
    pub(crate) fn size(&self) -> u64 {
        self.identity.size
    }
}

/// The files used last, newest last.
#[derive(Debug, Default)]
pub(crate) struct Cache(Mutex<Vec<Arc<Mapped>>>);

impl Cache {
    /// A file that is mapped, if it can be found without blocking.
    pub(crate) fn known(&self, root: &Root, path: &str) -> Option<Arc<Mapped>> {
        let identity = identity_of(&root.cached_file(path).ok()?, path).ok()?;
        self.find(identity)
    }

    /// The mapping of these contents, which is the newest from now on.
    fn find(&self, identity: Identity) -> Option<Arc<Mapped>> {
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = cached.iter().position(|mapped| mapped.identity == identity)?;
        let found = cached.remove(at);
        cached.push(found.clone());
        Some(found)
    }

    /// Opens a file below the root, and maps and registers it unless that was done before.
    pub(crate) fn open(&self, root: &Root, agent: &Agent, path: &str) -> Result<Arc<Mapped>, String> {
        let explain = |error: io::Error| format!("cannot read {path:?}: {error}");
        let file = root.file(path, false).map_err(explain)?;
        let identity = identity_of(&file, path)?;
        if let Some(found) = self.find(identity) {
            return Ok(found);
        }
        let len = usize::try_from(identity.size).map_err(|_| format!("{path:?} is too large to map"))?;
        let mapping = Arc::new(FileMapping::of(file.as_fd(), len).map_err(explain)?);
        let view = if len == 0 { None } else { Some(register(agent, &mapping, path)?) };
        let mapped = Arc::new(Mapped { identity, mapping, view });
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Requests see the new version only.
        let same = |other: &Identity| (other.device, other.inode) == (identity.device, identity.inode);
        cached.retain(|other| !same(&other.identity));
        if cached.len() >= MAX_CACHED {
            cached.remove(0);
        }
        cached.push(mapped.clone());
        Ok(mapped)
    }
}

#[allow(unsafe_code)] // registering memory is a promise about it
fn register(agent: &Agent, mapping: &Arc<FileMapping>, path: &str) -> Result<View, String> {
    let memory = Foreign {
        addr: mapping.addr(),
        len: mapping.len(),
        is_gpu: false,
        is_read_only: true,
        is_on_demand: true,
    };
    // SAFETY: the owner keeps the mapping; no reference to its bytes is ever made.
    let registered = unsafe { agent.register_raw(&memory, Some(Box::new(mapping.clone()))) };
    registered.map_err(|error| format!("cannot register {path:?}: {error}"))
}

fn identity_of(file: &File, path: &str) -> Result<Identity, String> {
    let found = file.metadata().map_err(|error| format!("cannot read {path:?}: {error}"))?;
    if !found.is_file() {
        return Err(format!("{path:?} is no regular file"));
    }
    let modified = (found.mtime(), found.mtime_nsec());
    Ok(Identity { device: found.dev(), inode: found.ino(), size: found.len(), modified })
}

/// The size of a file.
pub(crate) fn size_of(root: &Root, path: &str) -> Result<u64, String> {
    let file = root.file(path, false).map_err(|error| format!("cannot read {path:?}: {error}"))?;
    identity_of(&file, path).map(|identity| identity.size)
}
