//! Path MTU: whether packets as long as the path MTU allows reach a peer by UDP.
//!
//! The interface's MTU says nothing about the path. Where a router drops long packets and its ICMP
//! message does not arrive, or the peer's interface takes less, a connection opens and then fails
//! with its first long message. A probe sends [`Presence`] requests, a short one and one as long as
//! the longest packet, until the long one is answered: then the path carries the MTU. If only short
//! ones are answered, the next smaller MTU is probed. A peer that answers none is another RoCE
//! device; nothing is known of its path.

use std::net::IpAddr;

use nobounce_protocol::qp::Mtu;
use nobounce_protocol::timing::{MILLISECOND, Nanos};
use nobounce_protocol::wire::{ICRC_LEN, Presence, Qpn};

use crate::links::{PeerName, TxBatch};
use crate::process::random::random_u32;
use crate::soft::engine::Core;
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::timer::Timer;
use crate::soft::qp_index::QpIndex;

/// Headers of the longest packet with a full payload: BTH, RETH, immediate data.
const HEADERS: usize = 12 + 16 + 4;
/// The second request follows so soon; each later one takes twice as long, up to the longest delay.
const FIRST_DELAY: Nanos = 5 * MILLISECOND;
const LONGEST_DELAY: Nanos = 20 * MILLISECOND;
/// Long requests, sent since a short one was answered, after which the path does not carry them. At
/// 5 % loss in each direction all are lost once in 10^8 times.
const MAX_LONG: u32 = 8;
/// Requests after which a peer that answered none is another RoCE device.
const MAX_SILENT: u32 = 12;
/// Peers probed at the same time.
const MAX_PROBES: usize = 1024;

/// What is known of the path to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathMtu {
    /// It was not probed.
    Unknown,
    /// It is being probed.
    Probing,
    /// It carries packets of that path MTU.
    Carries(Mtu),
    /// It carries less than it was probed for.
    Narrow {
        /// What it was probed for.
        asked: Mtu,
        /// What it carries; `None` if not even the smallest.
        carries: Option<Mtu>,
        /// Longer packets sent, none of which was answered.
        sent: u32,
        /// Short packets that were answered meanwhile.
        answered: u32,
    },
    /// The peer answers no request: another RoCE device, or packets do not reach it at all.
    Silent,
}

#[derive(Debug)]
struct PathProbe {
    peer: PeerName,
    ours: Qpn,
    theirs: Qpn,
    asked: Mtu,
    /// What is probed now.
    mtu: Mtu,
    /// In the first request. Each MTU has two numbers, for short and for long requests.
    nonce: u32,
    /// Numbers of smaller MTUs begin there.
    step: u32,
    /// Requests for this MTU, and those since a short one was answered.
    rounds: u32,
    long_sent: u32,
    next_at: Nanos,
    /// In all.
    sent: u32,
    answered: u32,
    result: PathMtu,
}

impl PathProbe {
    /// The nonces of short and of long requests.
    const fn nonces(&self) -> (u32, u32) {
        (self.nonce.wrapping_add(self.step), self.nonce.wrapping_add(self.step + 1))
    }

    /// Begins with another MTU. Late answers to earlier requests do not count.
    fn restart(&mut self, mtu: Mtu, now: Nanos) {
        self.mtu = mtu;
        self.step += 2;
        (self.rounds, self.long_sent, self.next_at) = (0, 0, now);
    }

    /// The next step, when its time has come: `false` if it is over.
    fn step(&mut self, now: Nanos) -> bool {
        if self.long_sent >= MAX_LONG {
            let smaller = Mtu::ALL.into_iter().rev().find(|mtu| *mtu < self.mtu);
            match smaller {
                Some(mtu) => self.restart(mtu, now),
                None => return self.end(None),
            }
        } else if self.answered == 0 && self.rounds >= MAX_SILENT {
            self.result = PathMtu::Silent;
            return false;
        }
        self.next_at = now + (FIRST_DELAY << self.rounds.min(8)).min(LONGEST_DELAY);
        self.rounds += 1;
        if self.answered > 0 {
            self.long_sent += 1;
            self.sent += 1;
        }
        true
    }

    fn end(&mut self, carries: Option<Mtu>) -> bool {
        let Self { peer, asked, sent, answered, .. } = *self;
        self.result = match carries {
            Some(mtu) if mtu == asked => PathMtu::Carries(mtu),
            carries => {
                tracing::warn!(
                    peer = %peer.0,
                    "the path does not carry a path MTU of {}, but {}: {sent} longer packets were sent and none answered, \
                     while {answered} short ones were",
                    asked.bytes(),
                    carries.map_or_else(|| "not even 256".to_owned(), |mtu| mtu.bytes().to_string()),
                );
                PathMtu::Narrow { asked, carries, sent, answered }
            }
        };
        false
    }

    /// An answer with this nonce; whether it is one, perhaps a late one.
    fn hear(&mut self, nonce: u32) -> bool {
        let (short, long) = self.nonces();
        if self.result == PathMtu::Probing && nonce == long {
            self.end(Some(self.mtu));
        } else if nonce == short {
            self.answered += 1;
        }
        nonce.wrapping_sub(self.nonce) < self.step + 2
    }
}

/// The probes of an engine.
#[derive(Debug, Default)]
pub(crate) struct PathProbes {
    probes: Vec<PathProbe>,
    /// Requests to send, with their lengths.
    requests: Vec<(IpAddr, Presence, usize)>,
}

impl PathProbes {
    pub(crate) fn has_work(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Puts requests into the batch; whether it is full.
    pub(crate) fn fill(&mut self, tx: &mut TxBatch) -> bool {
        while let Some((to, presence, len)) = self.requests.pop() {
            let put = tx.has_room()
                && tx.put(to, 0, len, |room| {
                    room.fill(0);
                    presence.emit(room);
                });
            if !put {
                self.requests.push((to, presence, len));
                return true;
            }
        }
        false
    }

    /// What is known of the path to a peer.
    pub(crate) fn result(&self, peer: PeerName) -> PathMtu {
        self.probes.iter().find(|probe| probe.peer == peer).map_or(PathMtu::Unknown, |probe| probe.result)
    }

    /// An answer of a peer; whether it is one to a probe.
    pub(crate) fn hear(&mut self, from: PeerName, nonce: u32) -> bool {
        self.probes.iter_mut().any(|probe| probe.peer == from && probe.hear(nonce))
    }
}

impl Core {
    /// Probes the path to the peer of a connected queue pair, for its path MTU.
    pub(crate) fn probe_path(&mut self, now: Nanos, index: QpIndex) {
        let Some(entry) = self.qps.get(index) else { return };
        let (peer, mtu) = (entry.peer(), entry.qp.attr().path_mtu);
        let result = if entry.route.local.is_some() || peer.0.is_loopback() || peer.0 == self.local {
            PathMtu::Carries(mtu) // packets do not leave the machine
        } else {
            PathMtu::Probing
        };
        let (ours, theirs) = (entry.qpn, entry.qp.attr().dest_qpn);
        let probes = &mut self.presences.probes.probes;
        probes.retain(|probe| probe.peer != peer);
        if probes.len() == MAX_PROBES {
            probes.remove(0);
        }
        probes.push(PathProbe {
            peer,
            ours,
            theirs,
            asked: mtu,
            mtu,
            nonce: random_u32(),
            step: 0,
            rounds: 0,
            long_sent: 0,
            next_at: now,
            sent: 0,
            answered: 0,
            result,
        });
        self.advance_path_probes(now);
    }

    /// The peer of a queue pair did not answer in time: if its path was not probed, finds out
    /// whether it carries long packets, so that the log tells why the queue pair fails.
    #[cold]
    pub(crate) fn suspect_path(&mut self, now: Nanos, index: QpIndex) {
        let peer = self.qps.get(index).map(QueuePair::peer);
        if peer.is_some_and(|peer| self.presences.probes.result(peer) == PathMtu::Unknown) {
            self.probe_path(now, index);
        }
    }

    /// Sends the requests whose time has come.
    #[cold]
    pub(crate) fn advance_path_probes(&mut self, now: Nanos) {
        let ours = self.presences.ours;
        let PathProbes { probes, requests } = &mut self.presences.probes;
        let mut next: Option<Nanos> = None;
        for probe in probes.iter_mut().filter(|probe| probe.result == PathMtu::Probing) {
            if probe.next_at <= now {
                if !probe.step(now) {
                    continue;
                }
                let request = |nonce| ours.request(probe.theirs, probe.ours, nonce);
                let long = HEADERS + probe.mtu.bytes() as usize + ICRC_LEN;
                // The last leaves first: a long packet must not follow a short one in a GSO send.
                let (short_nonce, long_nonce) = probe.nonces();
                requests.push((probe.peer.0, request(short_nonce), Presence::LEN));
                requests.push((probe.peer.0, request(long_nonce), long));
            }
            next = Some(next.map_or(probe.next_at, |next| next.min(probe.next_at)));
        }
        if let Some(next) = next {
            self.scheduler.set_timer(next, Timer::PathProbe);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(asked: Mtu) -> PathProbe {
        PathProbe {
            peer: ([10, 0, 0, 1].into(), 3),
            ours: Qpn::new(2),
            theirs: Qpn::new(3),
            asked,
            mtu: asked,
            nonce: u32::MAX,
            step: 0,
            rounds: 0,
            long_sent: 0,
            next_at: 0,
            sent: 0,
            answered: 0,
            result: PathMtu::Probing,
        }
    }

    /// Steps until the end on a path that carries `most` bytes of payload, and loses the first
    /// `lost` requests.
    fn run(mut probe: PathProbe, most: u32, lost: u32) -> (PathMtu, Nanos) {
        let mut sent = 0;
        for _ in 0..200 {
            let now = probe.next_at;
            if !probe.step(now) {
                return (probe.result, now);
            }
            sent += 1;
            if sent > lost {
                let (short, long) = probe.nonces();
                assert!(probe.hear(short));
                if probe.mtu.bytes() <= most {
                    assert!(probe.hear(long));
                    return (probe.result, now);
                }
            }
        }
        panic!("no end: {probe:?}");
    }

    #[test]
    fn a_path_that_carries_the_mtu_is_known_after_one_request() {
        assert_eq!(run(probe(Mtu::Mtu4096), 4096, 0), (PathMtu::Carries(Mtu::Mtu4096), 0));
    }

    #[test]
    fn a_narrow_path_is_found_within_half_a_second() {
        let (result, took) = run(probe(Mtu::Mtu4096), 1300, 0);
        let carries = Some(Mtu::Mtu1024);
        assert!(
            matches!(result, PathMtu::Narrow { asked: Mtu::Mtu4096, carries: found, sent: 15.., answered: 16.. }
                if found == carries),
            "{result:?}"
        );
        assert!(took < 500 * MILLISECOND, "{took}");
        let (result, _) = run(probe(Mtu::Mtu512), 100, 0);
        assert!(matches!(result, PathMtu::Narrow { carries: None, .. }), "{result:?}");
    }

    /// The other end answers only once it is connected, too.
    #[test]
    fn a_peer_that_answers_late_is_no_black_hole() {
        assert_eq!(run(probe(Mtu::Mtu4096), 4096, 9).0, PathMtu::Carries(Mtu::Mtu4096));
    }

    #[test]
    fn a_silent_peer_is_another_device() {
        let (result, took) = run(probe(Mtu::Mtu4096), 4096, u32::MAX);
        assert_eq!(result, PathMtu::Silent);
        assert!(took < 300 * MILLISECOND, "{took}");
    }

    #[test]
    fn answers_of_others_and_to_earlier_requests_do_not_count() {
        let mut probes = PathProbes::default();
        probes.probes.push(probe(Mtu::Mtu4096));
        let ((short, long), name) = (probes.probes[0].nonces(), probes.probes[0].peer);
        let foreign = short.wrapping_sub(1);
        assert!(!probes.hear(([10, 0, 0, 2].into(), 3), long) && !probes.hear(name, foreign));
        assert!(!probes.hear(name, long.wrapping_add(1)), "no request had it");
        probes.probes[0].restart(Mtu::Mtu2048, 0);
        assert!(probes.hear(name, long), "a late answer is no malformed packet");
        assert_eq!(probes.result(name), PathMtu::Probing);
        let (_, long) = probes.probes[0].nonces();
        assert!(probes.hear(name, long) && probes.hear(name, long), "nor is a second one");
        assert!(matches!(probes.result(name), PathMtu::Narrow { carries: Some(Mtu::Mtu2048), .. }));
        assert_eq!(probes.result(([10, 0, 0, 2].into(), 3)), PathMtu::Unknown);
    }
}
