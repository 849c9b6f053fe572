//! `nobounce doctor` and `nobounce topo` as they are typed.

use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  nobounce doctor                                   this machine, as this process sees it
  sudo nobounce doctor                              with what only root can read (ACS, relaxed ordering)
  nobounce doctor --save facts.json --anonymous     facts to send to somebody else
  nobounce doctor --facts facts.json                somebody else's facts
  nobounce doctor --explain acs-redirect            the long text of a check

Exit codes: 0 fine, 1 a pair of GPU and adapter that could be direct is not, 2 wrong usage or broken environment.";

/// Say why GPUDirect is off, and what to do.
///
/// Reads the machine, tries what can be tried (exporting GPU memory, registering it with every adapter), and says for every GPU and
/// adapter: direct, direct but slow, or staged, and why. Nothing is changed.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) source: Source,

    /// Write the facts to a file ('-': standard output) instead of judging them
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,

    /// Leave out host name and addresses
    #[arg(long)]
    pub(crate) anonymous: bool,

    /// Findings and verdicts as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Every pair, and everything about information, too
    #[arg(long)]
    pub(crate) all: bool,

    /// The long text of a check; 'all' lists them
    #[arg(long, value_name = "ID", conflicts_with_all = ["facts", "root", "save", "json"])]
    pub(crate) explain: Option<String>,
}

/// Where the facts come from.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Source {
    /// Facts that were saved ('-': standard input) instead of this machine
    #[arg(long, value_name = "FILE", conflicts_with = "root")]
    pub(crate) facts: Option<PathBuf>,

    /// A folder with a copy of some machine's sys, proc and dev
    #[arg(long, value_name = "DIR")]
    pub(crate) root: Option<PathBuf>,

    /// Only read: no GPU memory is allocated, no adapter opened
    #[arg(long)]
    pub(crate) no_probe: bool,
}

/// Show what is plugged where: GPUs, adapters, switches, sockets, and how far they are apart.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct TopoArgs {
    #[command(flatten)]
    pub(crate) source: Source,

    /// Draw it as a picture into a file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,

    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}
