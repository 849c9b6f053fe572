//! Totals of a device's engines, and the report of them.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use nobounce_protocol::qp::Status;
use nobounce_protocol::seal::SealMode;

use crate::soft::config::Config;
use crate::soft::counters::{self, Counters};
use crate::soft::engine::{Core, Engine};
use crate::soft::port_speed::PortSpeed;
use crate::tally::{PathCounters, PathTotals, Tally};

/// Peers named in a report.
const MOST_PEERS: usize = 16;
/// Longest program name in a report, in bytes: `argv[0]` may have any length.
const MOST_NAME: usize = 255;
/// Bytes of each list of reasons in a report that has to be short, and of one reason.
const SHORT_REASONS: usize = 2048;
const SHORT_REASON: usize = 512;

/// What is known about a device when it opens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) local: IpAddr,
    /// Which threads drive it.
    pub(crate) progress: &'static str,
    pub(crate) speed: PortSpeed,
    /// How its packets are sealed.
    pub(crate) sealed: Option<SealMode>,
}

/// The sum of what a device's engines have done.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) counters: Counters,
    /// By peer and route.
    pub(crate) moved: HashMap<IpAddr, PathCounters>,
    staged: BTreeSet<String>,
    /// Why packets to same-host peers take UDP.
    pub(crate) fallbacks: BTreeSet<String>,
    pub(crate) link: Vec<(&'static str, u64)>,
    queue_pairs: u64,
    /// CPU time of the engine threads, in nanoseconds; what callers drive is not counted.
    cpu_ns: u64,
}

impl Totals {
    pub(crate) fn of(engine: &Engine) -> Self {
        Self {
            counters: engine.core.totals(),
            moved: engine.core.moved_by_peer(),
            staged: engine.core.regions.staged.clone(),
            fallbacks: engine.link.fallbacks().into_iter().collect(),
            link: engine.link.counters(),
            queue_pairs: engine.core.qps.iter().count() as u64,
            cpu_ns: engine.cpu.nanoseconds(),
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.counters.add(&other.counters);
        other.moved.iter().for_each(|(peer, moved)| self.moved.entry(*peer).or_default().add(moved));
        self.staged.extend(other.staged.iter().cloned());
        self.fallbacks.extend(other.fallbacks.iter().cloned());
        for (name, count) in &other.link {
            match self.link.iter_mut().find(|(known, _)| known == name) {
                Some((_, sum)) => *sum += count,
                None => self.link.push((name, *count)),
            }
        }
        self.queue_pairs += other.queue_pairs;
        self.cpu_ns += other.cpu_ns;
    }
}

impl Core {
    /// Bytes moved, by peer and route.
    fn moved_by_peer(&self) -> HashMap<IpAddr, PathCounters> {
        let mut moved = self.account.moved.clone();
        for entry in self.qps.iter() {
            moved.entry(entry.qp.attr().remote).or_default().add(&entry.tally);
        }
        moved
    }

    /// Everything counted so far.
    fn totals(&self) -> Counters {
        let mut total = self.account.counters;
        total.refused_access = self.regions.refused;
        total.memory_faults = self.regions.faults;
        total.icrc_solved = self.icrc.solved;
        for moved in self.moved_by_peer().values() {
            total.placed_bytes += moved.inbound.bytes();
            total.gathered_bytes += moved.outbound.bytes();
        }
        for entry in self.qps.iter() {
            counters::add(&mut total.qps, entry.qp.counters());
        }
        total
    }
}

/// The totals of a device so far, in the form of its report.
pub(crate) fn so_far(identity: Identity, totals: &Totals) -> String {
    text_of(&head(identity), totals)
}

/// The fields known at open.
pub(crate) fn head(Identity { local, progress, speed, sealed }: Identity) -> String {
    let (pid, program) = (std::process::id(), text(cut(&program_name().to_string_lossy(), MOST_NAME)));
    let (gigabits, sealed) = (speed.gigabits(), sealed.map_or("no", SealMode::name));
    let device = Config::device_name(local);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    format!(
        "\"version\": 1, \"pid\": {pid}, \"program\": {program}, \"device\": \"{device}\", \"address\": \"{local}\", \
         \"since\": {since}, \"progress\": \"{progress}\", \"rate_gbps\": {gigabits}, \"sealed\": \"{sealed}\""
    )
}

/// The report.
pub(crate) fn text_of(head: &str, totals: &Totals) -> String {
    with_reasons(head, totals, usize::MAX)
}

/// The report in at most so many bytes: with fewer and shorter reasons where it is too long.
pub(crate) fn text_within(head: &str, totals: &Totals, most: usize) -> String {
    let text = text_of(head, totals);
    if text.len() <= most { text } else { with_reasons(head, totals, SHORT_REASONS) }
}

fn with_reasons(head: &str, totals: &Totals, most: usize) -> String {
    let counters = &totals.counters;
    let mut moved = PathCounters::default();
    totals.moved.values().for_each(|one| moved.add(one));
    let errors = Status::ALL.into_iter().filter(|status| *status != Status::Flushed);
    let errors = errors.map(|status| (format!("{status:?}"), counters.failed(status)));
    let peers: BTreeSet<_> = totals.moved.keys().collect();
    let peers: Vec<_> = peers.into_iter().take(MOST_PEERS).map(|peer| format!("\"{peer}\"")).collect();
    let quoted = |reasons| reasons_within(reasons, most);
    let lines = [
        head.to_owned(),
        format!("\"in\": {}", paths(&moved.inbound)),
        format!("\"out\": {}", paths(&moved.outbound)),
        format!("\"staged_reason\": [{}]", quoted(&totals.staged)),
        format!("\"udp_reason\": [{}]", quoted(&totals.fallbacks)),
        format!("\"packets_sent\": {}", counters.sent_pkts),
        format!("\"packets_received\": {}", counters.rcvd_pkts),
        format!("\"packets_dropped\": {}", counters.dropped()),
        format!("\"retransmissions\": {}", counters.retransmissions()),
        format!("\"errors\": {}", numbers(errors.filter(|(_, count)| *count > 0))),
        format!("\"flushed\": {}", counters.failed(Status::Flushed)),
        format!("\"counters\": {}", numbers(counters.list())),
        format!("\"link\": {}", numbers(totals.link.iter().copied())),
        format!("\"queue_pairs\": {}", totals.queue_pairs),
        format!("\"peers\": [{}]", peers.join(", ")),
        format!("\"engine_cpu_ns\": {}", totals.cpu_ns),
    ];
    format!("{{\n  {}\n}}\n", lines.join(",\n  "))
}

/// JSON strings, as many as fit; the last one counts those that do not.
fn reasons_within(reasons: &BTreeSet<String>, most: usize) -> String {
    let (mut list, mut len) = (Vec::new(), 0);
    for reason in reasons {
        let quoted = text(if most == usize::MAX { reason } else { cut(reason, SHORT_REASON) });
        if len + quoted.len() > most {
            list.push(format!("\"and {} more\"", reasons.len() - list.len()));
            break;
        }
        len += quoted.len();
        list.push(quoted);
    }
    list.join(", ")
}

/// The first bytes of a text, in whole characters.
fn cut(words: &str, most: usize) -> &str {
    let ends = words.char_indices().map(|(at, c)| at + c.len_utf8());
    &words[..ends.take_while(|end| *end <= most).last().unwrap_or(0)]
}

fn program_name() -> OsString {
    let first = std::env::args_os().next().unwrap_or_default();
    Path::new(&first).file_name().map_or_else(|| OsString::from("?"), OsStr::to_owned)
}

fn paths(totals: &PathTotals) -> String {
    let one = |(name, tally): (&str, Tally)| {
        format!("\"{name}\": {{\"bytes\": {}, \"operations\": {}}}", tally.bytes, tally.operations)
    };
    format!("{{{}}}", totals.list().map(one).join(", "))
}

fn numbers(list: impl IntoIterator<Item = (impl AsRef<str>, u64)>) -> String {
    let one = |(name, value): (_, u64)| format!("{}: {value}", text(AsRef::as_ref(&name)));
    let list: Vec<String> = list.into_iter().map(one).collect();
    format!("{{{}}}", list.join(", "))
}

/// A JSON string.
fn text(words: &str) -> String {
    let mut quoted = String::from('"');
    for c in words.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c < ' ' => _ = write!(quoted, "\\u{:04x}", u32::from(c)),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted() {
        assert_eq!(text("a \"b\"\\\n"), r#""a \"b\"\\\u000a""#);
        assert_eq!((cut("äöü", 3), cut("äöü", 4), cut("a", 0)), ("ä", "äö", ""));
    }

    #[test]
    fn a_short_report_has_all_counters_and_some_reasons() {
        let mut totals = Totals { queue_pairs: 77, ..Totals::default() };
        totals.staged.extend((0..40).map(|n| format!("{n}: {}", "\u{1}ä".repeat(2000))));
        totals.fallbacks.extend((0..200).map(|n| format!("reason {n}")));
        let whole = text_within("\"version\": 1", &totals, usize::MAX);
        assert!(whole.len() > 100_000 && !whole.contains(" more\""));
        let short = text_within("\"version\": 1", &totals, 16 << 10);
        assert!(short.len() < 16 << 10, "{}", short.len());
        assert!(short.contains("\"queue_pairs\": 77,") && short.contains("more\"]"), "{short}");
    }
}
