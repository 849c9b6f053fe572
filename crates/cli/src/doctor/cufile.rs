//! `doctor --storage --prove`: what cuFile does with the file. A process of its own loads
//! libcufile, which may crash or hang.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::cufile_child::{Record, SUBCOMMAND};
use super::storage_proof::{LIMIT, StorageProof, StorageProofs, gbs_of};
use anyhow::Context;
use nobounce_topology::clean;
use nobounce_topology::facts::{Facts, Gpu, Storage};

/// How long the process may take to exit after its last record, and after SIGKILL: one that waits
/// in the kernel does not end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// Most bytes that are read from the process.
const MAX_OUTPUT: u64 = 1 << 20;
/// Most characters of a line of cuFile's log.
const MAX_LINE: usize = 300;
/// Where cuFile writes its log, instead of `cufile.log` in the current folder.
const LOG: &str = "CUFILE_LOGFILE_PATH";

/// How the process ended.
#[derive(Debug, PartialEq, Eq)]
enum Ending {
    /// After its last record.
    Complete,
    /// Before, and how.
    Early(String),
    /// It was killed.
    Late,
}

/// Reads the file by cuFile into each GPU.
pub(super) fn prove(facts: &Facts, storage: &Storage, path: &Path, proofs: &mut StorageProofs) {
    let log = Log::new();
    let (records, ending) = match command(storage, path, &log).and_then(|mut it| watch(&mut it, LIMIT)) {
        Ok(seen) => seen,
        Err(error) => return proofs.not_tried.push(format!("cuFile: {error:#}")),
    };
    let failed = |how: &str, detail: String| {
        let detail = log.last_error().map_or(detail.clone(), |line| format!("{detail}; its log: {line}"));
        StorageProof { how: how.to_owned(), bytes: 0, gbs: None, detail, ok: false }
    };
    let label = |address: &str| {
        let known = facts.gpus.iter().find(|fact| fact.address == address);
        format!("cuFile into {}", known.map_or_else(|| format!("GPU {address}"), Gpu::label))
    };
    let mut step = "its start".to_owned();
    for record in records {
        match record {
            Record::Step(next) => step = next,
            Record::NotTried(reason) => proofs.not_tried.push(format!("cuFile: {reason}")),
            Record::Library(library) => proofs.cufile = Some(library),
            Record::Failed(detail) => proofs.reads.push(failed("cuFile", detail)),
            Record::GpuFailed { gpu, detail } => proofs.reads.push(failed(&label(&gpu), detail)),
            Record::Read { gpu, bytes, nanoseconds, detail } => {
                let gbs = Some(gbs_of(bytes, Duration::from_nanos(nanoseconds)));
                proofs.reads.push(StorageProof { how: label(&gpu), bytes, gbs, detail, ok: bytes > 0 });
            }
            Record::End => {}
        }
    }
    let library = proofs.cufile.as_ref().map_or("its process", |library| library.path.as_str());
    match ending {
        Ending::Complete => {}
        Ending::Early(how) => {
            let detail = format!("{library} ended in {step} ({how}); doctor runs it in a process of its own");
            proofs.reads.push(failed("cuFile", detail));
        }
        Ending::Late => {
            let detail = format!("{library} was still in {step} after {} s, and was killed", LIMIT.as_secs());
            proofs.reads.push(failed("cuFile", detail));
        }
    }
}

fn command(storage: &Storage, path: &Path, log: &Log) -> anyhow::Result<Command> {
    let myself = std::env::current_exe().context("cannot find the path of the nobounce program")?;
    let mut command = Command::new(myself);
    command.arg(SUBCOMMAND).arg(path);
    if let Some(Some(library)) = storage.cufile.library.known() {
        command.arg("--library").arg(&library.path);
    }
    if let Some(Some(_)) = storage.direct_io.known() {
        command.arg("--direct");
    }
    if let Some(file) = &log.file {
        command.env(LOG, file);
    }
    Ok(command)
}

/// Runs the process, not longer than the limit. Its records, and how it ended.
fn watch(command: &mut Command, limit: Duration) -> anyhow::Result<(Vec<Record>, Ending)> {
    let deadline = Instant::now() + limit;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut process = command.spawn().context("cannot start the process that loads libcufile")?;
    let receiver = match process.stdout.take() {
        Some(output) => records(output),
        None => mpsc::channel().1,
    };
    let mut records = Vec::new();
    let ending = loop {
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Record::End) => break Ending::Complete,
            Ok(record) => records.push(record),
            // Another process may keep the pipe of one that has ended.
            Err(RecvTimeoutError::Timeout) => {
                break wait(&mut process, Duration::ZERO).map_or(Ending::Late, Ending::Early);
            }
            Err(RecvTimeoutError::Disconnected) => {
                let left = deadline.saturating_duration_since(Instant::now()).max(EXIT_TIMEOUT);
                break wait(&mut process, left).map_or(Ending::Late, Ending::Early);
            }
        }
    };
    if ending == Ending::Late || wait(&mut process, EXIT_TIMEOUT).is_none() {
        let _ = process.kill();
        let _ = wait(&mut process, EXIT_TIMEOUT);
    }
    Ok((records, ending))
}

/// The records of a process. The thread ends with the pipe, which a process that the library starts
/// may keep open.
fn records(output: impl Read + Send + 'static) -> Receiver<Record> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output.take(MAX_OUTPUT)).lines().map_while(Result::ok) {
            // What the library prints is none.
            if let Ok(record) = serde_json::from_str(&line)
                && sender.send(record).is_err()
            {
                return;
            }
        }
    });
    receiver
}

/// Waits for the end of a process; how it ended.
fn wait(process: &mut Child, limit: Duration) -> Option<String> {
    let end = Instant::now() + limit;
    loop {
        match process.try_wait() {
            Ok(Some(status)) => return Some(status.to_string()),
            Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(2)),
            Ok(None) | Err(_) => return None,
        }
    }
}

/// The file of cuFile's log, in a folder of its own that is removed at the end; `None` where the
/// user has named one.
struct Log {
    folder: Option<PathBuf>,
    file: Option<PathBuf>,
}

impl Log {
    fn new() -> Self {
        if std::env::var_os(LOG).is_some() {
            return Self { folder: None, file: None };
        }
        let folder = std::env::temp_dir().join(format!("nobounce-cufile-{}", std::process::id()));
        match fs::create_dir(&folder) {
            Ok(()) => Self { file: Some(folder.join("cufile.log")), folder: Some(folder) },
            Err(_) => Self { folder: None, file: Some(PathBuf::from("/dev/null")) },
        }
    }

    /// The last error that cuFile has logged.
    fn last_error(&self) -> Option<String> {
        let mut text = Vec::new();
        let file = fs::File::open(self.folder.as_ref()?.join("cufile.log")).ok()?;
        file.take(MAX_OUTPUT).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().rfind(|line| line.contains("ERROR"))?;
        Some(clean(line.trim()).chars().take(MAX_LINE).collect())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(script: &str, limit: Duration) -> (Vec<Record>, Ending) {
        watch(Command::new("sh").args(["-c", script]), limit).unwrap()
    }

    #[test]
    fn a_process_that_ends_early_or_never_is_told_from_one_that_is_complete() {
        const LONG: Duration = Duration::from_secs(20);
        let step = || vec![Record::Step("cuFileRead".to_owned())];
        let script = "echo '{\"Step\":\"cuFileRead\"}'; echo noise; ";
        let with = |rest: &str, limit| seen(&format!("{script}{rest}"), limit);
        assert_eq!(with("echo '\"End\"'; exit 3", LONG), (step(), Ending::Complete));
        let (records, ending) = with("kill -SEGV $$", LONG);
        let Ending::Early(how) = ending else { panic!("{ending:?}") };
        assert!(records == step() && how.contains("signal: 11"), "{how}");
        let begun = Instant::now();
        assert_eq!(with("exec sleep 60", Duration::from_millis(300)), (step(), Ending::Late));
        // A process that keeps the pipe open, and one that closes it and stays.
        let (records, ending) = with("sleep 3 & kill -KILL $$", Duration::from_millis(300));
        assert!(records == step() && matches!(ending, Ending::Early(_)), "{ending:?}");
        assert_eq!(with("exec >&-; exec sleep 60", Duration::from_millis(300)), (step(), Ending::Late));
        assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    }

    #[test]
    fn the_log_of_cufile_has_a_folder_that_vanishes() {
        let log = Log::new();
        let (Some(folder), Some(file)) = (log.folder.clone(), log.file.clone()) else { return };
        assert_eq!(log.last_error(), None);
        fs::write(&file, "1 INFO a\n2 ERROR  cufio-drv:1 no driver\n3 NOTICE b\n").unwrap();
        assert_eq!(log.last_error().as_deref(), Some("2 ERROR  cufio-drv:1 no driver"));
        drop(log);
        assert!(!folder.exists());
    }
}
