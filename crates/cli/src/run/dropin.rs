//! The folder with the libraries that replace the system's for a program.

use std::path::{Path, PathBuf};

/// Names another folder than the ones beside the command.
pub(crate) const VARIABLE: &str = "NOBOUNCE_DROPIN";
/// What is preloaded into every process of the command.
pub(crate) const PRELOAD: &str = "libnobounce-paths.so";
/// Preloaded on machines with GPUs.
pub(crate) const VMM: &str = "libnobounce-vmm.so";
/// Preloaded where the user asks for it: its soname is libcufile.so.0.
pub(crate) const CUFILE: &str = "libnobounce-cufile.so";
/// Preloaded as well: some programs bring a copy under another name.
pub(crate) const VERBS: &str = "libibverbs.so.1";

/// The folder is missing or not usable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum DropinError {
    #[error(
        "drop-in libraries not found: no {VERBS}, {PRELOAD} and {VMM} in {}. Build them with `make build`, or set {VARIABLE} to their directory",
        list(.0)
    )]
    Missing(Vec<PathBuf>),
    #[error(
        "the path in {VARIABLE} or of the command contains a space, colon or semicolon ({}), which the dynamic linker takes as a \
         separator; move the libraries",
        .0.display()
    )]
    Separator(PathBuf),
}

fn list(folders: &[PathBuf]) -> String {
    folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Finds the folder: the named one, or the one next to the executable (as built, as installed).
pub(crate) fn find(named: Option<PathBuf>, executable: &Path) -> Result<PathBuf, DropinError> {
    let candidates = match named {
        Some(folder) => vec![folder],
        None => {
            let beside = executable.parent().unwrap_or(Path::new("."));
            vec![beside.join("dropin"), beside.join("../lib/nobounce")]
        }
    };
    let found =
        candidates.iter().find(|folder| [VERBS, PRELOAD, VMM].iter().all(|file| folder.join(file).exists()));
    let Some(folder) = found.and_then(|folder| folder.canonicalize().ok()) else {
        return Err(DropinError::Missing(candidates));
    };
    if folder.as_os_str().as_encoded_bytes().iter().any(|byte| b" :;\t\n".contains(byte)) {
        return Err(DropinError::Separator(folder));
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_folder_is_named() {
        let told = find(None, Path::new("/no/such/bin/nobounce")).unwrap_err().to_string();
        assert!(told.contains("/no/such/bin/dropin") && told.contains("NOBOUNCE_DROPIN"), "{told}");
        let told = find(Some("/no/such".into()), Path::new("/x")).unwrap_err().to_string();
        assert!(told.contains("in /no/such.") && !told.contains("/x"), "{told}");
    }
}
