//! The machine drawn: a tree and matrices for terminals, a picture for people.

mod matrix;
mod model;
mod peers;
mod svg;

mod text;

pub use matrix::{Matrix, MatrixRow};
pub use model::{Branch, Kind, Topology};
pub use peers::Peers;

pub use svg::svg;
pub use text::text;
