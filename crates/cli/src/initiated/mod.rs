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

use std::net::SocketAddr;

use self::figures::{InitiatedLinkFigures, InitiatedReport, SCHEMA};
use crate::bench::Verdict;
use crate::bench::args::BenchArgs;
use crate::bench::gpu_mps::Mps;
use crate::bench::machine::{self, Machine};
use crate::bench::ranks::{self, LINK};

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
    ranks::check_files(args)?;
    let started = machine::timestamp();
    // Before any process uses the GPU.
    let (_mps, sharing) = Mps::start();
    let links =
        ranks::links(&args.link).iter().map(|link| measure(link, gpu)).collect::<anyhow::Result<Vec<_>>>()?;
    let gpus = links.first().map(|link| link.gpu.clone()).unwrap_or_default();
    let report = InitiatedReport {
        schema: SCHEMA.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started,
        machine: format!("{}, {gpus}", Machine::here()),
        sharing,
        links,
    };
    ranks::publish(args, &report, &table::render(&report), || plot::svg(&report))
}

/// Both ranks over one link.
fn measure(link: &str, gpu: i32) -> anyhow::Result<InitiatedLinkFigures> {
    ranks::measure(link, &["--gpu-initiated".to_owned(), "--gpu".to_owned(), gpu.to_string()])
}
