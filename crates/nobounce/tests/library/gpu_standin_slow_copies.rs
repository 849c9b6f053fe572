//! A copy engine slower than the retransmission timer: messages are retransmitted while their
//! copies are still in flight.
//!
//! There they come from host memory, which is at hand at once when they are sent again. Back they
//! come from GPU memory, where a sender waits for its own copy, and for another one before it can
//! repeat anything.

use crate::common::{pair, pattern, waived_on_hardware};
use fake_cuda::client::StandIn;
use nobounce::{ConnectOptions, GpuOptions};
use std::time::Duration;

/// A copy that takes longer than an acknowledgement is waited for (268 ms, at first).
const SLOW_US: u32 = 400_000;
const LONG: Duration = Duration::from_secs(60);

/// There, with messages sent more than once, and back: none is lost, none is taken twice, nothing
/// stands still.
#[test]
fn slow_copies_only_cost_time() {
    if waived_on_hardware("slow_copies_only_cost_time", "a hardware NIC places no bytes of peers' by copies")
    {
        return;
    }
    let cuda = StandIn::load();
    let (a, b) = pair("127.76.0.2", &ConnectOptions::default());
    let staged = GpuOptions { staged: true, ..GpuOptions::default() };
    let source = a.device().register(1 << 15).unwrap();
    let ours = a.device().register_gpu_on(0, 1 << 16, staged).unwrap();
    let theirs = b.device().register_gpu_on(0, 1 << 16, staged).unwrap();
    for (round, len) in (0..).zip([8, 4096, 20_000, 8]) {
        let bytes = pattern(len, round.into());
        source.write_at(5, &bytes).unwrap();
        let (here, there) = (a.recv(&ours, 0..0).unwrap(), b.recv(&theirs, 0..0).unwrap());
        cuda.set_copy_delay_us(SLOW_US);
        let write = a.write_imm(&source, 5..5 + len, &theirs.remote(), 9, round).unwrap();
        a.wait(write, LONG).unwrap_or_else(|error| panic!("{len} bytes: {error}"));
        assert_eq!(b.wait(there, LONG).unwrap().immediate, Some(round));
        let back = b.write_imm(&theirs, 9..9 + len, &ours.remote(), 30_000, round).unwrap();
        assert_eq!(a.wait(here, LONG).unwrap().immediate, Some(round), "{len} bytes");
        b.wait(back, LONG).unwrap_or_else(|error| panic!("{len} bytes: {error}"));
        cuda.set_copy_delay_us(5);
        assert!(cuda.peek(theirs.addr() + 9, len) == bytes && cuda.peek(ours.addr() + 30_000, len) == bytes);
    }
    let repeated = b.device().nic().soft().unwrap().counters().qps.duplicate_request;
    assert!(repeated > 0, "the copies were not slow enough to show anything");
}
