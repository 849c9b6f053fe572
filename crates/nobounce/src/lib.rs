//! nobounce
