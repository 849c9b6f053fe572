//! A process at one end of a path: it sends flows of one kind, or it receives all kinds.
//!
//! The sending process says `ready` when it has connected, and begins when it reads a line. It ends
//! with a line of JSON.

use std::io::{BufRead, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nobounce_emulator::End;
use serde::{Deserialize, Serialize};

use super::{flow_nb0, flow_tcp};
use crate::bench::numbers::float;

/// The hidden subcommand.
pub(crate) const SUBCOMMAND: &str = "path-flow";
pub(super) const TCP_PORT: u16 = 7001;
pub(super) const NB0_PORT: u16 = 7002;
/// The kind that is not TCP. Other kinds name the congestion control of TCP.
pub(super) const NB0: &str = "nb0";
/// A message that does not come back for so long ends a process.
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);
/// How often bytes are counted: the report has a median.
const INTERVALS: u32 = 8;

/// Command-line arguments of such a process.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct FlowArgs {
    /// Receive until standard input ends
    #[arg(long)]
    pub(super) serve: bool,
    /// nb0, or the congestion control of TCP
    #[arg(long, default_value = NB0)]
    pub(super) kind: String,
    /// Flows at once
    #[arg(long, default_value_t = 1)]
    pub(super) flows: usize,
    /// Measure round trips of 8 bytes instead of a stream
    #[arg(long)]
    pub(super) ping: bool,
    /// Milliseconds before the measured part
    #[arg(long, default_value_t = 500)]
    pub(super) warm_up: u64,
    /// Milliseconds of the measured part
    #[arg(long, default_value_t = 3000)]
    pub(super) time: u64,
}

/// What a sending process measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct FlowFigures {
    /// 10^9 bytes per second of each flow, as acknowledged by the receiver.
    pub(super) gbytes_per_s: Vec<f64>,
    /// Round trips in microseconds.
    pub(super) round_trips_us: Vec<f64>,
    /// Packets or segments that were sent again.
    pub(super) retransmitted: u64,
    /// Bytes that differ from what was sent; nb0 only.
    pub(super) wrong_bytes: u64,
    /// CPU seconds of this process.
    pub(super) cpu_s: f64,
}

/// Connections of one kind.
pub(super) trait Flows {
    /// Bytes of each flow that the receiver has acknowledged.
    fn acknowledged(&self) -> anyhow::Result<Vec<u64>>;
    /// Starts to send.
    fn start(&mut self) -> anyhow::Result<()>;
    /// Stops, and fills in what else is known.
    fn stop(&mut self, figures: &mut FlowFigures) -> anyhow::Result<()>;
    /// One message of 8 bytes there and back.
    fn round_trip(&mut self) -> anyhow::Result<()>;
}

/// The process.
pub(crate) fn main(args: &FlowArgs) -> anyhow::Result<()> {
    if args.serve {
        return serve();
    }
    let mut flows: Box<dyn Flows> = if args.kind == NB0 {
        Box::new(flow_nb0::Nb0Flows::connect(args.flows, args.ping)?)
    } else {
        Box::new(flow_tcp::TcpFlows::connect(&args.kind, args.flows, args.ping)?)
    };
    let mut out = std::io::stdout();
    writeln!(out, "ready")?;
    out.flush()?;
    let mut line = String::new();
    ensure!(std::io::stdin().lock().read_line(&mut line)? > 0, "the first process has ended");
    let (warm_up, time) = (Duration::from_millis(args.warm_up), Duration::from_millis(args.time));
    let mut figures = FlowFigures::default();
    if args.ping {
        ping(flows.as_mut(), time, &mut figures)?;
    } else {
        stream(flows.as_mut(), warm_up, time, &mut figures)?;
    }
    flows.stop(&mut figures)?;
    figures.cpu_s = crate::bench::busy::cpu_seconds();
    writeln!(out, "{}", serde_json::to_string(&figures)?)?;
    Ok(())
}

fn stream(
    flows: &mut dyn Flows,
    warm_up: Duration,
    time: Duration,
    figures: &mut FlowFigures,
) -> anyhow::Result<()> {
    flows.start()?;
    std::thread::sleep(warm_up);
    let (begin, before) = (Instant::now(), flows.acknowledged()?);
    for interval in 1..=INTERVALS {
        // A flow that fails is reported soon.
        std::thread::sleep((time * interval / INTERVALS).saturating_sub(begin.elapsed()));
        flows.acknowledged()?;
    }
    let (seconds, after) = (begin.elapsed().as_secs_f64(), flows.acknowledged()?);
    let moved = before.iter().zip(&after).map(|(before, after)| after - before);
    figures.gbytes_per_s = moved.map(|bytes| float(bytes) / seconds / 1e9).collect();
    Ok(())
}

fn ping(flows: &mut dyn Flows, time: Duration, figures: &mut FlowFigures) -> anyhow::Result<()> {
    let begin = Instant::now();
    while begin.elapsed() < time {
        let start = Instant::now();
        flows.round_trip()?;
        figures.round_trips_us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(())
}

/// The receiving process.
fn serve() -> anyhow::Result<()> {
    flow_tcp::listen(address(TCP_PORT))?;
    flow_nb0::listen(address(NB0_PORT))?;
    let mut out = std::io::stdout();
    writeln!(out, "ready")?;
    out.flush()?;
    let mut line = String::new();
    while std::io::stdin().lock().read_line(&mut line).context("cannot read standard input")? > 0 {}
    Ok(())
}

pub(super) fn address(port: u16) -> SocketAddr {
    let addr: Ipv4Addr = End::Far.v4();
    SocketAddr::new(addr.into(), port)
}
