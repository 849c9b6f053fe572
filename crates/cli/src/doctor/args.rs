//! `nobounce doctor` and `nobounce topo` as they are typed.

use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  nobounce doctor                                   this machine, as this process sees it
  sudo nobounce doctor                              include what only root can read (ACS, relaxed ordering)
  nobounce doctor --save facts.json --anonymous     save facts without host name and addresses
  nobounce doctor --facts facts.json                diagnose saved facts of another machine
  nobounce doctor --nccl-log job.log                which connections used GPUDirect, and why the others did not
  nobounce doctor -- torchrun train.py              run a program, and explain what its libraries did
  nobounce doctor --prove                           move bytes, and report the path they took
  nobounce doctor --storage /data/model.safetensors which route a read into each GPU takes, and why
  nobounce doctor --explain acs-redirect            the long text of a check

Exit codes: 0 success, 1 a GPU/NIC pair, or with --storage a read, that could be direct is not,
2 usage error or broken environment. After `--`: the program's own exit code if it failed,
else 0 or 1 as without a program.";

/// Find why GPUDirect is off, and print the fix.
///
/// Reads the configuration of the machine, exports GPU memory, and registers it with every adapter.
/// Reports for every GPU/NIC pair whether it is direct, direct but slow, or staged, and why.
/// Changes nothing.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) source: Source,

    /// Write the facts to a file ('-': standard output) instead of diagnosing them
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,

    /// Leave out host name and addresses
    #[arg(long)]
    pub(crate) anonymous: bool,

    /// Print findings and verdicts as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Show every GPU/NIC pair, and findings of severity info
    #[arg(long)]
    pub(crate) all: bool,

    /// Move bytes and compare their path with the verdict: between two ends on this machine, over
    /// nb0 and every adapter with an active port
    #[arg(long, conflicts_with_all = ["facts", "root", "example"])]
    pub(crate) prove: bool,

    /// Run --prove against a peer started with --serve
    #[arg(long, value_name = "HOST:PORT", requires = "prove")]
    pub(crate) peer: Option<String>,

    /// Serve a --peer client at this address
    #[arg(long, value_name = "ADDR:PORT", requires = "prove", conflicts_with_all = ["peer", "save"])]
    pub(crate) serve: Option<String>,

    /// Compare with the saved facts of the machine at the other end: MTU, kind of network and of
    /// address, speed, versions
    #[arg(long, value_name = "FILE")]
    pub(crate) peer_facts: Option<PathBuf>,

    /// Read a log of NCCL_DEBUG=INFO: which connections were direct, which were not, and why
    #[arg(long, value_name = "FILE")]
    pub(crate) nccl_log: Option<PathBuf>,

    /// Read a log of UCX (UCX_PROTO_INFO=y UCX_LOG_LEVEL=info)
    #[arg(long, value_name = "FILE")]
    pub(crate) ucx_log: Option<PathBuf>,

    /// Read a log of libfabric, or of NCCL's plugin for it (FI_LOG_LEVEL=warn)
    #[arg(long, value_name = "FILE")]
    pub(crate) libfabric_log: Option<PathBuf>,

    /// Read a log of any program: NCCL, UCX, libfabric, and messages of others whose cause is known
    #[arg(long, value_name = "FILE")]
    pub(crate) log: Option<PathBuf>,

    /// Run a program, read what NCCL, UCX and libfabric log in its output, and explain what it did
    #[arg(last = true, value_name = "PROGRAM", conflicts_with_all = ["save", "prove", "storage", "explain", "json"])]
    pub(crate) program: Vec<std::ffi::OsString>,

    /// Report which route a read of this file into each GPU takes with GPUDirect Storage (cuFile):
    /// P2PDMA, nvidia-fs or host memory, and why. With --prove, read it and measure. Without PATH:
    /// the current folder, or the path in --facts
    #[arg(
        long, value_name = "PATH", num_args = 0..=1, default_missing_value = ".",
        conflicts_with_all = ["example", "peer", "serve", "nccl_log", "ucx_log", "log", "explain"]
    )]
    pub(crate) storage: Option<PathBuf>,

    /// Explain a check; 'all' lists the checks
    #[arg(long, value_name = "ID", conflicts_with_all = ["facts", "root", "save", "json"])]
    pub(crate) explain: Option<String>,
}

/// Where the facts come from.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Source {
    /// Read saved facts ('-': standard input) instead of this machine
    #[arg(long, value_name = "FILE", conflicts_with = "root")]
    pub(crate) facts: Option<PathBuf>,

    /// Read a copy of a machine's sys, proc and dev below this directory
    #[arg(long, value_name = "DIR")]
    pub(crate) root: Option<PathBuf>,

    /// Use a known machine: dgx-a100, dgx-h100, dgx-b200, hgx-h100-roce, dual-socket, vm-flat,
    /// container, gh200, workstation, mi300x, p5-efa
    #[arg(long, value_name = "NAME", conflicts_with_all = ["facts", "root"])]
    pub(crate) example: Option<String>,

    /// Only read: allocate no GPU memory, open no adapter
    #[arg(long)]
    pub(crate) no_probe: bool,
}

/// Show GPUs, adapters, PCIe switches and sockets, and the best adapter for each GPU.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct TopoArgs {
    #[command(flatten)]
    pub(crate) source: Source,

    /// Write the topology as an SVG picture
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,

    /// Print the topology as JSON
    #[arg(long)]
    pub(crate) json: bool,
}
