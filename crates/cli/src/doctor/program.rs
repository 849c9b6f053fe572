//! `nobounce doctor -- PROGRAM`: runs a program, and reads what its libraries log.

use std::ffi::OsString;
use std::io::{BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

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
    Ok(Ran { logs: logs.into_inner().unwrap_or_else(PoisonError::into_inner), code })
}

/// Copies lines, and reads them.
fn copy(from: impl Read, mut to: impl Write, logs: &Mutex<Logs>) {
    // An end of a pipe that breaks is the end of the program's output.
    let _ = log::each_line(BufReader::new(from), |line| {
        let _ = writeln!(to, "{line}");
        logs.lock().unwrap_or_else(PoisonError::into_inner).take(line);
    });
}
