//! libefa.so.1 with all its names and nothing behind them.
//!
//! perftest and libfabric are linked with it and ask `efadv_query_device` of every device they see: no device here is one.

use nobounce_dropin::endings;

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
