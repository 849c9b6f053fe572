//! Common parts of the drop-in libraries.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! view  own_view  shared_dir                      the folders that programs look into
//! entry  endings  notice  reserve  find_object    the C boundary
//! log  testing                                    for all of them
//! ```
//!
//! | room | what |
//! |---|---|
//! | [`log`] | lines on standard error at the level of `NOBOUNCE_LOG` |
//! | [`entry`], [`endings`] | panics, cancellation and errno at the C boundary; unsupported functions |
//! | [`notice`], [`reserve`], `find_object` | waiting by descriptor flags; memory when there is none; unwinding |
//! | `view`, `own_view`, `shared_dir` | the InfiniBand folders, and where they are made |
//! | `testing` | what tests of the libraries share |

pub mod endings;
pub mod entry;
mod find_object;
pub mod log;
pub mod notice;
#[cfg(feature = "nic")]
pub mod own_view;
pub mod reserve;
#[cfg(feature = "nic")]
mod shared_dir;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "nic")]
pub mod view;
