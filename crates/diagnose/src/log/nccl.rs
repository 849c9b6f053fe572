//! What NCCL logs with `NCCL_DEBUG=INFO`: which connections are direct, on which adapter, and what
//! went wrong.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Adapters, KnownMessages, MAX_KEPT, Seen, fatal};

/// How a connection goes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Transport {
    /// `NET/IB`, `NET/Socket`, `P2P`, `SHM`, ...: without the number of the adapter.
    pub name: String,
    /// Whether it ends in GDRDMA.
    pub gdrdma: bool,
}

impl Transport {
    /// Over a network.
    #[must_use]
    pub fn is_network(&self) -> bool {
        self.name.starts_with("NET/") || self.name.starts_with("COLLNET") || self.name.starts_with("GIN")
    }

    /// Over RDMA, and not over sockets.
    #[must_use]
    pub fn is_rdma(&self) -> bool {
        self.is_network() && !self.name.to_ascii_lowercase().contains("socket")
    }
}

/// Connections of one rank over one adapter in one direction.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RankLink {
    pub(super) host: String,
    pub(super) rank: u32,
    pub(super) sends: bool,
    pub(super) device: Option<u32>,
    pub(super) transport: Transport,
}

/// What is known of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rank {
    /// PCI address of its GPU; none where communicators of the host differ.
    pub gpu: Option<String>,
}

/// What a log says.
#[derive(Clone, Debug, Default)]
pub struct NcclLog {
    /// Lines of NCCL's.
    pub lines: u64,
    /// Versions of NCCL.
    pub versions: BTreeMap<String, u64>,
    /// What ranks there are, by host and number.
    pub ranks: BTreeMap<(String, u32), Rank>,
    /// Adapters of each host, in NCCL's order.
    pub adapters: BTreeMap<String, Vec<String>>,
    /// Variables that NCCL says it was given, by host.
    pub variables: BTreeMap<(String, String), String>,
    /// Adapters for which NCCL says that GPUDirect is on or off, by host.
    pub gpu_direct: BTreeMap<(String, String), bool>,
    /// Networks that were chosen, by host.
    pub networks: BTreeMap<(String, String), u64>,
    /// Warnings that matter, by what they mean.
    pub problems: BTreeMap<&'static str, Seen>,
    /// Errors by host and adapter.
    pub errors: Adapters,
    /// Fatal completions by their status.
    pub(super) fatal: BTreeMap<u32, (fatal::Status, Seen)>,
    /// Messages whose causes are known.
    pub known: KnownMessages,
    /// What did not fit into memory any more.
    pub forgotten: u64,
    pub(super) links: BTreeMap<RankLink, u64>,
}

/// What a text in a warning means, and what to look at.
const PROBLEMS: [(&str, &str); 15] = [
    ("No device found", "no RDMA adapter found: NCCL uses sockets"),
    ("Unable to open device", "an adapter failed to open"),
    ("ibv_open_device failed", "an adapter failed to open"),
    ("Failed to open libibverbs", "libibverbs is not installed: NCCL uses sockets"),
    ("ibv_reg_dmabuf_mr failed", "registering GPU memory by dma-buf failed"),
    ("ibv_reg_mr_iova2 failed", "registering memory failed"),
    ("ibv_reg_mr failed", "registering memory failed"),
    ("ibv_create_cq failed", "a queue could not be created: usually the limit of locked memory"),
    ("ibv_create_qp failed", "a queue could not be created: usually the limit of locked memory"),
    ("ibv_modify_qp failed", "a connection failed: usually the GID index or the network"),
    ("Disabled for GPU", "a GPU and an adapter are farther apart than NCCL_NET_GDR_LEVEL allows"),
    ("IBV_EVENT_QP_FATAL", "an adapter reported a fatal error"),
    ("IBV_EVENT_PORT_ERR", "a port went down"),
    ("ACS is enabled", "NCCL suspects ACS"),
    ("unhandled cuda error", "a call of CUDA failed"),
];

impl NcclLog {
    /// Takes one line. Several ranks may have written into it at once.
    pub(super) fn take(&mut self, line: &str) {
        // Cheap first: most lines of a job's log are not NCCL's.
        let Some(first) = line.find("NCCL ") else { return self.old_line(line) };
        let mut rest = &line[first..];
        let mut before = &line[..first];
        loop {
            // Where lines of two ranks ran together, each part has its own beginning.
            let next =
                rest[5..].find(" NCCL INFO ").or_else(|| rest[5..].find(" NCCL WARN ")).map(|at| at + 6);
            let part = &rest[..next.unwrap_or(rest.len())];
            self.message(before, part);
            let Some(next) = next else { break };
            before = part;
            rest = &rest[next..];
        }
    }

    /// NCCL before 2.3 wrote no name: `host:10:20 [4] INFO 3 -> 12 via NET/IB/0/GDRDMA`.
    fn old_line(&mut self, line: &str) {
        for level in ["] INFO ", "] WARN "] {
            let Some(at) = line.find(level) else { continue };
            let before = line[..at].rsplit_once('[').map_or("", |(before, _)| before);
            // A clock looks like a host with numbers.
            if host(before).contains(|c: char| c.is_ascii_alphabetic()) {
                self.message(before, &format!("NCCL {}", &line[at + 2..]));
            }
        }
    }

    fn message(&mut self, before: &str, text: &str) {
        self.lines += 1;
        let host = host(before);
        if let Some(version) = text.strip_prefix("NCCL version ") {
            let version = version.split_whitespace().next().unwrap_or_default();
            count(&mut self.versions, version.to_owned(), &mut self.forgotten);
            return;
        }
        let warns = text.starts_with("NCCL WARN");
        let Some(text) = text.strip_prefix("NCCL INFO ").or_else(|| text.strip_prefix("NCCL WARN ")) else {
            return;
        };
        if !warns && let Some(via) = text.find(" via ") {
            // Most of NCCL's lines are these: they need not be searched for problems.
            return self.connection(host, &text[..via], &text[via + 5..]);
        }
        if let Some(at) = text.find("NET/IB : Using ") {
            self.using(host, &text[at + 15..]);
        } else if text.contains(" rank ") && text.contains(" busId ") {
            self.rank(host, text);
        } else if let Some((name, value)) = text.split_once(" set by environment to ") {
            let name = name.rsplit(' ').next().unwrap_or_default();
            let value = value.trim().trim_end_matches('.');
            keep(
                &mut self.variables,
                (host.to_owned(), name.to_owned()),
                value.to_owned(),
                &mut self.forgotten,
            );
        } else if let Some(name) = text.strip_prefix("NCCL_IB_HCA set to ") {
            let key = (host.to_owned(), "NCCL_IB_HCA".to_owned());
            keep(&mut self.variables, key, name.trim().to_owned(), &mut self.forgotten);
        } else if let Some(at) = text.find("GPU Direct RDMA ") {
            self.direct(host, &text[at + 16..]);
        } else if let Some(name) = text.strip_prefix("Assigned NET plugin ") {
            let name = name.trim_end_matches(" to comm").trim();
            count(&mut self.networks, (host.to_owned(), name.to_owned()), &mut self.forgotten);
        } else if let Some(name) = text.strip_prefix("Using network ") {
            count(&mut self.networks, (host.to_owned(), name.trim().to_owned()), &mut self.forgotten);
        }
        self.known.take(text);
        let status = fatal::status(text).filter(|_| warns);
        self.errors.take(host, status.map(|status| status.number), text);
        if let Some(status) = status {
            self.fatal.entry(status.number).or_insert_with(|| (status, Seen::default())).1.take(text);
            return;
        }
        let problem = PROBLEMS.iter().find(|(words, _)| text.contains(words));
        if let Some((_, meaning)) = problem.filter(|(words, _)| {
            warns || ["found", "open", "EVENT", "Disabled"].iter().any(|plain| words.contains(plain))
        }) {
            self.problems.entry(meaning).or_default().take(text);
        }
    }

    /// `Channel 00/0 : 1[1] -> 8[0] [send] via NET/IB/0/GDRDMA`, older `Ring 00 : 7[7000] ->
    /// 8[4000] [receive] via NET/IB/0`.
    fn connection(&mut self, host: &str, head: &str, way: &str) {
        let Some((from, to)) = head.split_once("->") else { return };
        let number =
            |text: &str| -> Option<u32> { text.trim().split('[').next()?.rsplit(' ').next()?.parse().ok() };
        let (Some(from), Some(to)) = (number(from), number(to)) else { return };
        let sends = !head.contains("[receive]");
        let (transport, device) = transport(way);
        let rank = if sends { from } else { to };
        let link = RankLink { host: host.to_owned(), rank, sends, device, transport };
        count(&mut self.links, link, &mut self.forgotten);
    }

    /// `[0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>`.
    fn using(&mut self, host: &str, text: &str) {
        let list = text.split(';').next().unwrap_or_default();
        let mut names: Vec<String> = Vec::new();
        // Adapters that NCCL merged stand in braces and count as one: `[0]={[0] mlx5_0:1/RoCE, [1]
        // mlx5_1:1/RoCE}`.
        let (mut merged, mut first) = (false, true);
        for part in list.split('[') {
            let Some((number, rest)) = part.split_once(']') else { continue };
            if number.trim().parse::<u32>().is_err() {
                continue;
            }
            if rest.trim_start().starts_with('=') {
                (merged, first) = (true, true);
                continue;
            }
            let name = rest.split([':', '/']).next().unwrap_or_default().trim();
            if name.is_empty() {
                continue;
            }
            match names.last_mut() {
                Some(last) if merged && !first => {
                    last.push('+');
                    last.push_str(name);
                }
                _ => names.push(name.to_owned()),
            }
            if names.len() >= 256 {
                break;
            }
            first = false;
            merged &= !rest.contains('}');
        }
        if !names.is_empty() {
            keep(&mut self.adapters, host.to_owned(), names, &mut self.forgotten);
        }
    }

    /// `comm 0x... rank 7 nranks 8 cudaDev 3 nvmlDev 3 busId 1901000 commId ... - Init COMPLETE`.
    fn rank(&mut self, host: &str, text: &str) {
        let word = |name: &str| {
            let mut words = text.split_whitespace();
            words.find(|word| *word == name)?;
            words.next()
        };
        let (Some(rank), Some(bus)) = (word("rank").and_then(|text| text.parse().ok()), word("busId")) else {
            return;
        };
        let Ok(number) = u64::from_str_radix(bus.trim_start_matches("0x"), 16) else { return };
        // Domain, bus, device and function in one number: 20, 8, 8 and 4 bits.
        let gpu = format!(
            "{:04x}:{:02x}:{:02x}.{:x}",
            number >> 20,
            number >> 12 & 0xff,
            number >> 4 & 0xff,
            number & 0xf
        );
        // Each communicator counts its ranks from 0.
        let key = (host.to_owned(), rank);
        let gpu =
            Some(gpu).filter(|gpu| self.ranks.get(&key).is_none_or(|known| known.gpu.as_ref() == Some(gpu)));
        keep(&mut self.ranks, key, Rank { gpu }, &mut self.forgotten);
    }

    /// `Disabled for HCA 0 'mlx5_0'`, `(DMABUF) enabled for HCA 0 'mlx5_0'`.
    fn direct(&mut self, host: &str, text: &str) {
        let on = text.to_ascii_lowercase().contains("enabled");
        let Some(name) = text.split('\'').nth(1) else { return };
        keep(&mut self.gpu_direct, (host.to_owned(), name.to_owned()), on, &mut self.forgotten);
    }
}

/// `NET/IB/0/GDRDMA`, `NET/AWS Libfabric/3/GDRDMA`, `P2P/CUMEM`; words may follow.
fn transport(way: &str) -> (Transport, Option<u32>) {
    let starts_number = |part: &str| part.starts_with(|first: char| first.is_ascii_digit());
    let parts: Vec<&str> = way.split('/').collect();
    let network = ["NET", "COLLNET", "GIN"].contains(&parts[0]);
    // Names of networks may have blanks; up to the adapter's number all is name.
    let number = parts.iter().skip(1).position(|part| starts_number(part)).map(|at| at + 1);
    if let Some(at) = number.filter(|at| network && *at <= 3) {
        let digits: String = parts[at].chars().take_while(char::is_ascii_digit).collect();
        // Behind a blank other words begin.
        let ended = parts[at].contains(char::is_whitespace);
        let gdrdma = !ended && parts[at + 1..].iter().take(2).any(|part| part.starts_with("GDRDMA"));
        return (Transport { name: parts[..at].join("/"), gdrdma }, digits.parse().ok());
    }
    let way = way.split_whitespace().next().unwrap_or_default();
    let name = way.split('/').take_while(|part| *part != "GDRDMA").collect::<Vec<_>>().join("/");
    (Transport { name, gdrdma: way.contains("GDRDMA") }, None)
}

/// The host at the beginning of a message: `gh-1:7038:7041 [0] `, after whatever mpirun, a
/// scheduler or a clock put before it.
fn host(before: &str) -> &str {
    let words = before.trim_end().rsplit(char::is_whitespace);
    for word in words.take(4) {
        let mut parts = word.rsplitn(3, ':');
        let (Some(thread), Some(process), Some(host)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if number(thread) && number(process) {
            // `[1,0]<stdout>:host` of mpirun.
            // `.../GDRDMAhost` where two lines ran together.
            let host = host.rsplit(['>', ':', ']', '/']).next().unwrap_or(host);
            return host.strip_prefix("GDRDMA").unwrap_or(host);
        }
    }
    ""
}

fn count<K: Ord>(map: &mut BTreeMap<K, u64>, key: K, forgotten: &mut u64) {
    if map.len() >= MAX_KEPT && !map.contains_key(&key) {
        *forgotten += 1;
    } else {
        *map.entry(key).or_default() += 1;
    }
}

fn keep<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: V, forgotten: &mut u64) {
    if map.len() >= MAX_KEPT && !map.contains_key(&key) {
        *forgotten += 1;
    } else {
        map.insert(key, value);
    }
}
