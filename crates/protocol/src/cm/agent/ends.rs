//! How connections end: by the user, with the process, or as stale connections.

use std::net::IpAddr;

use super::Agent;
use crate::cm::agent::CmError;
use crate::cm::communication::{CommId, Communication, CommunicationState};
use crate::cm::mad::MessageKind;
use crate::cm::message::{Ids, emit_dreq};
use crate::timing::{Nanos, SECOND};
use crate::wire::Qpn;

/// How long a DREP is kept in case this process exits before the peer retransmits its DREQ. The
/// kernel does so after 6.4 s.
const DREP_KEEP_TIME: Nanos = 10 * SECOND;
/// Maximum number of kept DREPs.
const MAX_KEPT_DREPS: usize = 1024;
/// How often an exiting process sends its last messages: it cannot retransmit them later.
const FINAL_SENDS: usize = 3;

impl Agent {
    /// Disconnects. A connection that the peer has ended stays as it is.
    ///
    /// # Errors
    /// It is not established.
    pub fn disconnect(&mut self, now: Nanos, id: CommId) -> Result<(), CmError> {
        let transaction = self.rng.next();
        self.change(id, |this, communication| match communication.state {
            CommunicationState::Established | CommunicationState::RepSent => {
                this.hang_up(now, communication, transaction);
                Ok(())
            }
            CommunicationState::DreqSent | CommunicationState::TimeWait | CommunicationState::Over => Ok(()),
            _ => Err(CmError::WrongState),
        })
    }

    pub(super) fn hang_up(&mut self, now: Nanos, communication: &mut Communication, transaction: u64) {
        communication.state = CommunicationState::DreqSent;
        communication.transaction = transaction;
        let mad = emit_dreq(communication.ids, communication.remote_qpn, transaction);
        communication.expect_answer(now, mad.clone());
        self.send(communication.peer, mad);
    }

    /// Keeps a DREP that the peer may not have received. A DREP for an unknown connection is not
    /// kept: any host can send a DREQ.
    pub(super) fn keep_drep(&mut self, now: Nanos, to: IpAddr, ids: Ids, transaction: u64, ours: bool) {
        let before = self.kept_dreps.len();
        self.kept_dreps.retain(|(_, peer, of, _)| (*peer, *of) != (to, ids));
        let again = self.kept_dreps.len() < before;
        self.kept_dreps.retain(|(at, ..)| now < at + DREP_KEEP_TIME);
        if ours || again {
            if self.kept_dreps.len() == MAX_KEPT_DREPS {
                self.kept_dreps.pop_front();
            }
            self.kept_dreps.push_back((now, to, ids, transaction));
        }
    }

    /// Ends every established connection without waiting for an answer: the process is exiting.
    /// Sends each DREQ several times, and the DREPs of connections that ended just now. A peer that
    /// missed a DREP would repeat its DREQ to no effect, the kernel for more than a minute.
    pub fn end_all(&mut self, now: Nanos) {
        let kept_dreps = std::mem::take(&mut self.kept_dreps);
        for (at, to, ids, transaction) in kept_dreps {
            if now < at + DREP_KEEP_TIME {
                self.send(to, ids.emit(MessageKind::Drep, transaction));
            }
        }
        let unanswered = self.communications.values().filter(|c| c.state == CommunicationState::DreqSent);
        let again: Vec<_> = unanswered.filter_map(|c| Some((c.peer, c.said.clone()?))).collect();
        again.into_iter().for_each(|(peer, mad)| self.send(peer, mad));
        let all: Vec<_> = self.communications.values().map(Communication::id).collect();
        all.into_iter().for_each(|id| self.release(now, id));
        let words: Vec<_> = self.out.drain(..).collect();
        (0..FINAL_SENDS).for_each(|_| self.out.extend(words.iter().cloned()));
    }

    /// The connection that is established, as far as we know, with a queue pair of `peer`.
    pub(super) fn standing_with(&self, peer: IpAddr, qpn: Qpn) -> Option<CommId> {
        let known = self.communications.get(self.queue_pairs.get(&(peer, qpn))?)?;
        matches!(known.state, CommunicationState::Established | CommunicationState::RepSent)
            .then(|| known.id())
    }

    /// The peer uses its queue pair for another connection. Either ours is stale, or the new
    /// request is a mistake; the peer's answer decides.
    pub(super) fn end_stale(&mut self, now: Nanos, id: CommId) {
        let transaction = self.rng.next();
        let _ = self.change(id, |this, communication| {
            this.hang_up(now, communication, transaction);
            Ok(())
        });
    }
}
