//! `nobounce path` as it is typed.

use nobounce_emulator::PathConfig;

const EXAMPLES: &str = "\
Settings of a path, for each direction:
  rate=500M         bits per second [default: no limit]
  queue=256K        bytes that wait for the rate; the packet after them is dropped
  ecn=64K           queue above which packets of ECN-capable senders are marked
  delay=100us       and jitter, loss, dup, reorder, corrupt, mark and seed, as --fault has them
  mtu=1500          MTU of the devices at both ends
  path-mtu=1400     longer packets are dropped, and answered by ICMP unless icmp=no

Examples:
  nobounce path rate=500M,delay=100us,loss=1% --far 'iperf3 -s' -- iperf3 -c 10.79.0.2
  nobounce path mtu=9000,path-mtu=1400,icmp=no --far 'nobounce bench --listen' -- \\
      nobounce bench --peer 10.79.0.2 --op write --size 1M
  nobounce path delay=5ms -- ping -c 3 10.79.0.2

Exit codes: that of COMMAND, 2 usage error or broken environment.";

/// Run programs at the two ends of an emulated network path.
///
/// COMMAND runs at 10.79.0.1 (fd79::1), the program of --far at 10.79.0.2 (fd79::2), each in a
/// network namespace with nothing else. nb0 uses these addresses. Needs /dev/net/tun, and root or
/// user namespaces.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PathArgs {
    /// What the path does: settings, separated by commas
    #[arg(value_name = "PATH")]
    pub(crate) path: PathConfig,

    /// Shell command at the far end; COMMAND starts once it listens on a TCP port or has ended, and
    /// it is killed when COMMAND ends
    #[arg(long, value_name = "SHELL-COMMAND")]
    pub(crate) far: Option<String>,

    /// Program at the near end, with its arguments
    #[arg(value_name = "COMMAND", required = true, last = true)]
    pub(crate) command: Vec<String>,
}
