//! Events for the application: completion channels, asynchronous events, connection-manager events.

pub(crate) mod cm_channel;
pub(crate) mod completion_events;
pub(crate) mod event;
