//! Whether the C library of an image can load the drop-in libraries.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Folders of libraries in images.
const FOLDERS: [&str; 8] = [
    "usr/lib/x86_64-linux-gnu",
    "lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib64",
    "lib64",
    "usr/lib",
    "lib",
];
/// Architectures in the names of musl's loader.
const MUSL: [&str; 8] = ["x86_64", "aarch64", "i386", "armhf", "armv7", "powerpc64le", "riscv64", "s390x"];
/// A larger file is no C library.
const MOST_BYTES: u64 = 64 << 20;

/// A version of glibc, as 2.36.
type Version = (u32, u32);

/// Parts of glibc that were separate before 2.34, and exist since.
const PARTS: [&str; 2] = ["libpthread.so.0", "libdl.so.2"];

/// What libraries need that zig links.
const OLDEST: Version = (2, 28);

/// What keeps a container of this root file system from loading the libraries.
pub(super) fn problems(root: &Path, libraries: &[PathBuf]) -> Vec<String> {
    let image = match Image::open(root) {
        Ok(image) => image,
        Err(error) => return vec![format!("{}: {error}", root.display())],
    };
    // The machine of all of them is the same: they were built at one time.
    let wanted = libraries.iter().find_map(|library| machine(&fs::read(library).ok()?));
    let found = match image.find_libc(wanted) {
        Ok(found) => found,
        Err(error) => return vec![format!("{}: {error}", root.display())],
    };
    let Some((path, libc)) = found else { return vec![image.without_glibc()] };
    if let (Some(has), Some(wanted)) = (machine(&libc), wanted)
        && has != wanted
    {
        return vec![format!(
            "{path} is for {}, the libraries are for {}: use an image for the architecture of this machine",
            name_of(has),
            name_of(wanted)
        )];
    }
    let Some(has) = newest(&libc) else {
        return vec![format!("{path} is no glibc: the drop-in libraries need one")];
    };
    let too_old = libraries.iter().filter_map(|library| {
        let needs = newest(names_of_versions(&fs::read(library).ok()?)?).filter(|needs| *needs > has)?;
        let remedy = if needs > OLDEST {
            ", or the libraries of 'make image', which zig links for glibc 2.28"
        } else {
            ""
        };
        Some(format!(
            "{} needs glibc {}.{}, the image has {}.{}: use a newer base image{remedy}",
            library.display(),
            needs.0,
            needs.1,
            has.0,
            has.1
        ))
    });
    too_old.chain(image.lacks(libraries)).collect()
}

/// A root file system. Links in it lead to files in it, as in the container.
struct Image<'a> {
    path: &'a Path,
    root: File,
}

impl<'a> Image<'a> {
    fn open(path: &'a Path) -> io::Result<Self> {
        let root = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(path)?;
        Ok(Self { path, root })
    }

    /// A file below the root.
    fn file(&self, path: &str) -> io::Result<File> {
        let path = CString::new(path)?;
        // SAFETY: zeros are valid: no flags.
        let mut how: libc::open_how = unsafe { std::mem::zeroed() };
        // A FIFO must not block.
        how.flags = u64::from((libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK).cast_unsigned());
        how.resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS;
        // SAFETY: an open descriptor, a C string, and a structure of the given size.
        let opened = unsafe {
            libc::syscall(
                libc::SYS_openat2,
                self.root.as_raw_fd(),
                path.as_ptr(),
                &raw const how,
                size_of::<libc::open_how>(),
            )
        };
        let opened = i32::try_from(opened).unwrap_or(-1);
        if opened < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call returned a new descriptor.
        Ok(unsafe { File::from_raw_fd(opened) })
    }

    /// The C library for this machine, otherwise one for another machine: its path and bytes.
    fn find_libc(&self, wanted: Option<u16>) -> io::Result<Option<(String, Vec<u8>)>> {
        let mut other = None;
        for folder in FOLDERS {
            let path = format!("{folder}/libc.so.6");
            let file = match self.file(&path) {
                Ok(file) => file,
                Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                    return Err(io::Error::other("this check needs Linux 5.6 or later (openat2)"));
                }
                Err(_) => continue,
            };
            if !file.metadata().is_ok_and(|facts| facts.is_file()) {
                continue;
            }
            let mut bytes = Vec::new();
            file.take(MOST_BYTES).read_to_end(&mut bytes)?;
            let path = self.path.join(path).display().to_string();
            if wanted.is_none() || machine(&bytes) == wanted {
                return Ok(Some((path, bytes)));
            }
            other = other.or(Some((path, bytes)));
        }
        Ok(other)
    }

    /// Parts of glibc that libraries for old versions need, and that images of single copied files
    /// may lack.
    fn lacks(&self, libraries: &[PathBuf]) -> Option<String> {
        let files: Vec<_> = libraries.iter().filter_map(|library| fs::read(library).ok()).collect();
        let needs = |part: &str| {
            let text = |file| names_of_versions(file).unwrap_or_default();
            files.iter().any(|file| text(file).split(|byte| *byte == 0).any(|name| name == part.as_bytes()))
        };
        let has = |part: &str| FOLDERS.iter().any(|folder| self.file(&format!("{folder}/{part}")).is_ok());
        let missing = PARTS.into_iter().find(|part| needs(part) && !has(part))?;
        Some(format!(
            "{} has no {missing}, which the libraries need for old versions of glibc: add this file of its glibc",
            self.path.display()
        ))
    }

    fn without_glibc(&self) -> String {
        let names = MUSL.iter().map(|machine| format!("lib/ld-musl-{machine}.so.1"));
        match names.into_iter().find(|name| self.file(name).is_ok()) {
            Some(loader) => format!(
                "the image uses musl ({loader}), which cannot load libraries built for glibc: every program in the container would \
                 end with \"Error loading shared library ld-linux-x86-64.so.2\". Use an image with glibc, such as one of Debian, Ubuntu, Fedora or UBI"
            ),
            None => format!(
                "{} has no libc.so.6: its programs are static, or of another architecture, and do not load the libraries",
                self.path.display()
            ),
        }
    }
}

/// `e_machine` of an ELF file; None for anything else. All architectures that we know are
/// little-endian.
fn machine(file: &[u8]) -> Option<u16> {
    let header = file.get(..20).filter(|header| header.starts_with(b"\x7fELF"))?;
    Some(u16::from_le_bytes([header[18], header[19]]))
}

fn name_of(machine: u16) -> String {
    match machine {
        libc::EM_386 => "x86 (32 bits)".to_owned(),
        libc::EM_X86_64 => "x86-64".to_owned(),
        libc::EM_ARM => "ARM (32 bits)".to_owned(),
        libc::EM_AARCH64 => "aarch64".to_owned(),
        other => format!("machine {other}"),
    }
}

/// The strings of an ELF file of 64 bits that name the versions that it needs. Other strings name
/// versions for `dlvsym`, which may fail.
fn names_of_versions(file: &[u8]) -> Option<&[u8]> {
    const SHT_GNU_VERNEED: u32 = 0x6fff_fffe;
    let bytes = |at: usize, len: usize| file.get(at..at.checked_add(len)?);
    let long = |at| Some(u64::from_le_bytes(bytes(at, 8)?.try_into().ok()?));
    let word = |at| Some(u32::from_le_bytes(bytes(at, 4)?.try_into().ok()?));
    let half = |at| Some(u16::from_le_bytes(bytes(at, 2)?.try_into().ok()?));
    let (table, size, count) =
        (usize::try_from(long(0x28)?).ok()?, usize::from(half(0x3a)?), usize::from(half(0x3c)?));
    let section = |number: usize| table.checked_add(number.checked_mul(size)?);
    let needs = (0..count)
        .filter_map(section)
        .find(|at| at.checked_add(4).and_then(word) == Some(SHT_GNU_VERNEED))?;
    let strings = section(usize::try_from(word(needs.checked_add(0x28)?)?).ok()?)?;
    let place = |field| usize::try_from(long(strings.checked_add(field)?)?).ok();
    bytes(place(0x18)?, place(0x20)?)
}

/// The highest version of glibc's interface that is named in a file: what glibc has, or what a
/// library needs.
fn newest(bytes: &[u8]) -> Option<Version> {
    const MARK: &[u8] = b"GLIBC_";
    let versions = bytes.windows(MARK.len()).enumerate().filter(|(_, window)| *window == MARK);
    versions.filter_map(|(at, _)| version(&bytes[at + MARK.len()..])).max()
}

/// The version at the start of the text, which a NUL ends.
fn version(text: &[u8]) -> Option<Version> {
    let text = text.get(..text.iter().take(12).position(|byte| *byte == 0)?)?;
    let (major, minor) = std::str::from_utf8(text).ok()?.split_once('.')?;
    // 2.2.5 is the first one on x86-64; its last part does not matter here.
    let minor = minor.split('.').next()?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn image(name: &str, files: &[(&str, &[u8])]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("rootfs-{name}-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        for (path, bytes) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        root
    }

    /// An ELF file of this machine as far as it is read.
    fn elf(machine: u16, text: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x7fELF".to_vec();
        bytes.resize(18, 0);
        bytes.extend(machine.to_le_bytes());
        bytes.extend(text);
        bytes
    }

    const OURS: u16 = libc::EM_X86_64;

    /// The same with two sections: the strings, and the list of needed versions that refers to
    /// them.
    fn elf_with_versions(machine: u16, names: &[u8]) -> Vec<u8> {
        const SECTION: usize = 64;
        let mut bytes = elf(machine, b"");
        bytes.resize(64, 0);
        let table = bytes.len() + names.len();
        bytes[0x28..0x30].copy_from_slice(&(table as u64).to_le_bytes());
        bytes[0x3a..0x3c].copy_from_slice(&u16::try_from(SECTION).unwrap().to_le_bytes());
        bytes[0x3c..0x3e].copy_from_slice(&2_u16.to_le_bytes());
        bytes.extend(names);
        let (mut strings, mut needs) = ([0; SECTION], [0; SECTION]);
        strings[0x18..0x20].copy_from_slice(&64_u64.to_le_bytes());
        strings[0x20..0x28].copy_from_slice(&(names.len() as u64).to_le_bytes());
        needs[4..8].copy_from_slice(&0x6fff_fffe_u32.to_le_bytes());
        bytes.extend(strings);
        bytes.extend(needs);
        bytes
    }

    #[test]
    fn versions_for_dlvsym_are_not_needed() {
        let mut file = elf_with_versions(OURS, b"\0GLIBC_2.2.5\0GLIBC_2.28\0");
        file.extend(b"GLIBC_2.34\0");
        assert_eq!(newest(names_of_versions(&file).unwrap()), Some((2, 28)));
        // A file that was cut off or changed.
        for at in 0..file.len() {
            let _ = names_of_versions(&file[..at]);
            let mut changed = file.clone();
            changed[at] = 0xff;
            let _ = names_of_versions(&changed);
        }
    }

    #[test]
    fn a_missing_part_of_glibc_is_named() {
        let library = elf_with_versions(OURS, b"\0libpthread.so.0\0GLIBC_2.28\0");
        let folder = image("part-library", &[("lib.so", &library)]);
        let libraries = [folder.join("lib.so")];
        let libc = elf(OURS, b"GLIBC_2.41\0");
        let lacking = image("part-lacking", &[("lib/libc.so.6", &libc)]);
        let whole = image("part-whole", &[("lib/libc.so.6", &libc), ("lib/libpthread.so.0", b"")]);
        assert!(problems(&lacking, &libraries).concat().contains("has no libpthread.so.0"));
        assert!(problems(&whole, &libraries).is_empty());
        for folder in [folder, lacking, whole] {
            let _ = fs::remove_dir_all(folder);
        }
    }

    fn library(name: &str) -> (PathBuf, [PathBuf; 1]) {
        let text = elf_with_versions(OURS, b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_PRIVATE\0");
        let folder = image(name, &[("lib.so", &text)]);
        (folder.clone(), [folder.join("lib.so")])
    }

    #[test]
    fn libraries_and_images_are_compared() {
        let (ours, libraries) = library("ours");
        let (newer, older) =
            (elf(OURS, b"GLIBC_2.2.5\0GLIBC_2.41\0"), elf(OURS, b"GLIBC_2.2.5\0GLIBC_2.31\0"));
        let new = image("new", &[("usr/lib/x86_64-linux-gnu/libc.so.6", &newer)]);
        let old = image("old", &[("usr/lib/libc.so.6", &older)]);
        let musl = image("musl", &[("lib/ld-musl-x86_64.so.1", b"")]);
        let empty = image("empty", &[("bin/static", b"")]);
        assert!(problems(&new, &libraries).is_empty());
        let told = |root: &Path| problems(root, &libraries).join("\n");
        let too_old = "needs glibc 2.34, the image has 2.31: use a newer base image, or the libraries";
        assert!(told(&old).contains(too_old), "{}", told(&old));
        assert!(told(&musl).contains("musl") && told(&musl).contains("Debian"), "{}", told(&musl));
        assert!(told(&empty).contains("no libc.so.6"), "{}", told(&empty));
        assert!(told(Path::new("/no/such")).contains("No such file or directory"));
        for root in [ours, new, old, musl, empty] {
            fs::remove_dir_all(root).unwrap();
        }
    }

    #[test]
    fn an_image_for_another_machine_is_refused() {
        let (ours, libraries) = library("machine");
        let (arm, x86) = (elf(libc::EM_AARCH64, b"GLIBC_2.41\0"), elf(libc::EM_386, b"GLIBC_2.41\0"));
        let fedora = image("fedora", &[("usr/lib64/libc.so.6", &arm)]);
        let debian = image("debian", &[("usr/lib/aarch64-linux-gnu/libc.so.6", &arm)]);
        for root in [&fedora, &debian] {
            let told = problems(root, &libraries).join("\n");
            assert!(told.contains("is for aarch64, the libraries are for x86-64"), "{told}");
        }
        // One for 32 bits may lie beside the right one.
        let both =
            image("both", &[("lib/libc.so.6", &x86), ("usr/lib/libc.so.6", &elf(OURS, b"GLIBC_2.41\0"))]);
        assert_eq!(problems(&both, &libraries), [""; 0]);
        for root in [ours, fedora, debian, both] {
            fs::remove_dir_all(root).unwrap();
        }
    }

    #[test]
    fn links_lead_to_files_of_the_image() {
        let (ours, libraries) = library("links");
        let libc = elf(OURS, b"GLIBC_2.40\0");
        let root = image("link", &[("usr/lib/real.so", &libc), ("opt/lib/libc.so.6", &libc)]);
        symlink("/usr/lib/real.so", root.join("usr/lib/libc.so.6")).unwrap();
        assert!(problems(&root, &libraries).is_empty());
        // A link to a folder: the host has one of that name, too.
        let outside = image("outside", &[("libc.so.6", &libc)]);
        let escaping = image("escaping", &[("usr/bin/sh", b"")]);
        symlink(&outside, escaping.join("lib64")).unwrap();
        symlink("../../../../../../../..".to_owned() + outside.to_str().unwrap(), escaping.join("lib"))
            .unwrap();
        assert!(problems(&escaping, &libraries)[0].contains("no libc.so.6"));
        symlink("/opt/lib", root.join("lib64")).unwrap();
        fs::remove_file(root.join("usr/lib/libc.so.6")).unwrap();
        assert!(problems(&root, &libraries).is_empty());
        for root in [ours, root, outside, escaping] {
            fs::remove_dir_all(root).unwrap();
        }
    }
}
