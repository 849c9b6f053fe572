//! `nobounce bench --gpu-initiated`: kernels of two processes put, get and signal.
//!
//! | file | what |
//! |---|---|
//! | rank | one of the two processes: the measurements |
//! | kernels | what runs on the GPU (bench.cu) |
//! | figures | the report |
//! | table, plot | the report for people |

mod figures;
mod kernels;
mod plot;
mod rank;
mod table;

use std::io::{IsTerminal, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};

use self::figures::{LinkFigures, Report, SCHEMA};
use crate::bench::args::BenchArgs;
use crate::bench::gpu_mps::Mps;
use crate::bench::machine::{self, Machine};
use crate::bench::{self, Verdict};

const LINK: &str = "NOBOUNCE_LINK";
const ADDR: &str = "NOBOUNCE_ADDR";

/// The command: one of its ranks, or the process that starts them.
pub(crate) fn main(args: &BenchArgs) -> anyhow::Result<Verdict> {
    let gpu = args.gpu.unwrap_or(0);
    if args.explain {
        print!("{}", rank::cases());
        return Ok(Verdict::Fine);
    }
    match (args.rank, args.meet) {
        (Some(rank), Some(meet)) => serve(rank, meet, gpu)?,
        _ => compare(args, gpu)?,
    }
    Ok(Verdict::Fine)
}

/// A rank. Rank 0 prints its figures.
fn serve(rank: u32, meet: SocketAddr, gpu: i32) -> anyhow::Result<()> {
    let link = std::env::var(LINK).unwrap_or_default();
    let figures = rank::Rank::join(rank, meet, gpu)?.measure(&link)?;
    if rank == 0 {
        println!("{}", serde_json::to_string(&figures)?);
    }
    Ok(())
}

fn compare(args: &BenchArgs, gpu: i32) -> anyhow::Result<()> {
    for path in [&args.json, &args.plot].into_iter().flatten() {
        bench::writable(path)?;
    }
    let started = machine::timestamp();
    // Before any process uses the GPU.
    let (_mps, sharing) = Mps::start();
    let links = match args.link.as_slice() {
        [] => vec!["auto".to_owned(), "udp".to_owned()],
        named => named.to_vec(),
    };
    let links = links.iter().map(|link| measure(link, gpu)).collect::<anyhow::Result<Vec<_>>>()?;
    let gpus = links.first().map(|link| link.gpu.clone()).unwrap_or_default();
    let report = Report {
        schema: SCHEMA.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started,
        machine: format!("{}, {gpus}", Machine::here()),
        sharing,
        links,
    };
    std::io::stdout()
        .lock()
        .write_all(table::render(&report).as_bytes())
        .context("cannot print the results")?;
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report)? + "\n";
        bench::save(path, text.as_bytes())?;
    }
    if let Some(path) = &args.plot {
        bench::save(path, plot::svg(&report)?.as_bytes())?;
    }
    Ok(())
}

/// Both ranks over one link.
fn measure(link: &str, gpu: i32) -> anyhow::Result<LinkFigures> {
    if std::io::stderr().is_terminal() {
        eprintln!("measuring over {}, about 15 s ...", table::link_name(link));
    }
    // Free now, and taken by rank 0 in a moment.
    let meet = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr())?;
    let mut ranks = [start(0, link, meet, gpu)?, start(1, link, meet, gpu)?];
    let [first, second] = ranks.each_mut().map(|rank| (rank.0.stdout.take(), rank.0.stderr.take()));
    // A rank that says much must not wait for the other one.
    let reading = std::thread::spawn(move || (text(second.0), text(second.1)));
    let said = [(text(first.0), text(first.1)), reading.join().unwrap_or_default()];
    for (rank, (child, (_, reason))) in ranks.iter_mut().zip(&said).enumerate() {
        let status = child.0.wait()?;
        let reason = reason.trim().trim_start_matches("nobounce: ");
        if !status.success() {
            let reason = if reason.is_empty() { status.to_string() } else { reason.to_owned() };
            bail!("rank {rank}, over {}: {reason}", table::link_name(link));
        }
        if !reason.is_empty() {
            eprintln!("{reason}");
        }
    }
    serde_json::from_str(&said[0].0).context("rank 0 printed no figures")
}

/// All that a rank says there.
fn text(pipe: Option<impl std::io::Read>) -> String {
    pipe.and_then(|pipe| std::io::read_to_string(pipe).ok()).unwrap_or_default()
}

/// A process that does not outlive this one's interest in it.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(rank: u32, link: &str, meet: SocketAddr, gpu: i32) -> anyhow::Result<Rank> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(program);
    command
        .args(["bench", "--gpu-initiated", "--gpu", &gpu.to_string()])
        .args(["--rank", &rank.to_string(), "--meet", &meet.to_string()])
        .env(LINK, link)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(address) = bench::free_loopback() {
        command.env(ADDR, address);
    }
    command.spawn().map(Rank).with_context(|| format!("cannot start rank {rank}"))
}
