//! `nobounce doctor -- PROGRAM`: runs a program, and reads what its libraries log.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use nobounce_diagnose::log::{self, Logs};

/// Variables that make libraries log, with their values; those that are set stay.
const LOGGING: [(&str, &str); 4] =
    [("NCCL_DEBUG", "INFO"), ("UCX_LOG_LEVEL", "info"), ("UCX_PROTO_INFO", "y"), ("FI_LOG_LEVEL", "warn")];

/// What a program did.
#[derive(Debug)]
pub(super) struct Ran {
    /// What it logged.
    pub(super) logs: Logs,
    /// Its exit code; 128 and more: killed by a signal.
    pub(super) code: u8,
    /// Logs that are elsewhere.
    pub(super) notes: Vec<String>,
}

/// Variables that send a library's log into a file.
const FILES: [&str; 2] = ["NCCL_DEBUG_FILE", "UCX_LOG_FILE"];

/// Reads the files that the environment names for logs, if the program wrote them. Patterns (`%h`,
/// `%p`) stand for a file of each process: those are only named.
fn read_files(since: SystemTime, value: impl Fn(&str) -> Option<OsString>, logs: &mut Logs) -> Vec<String> {
    let mut notes = Vec::new();
    for name in FILES {
        let Some(path) = value(name).map(PathBuf::from) else { continue };
        if ["", "stdout", "stderr"].iter().any(|stream| path.as_os_str() == *stream) {
            continue;
        }
        // `/dev/stderr` is another file in this process than in the program, whose output is read
        // anyway.
        if ["/dev", "/proc"].iter().any(|folder| path.starts_with(folder)) {
            continue;
        }
        let shown = path.display();
        // Clocks of file systems are coarse.
        let is_new = |data: Metadata| data.modified().is_ok_and(|at| at + Duration::from_secs(2) >= since);
        let mut read = || {
            let file = File::open(&path)?;
            log::each_line(BufReader::new(file), |line| logs.take(line))
        };
        notes.push(if path.to_string_lossy().contains('%') {
            format!("{name}={shown}: each process logs into a file of its own; read them with --log")
        } else if std::fs::metadata(&path).is_ok_and(|data| !data.is_file()) {
            // Opening a FIFO without a writer blocks.
            format!("{name}={shown}: not read, because it is no regular file")
        } else if !std::fs::metadata(&path).is_ok_and(is_new) {
            format!("{name}={shown}: the program wrote no such file")
        } else {
            match read() {
                Ok(()) => format!("{name}={shown}: read as well"),
                Err(error) => format!("{name}={shown}: cannot be read: {error}"),
            }
        });
    }
    notes
}

/// Runs a program to its end. Its output passes through.
pub(super) fn run(command: &[OsString]) -> anyhow::Result<Ran> {
    let (program, arguments) = command.split_first().context("no program was given")?;
    let mut command = Command::new(program);
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    for (name, value) in LOGGING {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    let since = SystemTime::now();
    let mut child = command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
    let logs = Mutex::new(Logs::default());
    let (out, err) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        if let Some(out) = out {
            scope.spawn(|| copy(out, std::io::stdout(), &logs));
        }
        if let Some(err) = err {
            scope.spawn(|| copy(err, std::io::stderr(), &logs));
        }
    });
    let status = child.wait().context("cannot wait for the program")?;
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    let code = status.code().or(signal.map(|signal| 128 + signal)).unwrap_or(1);
    let code = u8::try_from(code & 0xff).unwrap_or(1);
    let mut logs = logs.into_inner().unwrap_or_else(PoisonError::into_inner);
    let notes = read_files(since, |name| std::env::var_os(name), &mut logs);
    Ok(Ran { logs, code, notes })
}

/// Copies lines, and reads them.
fn copy(from: impl Read, mut to: impl Write, logs: &Mutex<Logs>) {
    // An end of a pipe that breaks is the end of the program's output.
    let _ = log::each_line(BufReader::new(from), |line| {
        let _ = writeln!(to, "{line}");
        logs.lock().unwrap_or_else(PoisonError::into_inner).take(line);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_in_files_are_read_or_named() {
        let folder = std::env::temp_dir().join(format!("nobounce-doctor-log-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("nccl.log");
        let line = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\n";
        std::fs::write(&file, line).unwrap();
        let read = |nccl: PathBuf, since| {
            let mut logs = Logs::default();
            let value = |name: &str| (name == "NCCL_DEBUG_FILE").then(|| nccl.clone().into_os_string());
            let notes = read_files(since, value, &mut logs);
            (logs.nccl.lines, notes.join("\n"))
        };
        let now = SystemTime::now();
        let (lines, notes) = read(file.clone(), now);
        assert!(lines == 1 && notes.ends_with("read as well"), "{lines} {notes}");
        // A file of an earlier job is not this program's.
        let (lines, notes) = read(file, now + Duration::from_secs(60));
        assert!(lines == 0 && notes.contains("wrote no such file"), "{lines} {notes}");
        let (lines, notes) = read(folder.join("nccl.%h.%p"), now);
        assert!(lines == 0 && notes.contains("--log"), "{lines} {notes}");
        // What is no regular file blocks, or is doctor's own output.
        let fifo = folder.join("fifo");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let (lines, notes) = read(fifo, now);
        assert!(lines == 0 && notes.contains("no regular file"), "{lines} {notes}");
        for stream in ["/dev/stderr", "/dev/stdout", "/proc/self/fd/2"] {
            assert_eq!(read(stream.into(), now), (0, String::new()), "{stream}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
