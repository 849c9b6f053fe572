//! A bound on the requests of each source, so that one cannot fill the backlog of every listener.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::timing::Nanos;

/// Requests that a source may send at once: more than the ranks of one host in any job.
const BURST: u64 = 4096;
/// Time in which one request is allowed again.
const INTERVAL: Nanos = 500_000;
/// Sources with a budget of their own. Later ones share one, so that invented addresses do not
/// grow the table.
const MAX_SOURCES: usize = 1024;

/// Token buckets by source address.
#[derive(Debug, Default)]
pub(super) struct SourceLimits {
    /// When the bucket of a source is full again.
    full_at: HashMap<IpAddr, Nanos>,
    others: Nanos,
}

impl SourceLimits {
    /// Whether a request from that source is allowed now.
    pub(super) fn allow(&mut self, now: Nanos, from: IpAddr) -> bool {
        if !self.full_at.contains_key(&from) && self.full_at.len() >= MAX_SOURCES {
            self.full_at.retain(|_, full_at| *full_at > now);
        }
        let known = self.full_at.len();
        let full_at = match self.full_at.get_mut(&from) {
            Some(full_at) => full_at,
            None if known < MAX_SOURCES => self.full_at.entry(from).or_insert(now),
            None => &mut self.others,
        };
        let next = (*full_at).max(now) + INTERVAL;
        let allowed = next - now <= BURST * INTERVAL;
        if allowed {
            *full_at = next;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn source(n: u32) -> IpAddr {
        Ipv4Addr::from(0x0a00_0000 + n).into()
    }

    #[test]
    fn a_source_has_a_burst_and_then_a_rate() {
        let mut limits = SourceLimits::default();
        let allowed = (0..2 * BURST).filter(|_| limits.allow(0, source(1))).count();
        assert_eq!(allowed as u64, BURST);
        assert!(limits.allow(0, source(2)), "another source has its own budget");
        let later = (0..100).filter(|_| limits.allow(10 * INTERVAL, source(1))).count();
        assert_eq!(later, 10);
    }

    #[test]
    fn invented_sources_share_one_budget_and_no_memory() {
        let mut limits = SourceLimits::default();
        let sources = u32::try_from(MAX_SOURCES).unwrap() + 10_000;
        let allowed = (0..sources).filter(|n| limits.allow(0, source(*n))).count();
        assert_eq!(allowed as u64, MAX_SOURCES as u64 + BURST);
        assert_eq!(limits.full_at.len(), MAX_SOURCES);
        assert!(limits.allow(BURST * INTERVAL, source(9_999_999)), "old sources make room");
    }
}
