//! Frames between two agents. The hello, keep-alives and the end use the side channel, all others
//! the first lane.

use std::net::SocketAddr;

use nobounce::RemoteRegion;
use serde::{Deserialize, Serialize};

/// Incremented when frames change.
pub(crate) const VERSION: u32 = 3;
/// Longest tag of a notification.
pub const MAX_TAG: usize = 256;
/// Longest name of an agent or a region.
pub const MAX_NAME: usize = 256;
/// Regions that one agent may export.
pub(crate) const MAX_EXPORTS: usize = 1 << 16;
/// Longest reason that is sent to a peer.
pub(crate) const MAX_REASON: usize = 512;
/// Longest message between applications.
pub const MAX_MESSAGE: usize = 1024;
/// Longest frame.
pub(crate) const MAX_FRAME: usize = 2048;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Frame {
    /// The first frame in each direction.
    Hello {
        version: u32,
        name: String,
        generation: u64,
        /// A peer that is silent for so many milliseconds is gone.
        silence_ms: u64,
        /// The name of its host, and where it listens.
        host: String,
        listens: Option<SocketAddr>,
    },
    /// A region that the peer may use, and the number of this change.
    Export {
        name: String,
        version: u64,
        region: RemoteRegion,
    },
    /// The region is withdrawn.
    Withdraw {
        name: String,
        version: u64,
    },
    /// Number of the last change; all of them have been sent.
    Version {
        version: u64,
    },
    /// A transfer with a tag begins.
    Announce {
        id: u64,
        tag: Vec<u8>,
    },
    /// All bytes of it are placed.
    Done {
        id: u64,
        bytes: u64,
    },
    /// It failed, or was given up.
    Failed {
        id: u64,
        is_aborted: bool,
        reason: String,
    },
    KeepAlive,
    /// The sender closes.
    Bye,
    /// The receiver may announce so many more transfers.
    Credit {
        count: u32,
    },
    /// For the application.
    Message {
        bytes: Vec<u8>,
    },
}

/// A frame that cannot be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a malformed frame")]
pub(crate) struct Malformed;

impl Frame {
    /// Appends length and content.
    pub(crate) fn append(&self, out: &mut Vec<u8>) {
        let at = out.len();
        out.extend_from_slice(&[0; 4]);
        let body = postcard::to_stdvec(self).expect("writing into a vector does not fail");
        out.extend_from_slice(&body);
        let len = u32::try_from(body.len()).expect("names, tags and reasons have limits");
        out[at..at + 4].copy_from_slice(&len.to_le_bytes());
    }

    /// The first frame of `bytes` and its length, if it is complete.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, Malformed> {
        let Some((prefix, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
        let len = usize::try_from(u32::from_le_bytes(*prefix)).map_err(|_| Malformed)?;
        if len > MAX_FRAME {
            return Err(Malformed);
        }
        let Some(body) = rest.get(..len) else { return Ok(None) };
        let (frame, left) = postcard::take_from_bytes::<Self>(body).map_err(|_| Malformed)?;
        if !left.is_empty() || !frame.is_within_limits() {
            return Err(Malformed);
        }
        Ok(Some((frame, 4 + len)))
    }

    fn is_within_limits(&self) -> bool {
        match self {
            Self::Hello { name, host, .. } => name.len() <= MAX_NAME && host.len() <= MAX_NAME,
            Self::Export { name, .. } | Self::Withdraw { name, .. } => name.len() <= MAX_NAME,
            Self::Announce { tag, .. } => tag.len() <= MAX_TAG,
            Self::Message { bytes } => bytes.len() <= MAX_MESSAGE,
            Self::Failed { reason, .. } => reason.len() <= MAX_REASON,
            Self::Version { .. } | Self::Done { .. } | Self::KeepAlive | Self::Bye | Self::Credit { .. } => {
                true
            }
        }
    }
}

/// Text of a peer, for people: without control characters, within the limit.
pub(crate) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_REASON / 4).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_are_parsed_wherever_the_bytes_break() {
        let region = RemoteRegion { addr: u64::MAX, len: 7, rkey: u32::MAX, closed: false };
        let frames = [
            Frame::Hello {
                version: VERSION,
                name: "n".repeat(MAX_NAME),
                generation: u64::MAX,
                silence_ms: u64::MAX,
                host: "h".repeat(MAX_NAME),
                listens: Some("[::1]:65535".parse().unwrap()),
            },
            Frame::Export { name: "kv".to_owned(), version: 1, region },
            Frame::Announce { id: 1, tag: vec![0xff; MAX_TAG] },
            Frame::Failed { id: 1, is_aborted: true, reason: "r".repeat(MAX_REASON) },
            Frame::KeepAlive,
            Frame::Message { bytes: vec![1; MAX_MESSAGE] },
            Frame::Credit { count: u32::MAX },
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.append(&mut bytes));
        for cut in 0..bytes.len() {
            let (mut at, mut found) = (0, Vec::new());
            while let Some((frame, len)) = Frame::parse(&bytes[at..cut]).unwrap() {
                found.push(frame);
                at += len;
            }
            assert_eq!(found, frames[..found.len()]);
        }
    }

    #[test]
    fn what_exceeds_a_limit_is_malformed() {
        let long = [
            Frame::Announce { id: 1, tag: vec![0; MAX_TAG + 1] },
            Frame::Withdraw { name: "n".repeat(MAX_NAME + 1), version: 1 },
            Frame::Failed { id: 1, is_aborted: false, reason: "r".repeat(MAX_REASON + 1) },
            Frame::Message { bytes: vec![0; MAX_MESSAGE + 1] },
        ];
        for frame in long {
            let mut bytes = Vec::new();
            frame.append(&mut bytes);
            assert_eq!(Frame::parse(&bytes), Err(Malformed));
        }
        assert_eq!(Frame::parse(&[0xff; 8]), Err(Malformed));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let mut framed = u32::try_from(bytes.len()).unwrap().to_le_bytes().to_vec();
            framed.extend_from_slice(&bytes);
            if let Ok(Some((frame, len))) = Frame::parse(&framed) {
                prop_assert_eq!(len, framed.len());
                let mut again = Vec::new();
                frame.append(&mut again);
                prop_assert_eq!(Frame::parse(&again).unwrap().unwrap().0, frame);
            }
        }
    }
}
