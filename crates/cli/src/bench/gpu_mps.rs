//! NVIDIA's multi-process service: with it, two processes use one GPU at the same time; without it,
//! they take turns.
//!
//! Each run starts a private instance in a folder of its own, which ends with the run, however that
//! ends. A small watcher process holds our pipe as its standard input, and is shielded from the
//! terminal's Ctrl-C.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CONTROL: &str = "nvidia-cuda-mps-control";
const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";
const LOGS: &str = "CUDA_MPS_LOG_DIRECTORY";
/// Where it is unless the environment says otherwise.
const USUAL_PIPES: &str = "/tmp/nvidia-mps";
/// The hidden subcommand that tests whether a GPU works through MPS.
pub(crate) const PROBE: &str = "gpu-probe";
/// How long starting and trying may take.
const MPS_TIMEOUT: Duration = Duration::from_secs(20);

const TAKE_TURNS: &str = "the two processes time-slice the GPU, which costs milliseconds per switch";

/// A service of our own. Dropping it ends it, a moment later.
#[derive(Debug)]
pub(crate) struct Mps {
    /// Ends the service when its standard input ends.
    _keeper: std::process::Child,
}

impl Mps {
    /// Starts MPS if that makes sense, and reports how the GPU is shared.
    pub(crate) fn start() -> (Option<Self>, String) {
        if std::env::var_os("NOBOUNCE_CUDA").is_some() {
            return (None, "NOBOUNCE_CUDA selects another driver; MPS was not started".to_owned());
        }
        if runs_already() {
            return (None, "MPS is already running, and is used".to_owned());
        }
        match start() {
            Ok(mps) => (Some(mps), "MPS was started for this run".to_owned()),
            Err(why) => (None, format!("{why}; {TAKE_TURNS}")),
        }
    }
}

/// Whether a service answers where CUDA would look for one.
fn runs_already() -> bool {
    let pipes = std::env::var_os(PIPES).map_or_else(|| PathBuf::from(USUAL_PIPES), PathBuf::from);
    // In a container there may be its pipe and not its program.
    pipes.join("control").exists() && ask(&pipes, "get_server_list").unwrap_or(true)
}

fn start() -> Result<Mps, String> {
    let folder = std::env::temp_dir().join(format!("nobounce-mps-{}", std::process::id()));
    let (pipes, logs) = (folder.join("pipe"), folder.join("log"));
    let made = [&pipes, &logs].into_iter().try_for_each(std::fs::create_dir_all);
    made.map_err(|error| format!("no MPS: cannot create {} ({error})", folder.display()))?;
    let started = Command::new(CONTROL)
        .arg("-d")
        .env(PIPES, &pipes)
        .env(LOGS, &logs)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let remove = || drop(std::fs::remove_dir_all(&folder));
    match started {
        Ok(status) if status.success() => {}
        Ok(status) => {
            remove();
            return Err(format!("no MPS: {CONTROL} -d failed with {status}"));
        }
        Err(error) => {
            remove();
            return Err(format!("no MPS: cannot start {CONTROL} ({error})"));
        }
    }
    let mps = match keep(&folder, &pipes) {
        Ok(keeper) => Mps { _keeper: keeper },
        Err(error) => {
            let _ = ask(&pipes, "quit");
            remove();
            return Err(format!("no MPS: cannot start its watcher ({error})"));
        }
    };
    // MPS may start and still refuse its clients (in some containers): that must not abort the run.
    if !works(&pipes) {
        return Err("no MPS: a test process could not use the GPU through it".to_owned());
    }
    // SAFETY: only this thread runs at this point, and CUDA was not loaded yet.
    unsafe { std::env::set_var(PIPES, &pipes) };
    Ok(mps)
}

/// Starts the watcher that ends MPS at end of file on its input: when we exit or close it.
fn keep(folder: &Path, pipes: &Path) -> std::io::Result<std::process::Child> {
    let script = format!("cat >/dev/null; echo quit | {CONTROL} >/dev/null 2>&1; rm -rf \"$1\"");
    Command::new("sh")
        .args(["-c", &script, "nobounce-mps-keeper"])
        .arg(folder)
        .env(PIPES, pipes)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
}

/// Sends a command to the service; whether it was taken.
fn ask(pipes: &Path, command: &str) -> std::io::Result<bool> {
    let mut control = Command::new(CONTROL)
        .env(PIPES, pipes)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    if let Some(mut input) = control.stdin.take() {
        writeln!(input, "{command}")?;
    }
    ends_well(&mut control)
}

/// Whether a child process gets a context on the GPU through MPS.
fn works(pipes: &Path) -> bool {
    let probe = std::env::current_exe().and_then(|myself| {
        Command::new(myself)
            .arg(PROBE)
            .env(PIPES, pipes)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
    });
    probe.and_then(|mut probe| ends_well(&mut probe)).unwrap_or(false)
}

/// Waits for a process, not forever; whether it ended with 0.
fn ends_well(process: &mut std::process::Child) -> std::io::Result<bool> {
    let start = Instant::now();
    loop {
        if let Some(status) = process.try_wait()? {
            return Ok(status.success());
        }
        if start.elapsed() > MPS_TIMEOUT {
            process.kill()?;
            process.wait()?;
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The process that [`works`] starts.
pub(crate) fn probe() -> anyhow::Result<()> {
    let gpu = super::gpu_choice::chosen().map_err(anyhow::Error::msg)?;
    gpu.primary()?;
    Ok(())
}
