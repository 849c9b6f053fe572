//! What this library costs above raw verbs, on a queue pair of a hardware device. Three methods
//! drive it by turns: the function table of libibverbs, as C's inline functions do, `nic::hard`,
//! and [`Connection`]. Each message is posted and its completion polled before the next one. Only
//! the calls differ, and other load on the CPU affects all three alike.
//!
//!     export NOBOUNCE_VERBS=target/release/dropin/libibverbs.so.1 NOBOUNCE_DEVICE=nb0
//!     cargo run --release --example verbs_cost [ROUNDS]
//!
//! Prints the best and the median round of each, in nanoseconds a message, and what they are above
//! raw verbs. `NOBOUNCE_DEVICE=mlx5_0` measures an adapter.

use std::time::{Duration, Instant};

use nobounce::nic::any::{Cq, Qp};
use nobounce::nic::work::{Operation, Remote, SendRequest, Sge};
use nobounce::{ConnectOptions, Connection, Device, Region, RemoteRegion};
use nobounce_verbs as verbs;

/// Messages of a round.
const MESSAGES: u32 = 100;
const SOON: Duration = Duration::from_secs(10);

type Error = Box<dyn std::error::Error>;

/// One message from one place to another, by one of three ways.
struct Transfer<'a> {
    connection: &'a Connection,
    local: &'a Region,
    remote: RemoteRegion,
    len: u32,
    is_inline: bool,
    bytes: Vec<u8>,
}

impl Transfer<'_> {
    fn raw(&self) -> Result<(), Error> {
        let (Qp::Hard(qp), Cq::Hard(cq)) = (self.connection.qp(0), self.connection.cq()) else {
            return Err("this is the software NIC: name a device of a libibverbs".into());
        };
        let (qp, cq) = (qp.as_ptr(), cq.as_ptr());
        // SAFETY: live objects, whose context lives as long.
        let (ops, polls) = unsafe { (&(*(*qp).context).ops, &(*(*cq).context).ops) };
        let (Some(post), Some(poll)) = (ops.post_send, polls.poll_cq) else {
            return Err("an empty table".into());
        };
        let addr = if self.is_inline { self.bytes.as_ptr().addr() as u64 } else { self.local.addr() };
        let mut sge = verbs::Sge { addr, length: self.len, lkey: self.local.mr().lkey() };
        // SAFETY: numbers, null pointers, and a union of them, for which zeroes are valid.
        let mut wr: verbs::SendWr = unsafe { std::mem::zeroed() };
        (wr.wr_id, wr.opcode, wr.send_flags) = (1, verbs::IBV_WR_RDMA_WRITE, verbs::IBV_SEND_SIGNALED);
        wr.send_flags |= if self.is_inline { verbs::IBV_SEND_INLINE } else { 0 };
        (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
        wr.wr.rdma = verbs::Rdma { remote_addr: self.remote.addr, rkey: self.remote.rkey };
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live queue pair; the request and its list live until the call returns.
        if unsafe { post(qp, &raw mut wr, &raw mut bad) } != 0 {
            return Err("the device takes no request".into());
        }
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut wc: verbs::Wc = unsafe { std::mem::zeroed() };
        // SAFETY: a live queue, and room for one.
        while unsafe { poll(cq, 1, &raw mut wc) } == 0 {}
        if wc.status == verbs::IBV_WC_SUCCESS { Ok(()) } else { Err(format!("status {}", wc.status).into()) }
    }

    fn hard(&self, got: &mut Vec<nobounce::nic::work::WorkCompletion>) -> Result<(), Error> {
        let operation = Operation::Write(Remote { addr: self.remote.addr, rkey: self.remote.rkey });
        let sges = [Sge { addr: self.local.addr(), len: self.len, lkey: self.local.mr().lkey() }];
        let request = match self.is_inline {
            true => SendRequest::inline(1, operation, &self.bytes),
            false => SendRequest::new(1, operation, &sges),
        };
        self.connection.qp(0).post_send(&request)?;
        got.clear();
        while self.connection.cq().poll(got, 64)? == 0 {}
        Ok(())
    }

    fn connection(&self) -> Result<(), Error> {
        let ticket = self.connection.write(self.local, 0..self.len as usize, &self.remote, 0)?;
        self.connection.wait(ticket, SOON)?;
        Ok(())
    }
}

fn round(mut message: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    let start = Instant::now();
    for _ in 0..MESSAGES {
        message()?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(MESSAGES))
}

fn sorted(mut times: Vec<f64>) -> Vec<f64> {
    times.sort_by(f64::total_cmp);
    times
}

fn middle(times: Vec<f64>) -> f64 {
    let count = times.len();
    sorted(times)[count / 2]
}

fn main() -> Result<(), Error> {
    let rounds: usize = std::env::args().nth(1).map_or(Ok(300), |word| word.parse())?;
    let device = Device::open()?;
    let listener = device.listen("127.0.0.1:0")?;
    let (at, near) = (listener.local_addr(), device.clone());
    // One device serves both ends: polling here drives both of them.
    let active = std::thread::spawn(move || near.connect(at, &ConnectOptions::default()));
    let passive = listener.accept(SOON)?;
    let connection = active.join().map_err(|_| "the connecting thread panicked")??;
    let (local, target) = (device.register(1 << 20)?, device.register(1 << 20)?);
    println!(
        "{} a message, one at a time, {rounds} rounds of {MESSAGES} by turns: best, median; above raw verbs: best, median of the turns",
        device.nic().name()
    );
    for len in [8_u32, 65536] {
        let is_inline = len as usize <= connection.qp(0).limits().inline.min(220);
        let bytes = vec![7; len as usize];
        let way = Transfer {
            connection: &connection,
            local: &local,
            remote: target.remote(),
            len,
            is_inline,
            bytes,
        };
        let mut times = [const { Vec::new() }; 3];
        let mut got = Vec::with_capacity(64);
        for turn in 0..rounds {
            // The first method inherits the caches of the previous one, so rotate the order.
            for at in (0..3).map(|at| (at + turn) % 3) {
                times[at].push(match at {
                    0 => round(|| way.raw())?,
                    1 => round(|| way.hard(&mut got))?,
                    _ => round(|| way.connection())?,
                });
            }
        }
        for (name, ours) in ["raw verbs", "nic::hard", "Connection"].into_iter().zip(&times) {
            // The rounds of one turn lie beside each other in time: their ratio is what loads of
            // others leave alone.
            let ratios = ours.iter().zip(&times[0]).map(|(ours, raw)| ours / raw).collect();
            let (best, median) = (sorted(ours.clone())[0], middle(ours.clone()));
            let above = |ratio: f64| (ratio - 1.0) * 100.0;
            println!(
                "{len:6} B{} {name:10}  {best:8.0} ns  {median:8.0} ns   {:+5.1} %  {:+5.1} %",
                if is_inline { ", inline" } else { "" },
                above(best / sorted(times[0].clone())[0]),
                above(middle(ratios))
            );
        }
    }
    drop(passive);
    Ok(())
}
