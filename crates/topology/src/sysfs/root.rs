//! Reading small files below a root folder: `/`, or a copy of another machine's `/sys` and `/proc`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::FileTypeExt;
use std::path::{Component, Path, PathBuf};

/// Most bytes taken from one file. Files of sysfs have a page at the most; the largest of procfs
/// that we read is `kallsyms`.
const MAX_FILE: u64 = 32 << 20;
/// Most entries taken from one folder.
const MAX_ENTRIES: usize = 8192;

/// A root folder. Nothing outside of it is read on purpose, and none of its files is trusted.
#[derive(Clone, Debug)]
pub struct Root {
    path: PathBuf,
}

impl Root {
    /// The root folder of the live machine, or of a copy.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// True for the machine we run on.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.path == Path::new("/")
    }

    /// A path below the root. `path` is absolute, as on the machine.
    #[must_use]
    pub fn join(&self, path: &str) -> PathBuf {
        self.path.join(path.trim_start_matches('/'))
    }

    /// Whether a file or folder exists.
    #[must_use]
    pub fn exists(&self, path: &str) -> bool {
        self.join(path).exists()
    }

    /// The bytes of a file. Anything that is no regular file (a FIFO would block forever) or too
    /// large is an error.
    pub fn bytes(&self, path: &str) -> io::Result<Vec<u8>> {
        let path = self.join(path);
        if !fs::metadata(&path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no plain file"));
        }
        let mut bytes = Vec::new();
        File::open(&path)?.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "it is too large to be a file of the kernel's",
            ));
        }
        Ok(bytes)
    }

    /// The text of a file, without blanks around it. Bytes that are no text are replaced.
    pub fn text(&self, path: &str) -> io::Result<String> {
        let bytes = self.bytes(path)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// The number in a file, decimal or with 0x.
    pub fn number<T: TryFrom<u64>>(&self, path: &str) -> io::Result<T> {
        let text = self.text(path)?;
        parse_number(&text)
            .and_then(|value| T::try_from(value).ok())
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{text:?} is no such number")))
    }

    /// Names in a folder, sorted; an error where the folder cannot be read.
    pub fn names(&self, path: &str) -> io::Result<Vec<String>> {
        let mut names: Vec<String> = fs::read_dir(self.join(path))?
            .take(MAX_ENTRIES)
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        Ok(names)
    }

    /// The last part of what a link points to: the name of a driver or a group.
    pub fn link_name(&self, path: &str) -> io::Result<String> {
        let target = fs::read_link(self.join(path))?;
        target
            .file_name()
            .and_then(|name| name.to_str())
            .map(str::to_owned)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the link points nowhere"))
    }

    /// The parts of the real path of something, links followed.
    pub fn real_parts(&self, path: &str) -> io::Result<Vec<String>> {
        let real = fs::canonicalize(self.join(path))?;
        Ok(real
            .components()
            .filter_map(|part| match part {
                Component::Normal(name) => name.to_str().map(str::to_owned),
                _ => None,
            })
            .collect())
    }

    /// Opens a device file for reading and writing, and closes it.
    pub fn open_device(&self, path: &str) -> io::Result<()> {
        let path = self.join(path);
        let kind = fs::metadata(&path)?.file_type();
        if !(kind.is_char_device() || kind.is_file()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no device file"));
        }
        OpenOptions::new().read(true).write(true).open(&path).map(drop)
    }
}

/// A number, decimal or with 0x.
pub(super) fn parse_number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}
