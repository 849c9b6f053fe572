//! Two endpoints on a virtual clock: one scenario, one sentence.

mod answers;
mod connections;
mod datagrams;
mod errors;
mod forged;
mod losses;
mod operations;
mod order;
mod patience;
mod refusals;
mod selective;
mod world;
