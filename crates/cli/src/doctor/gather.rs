//! Gathers the facts of this machine: files, libraries, experiments.

use std::io;

use anyhow::Context;
use nobounce_topology::facts::{Facts, Probe, Read};
use nobounce_topology::sysfs::{self, Root, Surroundings};

use super::{cuda, flow_control, nvml, routes, umad};

/// Bytes to lock, to test whether the locked-memory limit is effective.
const LOCKED: usize = 72 << 20;
/// Lines of the kernel's log that are kept.
const MAX_LINES: usize = 200;

/// What of the kernel's log matters.
const WORDS: [&str; 15] = [
    "port module event",
    "link down",
    "link is down",
    "gdrdrv_init",
    "avc:",
    "apparmor",
    "peermem",
    "nv_peer_mem",
    "peer_memory",
    "dmar:",
    "amd-vi",
    "arm-smmu",
    "aer:",
    "bar1 is",
    "i/o region",
];

/// Reads everything. Below another root than `/` only files are read: libraries and probes would
/// describe this machine.
pub(super) fn gather(root: &Root, probe: bool) -> anyhow::Result<Facts> {
    let environment: std::collections::BTreeMap<String, String> = match root.is_live() {
        true => std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect(),
        false => std::collections::BTreeMap::new(),
    };
    let home = environment.get("HOME").cloned();
    let mut facts =
        sysfs::read(root, &Surroundings { environment, home }).context("cannot read the machine's facts")?;
    facts.written_by = format!("nobounce {}", env!("CARGO_PKG_VERSION"));
    for nic in &mut facts.nics {
        // Devices of `nobounce run` have no driver of the kernel's.
        if nic.driver.is_none() && nic.name.strip_prefix("nb").is_some_and(|rest| rest.parse::<u32>().is_ok())
        {
            nic.driver = Some("nobounce".to_owned());
        }
    }
    if !root.is_live() {
        return Ok(facts);
    }
    facts.kernel.log = kernel_log();
    if facts.process.user_namespace.get() == Some(true) && probe {
        facts.process.mlock_probe = Read::Yes(try_lock());
    }
    flow_control::fill(&mut facts);
    routes::fill(&mut facts, root);
    if probe {
        umad::fill(&mut facts, root);
    }
    nvml::fill(&mut facts);
    cuda::fill(&mut facts, probe);
    Ok(facts)
}

/// Lines of the kernel's log that matter, if we may read it.
fn kernel_log() -> Read<Vec<String>> {
    const READ_ALL: libc::c_int = 3;
    const SIZE: libc::c_int = 10;
    // SAFETY: asks for a number; no buffer is used.
    let size = unsafe { libc::klogctl(SIZE, std::ptr::null_mut(), 0) };
    let Ok(room) = usize::try_from(size) else { return Read::no(io::Error::last_os_error().to_string()) };
    let mut buffer = vec![0_u8; room.min(16 << 20)];
    let Ok(length) = libc::c_int::try_from(buffer.len()) else {
        return Read::no("the kernel's log is too long");
    };
    // SAFETY: the buffer is as long as we say.
    let read = unsafe { libc::klogctl(READ_ALL, buffer.as_mut_ptr().cast(), length) };
    let Ok(read) = usize::try_from(read) else { return Read::no(io::Error::last_os_error().to_string()) };
    let text = String::from_utf8_lossy(buffer.get(..read).unwrap_or_default());
    let mut lines: Vec<String> = text
        .lines()
        .filter(|line| {
            let line = line.to_ascii_lowercase();
            WORDS.iter().any(|word| line.contains(word))
        })
        .map(str::to_owned)
        .collect();
    if lines.len() > MAX_LINES {
        lines.drain(..lines.len() - MAX_LINES);
    }
    Read::Yes(lines)
}

/// Locks memory, and gives it back.
fn try_lock() -> Probe {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new memory at a place of the kernel's choice.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), LOCKED, protection, flags, -1, 0) };
    if memory == libc::MAP_FAILED {
        return Probe::failed(io::Error::last_os_error().raw_os_error(), "cannot allocate memory to lock");
    }
    // SAFETY: the memory just made.
    let locked = unsafe { libc::mlock(memory, LOCKED) };
    let probe = match locked {
        0 => Probe::worked(format!("{} MiB", LOCKED >> 20)),
        _ => {
            let error = io::Error::last_os_error();
            Probe::failed(error.raw_os_error(), format!("{} MiB: {error}", LOCKED >> 20))
        }
    };
    // SAFETY: as above; the mapping has no other user.
    unsafe { libc::munmap(memory, LOCKED) };
    probe
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// Lines of the kernel's log in a recorded case: as a changed path, or as a fact.
    fn lines(value: &Value, found: &mut Vec<String>) {
        let texts = |value: &Value| -> Vec<String> {
            let items = value.as_array().into_iter().flatten();
            items.filter_map(Value::as_str).map(str::to_owned).collect()
        };
        match value {
            Value::Array(items) if items.first().and_then(Value::as_str) == Some("/kernel/log") => {
                found.extend(items.get(1).map(texts).unwrap_or_default());
            }
            Value::Array(items) => items.iter().for_each(|item| lines(item, found)),
            Value::Object(fields) => {
                found.extend(
                    fields.get("kernel").and_then(|kernel| kernel.get("log")).map(texts).unwrap_or_default(),
                );
                fields.values().for_each(|field| lines(field, found));
            }
            _ => {}
        }
    }

    #[test]
    fn recorded_lines_of_the_kernels_log_are_lines_that_are_gathered() {
        let tests = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../diagnose/tests");
        let mut found = Vec::new();
        for folder in ["cases", "corpus/threads", "corpus/unseen"] {
            for entry in std::fs::read_dir(tests.join(folder)).unwrap() {
                let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
                // Beside the cases there are texts about them.
                if let Ok(cases) = serde_json::from_str(&text) {
                    lines(&cases, &mut found);
                }
            }
        }
        assert!(found.len() > 5, "{found:?}");
        let foreign: Vec<_> = found
            .iter()
            .filter(|line| !WORDS.iter().any(|word| line.to_ascii_lowercase().contains(word)))
            .collect();
        assert!(foreign.is_empty(), "{foreign:#?}");
    }
}
