//! `nobounce ui` and `nobounce report` as they are typed.

use std::net::IpAddr;
use std::path::PathBuf;

use crate::doctor::args::Source;

const UI_EXAMPLES: &str = "\
Examples:
  nobounce ui                                this machine; prints the address to open
  nobounce ui --bench run.json               with the curves of `nobounce bench --json run.json`
  nobounce ui --facts facts.json             a machine saved by `nobounce doctor --save`
  ssh -L 8000:127.0.0.1:8000 host nobounce ui --port 8000      the page of another machine

Ctrl-C ends it. The address contains a token; without it the server answers 401.";

const REPORT_EXAMPLES: &str = "\
Examples:
  nobounce report --out report.html                          this machine, to attach to a ticket
  nobounce report --out report.html --anonymous              without host name and addresses
  nobounce report --out report.html --bench run.json         with measured curves";

/// What the page shows.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Shown {
    #[command(flatten)]
    pub(crate) source: Source,

    /// Show the curves of a file of `nobounce bench --json`; may be repeated
    #[arg(long, value_name = "FILE")]
    pub(crate) bench: Vec<PathBuf>,

    /// Leave out host name and addresses
    #[arg(long)]
    pub(crate) anonymous: bool,
}

/// Serve a page with the machine, findings, predictions, measurements and live traffic.
///
/// Listens on loopback at a free port and prints the address. The page needs no other server.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = UI_EXAMPLES)]
pub(crate) struct UiArgs {
    #[command(flatten)]
    pub(crate) shown: Shown,

    /// Address to listen at; others than loopback are reachable from the network
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) addr: IpAddr,

    /// Port to listen at [default: a free one]
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub(crate) port: u16,
}

/// Write the page of `nobounce ui` as one HTML file.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = REPORT_EXAMPLES)]
pub(crate) struct ReportArgs {
    #[command(flatten)]
    pub(crate) shown: Shown,

    /// File to write ('-': standard output)
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    pub(crate) out: PathBuf,
}
