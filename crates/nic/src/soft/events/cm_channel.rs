//! Connection-manager channels: queues of events about communications.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use nobounce_protocol::cm::Event;

use crate::sync::notices::Notices;

/// One notice.
#[derive(Clone, Debug)]
pub struct CmNotice {
    /// The user's tag of the affected object.
    pub tag: u64,
    /// What happened.
    pub told: Told,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Told {
    /// An event of a communication of the device with this address.
    #[allow(missing_docs)]
    Event { local: IpAddr, event: Event },
    /// A notice that the user posted itself.
    #[allow(missing_docs)]
    Own { kind: u32, status: i32 },
}

/// A queue of notices with a pollable descriptor.
#[derive(Clone, Debug)]
pub struct CmChannel(pub(crate) Arc<Notices<CmNotice>>);

impl CmChannel {
    /// Creates a channel.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(Notices::new()?)))
    }

    /// The next notice, for a caller that has just read 8 bytes from
    /// [`counter_fd`](Self::counter_fd). `None` if it was dropped meanwhile: then read again.
    pub fn claim(&self) -> Option<CmNotice> {
        self.0.claim()
    }

    /// The descriptor that counts the notices: each read of 8 bytes stands for one. It blocks while
    /// there are none.
    pub fn counter_fd(&self) -> RawFd {
        self.0.counter_fd()
    }

    /// A descriptor to poll: readable while there are notices.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Posts a notice to this channel.
    pub fn tell(&self, tag: u64, kind: u32, status: i32) {
        self.0.push(CmNotice { tag, told: Told::Own { kind, status } }, usize::MAX);
    }

    /// Drops the notices that `of` selects.
    pub fn forget(&self, of: impl Fn(&CmNotice) -> bool) {
        self.0.forget(of);
    }

    /// Moves the notices that `of` selects to another channel, in order.
    pub fn give(&self, to: &Self, of: impl Fn(&CmNotice) -> bool) {
        let given = std::cell::RefCell::new(Vec::new());
        self.0.forget(|notice| {
            let picked = of(notice);
            if picked {
                given.borrow_mut().push(notice.clone());
            }
            picked
        });
        given.into_inner().into_iter().for_each(|notice| to.0.push(notice, usize::MAX));
    }

    /// Whether both are the same channel.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
