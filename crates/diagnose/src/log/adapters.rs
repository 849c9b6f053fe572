//! Time-outs, other fatal completions and port errors of a log, counted by adapter.

use std::collections::BTreeMap;

use serde::Serialize;

use super::MAX_KEPT;
use crate::checks::port_events;
use crate::finding::Fix;
use nobounce_topology::facts::{Facts, Nic};

/// Retries exceeded: no answer came.
const TIMEOUT: u32 = 12;
/// Flushed requests follow an error and are none themselves.
const FLUSHED: u32 = 5;
/// How the names of adapters begin, by their drivers or by udev's rules.
const BEGINNINGS: [&str; 14] = [
    "mlx5_", "mlx4_", "bnxt_re", "irdma", "ionic_", "erdma_", "efa_", "hns_", "cxgb4_", "qedr", "roce",
    "ibp", "ibs", "rdmap",
];

/// Errors of one adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Counts {
    timeouts: u64,
    others: u64,
    port_errors: u64,
    first: String,
}

/// Errors by host and adapter.
#[derive(Clone, Debug, Default)]
pub struct Adapters {
    found: BTreeMap<(String, String), Counts>,
}

/// An adapter with errors in a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AdapterErrors {
    /// The host, if the log names it.
    pub host: String,
    /// The adapter.
    pub adapter: String,
    /// Completions with status 12.
    pub timeouts: u64,
    /// Other fatal completions.
    pub others: u64,
    /// Port errors that the driver reported.
    pub port_errors: u64,
    /// The first line.
    pub first: String,
    /// What the facts tell about the adapter.
    pub why: Vec<String>,
    /// What shows or mends it.
    #[serde(flatten)]
    pub fix: Fix,
}

/// The adapter that a line names: `mlx5_3` of `mlx5_3:1/RoCE`.
fn adapter(line: &str) -> Option<&str> {
    line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').find(|word| {
        let rest = BEGINNINGS.iter().find_map(|begin| word.strip_prefix(begin));
        // A name has a number; `mlx5_core` and words that begin alike have none.
        rest.is_some_and(|rest| rest.len() < 32 && rest.bytes().any(|byte| byte.is_ascii_digit()))
    })
}

/// Whether a line reports a port that went down.
fn is_port_error(line: &str) -> bool {
    line.contains("IBV_EVENT_PORT_ERR") || (line.contains("sync event") && line.contains("port error"))
}

impl Adapters {
    /// Takes a line with the status of the fatal completion in it.
    pub(super) fn take(&mut self, host: &str, status: Option<u32>, line: &str) {
        let port = is_port_error(line);
        let status = status.filter(|status| *status != FLUSHED);
        if status.is_none() && !port {
            return;
        }
        let Some(adapter) = adapter(line) else { return };
        let key = (host.to_owned(), adapter.to_owned());
        if self.found.len() >= MAX_KEPT && !self.found.contains_key(&key) {
            return;
        }
        let counts = self.found.entry(key).or_default();
        match status {
            Some(TIMEOUT) => counts.timeouts += 1,
            Some(_) => counts.others += 1,
            None => counts.port_errors += 1,
        }
        if counts.first.is_empty() {
            counts.first = line.trim().chars().take(200).collect();
        }
    }

    /// Whether no adapter had errors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// The adapters, those with the most errors first. `ours` tells hosts that the facts are of.
    pub(super) fn rows(&self, facts: &Facts, ours: &dyn Fn(&str) -> bool) -> Vec<AdapterErrors> {
        let sum = |counts: &Counts| counts.timeouts + counts.others + counts.port_errors;
        let all: u64 = self.found.values().map(sum).sum();
        let mut rows: Vec<(u64, AdapterErrors)> = self
            .found
            .iter()
            .map(|((host, adapter), counts)| {
                let nic = facts.nics.iter().find(|nic| nic.name == *adapter).filter(|_| ours(host));
                let mut why: Vec<String> = Vec::new();
                why.extend(alone(sum(counts), all, facts, nic));
                why.extend(nic.into_iter().flat_map(|nic| state(facts, nic)));
                let row = AdapterErrors {
                    host: host.clone(),
                    adapter: adapter.clone(),
                    timeouts: counts.timeouts,
                    others: counts.others,
                    port_errors: counts.port_errors,
                    first: counts.first.clone(),
                    why,
                    fix: fix(adapter, nic),
                };
                (sum(counts), row)
            })
            .collect();
        rows.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
        rows.into_iter().map(|(_, row)| row).collect()
    }
}

/// Errors of one adapter alone are of its link; those of all are of the network or of the peers.
fn alone(own: u64, all: u64, facts: &Facts, nic: Option<&Nic>) -> Option<String> {
    /// Fewer may have hit one adapter by chance.
    const FEW: u64 = 4;
    let adapters = facts.nics.iter().filter(|nic| !nic.is_software()).count();
    (nic.is_some() && all >= FEW && adapters > 1 && own * 10 >= all * 9).then(|| {
        format!("{own} of {all} errors are of this adapter, one of {adapters}: its cable, transceiver or switch port")
    })
}

/// What the facts tell about an adapter's ports.
fn state(facts: &Facts, nic: &Nic) -> Vec<String> {
    let mut told = Vec::new();
    for port in nic.ports.iter().filter(|port| !port.state.is_empty() && !port.is_active()) {
        told.push(format!("port {} is {} now ({})", port.number, port.state, port.physical_state));
    }
    for name in ["link_downed", "symbol_error", "local_ack_timeout_err"] {
        let count: u64 = nic.ports.iter().filter_map(|port| port.counters.get(name)).sum();
        if count > 0 {
            told.push(format!("{name} {count}"));
        }
    }
    told.extend(port_events::told(facts, nic));
    told
}

/// What shows the state of a link.
fn fix(adapter: &str, nic: Option<&Nic>) -> Fix {
    if !adapter.starts_with("mlx") {
        return Fix::both().run(format!("rdma statistic show link {adapter}/1"));
    }
    let device = nic.and_then(|nic| nic.address.as_deref()).unwrap_or(adapter);
    Fix::host().run(format!("sudo mlxlink -d {device} -m -c"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_found_in_lines() {
        let of = |line| adapter(line);
        assert_eq!(
            of("Transport retry count exceeded on mlx5_bond_0:1/RoCE (synd 0x15)"),
            Some("mlx5_bond_0")
        );
        assert_eq!(of("with status=12 opcode=0 vendor err 129 (Recv) hca mlx5_3"), Some("mlx5_3"));
        assert_eq!(of("on rocep1s0f0:1 status 12"), Some("rocep1s0f0"));
        assert_eq!((of("mlx5_core says no"), of("rocefully")), (None, None));
    }

    #[test]
    fn flushed_requests_and_other_events_are_not_counted() {
        let mut found = Adapters::default();
        found.take("", Some(5), "status=5 hca mlx5_0");
        found.take("", None, "NET/IB : mlx5_0:1 Got async event : port active");
        found.take("", Some(12), "status=12 without a name");
        assert!(found.is_empty());
        found.take("", None, "NET/IB : mlx5_0:1 Got async event : port error");
        assert!(!found.is_empty());
    }
}
