//! This process: its forks, its CPUs, its event descriptors.

pub(crate) mod aio;
pub(crate) mod cpu;
pub(crate) mod epoll;
pub(crate) mod eventfd;
pub(crate) mod fork;
pub(crate) mod private_file;
pub(crate) mod random;
pub(crate) mod users;
