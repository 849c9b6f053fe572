//! Announcements of this end: tags that the peer expects, and those that wait until it has room.

use std::collections::{HashMap, VecDeque};

use crate::error::TransferError;
use crate::frame::{Frame, printable};
use crate::transfer::Summary;

#[derive(Debug, Default)]
struct AnnouncedTransfer {
    /// Not sent yet.
    tag: Option<Vec<u8>>,
    /// Transfers that wait until it is sent.
    held: Vec<u64>,
    jobs: usize,
    bytes: u64,
    failed: Option<(bool, String)>,
    is_finished: bool,
    /// The frame that ends it is on its way.
    is_told: bool,
}

/// Announcements that have not ended. The peer grants credit: one for each notification that it has
/// room for.
#[derive(Debug, Default)]
pub(crate) struct Announcements {
    by_id: HashMap<u64, AnnouncedTransfer>,
    /// Those that wait for credit, the oldest first.
    waiting: VecDeque<u64>,
    credit: u64,
}

impl Announcements {
    pub(crate) fn grant(&mut self, credit: u32) {
        self.credit = self.credit.saturating_add(credit.into());
    }

    pub(crate) fn add(&mut self, id: u64, tag: Vec<u8>) {
        self.by_id.insert(id, AnnouncedTransfer { tag: Some(tag), ..AnnouncedTransfer::default() });
        self.waiting.push_back(id);
    }

    /// The next one that the peer has room for: its frames, and the transfers that waited for it.
    pub(crate) fn announce(&mut self) -> Option<(Frame, Option<Frame>, Vec<u64>)> {
        if self.credit == 0 {
            return None;
        }
        let id = self.waiting.pop_front()?;
        self.credit -= 1;
        let announcement = self.by_id.get_mut(&id)?;
        let (tag, held) = (announcement.tag.take()?, std::mem::take(&mut announcement.held));
        Some((Frame::Announce { id, tag }, self.end_frame(id), held))
    }

    /// A transfer belongs to it; whether it may begin now.
    pub(crate) fn submit(&mut self, id: u64, job: u64) -> bool {
        let Some(announcement) = self.by_id.get_mut(&id) else { return true };
        announcement.jobs += 1;
        if announcement.tag.is_some() {
            announcement.held.push(job);
        }
        announcement.tag.is_none()
    }

    /// All of its transfers are submitted; or it is given up, for a reason. The frame that ends it,
    /// if it ends now.
    pub(crate) fn finish(&mut self, id: u64, abort: Option<String>) -> Option<Frame> {
        let announcement = self.by_id.get_mut(&id)?;
        announcement.is_finished = true;
        if let Some(reason) = abort {
            announcement.failed.get_or_insert((true, reason));
        }
        self.end_frame(id)
    }

    /// A transfer of it has ended. The frame that ends it, if it ends now.
    pub(crate) fn end_job(&mut self, id: u64, result: &Result<Summary, TransferError>) -> Option<Frame> {
        let announcement = self.by_id.get_mut(&id)?;
        announcement.jobs -= 1;
        match result {
            Ok(summary) => announcement.bytes += summary.bytes,
            Err(error) => {
                let is_aborted = *error == TransferError::Cancelled;
                announcement.failed.get_or_insert((is_aborted, error.to_string()));
            }
        }
        self.end_frame(id)
    }

    fn end_frame(&mut self, id: u64) -> Option<Frame> {
        let announcement = self.by_id.get_mut(&id)?;
        let is_open = announcement.tag.is_some() || !announcement.is_finished || announcement.jobs > 0;
        if is_open || std::mem::replace(&mut announcement.is_told, true) {
            return None;
        }
        Some(match &announcement.failed {
            None => Frame::Done { id, bytes: announcement.bytes },
            Some((is_aborted, reason)) => {
                Frame::Failed { id, is_aborted: *is_aborted, reason: printable(reason) }
            }
        })
    }

    /// The peer has the frame that ends it.
    pub(crate) fn forget(&mut self, id: u64) {
        self.by_id.remove(&id);
    }

    /// Ends all; those that the peer knows of, in order.
    pub(crate) fn take_announced(&mut self) -> Vec<u64> {
        self.waiting.clear();
        let mut announced: Vec<_> =
            self.by_id.drain().filter(|(_, one)| one.tag.is_none()).map(|(id, _)| id).collect();
        announced.sort_unstable();
        announced
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcements_and_their_transfers_wait_for_credit() {
        let mut announcements = Announcements::default();
        for id in [1, 2, 3] {
            announcements.add(id, vec![7]);
            assert!(!announcements.submit(id, 10 * id));
            assert_eq!(announcements.finish(id, None), None);
        }
        assert_eq!(announcements.announce(), None);
        announcements.grant(2);
        let announced = |id| Some((Frame::Announce { id, tag: vec![7] }, None, vec![10 * id]));
        assert_eq!(announcements.announce(), announced(1));
        // The second one's transfer is cancelled before its turn.
        assert_eq!(announcements.end_job(2, &Err(TransferError::Cancelled)), None);
        let (_, end, _) = announcements.announce().unwrap();
        assert!(matches!(end, Some(Frame::Failed { id: 2, is_aborted: true, .. })), "{end:?}");
        assert_eq!(announcements.announce(), None, "no credit is left");
        let done = announcements.end_job(1, &Ok(Summary { bytes: 5, pieces: 1 }));
        assert_eq!(done, Some(Frame::Done { id: 1, bytes: 5 }));
        assert!(announcements.submit(1, 11), "it has ended");
        (1..3).for_each(|id| announcements.forget(id));
        assert!(announcements.take_announced().is_empty(), "the peer has not heard of the third one");
    }
}
