//! Whether the C library of an image can load the drop-in libraries.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders of libraries in images, for the architecture of this command.
const FOLDERS: [&str; 6] = if cfg!(target_arch = "aarch64") {
    ["usr/lib/aarch64-linux-gnu", "lib/aarch64-linux-gnu", "usr/lib64", "lib64", "usr/lib", "lib"]
} else {
    ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib64", "lib64", "usr/lib", "lib"]
};

/// A version of glibc, as 2.36.
type Version = (u32, u32);

/// What keeps a container of this root file system from loading the libraries.
pub(super) fn problems(root: &Path, libraries: &[PathBuf]) -> Vec<String> {
    if !root.is_dir() {
        return vec![format!("{}: no such directory", root.display())];
    }
    let Some(libc) = find(root, "libc.so.6") else {
        return vec![without_glibc(root)];
    };
    let Some(has) = newest(&libc) else {
        return vec![format!("{} is no glibc: the drop-in libraries need one", libc.display())];
    };
    let too_old = libraries.iter().filter_map(|library| {
        let needs = newest(library).filter(|needs| *needs > has)?;
        Some(format!(
            "{} needs glibc {}.{}, the image has {}.{}: use a newer base image, or build nobounce on an older system",
            library.display(),
            needs.0,
            needs.1,
            has.0,
            has.1
        ))
    });
    too_old.collect()
}

fn without_glibc(root: &Path) -> String {
    let musl = fs::read_dir(root.join("lib")).into_iter().flatten().flatten();
    let musl = musl.filter_map(|entry| entry.file_name().into_string().ok());
    let musl = musl.into_iter().find(|name| name.starts_with("ld-musl-"));
    match musl {
        Some(loader) => format!(
            "the image uses musl (lib/{loader}), which cannot load libraries built for glibc: every program in the container would \
             end with \"Error loading shared library ld-linux-x86-64.so.2\". Use an image with glibc, such as one of Debian, Ubuntu, Fedora or UBI"
        ),
        None => format!(
            "{} has no libc.so.6: its programs are static, or of another architecture, and do not load the libraries",
            root.display()
        ),
    }
}

/// A library in one of the folders. Links are followed within the image.
fn find(root: &Path, name: &str) -> Option<PathBuf> {
    FOLDERS.iter().map(|folder| root.join(folder).join(name)).find_map(|path| {
        let target = fs::read_link(&path).ok().filter(|target| target.is_absolute());
        let path = match target {
            Some(target) => root.join(target.strip_prefix("/").ok()?),
            None => path,
        };
        path.is_file().then_some(path)
    })
}

/// The highest version of glibc's interface that is named in a file: what glibc has, or what a
/// library needs.
fn newest(file: &Path) -> Option<Version> {
    const MARK: &[u8] = b"GLIBC_";
    let bytes = fs::read(file).ok()?;
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
    use super::*;

    fn image(name: &str, files: &[(&str, &[u8])]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("rootfs-{name}-{}", std::process::id()));
        for (path, bytes) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        root
    }

    #[test]
    fn libraries_and_images_are_compared() {
        let ours = image("ours", &[("lib.so", b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_PRIVATE\0")]);
        let libraries = [ours.join("lib.so")];
        let folder = FOLDERS[0];
        let new = image("new", &[(&format!("{folder}/libc.so.6"), b"GLIBC_2.2.5\0GLIBC_2.41\0")]);
        let old = image("old", &[("usr/lib/libc.so.6", b"GLIBC_2.2.5\0GLIBC_2.31\0")]);
        let musl = image("musl", &[("lib/ld-musl-x86_64.so.1", b"")]);
        let empty = image("empty", &[("bin/static", b"")]);
        assert!(problems(&new, &libraries).is_empty());
        let told = |root: &Path| problems(root, &libraries).join("\n");
        assert!(told(&old).contains("needs glibc 2.34, the image has 2.31"), "{}", told(&old));
        assert!(told(&musl).contains("musl") && told(&musl).contains("Debian"), "{}", told(&musl));
        assert!(told(&empty).contains("no libc.so.6"), "{}", told(&empty));
        assert!(told(Path::new("/no/such")).contains("no such directory"));
        for root in [ours, new, old, musl, empty] {
            fs::remove_dir_all(root).unwrap();
        }
    }

    #[test]
    fn an_absolute_link_is_one_of_the_image() {
        let root = image("link", &[("usr/lib/real.so", b"GLIBC_2.40\0")]);
        std::os::unix::fs::symlink("/usr/lib/real.so", root.join("usr/lib/libc.so.6")).unwrap();
        assert_eq!(find(&root, "libc.so.6"), Some(root.join("usr/lib/real.so")));
        fs::remove_dir_all(root).unwrap();
    }
}
