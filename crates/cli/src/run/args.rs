//! `nobounce run` as it is typed.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use nobounce::nic::soft::LinkChoice;

const EXAMPLES: &str = "\
Examples:
  nobounce run -- ibv_devinfo -v
  nobounce run -- ib_write_bw                       in one terminal, and in another:
  nobounce run -- ib_write_bw 127.0.0.1
  nobounce run --addr eth0 -- ib_send_lat           reachable from other machines
  nobounce run --fault loss=0.01,seed=7 -- mpirun -n 2 ./program
  nobounce run --pcap trace.pcap -- ./program       one capture per process: trace-PID.pcap

Exit codes: that of the command; 128 + n after signal n; 127 command not found, 126 not executable;
2 usage error or broken environment.";

/// Run an unmodified RDMA program on a software NIC.
///
/// The program finds the device nb0 through libibverbs, like a RoCE adapter. Needs no privileges
/// and installs nothing.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    /// Address or interface of nb0; a comma-separated list for nb0, nb1, ... [default:
    /// NOBOUNCE_ADDR, or loopback]
    #[arg(long, value_name = "ADDR,...")]
    pub(crate) addr: Option<String>,

    /// Inject network faults, for example loss=0.01,seed=7
    #[arg(long, value_name = "FAULT")]
    pub(crate) fault: Option<String>,

    /// Link: udp, or shm or auto (shared memory to processes of this machine, UDP to others)
    /// [default: NOBOUNCE_LINK, or auto]
    #[arg(long, value_name = "LINK", value_parser = PossibleValuesParser::new(LinkChoice::names()))]
    pub(crate) link: Option<String>,

    /// Maximum number of engine threads per device, 1 to 8 [default: NOBOUNCE_ENGINES, or by the
    /// number of CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub(crate) engines: Option<u8>,

    /// Thread that drives the NIC: an engine thread (thread), the program's threads that post and
    /// poll (caller), or auto (thread with 4 or more CPUs) [default: NOBOUNCE_PROGRESS, or auto]
    #[arg(long, value_name = "MODE", value_parser = ["auto", "thread", "caller"], hide_possible_values = true)]
    pub(crate) progress: Option<String>,

    /// Capture the packets of each process; %p is replaced by the process ID, which otherwise goes
    /// before the extension
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,

    /// Refuse to register memory without a direct path, and report the reason
    #[arg(long, value_name = "PATH", value_parser = ["direct"])]
    pub(crate) require: Option<String>,

    /// Serve the program's cuFile calls (GPUDirect Storage) with this project's libcufile: no
    /// nvidia-fs, and the last line has the path of the bytes
    #[arg(long)]
    pub(crate) cufile: bool,

    /// Log level of the device in each process, on stderr: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log: Option<String>,

    /// Also show the InfiniBand directories of sysfs in a mount namespace, for programs that bypass
    /// the C library, such as Go programs
    #[arg(long)]
    pub(crate) mounts: bool,

    /// Print the variables set for the program and why; at the end, print every reason in full
    #[arg(long)]
    pub(crate) explain: bool,

    /// Print no summary at the end
    #[arg(long, short)]
    pub(crate) quiet: bool,

    /// Program to run, with its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}
