//! What tests of the drop-in libraries share.

use std::path::PathBuf;

/// The library of that file name as cargo has built it for the calling test.
///
/// # Panics
/// If the library is not there: the test needs a dependency on its package.
#[must_use]
pub fn built_library(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has an executable");
    test.ancestors()
        .skip(1)
        .take(2)
        .flat_map(|folder| [folder.join(name), folder.join("deps").join(name)])
        .find(|path| path.exists())
        .expect("cargo builds the library before its tests")
}
