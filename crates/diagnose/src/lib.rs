//! Why GPUDirect is off.
//!
//! * [`diagnose`]: facts in, findings and verdicts out. Pure: the same facts give the same answer
//!   anywhere.
//! * [`draw`]: the PCI tree on a terminal and as SVG, with what was found.
//! * [`log`]: logs of NCCL and UCX, which show what was done and not what is possible.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! report  draw  log    text, pictures, logs of NCCL and UCX
//! checks  diagnosis    findings
//! verdict  storage_verdict    each GPU with each adapter, and with a file
//! finding  explain     words
//! ```
//!
//! | room | what |
//! |---|---|
//! | `checks` | one file for each subject: a new check is a function there and a text in `explain` |
//! | `severity`, `fold`, `words` | how grave a finding is, which go below another, names of devices |
//! | [`verdict`] | direct, slow or staged, with the rules of NCCL (`nccl`) and UCX (`ucx`) |
//! | [`log`], [`draw`] | logs that are read; trees that are drawn |
#![forbid(unsafe_code)]

mod checks;
mod container;
mod diagnosis;
pub mod draw;
pub mod explain;
pub mod finding;
mod fold;
pub mod fuzzing;
pub mod log;
mod lost;
mod names;
mod nccl;
mod report;
mod severity;
mod storage_report;
pub mod storage_verdict;
mod ucx;
pub mod verdict;
mod words;

pub use diagnosis::{Diagnosis, diagnose, diagnose_with_peer};
pub use report::{Style, report};
pub use storage_report::storage_report;
