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
    /// How UCX words it, if it does.
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

/// Every fatal status. 0 is success, and 23 (`TM_RNDV_INCOMPLETE`) leaves a rendezvous to software.
const STATUSES: [Status; 22] = [
    Status {
        number: 1,
        name: "LOC_LEN_ERR",
        words: "local length error",
        meaning: "a message was longer than its receive buffer, or the MTUs of the ends differ",
        causes: &["mtu-"],
    },
    Status {
        number: 2,
        name: "LOC_QP_OP_ERR",
        words: "local qp operation",
        meaning: "this end's adapter could not carry out a request: a fault of the driver, or a queue pair in a wrong state",
        causes: &[],
    },
    Status {
        number: 3,
        name: "LOC_EEC_OP_ERR",
        words: "",
        meaning: "an error of the context of reliable datagrams at this end",
        causes: &[],
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
        number: 6,
        name: "MW_BIND_ERR",
        words: "memory window bind",
        meaning: "binding a memory window failed: its region does not allow it",
        causes: &[],
    },
    Status {
        number: 7,
        name: "BAD_RESP_ERR",
        words: "bad response",
        meaning: "the other end's answer did not fit the request: a fault of its adapter, or packets of an older connection",
        causes: &["mtu-"],
    },
    Status {
        number: 8,
        name: "LOC_ACCESS_ERR",
        words: "local access",
        meaning: "a message of the other end hit memory of this end that does not allow it: its registration is gone or has other rights",
        causes: &["bar1-", "expandable-segments", "known-bad", "moves-no-data"],
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
    Status {
        number: 14,
        name: "LOC_RDD_VIOL_ERR",
        words: "",
        meaning: "the domains of reliable datagrams at this end do not fit",
        causes: &[],
    },
    Status {
        number: 15,
        name: "REM_INV_RD_REQ_ERR",
        words: "",
        meaning: "the other end refused a request of reliable datagrams",
        causes: &[],
    },
    Status {
        number: 16,
        name: "REM_ABORT_ERR",
        words: "remote side aborted",
        meaning: "the other end aborted the request: its queue pair or process ended",
        causes: &[],
    },
    Status {
        number: 17,
        name: "INV_EECN_ERR",
        words: "",
        meaning: "the number of a context of reliable datagrams is invalid",
        causes: &[],
    },
    Status {
        number: 18,
        name: "INV_EEC_STATE_ERR",
        words: "",
        meaning: "a context of reliable datagrams is in a wrong state",
        causes: &[],
    },
    Status {
        number: 19,
        name: "FATAL_ERR",
        words: "",
        meaning: "the adapter stopped working: its firmware or PCIe link failed; the kernel log has the reason",
        causes: &["pcie-", "port-events"],
    },
    Status {
        number: 20,
        name: "RESP_TIMEOUT_ERR",
        words: "",
        meaning: "the other end did not answer in time",
        causes: &["gid-", "mtu-", "roce-", "port-", "link-layers"],
    },
    Status {
        number: 21,
        name: "GENERAL_ERR",
        words: "",
        meaning: "an error of the transport that has no status of its own; the vendor error tells more",
        causes: &[],
    },
    Status {
        number: 22,
        name: "TM_ERR",
        words: "",
        meaning: "matching of tags in the adapter failed",
        causes: &[],
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
const VERBS: [(u32, &str); 11] = [
    (2, "local QP operation error"),
    (4, "local protection error"),
    (6, "memory management operation error"),
    (7, "bad response error"),
    (8, "local access error"),
    (9, "remote invalid request error"),
    (10, "remote access error"),
    (11, "remote operation error"),
    (12, "transport retry counter exceeded"),
    (13, "RNR retry counter exceeded"),
    (20, "response timeout error"),
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
        STATUSES.into_iter().find(|status| ucx && !status.words.is_empty() && lower.contains(status.words))
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
        assert_eq!(of("ERROR Local access on mlx5_0:1/IB (synd 0x11 vend 0x0 hw_synd 0/0)"), Some(8));
        for number in 1..=22 {
            let line = format!("Got completion with error {number}, opcode 0");
            assert_eq!(status(&line).map(|status| status.number), Some(number));
        }
        let numbers: Vec<u32> = STATUSES.iter().map(|status| status.number).collect();
        assert_eq!(numbers, (1..=22).collect::<Vec<_>>());
        let other = |line| named(line).map(|status| status.number);
        assert_eq!(other("worker_pool.cpp:294] retry_cnt: 0): transport retry counter exceeded"), Some(12));
        assert_eq!(other("wr failed: IBV_WC_LOC_PROT_ERR"), Some(4));
        assert_eq!(other("error 12: transport retries"), None);
    }
}
