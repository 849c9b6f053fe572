//! Messages from clients to the server.
//!
//! A request with few ranges of one file is one message, `Short`. Others are a sequence of messages
//! with one number: `Begin`, then each `File` followed by the `Ranges` of it, then `Go`. The answer
//! is the notification of a transfer whose tag begins with the number; of a read that needed no
//! thread, a message with the number and the bytes.

use serde::{Deserialize, Serialize};

/// Longest path of a file, in bytes.
pub const MAX_PATH: usize = 512;
/// Ranges of one request.
pub const MAX_RANGES: usize = 1 << 16;
/// Requests of one client that are not answered.
pub(crate) const MAX_REQUESTS: usize = 64;
/// Files of one request.
pub(crate) const MAX_FILES: usize = 1000;
/// Ranges in one message: each takes 30 bytes at most.
pub(crate) const RANGES_PER_MESSAGE: usize = 32;
/// Ranges of a request that is one message.
const RANGES_OF_SHORT: usize = 8;
/// Longest name of an export.
const MAX_NAME: usize = 64;

/// A range of a file, and where its bytes are in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRange {
    /// Offset in the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Offset in the memory.
    pub memory: u64,
}

/// What is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// The size of the file.
    Stat,
    /// From files into the client's memory.
    Read,
    /// From the client's memory into files.
    Write,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// The memory is exported by this name.
    Begin {
        id: u64,
        kind: Kind,
        export: String,
    },
    File {
        id: u64,
        path: String,
    },
    /// Ranges of the last file.
    Ranges {
        id: u64,
        ranges: Vec<FileRange>,
    },
    Go {
        id: u64,
    },
    /// A whole request.
    Short {
        id: u64,
        kind: Kind,
        export: String,
        path: String,
        ranges: Vec<FileRange>,
    },
}

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("writing into a vector does not fail")
    }

    /// `None` if the bytes are no message, or exceed a limit.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (found, rest) = postcard::take_from_bytes::<Self>(bytes).ok()?;
        let fits = match &found {
            Self::Begin { export, .. } => export.len() <= MAX_NAME,
            Self::File { path, .. } => path.len() <= MAX_PATH,
            Self::Ranges { ranges, .. } => ranges.len() <= RANGES_PER_MESSAGE,
            Self::Go { .. } => true,
            Self::Short { export, path, ranges, .. } => {
                export.len() <= MAX_NAME && path.len() <= MAX_PATH && ranges.len() <= RANGES_OF_SHORT
            }
        };
        (fits && rest.is_empty()).then_some(found)
    }
}

/// A request that is complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) kind: Kind,
    pub(crate) export: String,
    pub(crate) files: Vec<(String, Vec<FileRange>)>,
}

impl Request {
    pub(crate) fn new(id: u64, kind: Kind, export: String) -> Self {
        Self { id, kind, export, files: Vec::new() }
    }

    /// Adds a file or ranges; false if there are too many, or ranges without a file.
    pub(crate) fn add_file(&mut self, path: String) -> bool {
        let fits = self.files.len() < MAX_FILES;
        if fits {
            self.files.push((path, Vec::new()));
        }
        fits
    }

    pub(crate) fn add_ranges(&mut self, ranges: &[FileRange]) -> bool {
        let known: usize = self.files.iter().map(|(_, ranges)| ranges.len()).sum();
        match self.files.last_mut() {
            Some((_, last)) if known + ranges.len() <= MAX_RANGES => {
                last.extend_from_slice(ranges);
                true
            }
            _ => false,
        }
    }

    /// The number of its messages, at most.
    pub(crate) fn message_count(&self) -> usize {
        if self.short().is_some() {
            return 1;
        }
        let of_file = |(_, ranges): &(String, Vec<FileRange>)| 1 + ranges.len().div_ceil(RANGES_PER_MESSAGE);
        2 + self.files.iter().map(of_file).sum::<usize>()
    }

    /// The one message that it fits into.
    fn short(&self) -> Option<Message> {
        let Self { id, kind, ref export, ref files } = *self;
        let [(path, ranges)] = &files[..] else { return None };
        let (export, path, ranges) = (export.clone(), path.clone(), ranges.clone());
        (ranges.len() <= RANGES_OF_SHORT).then_some(Message::Short { id, kind, export, path, ranges })
    }

    /// Its messages.
    pub(crate) fn messages(&self) -> impl Iterator<Item = Message> {
        let short = self.short();
        let others = short.is_none().then(|| self.sequence()).into_iter().flatten();
        short.into_iter().chain(others)
    }

    fn sequence(&self) -> impl Iterator<Item = Message> {
        let id = self.id;
        let files = self.files.iter().flat_map(move |(path, ranges)| {
            let ranges = ranges.chunks(RANGES_PER_MESSAGE);
            let ranges = ranges.map(move |ranges| Message::Ranges { id, ranges: ranges.to_vec() });
            std::iter::once(Message::File { id, path: path.clone() }).chain(ranges)
        });
        let begin = Message::Begin { id, kind: self.kind, export: self.export.clone() };
        std::iter::once(begin).chain(files).chain(std::iter::once(Message::Go { id }))
    }
}

/// The tag of an answer: the number of the request, and the size of a file.
pub(crate) fn tag(id: u64, size: u64) -> [u8; 16] {
    let mut tag = [0; 16];
    tag[..8].copy_from_slice(&id.to_le_bytes());
    tag[8..].copy_from_slice(&size.to_le_bytes());
    tag
}

pub(crate) fn of_tag(tag: &[u8]) -> Option<(u64, u64)> {
    let (id, size) = tag.split_first_chunk::<8>()?;
    Some((u64::from_le_bytes(*id), u64::from_le_bytes(size.try_into().ok()?)))
}

/// The answer to a short read: the number of the request, and its bytes.
pub(crate) fn answer(id: u64, bytes: u64) -> [u8; 16] {
    tag(id, bytes)
}

pub(crate) fn of_answer(message: &[u8]) -> Option<(u64, u64)> {
    of_tag(message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_longest_messages_fit() {
        let range = FileRange { offset: u64::MAX, len: u64::MAX, memory: u64::MAX };
        for message in [
            Message::Begin { id: u64::MAX, kind: Kind::Write, export: "e".repeat(MAX_NAME) },
            Message::File { id: u64::MAX, path: "p".repeat(MAX_PATH) },
            Message::Ranges { id: u64::MAX, ranges: vec![range; RANGES_PER_MESSAGE] },
            Message::Short {
                id: u64::MAX,
                kind: Kind::Write,
                export: "e".repeat(MAX_NAME),
                path: "p".repeat(MAX_PATH),
                ranges: vec![range; RANGES_OF_SHORT],
            },
        ] {
            let bytes = message.encode();
            assert!(bytes.len() <= nobounce_transfer::MAX_MESSAGE, "{}", bytes.len());
            assert_eq!(Message::decode(&bytes), Some(message));
        }
        let long = Message::File { id: 0, path: "p".repeat(MAX_PATH + 1) };
        assert_eq!(Message::decode(&long.encode()), None);
    }

    #[test]
    fn a_request_is_put_together_from_its_messages() {
        let range = |offset| FileRange { offset, len: 1, memory: offset };
        let files = vec![
            ("a".to_owned(), (0..100).map(range).collect()),
            ("b".to_owned(), Vec::new()),
            ("c".to_owned(), vec![range(7)]),
        ];
        let request = Request { id: 3, kind: Kind::Read, export: "x".to_owned(), files };
        let mut again = None;
        for message in request.messages() {
            match (message, &mut again) {
                (Message::Begin { id, kind, export }, none) => *none = Some(Request::new(id, kind, export)),
                (Message::File { path, .. }, Some(request)) => assert!(request.add_file(path)),
                (Message::Ranges { ranges, .. }, Some(request)) => assert!(request.add_ranges(&ranges)),
                (Message::Go { .. }, _) => break,
                (Message::Short { .. }, _) => panic!("it has several files"),
                (other, None) => panic!("{other:?} before the beginning"),
            }
        }
        assert_eq!(again, Some(request.clone()));
        assert_eq!(request.messages().count(), request.message_count());
        let short = Request { files: vec![("c".to_owned(), vec![range(7)])], ..request };
        assert!(matches!(short.messages().collect::<Vec<_>>()[..], [Message::Short { id: 3, .. }]));
        assert_eq!(short.message_count(), 1);
        assert!(!Request::new(1, Kind::Read, String::new()).add_ranges(&[range(1)]));
    }

    #[test]
    fn the_largest_request_fits_into_the_queue_of_its_server() {
        let range = FileRange { offset: 0, len: 1, memory: 0 };
        let mut request = Request::new(1, Kind::Read, String::new());
        for number in 0..MAX_FILES {
            assert!(request.add_file(String::new()));
            let count = MAX_RANGES / MAX_FILES + usize::from(number < MAX_RANGES % MAX_FILES);
            assert!(request.add_ranges(&vec![range; count]));
        }
        assert!(!request.add_file(String::new()) && !request.add_ranges(&[range]));
        assert!(request.message_count() <= nobounce_transfer::MAX_UNREAD, "{}", request.message_count());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Some(message) = Message::decode(&bytes) {
                prop_assert_eq!(Message::decode(&message.encode()), Some(message));
            }
            let _ = of_tag(&bytes);
        }
    }
}
