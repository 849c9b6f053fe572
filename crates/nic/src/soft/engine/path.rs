//! The in-flight limit (budget) for each destination socket.
//!
//! The receiver's socket buffer is shared by all queue pairs that send to it. An ordinary user gets
//! 212,992 bytes of it (doubled by the kernel for its own overhead). Packets that do not fit are
//! lost. So all queue pairs to one peer process share one budget; each keeps its own window below
//! that.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::links::PeerName;
use crate::soft::qp_index::QpIndex;

/// Bytes in flight to one socket. Small enough to stay in the receiver's cache and buffer, large
/// enough for five full segmented sends.
const BUDGET: u64 = 340 << 10;
/// The upper limit for a socket that is known to have more room: the receiver may be busy with
/// something else for as long as the five sends of `BUDGET` take. (NCCL's send and receive of
/// 64 MiB over UDP on an H200: 32 ms instead of 46.)
const ROOMY_BUDGET: u64 = 1360 << 10;
/// The same for an unreliable service. The kernel frees buffer space late and by quarters, and
/// other processes may send to the same socket.
const CAREFUL_BUDGET: u64 = 208 << 10;
/// Room is granted in pieces of at least a full segmented send. Otherwise sends would shrink to the
/// size of the last ACK, and a system call costs the same for one packet as for fifteen.
const PIECE: u64 = 68 << 10;

/// Identifies the budget that a queue pair uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PathIndex(usize);

#[derive(Debug)]
struct NetworkPath {
    budget: u64,
    /// The budget if all users retransmit lost packets.
    usual: u64,
    under_way: u64,
    /// The destination socket is on this host.
    ends_here: bool,
    users: usize,
    /// Users of an unreliable service: while there are any, the budget is smaller.
    careful: usize,
    /// Queue pairs with packets to send that found no room.
    waiting: VecDeque<QpIndex>,
    /// Number of engines of this device that send there: each has its part of the budget.
    sharers: Option<Arc<AtomicU64>>,
}

impl Default for NetworkPath {
    fn default() -> Self {
        Self {
            budget: BUDGET,
            usual: BUDGET,
            under_way: 0,
            ends_here: false,
            users: 0,
            careful: 0,
            waiting: VecDeque::new(),
            sharers: None,
        }
    }
}

/// Number of engines of one device that send to each socket.
#[derive(Debug, Default)]
pub(crate) struct Sharers(Mutex<HashMap<PeerName, Arc<AtomicU64>>>);

impl Sharers {
    fn join(&self, to: PeerName) -> Arc<AtomicU64> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = all.entry(to).or_default();
        count.fetch_add(1, Ordering::Relaxed);
        count.clone()
    }

    fn leave(&self, to: PeerName) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = all.get(&to)
            && count.fetch_sub(1, Ordering::Relaxed) == 1
        {
            all.remove(&to);
        }
    }
}

impl NetworkPath {
    fn set_budget(&mut self) {
        self.budget = if self.careful > 0 { CAREFUL_BUDGET } else { self.usual };
    }
}

#[derive(Debug, Default)]
pub(crate) struct NetworkPaths {
    index: HashMap<PeerName, usize>,
    paths: Vec<NetworkPath>,
    free: Vec<usize>,
    sharers: Option<Arc<Sharers>>,
}

impl NetworkPaths {
    /// The paths of an engine; `sharers` is set if the device may have further engines.
    pub(crate) fn new(sharers: Option<Arc<Sharers>>) -> Self {
        Self { sharers, ..Self::default() }
    }

    /// Joins the path to that slot of that address. `reliable`: the queue pair retransmits lost
    /// packets.
    pub(crate) fn join(&mut self, remote: IpAddr, slot: u8, reliable: bool) -> PathIndex {
        let at = *self.index.entry((remote, slot)).or_insert_with(|| {
            self.free.pop().unwrap_or_else(|| {
                self.paths.push(NetworkPath::default());
                self.paths.len() - 1
            })
        });
        let path = &mut self.paths[at];
        if path.users == 0 {
            path.sharers = self.sharers.as_ref().map(|sharers| sharers.join((remote, slot)));
        }
        path.users += 1;
        path.careful += usize::from(!reliable);
        path.set_budget();
        PathIndex(at)
    }

    /// The destination's socket has so many bytes of kernel buffer, a fifth of them for kernel
    /// overhead.
    pub(crate) fn set_receive_room(&mut self, path: PathIndex, room: u64) {
        self.paths[path.0].usual = (room / 5 * 4).clamp(BUDGET, ROOMY_BUDGET);
        self.paths[path.0].set_budget();
    }

    /// The destination is a socket of this host, with as much room as our own.
    pub(crate) fn ends_here(&mut self, path: PathIndex, room: u64) {
        self.paths[path.0].ends_here = true;
        self.set_receive_room(path, room);
    }

    /// Leaves the path; `reliable` as in [`join`](Self::join). The caller first returns what is
    /// still charged.
    pub(crate) fn leave(&mut self, path: PathIndex, reliable: bool) {
        let PathIndex(at) = path;
        self.paths[at].users -= 1;
        self.paths[at].careful -= usize::from(!reliable);
        self.paths[at].set_budget();
        if self.paths[at].users == 0 {
            self.paths[at] = NetworkPath::default();
            self.index.retain(|to, index| {
                let leaves = *index == at;
                if let Some(sharers) = self.sharers.as_ref().filter(|_| leaves) {
                    sharers.leave(*to);
                }
                !leaves
            });
            self.free.push(at);
        }
    }

    /// Bytes that may still be sent. An idle path takes anything, except to a socket of this host,
    /// which would drop it. There one READ could request more than fits.
    pub(crate) fn room(&self, path: PathIndex) -> u64 {
        let NetworkPath { budget, under_way, ref sharers, ends_here, .. } = self.paths[path.0];
        let budget = match sharers {
            None => budget,
            Some(sharers) => (budget / sharers.load(Ordering::Relaxed).max(1)).max(PIECE),
        };
        match under_way {
            0 if ends_here => budget,
            0 => u64::MAX,
            under_way if under_way + PIECE > budget => 0,
            under_way => budget - under_way,
        }
    }

    /// Whether ACKs that free little room cost more than they gain. True if both ends are on this
    /// host, and one queue pair has the whole path, without another engine. (Other queue pairs must
    /// not wait for room until this one requests an ACK. With a divided budget, no room may be left
    /// without an ACK.)
    pub(crate) fn has_dear_answers(&self, path: PathIndex) -> bool {
        let NetworkPath { users, ends_here, ref sharers, .. } = self.paths[path.0];
        let is_divided = || sharers.as_ref().is_some_and(|sharers| sharers.load(Ordering::Relaxed) > 1);
        ends_here && users == 1 && !is_divided()
    }

    /// Whether several queue pairs use it.
    pub(crate) fn is_shared(&self, path: PathIndex) -> bool {
        self.paths[path.0].users > 1
    }

    /// A queue pair's charge changed from `before` to `after`.
    pub(crate) fn charge(&mut self, path: PathIndex, before: u64, after: u64) {
        let path = &mut self.paths[path.0];
        path.under_way = path.under_way.saturating_sub(before) + after;
    }

    /// A queue pair waits for room.
    pub(crate) fn wait(&mut self, path: PathIndex, qp: QpIndex) {
        self.paths[path.0].waiting.push_back(qp);
    }

    /// The next queue pair that may retry.
    pub(crate) fn wake(&mut self, path: PathIndex) -> Option<QpIndex> {
        if self.room(path) == 0 {
            return None;
        }
        self.paths[path.0].waiting.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_this_machine_have_the_room_that_they_have() {
        let mut paths = NetworkPaths::default();
        let to = IpAddr::from([127, 0, 0, 1]);
        let left = |paths: &NetworkPaths, path| paths.room(path) + 1;
        let path = paths.join(to, 1, true);
        paths.charge(path, 0, 1);
        for (room, budget) in [(0, BUDGET), (425_984, BUDGET), (1 << 20, 838_860), (8 << 20, ROOMY_BUDGET)] {
            paths.ends_here(path, room);
            assert_eq!(left(&paths, path), budget, "{room}");
        }
        assert!(paths.has_dear_answers(path));
        paths.charge(path, 1, 0);
        assert_eq!(paths.room(path), ROOMY_BUDGET, "one READ must not ask for more");
        paths.charge(path, 0, 1);
        let careful = paths.join(to, 1, false);
        assert_eq!(left(&paths, careful), CAREFUL_BUDGET, "an unreliable service has less");
        paths.leave(careful, false);
        assert_eq!(left(&paths, path), ROOMY_BUDGET);
        paths.charge(path, 1, 0);
        paths.leave(path, true);
        let again = paths.join(to, 1, true);
        paths.charge(again, 0, 1);
        assert_eq!(left(&paths, again), BUDGET, "the next user starts with the default");
        assert!(!paths.has_dear_answers(again));
    }

    #[test]
    fn a_path_is_careful_while_it_has_unreliable_users() {
        let mut paths = NetworkPaths::default();
        let to = "127.0.0.1".parse().unwrap();
        let room = |paths: &NetworkPaths, path| paths.room(path) + 1;
        let first = paths.join(to, 1, true);
        paths.charge(first, 0, 1);
        assert_eq!(room(&paths, first), BUDGET);
        let (second, third) = (paths.join(to, 1, false), paths.join(to, 1, false));
        assert_eq!(room(&paths, first), CAREFUL_BUDGET);
        paths.leave(second, false);
        assert_eq!(room(&paths, first), CAREFUL_BUDGET);
        paths.leave(third, false);
        assert_eq!(room(&paths, first), BUDGET);
    }

    #[test]
    fn engines_that_send_to_one_socket_share_its_room() {
        let sharers = Arc::<Sharers>::default();
        let [mut one, mut other] = [(); 2].map(|()| NetworkPaths::new(Some(sharers.clone())));
        let to = "127.0.0.1".parse().unwrap();
        let path = one.join(to, 1, true);
        one.charge(path, 0, 1);
        assert_eq!(one.room(path) + 1, BUDGET);
        one.ends_here(path, 0);
        assert!(one.has_dear_answers(path));
        let (same, elsewhere) = (other.join(to, 1, true), other.join(to, 2, true));
        other.charge(elsewhere, 0, 1);
        assert_eq!((one.room(path) + 1, other.room(elsewhere) + 1), (BUDGET / 2, BUDGET));
        assert!(!one.has_dear_answers(path) && !one.is_shared(path), "it is divided");
        other.leave(same, true);
        assert!(one.has_dear_answers(path));
        assert_eq!(one.room(path) + 1, BUDGET);
        one.charge(path, 1, 0);
        one.leave(path, true);
        other.leave(elsewhere, true);
        assert!(sharers.0.lock().unwrap().is_empty());
    }
}
