//! `nobounce path`: programs at both ends.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::Context;
use nobounce_emulator::{DirectionReport, Emulator, End};

use super::args::PathArgs;

/// How long the far program may take until it listens; then the near one starts anyway.
const LISTENS_WITHIN: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The state of a listening socket in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// The command: arguments in, exit code out. An error is exit code 2.
pub(crate) fn main(args: &PathArgs) -> anyhow::Result<ExitCode> {
    let signals = args.far.is_some().then(EndingSignals::block);
    let emulator = Emulator::start(&args.path)?;
    let far = args.far.as_ref().map(|far| {
        let mut command = at(&emulator, End::Far, "sh")?;
        command.args(["-c", far]);
        Group::start(&mut command)
    });
    let mut far = far.transpose().context("cannot start the program of --far")?;
    if let (Some(far), Some(signals)) = (&mut far, &signals) {
        signals.end_group(far.0.id());
        far.wait_until_listening(&emulator);
    }
    let (program, arguments) = args.command.split_first().context("no program to run")?;
    let mut near = at(&emulator, End::Near, program)?;
    let status = near.args(arguments).status().with_context(|| format!("cannot run {program}"))?;
    drop(far);
    for (name, report) in ["out", "back"].into_iter().zip(emulator.stop()) {
        eprintln!("path {name}: {}", describe(&report));
    }
    // As a shell has it.
    let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// A program at an end, where nb0 has the address of that end.
pub(super) fn at(emulator: &Emulator, end: End, program: &str) -> anyhow::Result<Command> {
    let mut command = Command::new(program);
    command.env("NOBOUNCE_ADDR", end.v4().to_string());
    emulator.enter(end, &mut command)?;
    // A blocked signal stays blocked in a new program.
    // SAFETY: between fork and exec it makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            EndingSignals::all().unblock();
            Ok(())
        })
    };
    Ok(command)
}

/// What a direction did, in one line; zeros are left out.
pub(super) fn describe(report: &DirectionReport) -> String {
    let counts = report.counts;
    let mut text = format!("{} packets in, {} out", counts.packets, report.delivered);
    for (count, what) in [
        (counts.lost, "lost"),
        (counts.queue_full, "dropped by the queue"),
        (counts.too_long, "longer than the path MTU"),
        (counts.marked, "marked"),
        (counts.duplicated, "duplicated"),
        (counts.reordered, "reordered"),
        (counts.corrupted, "corrupted"),
        (report.overrun, "dropped by the device"),
    ] {
        if count > 0 {
            text += &format!(", {count} {what}");
        }
    }
    text + &format!("; late by {:.1} us on average", late_us(report))
}

/// Microseconds by which packets left late on average.
pub(super) fn late_us(report: &DirectionReport) -> f64 {
    report.late.as_secs_f64() * 1e6 / crate::bench::numbers::float(report.delivered.max(1))
}

/// The signals that end this program. The far program is in a group of its own, which a terminal
/// does not reach.
struct EndingSignals(libc::sigset_t);

impl EndingSignals {
    fn all() -> Self {
        // SAFETY: a sigset_t is plain data; the calls write to a live set only.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                libc::sigaddset(&raw mut set, signal);
            }
            Self(set)
        }
    }

    /// Blocks them for this thread and those that it starts from now on.
    fn block() -> Self {
        let all = Self::all();
        // SAFETY: the set is live, and no old mask is asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all.0, std::ptr::null_mut()) };
        all
    }

    fn unblock(&self) {
        // SAFETY: the set is live, and no old mask is asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const self.0, std::ptr::null_mut()) };
    }

    /// Kills that group when one arrives, and exits.
    fn end_group(&self, group: u32) {
        let set = self.0;
        std::thread::spawn(move || {
            let mut signal = 0;
            // SAFETY: both are live, and the signals of the set are blocked.
            unsafe { libc::sigwait(&raw const set, &raw mut signal) };
            kill_group(group);
            std::process::exit(128 + signal);
        });
    }
}

fn kill_group(leader: u32) {
    if let Ok(id) = libc::pid_t::try_from(leader) {
        // SAFETY: it takes numbers only. The leader is our child, so its number is not reused
        // before it was waited for.
        unsafe { libc::kill(-id, libc::SIGKILL) };
    }
}

/// A program with everything that it starts; killed in the end.
struct Group(Child);

impl Group {
    fn start(command: &mut Command) -> anyhow::Result<Self> {
        Ok(Self(command.process_group(0).spawn()?))
    }

    fn wait_until_listening(&mut self, emulator: &Emulator) {
        let end = Instant::now() + LISTENS_WITHIN;
        let is_listening = || {
            let tables = ["tcp", "tcp6"]
                .map(|table| std::fs::read_to_string(format!("/proc/thread-self/net/{table}")));
            Ok(tables.iter().flatten().any(|table| lists_listener(table)))
        };
        while Instant::now() < end
            && matches!(self.0.try_wait(), Ok(None))
            && !emulator.run(End::Far, is_listening).unwrap_or(true)
        {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        kill_group(self.0.id());
        let _ = self.0.wait();
    }
}

fn lists_listener(table: &str) -> bool {
    table.lines().skip(1).any(|line| line.split_whitespace().nth(3) == Some(LISTEN))
}

#[cfg(test)]
mod tests {
    use nobounce_emulator::PathCounts;

    use super::*;

    #[test]
    fn a_listening_socket_is_found() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue\n";
        let line =
            |state: &str| format!("{head}   0: 0100007F:1F90 00000000:0000 {state} 00000000:00000000\n");
        assert!(lists_listener(&line("0A")) && !lists_listener(&line("01")) && !lists_listener(head));
    }

    #[test]
    fn a_direction_is_described_by_what_happened() {
        let counts = PathCounts { packets: 10, lost: 2, marked: 1, ..PathCounts::default() };
        let late = Duration::from_micros(16);
        let report = DirectionReport { counts, delivered: 8, late, ..DirectionReport::default() };
        let text = describe(&report);
        assert_eq!(text, "10 packets in, 8 out, 2 lost, 1 marked; late by 2.0 us on average");
    }
}
