//! `nobounce bench --kv`: lists of KV-cache pages between two processes.
//!
//! | file | what |
//! |---|---|
//! | rank | one of the two processes: the measurements |
//! | workload | block tables and requests |
//! | figures | the report |
//! | table, plot | the report for people |

mod figures;
mod plot;
mod rank;
mod table;
mod workload;

use self::figures::{KvLinkFigures, KvReport, SCHEMA};
use crate::bench::Verdict;
use crate::bench::args::BenchArgs;
use crate::bench::case::Memory;
use crate::bench::gpu_mps::Mps;
use crate::bench::machine::{self, Machine};
use crate::bench::ranks::{self, LINK};

/// The command: one of its ranks, or the process that starts them.
pub(crate) fn main(args: &BenchArgs) -> anyhow::Result<Verdict> {
    let gpu = (args.memory == Some(Memory::Gpu)).then(|| args.gpu.unwrap_or(0));
    if args.explain {
        print!("{}", rank::cases());
        return Ok(Verdict::Fine);
    }
    match (args.rank, args.meet) {
        (Some(0), Some(meet)) => {
            let link = std::env::var(LINK).unwrap_or_default();
            println!("{}", serde_json::to_string(&rank::measure(meet, gpu, &link)?)?);
        }
        (Some(_), Some(meet)) => rank::serve(meet, gpu)?,
        _ => compare(args, gpu)?,
    }
    Ok(Verdict::Fine)
}

fn compare(args: &BenchArgs, gpu: Option<i32>) -> anyhow::Result<()> {
    ranks::check_files(args)?;
    let started = machine::timestamp();
    // Before any process uses the GPU.
    let mps = gpu.map(|_| Mps::start());
    let links: Vec<_> =
        ranks::links(&args.link).iter().map(|link| measure(link, gpu)).collect::<anyhow::Result<_>>()?;
    let report = KvReport {
        schema: SCHEMA.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        started,
        machine: Machine::here().to_string(),
        memory: match gpu {
            None => "host memory".to_owned(),
            Some(gpu) => {
                format!("memory of GPU {gpu}; {}", mps.map(|(_, sharing)| sharing).unwrap_or_default())
            }
        },
        links,
    };
    ranks::publish(args, &report, &table::render(&report), || plot::svg(&report))
}

fn measure(link: &str, gpu: Option<i32>) -> anyhow::Result<KvLinkFigures> {
    let mut arguments = vec!["--kv".to_owned()];
    if let Some(gpu) = gpu {
        arguments.extend(["--memory", "gpu", "--gpu"].map(str::to_owned));
        arguments.push(gpu.to_string());
    }
    ranks::measure(link, &arguments)
}
