//! The environment of a container with the software NIC: what `run` would set, without what is made
//! for one run.

use std::path::{Path, PathBuf};

use anyhow::Context;
use nobounce_dropin::view::System;

use super::args::RunArgs;
use super::{dropin, environment};

/// Preloaded by absolute path: a program that needs the library of this name gets the loaded one,
/// and `LD_LIBRARY_PATH` of the image stays.
const PRELOADED: [&str; 6] =
    [dropin::PRELOAD, dropin::VERBS, "librdmacm.so.1", "libgdrapi.so.2", "libmlx5.so.1", "libefa.so.1"];

/// Made by `run` for its own processes.
const OF_A_RUN: [&str; 4] = ["LD_LIBRARY_PATH", "LD_PRELOAD", "NOBOUNCE_VIEW", "NOBOUNCE_REPORT"];

/// The folder of the drop-in libraries on this machine.
pub(crate) fn dropin() -> anyhow::Result<PathBuf> {
    let Some(named) = std::env::var_os(dropin::VARIABLE) else {
        let executable = std::env::current_exe().context("cannot find the path of the nobounce program")?;
        return Ok(dropin::find(None, &executable)?);
    };
    // Packages are also configured in a root without /proc, which names the executable.
    Ok(dropin::find(Some(named.into()), Path::new(""))?)
}

/// The variables of a container with so many devices, where the libraries of `dropin` are mounted
/// at `inside`.
pub(crate) fn variables(
    dropin: &Path,
    inside: &Path,
    devices: usize,
    is_loopback: bool,
) -> Vec<(String, String)> {
    let gpus = environment::gpus();
    let given = environment::Given {
        dropin: inside,
        view: Path::new(""),
        report: Path::new(""),
        gpus,
        engines: 1,
        devices,
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        is_loopback,
        adapters: System::here().has_adapters(),
        // What the container brings is not known.
        has_gpi: false,
    };
    let vmm = (gpus > 0).then_some(dropin::VMM);
    let preloaded = vmm.into_iter().chain(PRELOADED).filter(|file| dropin.join(file).exists());
    let preloaded: Vec<_> = preloaded.map(|file| inside.join(file).display().to_string()).collect();
    // Without a launcher the reason for a missing device would not be seen.
    let first = [("LD_PRELOAD", preloaded.join(":")), ("NOBOUNCE_LOG", "error".to_owned())];
    let first = first.map(|(name, value)| (name.to_owned(), value));
    let others = environment::variables(&RunArgs::default(), &given, |_| None).into_iter();
    let others = others.filter(|set| !OF_A_RUN.contains(&set.name));
    let others = others.map(|set| (set.name.to_owned(), set.value.to_string_lossy().into_owned()));
    first.into_iter().chain(others).collect()
}
