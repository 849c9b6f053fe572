//! libmlx5.so.1 with all its names and nothing behind them.
//!
//! perftest, UCX and others are linked with it and ask `mlx5dv_is_supported` of every device they see: no device here is one.

use nobounce_dropin::endings;

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
