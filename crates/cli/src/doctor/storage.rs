//! `doctor --storage`: the facts of a path, and what its file says about O_DIRECT.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use nobounce_topology::facts::{DirectIo, Facts, Read};
use nobounce_topology::sysfs::{self, Root, Surroundings};

use super::args::Source;

/// Alignment that every drive and filesystem takes, where the kernel tells none.
const SAFE: u32 = 4096;
/// Most entries of a folder that are looked at for a file.
const MAX_ENTRIES: usize = 4096;

/// Adds the facts of the path; for saved facts, checks that they have one.
pub(super) fn fill(facts: &mut Facts, source: &Source, path: &Path) -> anyhow::Result<()> {
    // The current folder stands for a path that was not given.
    let named = path != Path::new(".");
    if let Some(file) = &source.facts {
        let Some(storage) = &facts.storage else {
            bail!(
                "{} has no facts of a path: save them on the machine with `nobounce doctor --storage PATH --save {}`",
                file.display(),
                file.display()
            );
        };
        if named && Path::new(&storage.path) != path && storage.path != "/PATH" {
            bail!(
                "{} has the facts of {}, not of {}: use --storage without a path",
                file.display(),
                storage.path,
                path.display()
            );
        }
        return Ok(());
    }
    if let Some(root) = &source.root {
        if named && !path.is_absolute() {
            bail!("{} is not absolute: with --root the path is that of the copied machine", path.display());
        }
        let path = if named { text(path)? } else { "/" };
        facts.storage = Some(sysfs::storage(&Root::new(root), &Surroundings::default(), path));
        return Ok(());
    }
    let real = fs::canonicalize(path).with_context(|| format!("cannot find {}", path.display()))?;
    let kind = fs::metadata(&real).with_context(|| format!("cannot read {}", real.display()))?.file_type();
    if !kind.is_file() && !kind.is_dir() {
        bail!("{} is neither a file nor a folder: name a file that programs would read", real.display());
    }
    let environment: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let home = environment.get("HOME").cloned();
    let mut storage = sysfs::storage(&Root::new("/"), &Surroundings { environment, home }, text(&real)?);
    storage.direct_io = match file_of(&real) {
        Ok(file) => direct_io(&file),
        Err(error) => Read::no(error.to_string()),
    };
    facts.storage = Some(storage);
    Ok(())
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8, which facts are", path.display()))
}

/// The file that stands for a path: itself, or the largest one in a folder.
pub(super) fn file_of(path: &Path) -> io::Result<PathBuf> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(path.to_owned());
    }
    let mut best: Option<(u64, PathBuf)> = None;
    for entry in fs::read_dir(path)?.take(MAX_ENTRIES).flatten() {
        // Links may lead to another filesystem.
        let Ok(kind) = entry.file_type() else { continue };
        let Ok(data) = entry.metadata() else { continue };
        if kind.is_file() && best.as_ref().is_none_or(|(len, _)| data.len() > *len) {
            best = Some((data.len(), entry.path()));
        }
    }
    best.map(|(_, path)| path).ok_or_else(|| {
        let told = format!("{} is a folder without files: name a file", path.display());
        io::Error::new(io::ErrorKind::NotFound, told)
    })
}

/// Opens a file for reading with O_DIRECT. O_NONBLOCK keeps a FIFO from blocking.
pub(super) fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT | libc::O_NONBLOCK).open(path)
}

fn direct_io(path: &Path) -> Read<Option<DirectIo>> {
    let file = match open_direct(path) {
        Ok(file) => file,
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Read::Yes(None),
        Err(error) => return Read::no(error.to_string()),
    };
    match alignment(&file) {
        Some((0, _)) | Some((_, 0)) => Read::Yes(None),
        Some((memory, offset)) => Read::Yes(Some(DirectIo { memory, offset, reported: true })),
        None => Read::Yes(Some(DirectIo { memory: SAFE, offset: SAFE, reported: false })),
    }
}

/// What statx tells of O_DIRECT: alignment of memory, and of offset and length; zeros where the
/// file does not take it. None on kernels before 6.1, and for filesystems that do not tell.
fn alignment(file: &File) -> Option<(u32, u32)> {
    const STATX_DIOALIGN: libc::c_uint = 0x2000;
    const EMPTY: &CStr = c"";
    // SAFETY: plain integers, for which zeros are valid.
    let mut told: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an open descriptor, a C string, and a structure of the kernel's form.
    let result = unsafe {
        libc::statx(file.as_raw_fd(), EMPTY.as_ptr(), libc::AT_EMPTY_PATH, STATX_DIOALIGN, &raw mut told)
    };
    let known = result == 0 && told.stx_mask & STATX_DIOALIGN != 0;
    known.then_some((told.stx_dio_mem_align, told.stx_dio_offset_align))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_represented_by_its_largest_file_and_an_empty_one_by_none() {
        let folder = std::env::temp_dir().join(format!("nobounce-storage-{}", std::process::id()));
        fs::create_dir_all(folder.join("sub")).unwrap();
        assert!(file_of(&folder).is_err());
        fs::write(folder.join("small"), b"x").unwrap();
        fs::write(folder.join("large"), [0; 8192]).unwrap();
        assert_eq!(file_of(&folder).unwrap(), folder.join("large"));
        assert!(direct_io(&folder.join("large")).known().is_some());
        assert!(direct_io(&folder.join("missing")).known().is_none());
        fs::remove_dir_all(&folder).unwrap();
    }
}
