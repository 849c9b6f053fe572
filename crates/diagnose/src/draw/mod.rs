//! The machine drawn: a tree and a matrix for terminals, a picture for people.

mod matrix;
mod model;
mod svg;

mod text;

pub use matrix::{Matrix, MatrixRow};
pub use model::{Branch, Kind, Topology};

pub use svg::svg;
pub use text::text;
