//! `nobounce run` as it is typed.

use std::ffi::OsString;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  nobounce run -- ibv_devinfo -v
  nobounce run -- ib_write_bw                       in one terminal, and in another:
  nobounce run -- ib_write_bw 127.0.0.1
  nobounce run --addr eth0 -- ib_send_lat           to be reached from other machines
  nobounce run --fault loss=0.01,seed=7 -- mpirun -n 2 ./program
  nobounce run --pcap trace.pcap -- ./program       one capture for each process: trace-PID.pcap

Exit codes: the command's own; 128 + n if signal n ended it; 127 no such command, 126 it could not be started;
2 wrong usage or broken environment.";

/// Run a program that uses RDMA, with a software NIC in place of a real one.
///
/// The program finds a device nb0 through libibverbs, as if a RoCE adapter were in the machine.
/// Nothing is installed, no privilege is needed, and the program needs no change.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    /// Address or interface of nb0; several, separated by commas, for nb0, nb1, ... [default:
    /// NOBOUNCE_ADDR, or loopback]
    #[arg(long, value_name = "ADDR,...")]
    pub(crate) addr: Option<String>,

    /// Inject network faults, for example loss=0.01,seed=7
    #[arg(long, value_name = "FAULT")]
    pub(crate) fault: Option<String>,

    /// Link: udp, or shm (shared memory) to processes on this machine and UDP to others [default:
    /// shm]
    #[arg(long, value_name = "LINK", value_parser = ["udp", "shm", "auto"])]
    pub(crate) link: Option<String>,

    /// Engines that drive each device at most, each with a thread: 1 to 8 [default: by the CPUs, or
    /// NOBOUNCE_ENGINES]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub(crate) engines: Option<u8>,

    /// Which thread drives the NIC: its own (thread), the program's that post and poll (caller), or
    /// auto: thread from 4 CPUs on [default: NOBOUNCE_PROGRESS, or auto]
    #[arg(long, value_name = "MODE", value_parser = ["auto", "thread", "caller"], hide_possible_values = true)]
    pub(crate) progress: Option<String>,

    /// Record the packets of each process; %p stands for the process ID, which is put before the
    /// ending otherwise
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,

    /// Refuse memory whose bytes could not go directly, with the reason
    #[arg(long, value_name = "PATH", value_parser = ["direct"])]
    pub(crate) require: Option<String>,

    /// Log of the device in each process, on stderr: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log: Option<String>,

    /// Show the InfiniBand folders in a mount namespace, too: for programs that read them past the
    /// C library, such as those in Go
    #[arg(long)]
    pub(crate) mounts: bool,

    /// Print no line at the end
    #[arg(long, short)]
    pub(crate) quiet: bool,

    /// The program and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}
