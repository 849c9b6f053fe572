//! Events for the application: completion channels, asynchronous events, connection-manager events.

pub(crate) mod channel;
pub(crate) mod cm_channel;
pub(crate) mod event;
