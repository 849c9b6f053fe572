//! Packets between two nobounce devices that share a secret: authenticated, and encrypted unless
//! only authentication is wanted.
//!
//! A sealed packet is a header ([`SealedHeader`]), a whole RoCE packet and a tag of AES-256-GCM.
//! The receiver chooses the key of a session, as with PSP: the sender asks it once
//! ([`Seal::route`]), with a nonce, and the answer has a nonce of the receiver. Both nonces, the
//! addresses and the secret give the key, so that a device that is opened anew neither repeats a
//! key nor takes what was recorded before. docs/reference/keys.md has the format.
//!
//! [`Seal`] is one end. It does no IO: [`Seal::handle_packet`] and [`Seal::handle_timeout`] take
//! what the world does, [`Seal::poll_message`], [`Seal::poll_outcome`] and [`Seal::poll_timeout`]
//! give what follows.

mod endpoint;
pub mod fuzzing;
mod header;
mod keys;
mod message;
mod random;
mod receiver;
mod secret;
mod sender;
mod window;

pub use endpoint::{Outcome, Seal, SealConfig, SealCounters};
pub use header::{HEADER_LEN, Kind, OVERHEAD, SealedHeader, TAG_LEN};
pub use message::SealMessage;
pub use receiver::{Dropped, Opened};
pub use secret::{KeyError, KeyRing};
pub use sender::{SealDecision, SealFlow};
pub use window::ReplayWindow;

/// What a device does with the packets that it sends. It takes both kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SealMode {
    /// Authenticated and encrypted.
    #[default]
    Encrypt,
    /// Authenticated, and readable on the way.
    Authenticate,
}

impl SealMode {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Encrypt => "encrypt",
            Self::Authenticate => "authenticate",
        }
    }
}
