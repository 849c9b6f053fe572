//! The log on standard error, one plain line each, at the level of `NOBOUNCE_LOG`. Without it the
//! library is silent; but under `nobounce run` it reports why something does not work at all.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Log level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing.
    Silent,
    /// Why there is no device.
    Error,
    /// Also refusals.
    Warn,
    /// Also choices.
    Info,
    /// Every refused call, too.
    Debug,
}

/// The level set by `NOBOUNCE_LOG`.
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| match std::env::var("NOBOUNCE_LOG").as_deref() {
        Ok("debug" | "trace") => Level::Debug,
        Ok("info") => Level::Info,
        Ok("warn") => Level::Warn,
        Ok("error") => Level::Error,
        Err(_) if std::env::var_os("NOBOUNCE_REPORT").is_some() => Level::Error,
        _ => Level::Silent,
    })
}

fn say(at: Level, line: impl FnOnce() -> String) {
    if level() >= at {
        // One write, so that lines of several threads do not mix. A failure cannot be reported
        // anywhere.
        let _ = std::io::stderr().write_all(format!("nobounce: {}\n", line()).as_bytes());
    }
}

/// There is no device for the program, and this is why.
pub fn error(line: impl FnOnce() -> String) {
    say(Level::Error, line);
}

/// Logs a refusal with its reason. `nobounce run` repeats it in its last line.
pub fn warn(line: impl FnOnce() -> String) {
    warn_in("refused", line);
}

/// A warning that `nobounce run` finds in the file of this kind.
pub fn warn_in(kind: &str, line: impl FnOnce() -> String) {
    let report = std::env::var_os("NOBOUNCE_REPORT").filter(|folder| !folder.is_empty());
    if report.is_none() && level() < Level::Warn {
        return;
    }
    let line = line();
    if let Some(folder) = report {
        keep(Path::new(&folder), kind, &line);
    }
    say(Level::Warn, || line);
}

/// What became of something: `nobounce run` finds it in the file of this kind, and the log has it
/// at level info.
pub fn note(kind: &str, line: &str) {
    if let Some(folder) = std::env::var_os("NOBOUNCE_REPORT").filter(|folder| !folder.is_empty()) {
        keep(Path::new(&folder), kind, line);
    }
    say(Level::Info, || line.to_owned());
}

/// Lines that one process leaves at most: a program may try something without end.
const MOST_KEPT: u32 = 64;

fn keep(folder: &Path, kind: &str, line: &str) {
    static KEPT: AtomicU32 = AtomicU32::new(0);
    if KEPT.fetch_add(1, Ordering::Relaxed) < MOST_KEPT {
        let path = folder.join(format!("{}.{kind}", std::process::id()));
        // One write, as below; a failure cannot be reported, either.
        if let Ok(mut file) = OpenOptions::new().append(true).create(true).open(path) {
            let _ = file.write_all(format!("{}\n", line.replace('\n', " ")).as_bytes());
        }
    }
}

/// Something was chosen that one may want to know.
pub fn info(line: impl FnOnce() -> String) {
    say(Level::Info, line);
}

/// A call of the program was refused, and this is why.
pub fn debug(line: impl FnOnce() -> String) {
    say(Level::Debug, line);
}
