//! `nobounce serve` as it is typed.

use std::net::SocketAddr;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  nobounce serve --root /models                                         for programs of this machine
  NOBOUNCE_ADDR=eth0 NOBOUNCE_KEY=nobounce.key nobounce serve --root /models \\
      --listen 10.0.0.7:9200 --allow 10.0.0.0/24                        for a network";

/// Serve files to peers, which have them written into their memory.
///
/// Clients name ranges of files and places in registered host or GPU memory; the bytes are written
/// there by RDMA WRITE. Paths do not lead out of the directory. With NOBOUNCE_KEY requests and
/// bytes are sealed.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ServeArgs {
    /// Directory whose files are served
    #[arg(long, value_name = "DIR")]
    pub(crate) root: PathBuf,

    /// Listen here; other addresses than loopback need --allow and NOBOUNCE_KEY
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:9200")]
    pub(crate) listen: SocketAddr,

    /// Peers that may connect: addresses or networks; repeat it, or separate by commas
    #[arg(long, value_name = "NETWORK", value_delimiter = ',')]
    pub(crate) allow: Vec<String>,

    /// Let peers write and create files, too; needs --allow
    #[arg(long)]
    pub(crate) write: bool,

    /// Queue pairs for each client
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) lanes: usize,
}
