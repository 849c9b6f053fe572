//! The `nobounce` command: parse, run, exit code.
//!
//! Exit codes: 0 success, 1 a comparison or verification failed, 2 usage error or broken
//! environment.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! generate     man pages, completions
//! ui  top  metrics   the page, the terminal, Prometheus
//! cdi          containers on nb0
//! run          other programs on nb0
//! serve        files for the memory of peers
//! kv  initiated  files   measurements of page lists, of kernels that put and get, of files
//! path         emulated network paths
//! bench        measurements
//! sim          fabrics on a virtual clock
//! predict      what to expect
//! doctor       why GPUDirect is off
//! live  http   published counters, a local server
//! log  size    words
//! ```
//!
//! | room | what |
//! |---|---|
//! | `run` | the environment of another program, its report |
//! | `bench` | cases, both ends, tables, plots |
//! | `kv`, `initiated`, `files` | `nobounce bench` of one subject each |
//! | `ui`, `live`, `http` | the page, what devices publish, the server |
//! | `doctor`, `predict`, `sim` | commands on `nobounce-diagnose`, `nobounce-predict`, `nobounce-fabric` |

mod bench;
mod cdi;
mod doctor;
mod files;
#[doc(hidden)]
pub mod fuzzing;
mod generate;
mod http;
mod initiated;
mod kv;
mod live;
mod log;
mod metrics;
mod path;
mod predict;
mod run;
mod serve;
mod sim;
mod size;
#[cfg(feature = "top")]
mod top;
mod ui;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Move GPU and host memory between machines over RDMA, with or without an RDMA NIC.
#[derive(Debug, Parser)]
#[command(
    name = "nobounce",
    version,
    long_version = env!("LONG_VERSION"),
    propagate_version = true,
    arg_required_else_help = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(bench::demo::DemoArgs),

    Bench(Box<bench::args::BenchArgs>),

    Run(run::args::RunArgs),

    Cdi(cdi::args::CdiArgs),

    Doctor(Box<doctor::args::DoctorArgs>),

    Topo(doctor::args::TopoArgs),

    Predict(Box<predict::args::PredictArgs>),

    Sim(Box<sim::args::SimArgs>),

    Path(path::args::PathArgs),

    Ui(ui::args::UiArgs),

    Report(ui::args::ReportArgs),

    #[cfg(feature = "top")]
    Top(top::args::TopArgs),

    Metrics(metrics::args::MetricsArgs),
    Serve(serve::args::ServeArgs),

    /// Write man pages or shell completions; `make install` uses it
    #[command(hide = true)]
    Generate(generate::GenerateArgs),

    /// Measure plain UDP between two processes of this machine
    #[command(hide = true)]
    Raw,

    /// Second process of the raw measurement; started by `bench`
    #[command(name = bench::raw::SUBCOMMAND, hide = true)]
    RawEcho(bench::raw::ChildArgs),

    /// Second process of a bench on this machine; started by `bench`
    #[command(name = bench::peer::SUBCOMMAND, hide = true)]
    BenchPeer(bench::peer::PeerArgs),

    /// Busy-looping process; started by `bench --busy`
    #[command(name = bench::busy::SUBCOMMAND, hide = true)]
    BenchNeighbour,

    /// Process at one end of an emulated path; started by `bench --path`
    #[command(name = path::flow::SUBCOMMAND, hide = true)]
    PathFlow(path::flow::FlowArgs),

    /// Probe whether a process can use the GPU; started by `bench`
    #[command(name = bench::gpu_mps::PROBE, hide = true)]
    GpuProbe,

    /// Process that loads libcufile; started by `doctor --storage --prove`
    #[command(name = doctor::cufile_child::SUBCOMMAND, hide = true)]
    CufileRead(doctor::cufile_child::CufileArgs),
}

/// Runs the command line.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse(); // clap itself ends with 2 on wrong usage and 0 on --help
    let outcome = log::start().map_err(anyhow::Error::from).and_then(|()| command(cli.command));
    match outcome {
        Ok(code) => code,
        // Broken pipe: the reader of stdout has exited (`nobounce bench | head`). Exit silently.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nobounce: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn command(command: Command) -> anyhow::Result<ExitCode> {
    let verdict = match command {
        Command::Run(args) => return run::main(&args),
        Command::Cdi(args) => return cdi::main(&args),
        Command::Doctor(args) => return doctor::main(&args),
        Command::Topo(args) => return doctor::topo(&args),
        Command::Predict(args) => return predict::main(&args),
        Command::Sim(args) => return sim::main(&args),
        Command::Path(args) => return path::main(&args),
        Command::Ui(args) => return ui::main(&args),
        Command::Report(args) => return ui::report(&args),
        #[cfg(feature = "top")]
        Command::Top(args) => return top::main(&args),
        Command::Metrics(args) => return metrics::main(&args),
        Command::Serve(args) => return serve::main(&args),
        Command::Generate(args) => generate::main::<Cli>(&args).map(|()| bench::Verdict::Fine)?,
        Command::Demo(args) => bench::demo::main(&args)?,
        Command::Bench(args) if args.gpu_initiated => initiated::main(&args)?,
        Command::Bench(args) if args.kv => kv::main(&args)?,
        Command::Bench(args) if args.files.is_some() => {
            files::main(&args, args.files.as_deref().unwrap_or_else(|| Path::new(".")))?
        }
        Command::Bench(args) if !args.path.is_empty() => path::compare(&args)?,
        Command::Bench(args) => bench::main(&args)?,
        Command::Raw => {
            writeln!(std::io::stdout(), "{}", bench::raw::measure()?)?;
            bench::Verdict::Fine
        }
        Command::BenchPeer(args) => bench::serve::child(&args).map(|()| bench::Verdict::Fine)?,
        Command::PathFlow(args) => path::flow::main(&args).map(|()| bench::Verdict::Fine)?,
        Command::BenchNeighbour => bench::busy::spin().map(|()| bench::Verdict::Fine)?,
        Command::CufileRead(args) => doctor::cufile_child::main(&args).map(|()| bench::Verdict::Fine)?,
        Command::GpuProbe => bench::gpu_mps::probe().map(|()| bench::Verdict::Fine)?,
        Command::RawEcho(args) => bench::raw::child(&args).map(|()| bench::Verdict::Fine)?,
    };
    Ok(verdict.into())
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_closed_pipe_is_recognised_through_context() {
        let closed = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert!(is_broken_pipe(&anyhow::Error::from(closed).context("cannot print the table")));
        assert!(!is_broken_pipe(&anyhow::anyhow!("something else")));
    }
}
