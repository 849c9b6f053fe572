//! Fatal completions in logs: their status, what it means, and the findings that can be the cause.

use serde::Serialize;

use super::Seen;
use super::causes;
use super::known::{self, LogCause};
use nobounce_topology::facts::Facts;

/// A status of work completions (`enum ibv_wc_status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) number: u32,
    name: &'static str,
    /// How UCX words it.
    words: &'static str,
    meaning: &'static str,
    /// Beginnings of the names of findings that cause it.
    causes: &'static [&'static str],
}

impl Status {
    /// Its causes, by this machine's facts.
    pub(super) fn causes(&self, facts: &Facts, seen: &Seen) -> Vec<LogCause> {
        let list = match self.number {
            1 => causes::OTHER_MTU,
            4 => causes::PROTECTED,
            10 => causes::NO_ACCESS,
            12 => causes::NO_ANSWER,
            _ => &[],
        };
        let problem = format!("status {} ({}): {}", self.number, self.name, self.meaning);
        known::causes(&problem, list, facts, &seen.example).collect()
    }
}

const STATUSES: [Status; 8] = [
    Status {
        number: 1,
        name: "LOC_LEN_ERR",
        words: "local length error",
        meaning: "a message was longer than its receive buffer, or the MTUs of the ends differ",
        causes: &["mtu-"],
    },
    Status {
        number: 4,
        name: "LOC_PROT_ERR",
        words: "local protection",
        meaning: "this end's adapter could not access its own memory: the IOMMU, ACS, or memory freed while registered",
        causes: &[
            "iommu-",
            "acs-",
            "ats-",
            "bar1-",
            "registration-",
            "moves-no-data",
            "known-bad",
            "expandable-segments",
        ],
    },
    Status {
        number: 5,
        name: "WR_FLUSH_ERR",
        words: "flushed",
        meaning: "flushed after an earlier error: the first error of the log is the cause",
        causes: &[],
    },
    Status {
        number: 9,
        name: "REM_INV_REQ_ERR",
        words: "remote invalid request",
        meaning: "the other end refused the request: too long, or not allowed on its queue pair",
        causes: &["mtu-"],
    },
    Status {
        number: 10,
        name: "REM_ACCESS_ERR",
        words: "remote access",
        meaning: "the address is outside of what the other end registered, or its registration is gone",
        causes: &["bar1-", "expandable-segments", "known-bad", "moves-no-data"],
    },
    Status {
        number: 11,
        name: "REM_OP_ERR",
        words: "remote operation",
        meaning: "the other end's adapter could not access its memory: the IOMMU or ACS there",
        causes: &["iommu-", "acs-", "ats-", "moves-no-data"],
    },
    Status {
        number: 12,
        name: "RETRY_EXC_ERR",
        words: "transport retry count exceeded",
        meaning: "no answer from the other end: a wrong address (GID), a smaller MTU on the way, packet loss, a port down, or the peer died",
        causes: &["gid-", "mtu-", "roce-", "port-", "link-layers", "nccl-bond"],
    },
    Status {
        number: 13,
        name: "RNR_RETRY_EXC_ERR",
        words: "rnr",
        meaning: "the other end posted no receive buffer in time: it is overloaded or stopped",
        causes: &["memlock"],
    },
];

/// A fatal completion that a log shows.
#[derive(Clone, Debug, Serialize)]
pub struct Fatal {
    /// The status, such as 12.
    pub status: u32,
    /// Its name in verbs.
    pub name: &'static str,
    /// What it means.
    pub meaning: &'static str,
    /// How often, and the first line.
    pub seen: Seen,
    /// Findings of this machine that can be the cause.
    pub findings: Vec<&'static str>,
}

impl Fatal {
    pub(super) fn of(status: Status, seen: Seen, findings: impl Iterator<Item = &'static str>) -> Self {
        let findings =
            findings.filter(|id| status.causes.iter().any(|begin| id.starts_with(begin))).collect();
        Self { status: status.number, name: status.name, meaning: status.meaning, seen, findings }
    }
}

/// How `ibv_wc_status_str` words the statuses.
const VERBS: [(u32, &str); 6] = [
    (4, "local protection error"),
    (9, "remote invalid request error"),
    (10, "remote access error"),
    (11, "remote operation error"),
    (12, "transport retry counter exceeded"),
    (13, "RNR retry counter exceeded"),
];

/// The status that a line names as verbs do, whichever program wrote it.
pub(super) fn named(line: &str) -> Option<Status> {
    let by_words = || VERBS.iter().find(|(_, words)| line.contains(words)).map(|(number, _)| *number);
    let number = STATUSES.iter().find(|status| line.contains("IBV_WC_") && has_word(line, status.name));
    let number = number.map(|status| status.number).or_else(by_words)?;
    STATUSES.into_iter().find(|status| status.number == number)
}

/// The status of a completion that a line reports: by number, by verbs' name, or in UCX's words.
pub(super) fn status(line: &str) -> Option<Status> {
    let lower = line.to_ascii_lowercase();
    if !["completion", "status", "wc", "error"].iter().any(|word| lower.contains(word)) {
        return None;
    }
    let by_name = STATUSES.into_iter().find(|status| has_word(line, status.name));
    by_name.or_else(|| by_number(&lower)).or_else(|| {
        let ucx = lower.contains("synd") || lower.contains("vend");
        STATUSES.into_iter().find(|status| ucx && lower.contains(status.words))
    })
}

/// Whether a name stands as a word, behind `IBV_WC_` or alone.
fn has_word(line: &str, name: &str) -> bool {
    line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .any(|word| word.strip_prefix("IBV_WC_").unwrap_or(word) == name)
}

/// `Got completion with error 12,`, `with status=12 opcode=0`, `completion with status 12`.
fn by_number(lower: &str) -> Option<Status> {
    let at = lower.find("completion")?;
    let rest = &lower[at..];
    let number = ["with error ", "status=", "status "].iter().find_map(|before| {
        let text = &rest[rest.find(before)? + before.len()..];
        let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    })?;
    STATUSES.into_iter().find(|status| status.number == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_in_all_their_forms() {
        let of = |line| status(line).map(|status| status.number);
        assert_eq!(
            of("NET/IB : Got completion with error 12, opcode 1, len 21938, vendor err 129"),
            Some(12)
        );
        assert_eq!(
            of("NET/IB: Got completion from peer 10.0.0.1<1> with status=12 opcode=0 len=0"),
            Some(12)
        );
        assert_eq!(of("wc status IBV_WC_LOC_PROT_ERR on mlx5_0"), Some(4));
        assert_eq!(of("IBV_WC_RNR_RETRY_EXC_ERR: completion"), Some(13));
        assert_eq!(
            of("Transport retry count exceeded on mlx5_0:1/RoCE (synd 0x15 vend 0x81 hw_synd 0/0)"),
            None,
            "UCX's line names an error"
        );
        assert_eq!(
            of("ERROR Transport retry count exceeded on mlx5_0:1/RoCE (synd 0x15 vend 0x81)"),
            Some(12)
        );
        assert_eq!(of("ERROR Remote access on mlx5_0:1/IB (synd 0x13 vend 0x88 hw_synd 0/0)"), Some(10));
        assert_eq!(of("loss 12, status ok"), None);
        let other = |line| named(line).map(|status| status.number);
        assert_eq!(other("worker_pool.cpp:294] retry_cnt: 0): transport retry counter exceeded"), Some(12));
        assert_eq!(other("wr failed: IBV_WC_LOC_PROT_ERR"), Some(4));
        assert_eq!(other("error 12: transport retries"), None);
    }
}
