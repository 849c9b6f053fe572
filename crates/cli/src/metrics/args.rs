//! `nobounce metrics` as it is typed.

use std::net::SocketAddr;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  nobounce metrics                                             print once
  nobounce metrics --textfile /var/lib/node_exporter           for node_exporter, from a timer
  nobounce metrics --listen 127.0.0.1:9401                     for Prometheus; Ctrl-C ends it";

/// Print the counters of this user's devices for Prometheus.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MetricsArgs {
    /// Write DIR/nobounce.prom instead of printing; replaced in one step
    #[arg(long, value_name = "DIR", conflicts_with = "listen")]
    pub(crate) textfile: Option<PathBuf>,

    /// Answer scrapes at this address
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) listen: Option<SocketAddr>,

    /// Also use node_exporter's names (node_infiniband_*) for nb0, where its own collector is off
    #[arg(long)]
    pub(crate) node_names: bool,
}
