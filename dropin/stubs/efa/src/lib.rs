//! libefa.so.1 with all its symbols and no implementation.
//!
//! perftest and libfabric are linked with it and call `efadv_query_device` on every device: none
//! here is an EFA device.

use nobounce_dropin::endings;

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
