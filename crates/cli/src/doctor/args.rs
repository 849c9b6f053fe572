//! `nobounce doctor` and `nobounce topo` as they are typed.

use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  nobounce doctor                                   this machine, as this process sees it
  sudo nobounce doctor                              with what only root can read (ACS, relaxed ordering)
  nobounce doctor --save facts.json --anonymous     facts without names and addresses, to send to others
  nobounce doctor --facts facts.json                facts of another machine
  nobounce doctor --nccl-log job.log                which connections used GPUDirect, and why the others did not
  nobounce doctor --prove                           move bytes, and see which way they took
  nobounce doctor --explain acs-redirect            the long text of a check

Exit codes: 0 fine, 1 a pair of GPU and adapter that could be direct is not, 2 wrong usage or broken environment.";

/// Say why GPUDirect is off, and what to do.
///
/// Reads the machine, tries what can be tried (exporting GPU memory, registering it with every
/// adapter), and says for every GPU and adapter: direct, direct but slow, or staged, and why.
/// Nothing is changed.
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

    /// Show every GPU/NIC pair, and findings of severity info
    #[arg(long)]
    pub(crate) all: bool,

    /// Move bytes and compare their path with the verdict; both ends here, on the software NIC
    #[arg(long, conflicts_with_all = ["facts", "root", "save", "example"])]
    pub(crate) prove: bool,

    /// Prove with a peer that serves at HOST:PORT
    #[arg(long, value_name = "HOST:PORT", requires = "prove")]
    pub(crate) peer: Option<String>,

    /// Be that peer, at ADDR:PORT
    #[arg(long, value_name = "ADDR:PORT", requires = "prove", conflicts_with = "peer")]
    pub(crate) serve: Option<String>,

    /// A log of NCCL_DEBUG=INFO: which connections were direct, which were not, and why
    #[arg(long, value_name = "FILE")]
    pub(crate) nccl_log: Option<PathBuf>,

    /// A log of UCX (UCX_PROTO_INFO=y UCX_LOG_LEVEL=info)
    #[arg(long, value_name = "FILE")]
    pub(crate) ucx_log: Option<PathBuf>,

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

    /// A known machine instead: dgx-a100, dgx-h100, dgx-b200, hgx-h100-roce, dual-socket, vm-flat,
    /// container, gh200, workstation, mi300x, p5-efa
    #[arg(long, value_name = "NAME", conflicts_with_all = ["facts", "root"])]
    pub(crate) example: Option<String>,

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
