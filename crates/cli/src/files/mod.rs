//! `nobounce bench --files DIR`: files into memory, from this machine and from a file server.
//!
//! | file | what |
//! |---|---|
//! | local | reads of one process, beside what programs do without nobounce |
//! | remote | two processes: a file server and a client |
//! | figures, table | the report |

mod figures;
mod local;
mod remote;
mod table;

use std::path::{Path, PathBuf};

use anyhow::Context;

use self::figures::{Report, SCHEMA};
use crate::bench::Verdict;
use crate::bench::args::BenchArgs;
use crate::bench::case::Memory;
use crate::bench::gpu_mps::Mps;
use crate::bench::machine::{self, Machine};
use crate::bench::ranks::{self, LINK};

/// Bytes of the file.
const FILE_LEN: u64 = 512 << 20;
/// Name of the file, and of the one that ends the second process.
const NAME: &str = "data";
const DONE: &str = "done";

/// The command: one of its ranks, or the process that starts them.
pub(crate) fn main(args: &BenchArgs, folder: &Path) -> anyhow::Result<Verdict> {
    let gpu = (args.memory == Some(Memory::Gpu)).then(|| args.gpu.unwrap_or(0));
    if args.explain {
        print!("{}", cases(folder));
        return Ok(Verdict::Fine);
    }
    match (args.rank, args.meet) {
        (Some(0), Some(meet)) => {
            let link = std::env::var(LINK).unwrap_or_default();
            println!("{}", serde_json::to_string(&remote::measure(meet, gpu, folder, &link)?)?);
        }
        (Some(_), Some(meet)) => remote::serve(meet, gpu, folder)?,
        _ => compare(args, gpu, folder)?,
    }
    Ok(Verdict::Fine)
}

/// What would be measured.
fn cases(folder: &Path) -> String {
    format!(
        "a file of {} MiB below {}, removed at the end\n{}{}",
        FILE_LEN >> 20,
        folder.display(),
        local::cases(),
        remote::cases()
    )
}

fn compare(args: &BenchArgs, gpu: Option<i32>, folder: &Path) -> anyhow::Result<()> {
    ranks::check_files(args)?;
    let started = machine::timestamp();
    let folder = Temporary::new(folder)?;
    folder.fill()?;
    let mps = gpu.map(|_| Mps::start());
    let links: Vec<_> = ranks::links(&args.link)
        .iter()
        .map(|link| measure(link, gpu, &folder.0))
        .collect::<anyhow::Result<_>>()?;
    let report = Report {
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
    ranks::publish(args, &report, &table::render(&report), || Ok(String::new()))
}

fn measure(link: &str, gpu: Option<i32>, folder: &Path) -> anyhow::Result<figures::LinkFigures> {
    let mut arguments = vec!["--files".to_owned(), folder.display().to_string()];
    if let Some(gpu) = gpu {
        arguments.extend(["--memory", "gpu", "--gpu"].map(str::to_owned));
        arguments.push(gpu.to_string());
    }
    let _ = std::fs::remove_file(folder.join(DONE));
    ranks::measure(link, &arguments)
}

/// A directory that is removed at the end.
struct Temporary(PathBuf);

impl Temporary {
    fn new(parent: &Path) -> anyhow::Result<Self> {
        let path = parent.join(format!("nobounce-bench-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }

    /// Writes the file, with bytes that no file system compresses.
    fn fill(&self) -> anyhow::Result<()> {
        let path = self.0.join(NAME);
        let mut word = 0x9e37_79b9_7f4a_7c15_u64;
        let mut piece = vec![0; 1 << 20];
        let write = || -> std::io::Result<()> {
            let mut file = std::fs::File::create(&path)?;
            for _ in 0..FILE_LEN / piece.len() as u64 {
                for bytes in piece.chunks_exact_mut(8) {
                    word = (word ^ word << 13).wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(29);
                    bytes.copy_from_slice(&word.to_le_bytes());
                }
                std::io::Write::write_all(&mut file, &piece)?;
            }
            file.sync_data()
        };
        let mut write = write;
        write().with_context(|| format!("cannot write {} MiB to {}", FILE_LEN >> 20, path.display()))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
