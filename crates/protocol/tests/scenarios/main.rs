//! Two endpoints on a virtual clock: one scenario, one sentence.

mod answers;
mod connections;
mod datagrams;
mod errors;
mod forged;
mod losses;
mod operations;
mod order;
mod refusals;
mod selective;
mod timers;
mod world;
