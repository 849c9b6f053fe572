//! `nobounce path` and `nobounce bench --path`: an emulated network path, and nb0 beside TCP on it.
//!
//! | file | what |
//! |---|---|
//! | args | what is typed |
//! | run | programs at both ends |
//! | flow, flow_tcp, flow_nb0 | a process at one end that sends, or receives |
//! | compare | the measurements of `bench --path` |
//! | figures, table | their report |

pub(crate) mod args;
mod compare;
mod figures;
pub(crate) mod flow;
mod flow_nb0;
mod flow_tcp;
mod run;
mod table;

pub(crate) use self::compare::main as compare;
pub(crate) use self::run::main;
