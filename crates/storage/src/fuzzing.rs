//! Entry points for fuzzing.

use crate::request::Message;

/// A message of a client: it means the same when it is written again.
pub fn message(bytes: &[u8]) {
    if let Some(message) = Message::decode(bytes) {
        assert_eq!(Message::decode(&message.encode()), Some(message));
    }
}
