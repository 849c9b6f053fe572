//! What to expect: latency and bandwidth of a transfer, direct and staged, from what is plugged
//! where.
//!
//! A [`parts::Spec`] is the input; [`parts::Parts`] is a transfer that can be predicted.
//! [`model::direct`] and [`staging::staged`] predict. Every factor gives a time or a rate, so that
//! the result can name the bottleneck. docs/reference/predict-model.md has the formulae, the
//! constants and their error against published figures.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! validation published figures, each source held out
//! model      parts, route, staging, estimate, calibration, reports
//! numbers    constants, factors, least squares
//! ```
//!
//! | room | what |
//! |---|---|
//! | [`constants`], [`factor`] | every constant with its source; how factors add up |
//! | [`parts`], [`model`], [`staging`] | a transfer, its direct and its staged estimate |
//! | [`calibration`] | constants of one machine, from a bench |
#![forbid(unsafe_code)]

pub mod basis;
pub mod calibration;
pub mod cluster;
mod cluster_error;
pub mod constants;
pub mod fabric;
pub mod factor;
pub mod fitted;
pub mod interval;
mod interval_table;
mod kinds;
mod least_squares;
pub mod machine;
mod measured;
pub mod model;
pub mod parts;
mod parts_error;
mod plausible;
pub mod plot;
pub mod plot_cluster;
pub mod published;
mod rails;
pub mod report;
pub mod route;
mod seen;
pub mod slot;
pub mod soft;
mod software;
pub mod staging;
pub mod upgrade;
pub mod validation;
pub mod window;
