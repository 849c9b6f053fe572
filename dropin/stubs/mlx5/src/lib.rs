//! libmlx5.so.1 with all its symbols and no implementation.
//!
//! perftest, UCX and others are linked with it and call `mlx5dv_is_supported` on every device: none
//! here is an mlx5 device.

use nobounce_dropin::endings;

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
