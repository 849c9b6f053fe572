//! The objects of the verbs API.

pub(crate) mod channel;
pub(crate) mod cq;
pub(crate) mod device;
pub(crate) mod mr;
pub(crate) mod mw;
pub(crate) mod qp;
pub(crate) mod register;
pub(crate) mod srq;
pub(crate) mod xrc;
