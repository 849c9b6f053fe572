//! Plain UDP between two processes of this machine: the baseline of our own figures.
//!
//! Blast: one process sends GSO batches of 15 x 4132 bytes without pause. The other (GRO) receives,
//! counts and discards. Ping-pong: 32 bytes, both sides spin on a non-blocking receive. One thread
//! each, no privilege, loopback only, ports chosen by the kernel. The other process is this program
//! with a hidden subcommand, controlled by lines on its stdin and stdout.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{Ipv4Addr, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::numbers::{figure, float, rounded};
use super::own_time::OwnTime;
use super::raw_socket;
use super::stats::{mad, median};

/// The hidden subcommand that runs [`child`].
pub(crate) const SUBCOMMAND: &str = "raw-echo";

/// A path-MTU packet: 4096 bytes of payload and 36 of headers and checksum.
const SEGMENT: usize = 4132;
const BATCH: usize = 15;
const PING: usize = 32;
/// One long blast, divided into intervals by the receiver. Five rounds of 200 ms with pauses
/// between them gave less than one of 2 s on the same 2 CPUs.
const BLAST_TIME: Duration = Duration::from_millis(1200);
const BLAST_INTERVAL: Duration = Duration::from_millis(150);
const PING_ROUNDS: u32 = 5;
const PING_TIME: Duration = Duration::from_millis(100);
/// A blast is over when nothing has come for this long.
const QUIET: Duration = Duration::from_millis(100);
/// A ping that is not answered by then is lost; so is a peer.
const RAW_TIMEOUT: Duration = Duration::from_secs(2);

/// Least share of a CPU that a blasting or spinning thread needs. With less, the scheduler is what
/// is measured. At three quarters of a CPU on each end, half a round trip already takes nearly
/// twice as long. On a busy machine it takes a thousand times as long.
const LEAST_OF_CPU: f64 = 0.8;
/// A median deviation beyond this share of the median makes the median meaningless.
const BEYOND_REASON: f64 = 0.5;

/// The figures, and the rounds they are the medians of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Raw {
    /// 10^9 bytes per second received in the blast.
    pub(crate) gbytes_per_s: f64,
    /// Half of a ping-pong, microseconds.
    pub(crate) half_round_trip_us: f64,
    /// The intervals of the blast.
    pub(crate) gbytes_per_s_samples: Vec<f64>,
    /// The mean of each ping-pong round.
    pub(crate) half_round_trip_us_samples: Vec<f64>,
    /// The sender's CPU share in each blast, and the worse end's in each ping-pong round.
    #[serde(default)]
    pub(crate) blast_cpu_samples: Vec<f64>,
    #[serde(default)]
    pub(crate) ping_cpu_samples: Vec<f64>,
}

impl Raw {
    /// The figures of two times: medians of all rounds.
    pub(crate) fn and(mut self, later: Self) -> Self {
        self.gbytes_per_s_samples.extend(later.gbytes_per_s_samples);
        self.half_round_trip_us_samples.extend(later.half_round_trip_us_samples);
        self.blast_cpu_samples.extend(later.blast_cpu_samples);
        self.ping_cpu_samples.extend(later.ping_cpu_samples);
        let kept = |samples: &[f64], before| median(samples).map_or(before, rounded);
        self.gbytes_per_s = kept(&self.gbytes_per_s_samples, self.gbytes_per_s);
        self.half_round_trip_us = kept(&self.half_round_trip_us_samples, self.half_round_trip_us);
        self
    }

    /// Why nothing can be set against this bandwidth, if so.
    pub(crate) fn bandwidth_doubt(&self) -> Option<String> {
        doubt(&self.blast_cpu_samples, &self.gbytes_per_s_samples, "GB/s")
    }

    /// Why this latency is no valid baseline, if so.
    pub(crate) fn latency_doubt(&self) -> Option<String> {
        doubt(&self.ping_cpu_samples, &self.half_round_trip_us_samples, "us")
    }
}

fn doubt(shares: &[f64], samples: &[f64], unit: &str) -> Option<String> {
    if let Some(share) = median(shares).filter(|share| *share < LEAST_OF_CPU) {
        return Some(format!("plain UDP got {:.0} % of the CPU time it needed", share * 100.0));
    }
    let (mad, middle) = mad(samples).zip(median(samples))?;
    let (least, most) = samples.iter().fold((f64::MAX, f64::MIN), |(a, b), one| (a.min(*one), b.max(*one)));
    (mad > middle * BEYOND_REASON)
        .then(|| format!("plain UDP varied between {} and {} {unit}", figure(least), figure(most)))
}

impl std::fmt::Display for Raw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} GB/s, half round trip {} us",
            figure(self.gbytes_per_s),
            figure(self.half_round_trip_us)
        )
    }
}

/// Command-line arguments of the other process.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ChildArgs {
    /// Loopback port of the parent's socket
    #[arg(long)]
    port: u16,
}

/// Measures, with a second process of this program.
pub(crate) fn measure() -> anyhow::Result<Raw> {
    let socket = raw_socket::open()?;
    let port = socket.local_addr().context("cannot read the port of the socket")?.port();
    let program = std::env::current_exe().context("cannot find the path of the nobounce program")?;
    let mut process = Command::new(program);
    process.args([SUBCOMMAND, "--port", &port.to_string()]);
    process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut process = Reaped(process.spawn().context("cannot start a second process")?);
    let orders = process.0.stdin.take().context("the second process has no stdin")?;
    let answers = process.0.stdout.take().context("the second process has no stdout")?;
    drive(&socket, orders, BufReader::new(answers))
}

/// The second process: executes the lines on stdin until end of file.
pub(crate) fn child(args: &ChildArgs) -> anyhow::Result<()> {
    serve(args.port, std::io::stdin().lock(), std::io::stdout())
}

/// Never leaves a process behind, whichever way we leave.
#[derive(Debug)]
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // Closing its stdin (already done) ends it; killing makes that certain.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn drive(socket: &UdpSocket, mut orders: impl Write, mut answers: impl BufRead) -> anyhow::Result<Raw> {
    let mut answer = move || -> anyhow::Result<String> {
        let mut line = String::new();
        let read = answers.read_line(&mut line).context("cannot read from the second process")?;
        if read == 0 { bail!("the second process exited early") } else { Ok(line.trim().to_owned()) }
    };
    let port: u16 = answer()?.parse().context("the second process sent no port")?;
    socket.connect((Ipv4Addr::LOCALHOST, port)).context("cannot reach the second process by UDP")?;

    writeln!(orders, "blast")?;
    orders.flush()?;
    raw_socket::set_segment(socket, SEGMENT)?;
    let time = OwnTime::begin();
    blast(socket)?;
    let blast_cpu = time.share();
    let line = answer()?;
    let bandwidths: Vec<f64> = line.split_whitespace().filter_map(|figure| figure.parse().ok()).collect();
    raw_socket::set_segment(socket, 0)?;
    socket.set_nonblocking(true).context("cannot make the socket non-blocking")?;
    let (mut halves, mut ping_cpu) = (Vec::new(), Vec::new());
    for _ in 0..PING_ROUNDS {
        writeln!(orders, "ping")?;
        orders.flush()?;
        answer()?; // it is spinning now
        let time = OwnTime::begin();
        halves.push(ping(socket)?);
        let ours = time.share();
        socket.send(&[0]).context("cannot end the ping-pong")?;
        let theirs: f64 = answer()?.parse().context("the second process sent no result")?;
        ping_cpu.push(ours.min(theirs));
    }
    Ok(Raw {
        gbytes_per_s: rounded(median(&bandwidths).context("no datagram of the stream arrived")?),
        half_round_trip_us: rounded(median(&halves).context("no ping-pong completed")?),
        gbytes_per_s_samples: bandwidths.into_iter().map(rounded).collect(),
        half_round_trip_us_samples: halves.into_iter().map(rounded).collect(),
        blast_cpu_samples: vec![rounded(blast_cpu)],
        ping_cpu_samples: ping_cpu.into_iter().map(rounded).collect(),
    })
}

fn blast(socket: &UdpSocket) -> anyhow::Result<()> {
    // Large enough that the allocator maps it. Unwritten pages share one zero page, as in the
    // program that defines raw, so that sending reads from the L1 cache.
    let zeros = vec![0; 1 << 20];
    let batch = &zeros[..SEGMENT * BATCH];
    let started = Instant::now();
    let mut sent = 0u64;
    while started.elapsed() < BLAST_TIME {
        match socket.send(batch) {
            Ok(_) => sent += 1,
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            // ENOBUFS is transient once something has gone out.
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) && sent > 0 => {}
            Err(error) => return Err(error).context("cannot send UDP batches (UDP_SEGMENT)"),
        }
    }
    Ok(())
}

/// One round of pings; the mean half round trip in microseconds.
fn ping(socket: &UdpSocket) -> anyhow::Result<f64> {
    let message = [1; PING];
    let mut rounds = 0u32;
    let started = Instant::now();
    loop {
        socket.send(&message).context("cannot send a ping")?;
        if receive(socket)?.is_none() {
            bail!("no answer to a ping over loopback within {RAW_TIMEOUT:?}");
        }
        rounds += 1;
        if rounds.is_multiple_of(64) && started.elapsed() >= PING_TIME {
            return Ok(started.elapsed().as_secs_f64() / f64::from(rounds) / 2.0 * 1e6);
        }
    }
}

/// Spins until a datagram arrives; returns its length, or `None` on timeout.
fn receive(socket: &UdpSocket) -> anyhow::Result<Option<usize>> {
    let mut buffer = [0; 64];
    let mut deadline = None;
    let mut spins = 0u32;
    loop {
        match socket.recv(&mut buffer) {
            Ok(length) => return Ok(Some(length)),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error).context("cannot receive a ping"),
        }
        spins = spins.wrapping_add(1);
        // Reading the clock costs as much as a failed receive, so read it rarely.
        if spins.is_multiple_of(4096)
            && Instant::now() > *deadline.get_or_insert_with(|| Instant::now() + RAW_TIMEOUT)
        {
            return Ok(None);
        }
    }
}

fn serve(peer: u16, orders: impl BufRead, mut answers: impl Write) -> anyhow::Result<()> {
    let socket = raw_socket::open()?;
    raw_socket::receive_coalesced(&socket)?;
    socket.connect((Ipv4Addr::LOCALHOST, peer)).context("cannot reach the first process by UDP")?;
    let port = socket.local_addr().context("cannot read the port of the socket")?.port();
    writeln!(answers, "{port}")?;
    answers.flush()?;
    for order in orders.lines() {
        match order?.as_str() {
            "blast" => {
                let figures: Vec<String> = swallow(&socket)?.iter().map(f64::to_string).collect();
                writeln!(answers, "{}", figures.join(" "))?;
            }
            "ping" => {
                socket.set_nonblocking(true).context("cannot make the socket non-blocking")?;
                writeln!(answers, "ready")?;
                answers.flush()?;
                let time = OwnTime::begin();
                echo(&socket)?;
                writeln!(answers, "{}", time.share())?;
            }
            other => bail!("unknown command {other:?}"),
        }
        answers.flush()?;
    }
    Ok(())
}

/// Receives and discards until traffic stops; 10^9 bytes per second in each full interval.
fn swallow(socket: &UdpSocket) -> anyhow::Result<Vec<f64>> {
    socket.set_read_timeout(Some(QUIET)).context("cannot set a receive timeout")?;
    let mut buffer = vec![0; 1 << 16];
    let mut figures = Vec::new();
    // Bytes since, and when the first of them came.
    let mut interval: Option<(u64, Instant)> = None;
    let asked = Instant::now();
    loop {
        match socket.recv(&mut buffer) {
            Ok(length) => {
                let now = Instant::now();
                let (bytes, since) = interval.unwrap_or((0, now));
                let bytes = bytes + u64::try_from(length).unwrap_or(0);
                interval = Some((bytes, since));
                if now - since >= BLAST_INTERVAL {
                    figures.push(float(bytes) / (now - since).as_secs_f64() / 1e9);
                    interval = Some((0, now));
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if interval.is_some() || asked.elapsed() > RAW_TIMEOUT {
                    return Ok(figures);
                }
            }
            Err(error) => return Err(error).context("cannot receive the stream"),
        }
    }
}

/// Answers pings until a one-byte datagram arrives, or until pings stop.
fn echo(socket: &UdpSocket) -> anyhow::Result<()> {
    let message = [2; PING];
    while let Some(length) = receive(socket)? {
        if length == 1 {
            return Ok(());
        }
        socket.send(&message).context("cannot answer a ping")?;
    }
    bail!("no ping within {RAW_TIMEOUT:?}")
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// The whole exchange, with a thread in place of the second process (the figures mean less, the
    /// flow is the same).
    #[test]
    fn both_figures_are_measured_and_bounded_in_time() {
        let started = Instant::now();
        let socket = raw_socket::open().unwrap();
        let port = socket.local_addr().unwrap().port();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let other = std::thread::spawn(move || {
            let input = BufReader::new(theirs.try_clone().unwrap());
            serve(port, input, theirs)
        });
        let found = drive(&socket, ours.try_clone().unwrap(), BufReader::new(ours)).unwrap();
        other.join().unwrap().unwrap();
        assert!(found.gbytes_per_s > 0.0 && found.half_round_trip_us > 0.0, "{found:?}");
        assert!(found.gbytes_per_s_samples.len() > 1, "{found:?}");
        assert_eq!(found.half_round_trip_us_samples.len(), 5);
        assert_eq!((found.blast_cpu_samples.len(), found.ping_cpu_samples.len()), (1, 5));
        let shares = found.blast_cpu_samples.iter().chain(&found.ping_cpu_samples);
        assert!(shares.into_iter().all(|share| *share > 0.0 && *share <= 1.0), "{found:?}");
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    }

    /// Both invalid baselines: steady for lack of a CPU, and unsteady.
    #[test]
    fn on_a_busy_machine_nothing_is_set_against_it() {
        let quiet = Raw {
            gbytes_per_s: 5.0,
            half_round_trip_us: 2.5,
            gbytes_per_s_samples: vec![4.0, 5.0, 6.0],
            half_round_trip_us_samples: vec![2.0, 2.5, 5.0],
            blast_cpu_samples: vec![0.99, 0.97],
            ping_cpu_samples: vec![0.99, 0.3, 1.0],
        };
        assert_eq!((quiet.bandwidth_doubt(), quiet.latency_doubt()), (None, None));
        let starved = Raw {
            half_round_trip_us_samples: vec![3600.0, 3700.0, 3650.0],
            ping_cpu_samples: vec![0.4, 0.43, 0.5],
            ..quiet.clone()
        };
        assert_eq!(starved.latency_doubt().as_deref(), Some("plain UDP got 43 % of the CPU time it needed"));
        assert_eq!(starved.bandwidth_doubt(), None);
        let torn = Raw { gbytes_per_s_samples: vec![0.1, 0.2, 2.0, 5.0, 5.1], ..quiet.clone() };
        assert_eq!(torn.bandwidth_doubt().as_deref(), Some("plain UDP varied between 0.10 and 5.10 GB/s"));
        // Before and after the cases: half of the time is enough.
        assert!(quiet.and(starved).latency_doubt().is_some());
    }

    #[test]
    fn a_second_process_that_dies_is_an_error_and_no_hang() {
        let socket = raw_socket::open().unwrap();
        let told = drive(&socket, Vec::new(), &b""[..]).unwrap_err().to_string();
        assert!(told.contains("exited early"), "{told}");
        let told = drive(&socket, Vec::new(), &b"no port\n"[..]).unwrap_err().to_string();
        assert!(told.contains("sent no port"), "{told}");
    }
}
