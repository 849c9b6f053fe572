//! What UCX logs with `UCX_LOG_LEVEL=info` or `debug` and `UCX_PROTO_INFO=y`.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{Adapters, KnownMessages, MAX_KEPT, Seen, fatal};

/// How messages from or into GPU memory go.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct UcxUse {
    /// The operation and its memory, as UCX words it.
    pub operation: String,
    /// Lengths.
    pub range: String,
    /// The protocol: `zero-copy`, `copy-in`, ...
    pub protocol: String,
    /// Transport and device: `rc_mlx5/mlx5_0:1`.
    pub lane: String,
}

impl UcxUse {
    /// Whether the adapter reads or writes GPU memory by itself.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.is_network() && self.protocol.contains("zero-copy") && !self.is_staged() && !self.is_emulated()
    }

    /// Whether UCX carries out the operation by messages, for want of RDMA on the lane.
    #[must_use]
    pub fn is_emulated(&self) -> bool {
        self.protocol.contains("software emulation")
    }

    /// Whether bytes are copied through host memory.
    #[must_use]
    pub fn is_staged(&self) -> bool {
        // Zero-copy fragments are direct.
        if self.protocol.contains("frag") && !self.protocol.contains("zero-copy") {
            return true;
        }
        let staged = ["cuda_copy", "rocm_copy", "copy-in", "copy-out", "pipeline", "host"];
        staged.iter().any(|word| self.protocol.contains(word) || self.lane.contains(word))
    }

    /// Whether it leaves the machine over an adapter.
    #[must_use]
    pub fn is_network(&self) -> bool {
        ["rc_", "dc_", "ud_", "srd", "gga"].iter().any(|kind| self.lane.contains(kind))
    }

    /// Whether it goes over sockets.
    #[must_use]
    pub fn is_tcp(&self) -> bool {
        self.lane.contains("tcp")
    }
}

/// What a log says.
#[derive(Clone, Debug, Default)]
pub struct UcxLog {
    /// Lines of UCX's.
    pub lines: u64,
    /// Protocols chosen for GPU memory, with how often.
    pub uses: BTreeMap<UcxUse, u64>,
    /// Transports of connections between machines, with how often.
    pub lanes: BTreeMap<String, u64>,
    /// Variables that UCX says it was given.
    pub variables: BTreeMap<String, String>,
    /// Whether peer memory or dma-buf was detected, by adapter and what was looked at.
    pub detected: BTreeMap<(String, String), bool>,
    /// Hosts that logged, as far as lines name them.
    pub hosts: BTreeSet<String>,
    /// Errors and warnings, by their text.
    pub problems: BTreeMap<String, Seen>,
    /// Errors by adapter.
    pub errors: Adapters,
    /// Fatal completions by their status.
    pub(super) fatal: BTreeMap<u32, (fatal::Status, Seen)>,
    /// Messages whose causes are known.
    pub known: KnownMessages,
    /// What did not fit into memory any more.
    pub forgotten: u64,
    operation: String,
}

impl UcxLog {
    pub(super) fn take(&mut self, line: &str) {
        let Some(at) = line.find("UCX ") else {
            return;
        };
        self.lines += 1;
        if let Some(host) = host(&line[..at])
            && self.hosts.len() < 64
            && !self.hosts.contains(host)
        {
            self.hosts.insert(host.to_owned());
        }
        let text = line[at + 4..].trim_start();
        let (level, text) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let text = text.trim();
        match level {
            "ERROR" | "FATAL" | "WARN" => match fatal::status(&format!("error {text}")) {
                Some(status) => {
                    self.errors.take("", Some(status.number), text);
                    self.fatal.entry(status.number).or_insert_with(|| (status, Seen::default())).1.take(text);
                }
                None => {
                    self.errors.take("", None, text);
                    self.known.take(text);
                    self.problem(text);
                }
            },
            "DEBUG" | "DIAG" | "INFO" | "TRACE" => {}
            _ => return,
        }
        if let Some((_, list)) =
            text.split_once("env variable").filter(|(before, _)| before.starts_with("UCX_*"))
        {
            for (name, value) in list.split_whitespace().filter_map(|word| word.split_once('=')) {
                if self.variables.len() < 1024 {
                    self.variables.insert(name.to_owned(), value.chars().take(200).collect());
                }
            }
            return;
        }
        // Older versions: `ep_cfg[0]: tag(sysv/memory rc_verbs/nb0:1)`.
        if text.contains("cfg#") && !text.starts_with('|') || text.starts_with("ep_cfg[") {
            return self.config(text);
        }
        if text.starts_with('|') || text.starts_with('+') {
            self.table(text);
        } else if let Some((device, rest)) = text.split_once(": ") {
            if rest.contains("GPUDirect RDMA is ") {
                let found = !rest.contains("not detected");
                let what = rest.rsplit(' ').next().unwrap_or_default();
                self.note(device, what, found);
            } else if rest.starts_with("dmabuf is ") {
                self.note(device, "dma-buf", !rest.contains("not supported"));
            }
        }
    }

    fn note(&mut self, device: &str, what: &str, found: bool) {
        let device = device.rsplit(' ').next().unwrap_or(device);
        let key = (device.to_owned(), what.to_owned());
        if self.detected.len() >= MAX_KEPT && !self.detected.contains_key(&key) {
            self.forgotten += 1;
            return;
        }
        *self.detected.entry(key).or_default() |= found;
    }

    /// `inter-node cfg#2 tag(rc_mlx5/mlx5_0:1 tcp/eth0)`.
    fn config(&mut self, text: &str) {
        if !text.contains("inter-node") && text.contains("intra-node") {
            return;
        }
        for group in text.split('(').skip(1) {
            for lane in
                group.split(')').next().unwrap_or_default().split_whitespace().filter(|lane| is_network(lane))
            {
                count(&mut self.lanes, lane.trim_end_matches(';').to_owned(), &mut self.forgotten);
            }
        }
    }

    /// Rows of the table of protocols: first what it is about, then ranges with protocol and lanes.
    fn table(&mut self, text: &str) {
        let cells: Vec<&str> = text.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect();
        match cells.as_slice() {
            [.., title] if is_title(title) => self.operation = title.chars().take(200).collect(),
            [range, protocol, lane] if range.contains("..") || range.chars().all(|c| c.is_ascii_digit()) => {
                let gpu = ["cuda", "rocm", "GPU", "gpu"].iter().any(|word| self.operation.contains(word));
                if gpu {
                    let key = UcxUse {
                        operation: self.operation.clone(),
                        range: (*range).to_owned(),
                        protocol: (*protocol).to_owned(),
                        lane: (*lane).to_owned(),
                    };
                    count(&mut self.uses, key, &mut self.forgotten);
                }
            }
            _ => {}
        }
    }

    fn problem(&mut self, text: &str) {
        // Numbers and addresses differ from line to line: what is left is the kind of problem.
        let kind: String = text.chars().map(|c| if c.is_ascii_digit() { '#' } else { c }).take(120).collect();
        if self.problems.len() >= 1024 && !self.problems.contains_key(&kind) {
            self.forgotten += 1;
            return;
        }
        let seen = self.problems.entry(kind).or_default();
        seen.count += 1;
        if seen.example.is_empty() {
            seen.example = text.chars().take(200).collect();
        }
    }
}

/// The host of `[1700000000.1] [host:10:0]   file.c:1 `.
fn host(before: &str) -> Option<&str> {
    let is_number = |text: &str| text.trim().bytes().all(|byte| byte.is_ascii_digit());
    before.split('[').find_map(|part| {
        let mut parts = part.split(']').next()?.rsplitn(3, ':');
        let (thread, process, host) = (parts.next()?, parts.next()?, parts.next()?);
        (is_number(thread) && is_number(process) && !host.is_empty()).then_some(host)
    })
}

/// A lane that leaves the machine, and not one through its memory.
fn is_network(lane: &str) -> bool {
    ["tcp/", "rc_", "dc_", "ud_", "srd/", "gga_"].iter().any(|kind| lane.starts_with(kind))
}

/// `tagged message by ucp_tag_send* from cuda/GPU0`.
fn is_title(cell: &str) -> bool {
    !cell.contains("..") && [" from ", " to ", " into ", " of "].iter().any(|word| cell.contains(word))
}

fn count<K: Ord>(map: &mut BTreeMap<K, u64>, key: K, forgotten: &mut u64) {
    if map.len() >= MAX_KEPT && !map.contains_key(&key) {
        *forgotten += 1;
    } else {
        *map.entry(key).or_default() += 1;
    }
}
