//! Requests that are left at an engine's door by those who would have to wait for its lock.
//!
//! Where an engine's own thread drives it without pause, it has the lock nearly always: NCCL's thread waited for it at two posts of three, 2 us on average, four times in its shortest operation. It leaves what it posts
//! here instead, and whoever takes the lock next lets it in first, so that everything is done in the order in which it was posted. Whether there is room in a queue is known to who posts as long as no more is
//! left than there was room for when it last had the lock; room that has been freed since then is found out under the lock.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nobounce_protocol::qp::{Operation, QpState, SendRequest as ProtocolSend};
use nobounce_protocol::wire::{Qpn, Service};

use super::engine::Core;
use super::entry::QpEntry;
use super::host::{PostedReceive, PostedSend};
use super::scatter::Bytes;
use crate::links::now_ns;

/// Something that was posted.
#[derive(Debug)]
pub(crate) enum Left {
    Send { send: ProtocolSend, bytes: Bytes },
    Receive(PostedReceive),
}

/// Where requests are left.
#[derive(Debug, Default)]
pub(crate) struct Door {
    is_used: AtomicBool,
    left: Mutex<Vec<(Qpn, Left)>>,
}

impl Door {
    /// Leaves one, behind those that lie here.
    pub(crate) fn leave(&self, qpn: Qpn, request: Left) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.push((qpn, request));
        self.is_used.store(true, Ordering::SeqCst);
    }

    /// Whether something lies here.
    #[inline]
    pub(crate) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::SeqCst)
    }

    /// Lets in what lies here.
    #[cold]
    pub(crate) fn open(&self, core: &mut Core) {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let_in(self.take(left, core), core);
    }

    /// The same where nobody may be waited for.
    pub(crate) fn open_if_free(&self, core: &mut Core) {
        if let Ok(left) = self.left.try_lock() {
            let_in(self.take(left, core), core);
        }
    }

    fn take(&self, mut left: MutexGuard<'_, Vec<(Qpn, Left)>>, core: &mut Core) -> Vec<(Qpn, Left)> {
        self.is_used.store(false, Ordering::SeqCst);
        mem::replace(&mut left, mem::take(&mut core.doormat))
    }
}

fn let_in(mut all: Vec<(Qpn, Left)>, core: &mut Core) {
    let now = now_ns();
    for (qpn, one) in all.drain(..) {
        let Some(entry) = core.entry(qpn) else { continue };
        let index = entry.index();
        match one {
            Left::Send { send, bytes } => {
                entry.credit.sends.admit();
                let early = !send.fence;
                // It was right when it was left, and room was kept for it. A queue pair that was reset since then has lost what it had.
                let Ok(serial) = entry.qp.post(send) else {
                    debug_assert!(matches!(entry.qp.state(), QpState::Reset | QpState::Init));
                    continue;
                };
                entry.sends.push_back(PostedSend { serial, early, bytes });
                entry.note_posted(now);
                entry.show_send_room();
                if entry.qp.has_completions() {
                    core.settle(index);
                }
                core.make_ready(index);
            }
            Left::Receive(receive) => {
                entry.credit.receives.admit();
                let state = entry.qp.state();
                if state == QpState::Reset {
                    continue;
                }
                entry.receives.push_back(receive);
                entry.show_receive_room();
                if state == QpState::Error {
                    core.settle(index);
                }
            }
        }
    }
    core.doormat = all;
}

/// For how many more requests a queue pair's queues have room, as far as those know who post.
#[derive(Debug, Default)]
pub(crate) struct Credit {
    pub(crate) sends: Room,
    pub(crate) receives: Room,
}

impl Credit {
    /// Nothing is left from now on, until somebody has seen under the lock what room there is.
    pub(crate) fn forget(&self) {
        self.sends.set(0);
        self.receives.set(0);
    }
}

impl QpEntry {
    /// Says what room there is for sends, to those who will not have the lock.
    #[inline]
    pub(crate) fn show_send_room(&self) {
        self.credit.sends.set(if self.is_open_to_all() { self.qp.send_room() } else { 0 });
    }

    /// The same for receives.
    #[inline]
    pub(crate) fn show_receive_room(&self) {
        let room = self.recv_depth.saturating_sub(self.receives.len());
        self.credit.receives.set(if self.is_open_to_all() { room } else { 0 });
    }

    /// Whether requests for it may be left at the door.
    fn is_open_to_all(&self) -> bool {
        self.qp.service() == Service::Rc && self.qp.state() == QpState::Rts
    }
}

/// Whether such a request may be left: what else could be wrong with it is not known without the lock.
pub(crate) fn may_be_left(op: &Operation) -> bool {
    use Operation::{Send, SendImmediate, Write, WriteImmediate};
    matches!(op, Send | SendImmediate(_) | Write(_) | WriteImmediate(..))
}

/// The room of one queue when it was last seen, and how many requests are left, or about to be, that will take of it. Several threads may post to one queue pair: both are one word. It has a line
/// of the cache to itself: who posts sends is not the one who looks for receives.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Room(AtomicU64);

impl Room {
    fn change(&self, mut change: impl FnMut(u32, u32) -> Option<(u32, u32)>) -> bool {
        let update = |word: u64| {
            let (room, left) = parts(word);
            change(room, left).map(|(room, left)| u64::from(room) << 32 | u64::from(left))
        };
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update).is_ok()
    }

    fn set(&self, room: usize) {
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        self.change(|_, left| Some((room, left)));
    }

    /// Whoever posts under the lock closes it first, or others would leave what finds the queue full; how many are still to come in.
    #[inline]
    pub(crate) fn close(&self) -> usize {
        self.set(0);
        self.left()
    }

    /// One more request is going to be left, if there is room for it.
    pub(crate) fn take(&self) -> bool {
        self.change(|room, left| (left < room).then(|| (room, left + 1)))
    }

    /// One that was left has come in.
    fn admit(&self) {
        self.change(|room, left| Some((room.saturating_sub(1), left.saturating_sub(1))));
    }

    /// How many will come in.
    #[inline]
    fn left(&self) -> usize {
        parts(self.0.load(Ordering::Relaxed)).1 as usize
    }
}

#[allow(clippy::cast_possible_truncation)] // each half of it
const fn parts(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_left_than_there_was_room_for() {
        let room = Room::default();
        assert!(!room.take(), "nobody has looked yet");
        room.set(2);
        assert!(room.take() && room.take() && !room.take());
        room.admit();
        assert!(!room.take(), "what came in took its room");
        room.set(1); // one is still on its way, and there is room for that one
        assert!(!room.take());
        room.admit();
        room.set(1);
        assert!(room.take() && !room.take());
        assert_eq!(room.left(), 1);
    }

    #[test]
    fn threads_that_leave_at_once_share_the_room() {
        let room = Room::default();
        room.set(1000);
        let taken: usize = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|_| scope.spawn(|| (0..1000).filter(|_| room.take()).count())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!((taken, room.left()), (1000, 1000));
    }
}
