//! The timed part: what both ends do between `Ready` and `Checked`.

use std::time::Instant;

use anyhow::Context;
use nobounce::nic::work::{Operation, RecvRequest, Remote, SendRequest, Sge, WorkCompletion};
use nobounce::{Connection, RemoteRegion, WorkKind};
use nobounce_predict::calibration::LISTED_BELOW;

use super::case::{Op, Wait};
use super::exchange::Work;
use super::ring::Ring;
use super::watch::{Watch, is_receive};

/// Outstanding requests per queue pair; the connection has room for twice as many.
pub(super) const WINDOW: u64 = 64;
/// Bytes that each queue pair keeps outstanding at least, in streams of large messages.
const STREAM_BYTES: u64 = 4 << 20;
/// A stream that posts lists signals one request per list.
const LIST: usize = 16;
/// A ping-pong signals every Nth request, so that the send queue does not fill.
const SIGNAL_EVERY: u64 = 16;
/// Up to so many bytes ib_write_lat sends inline.
const PERFTEST_INLINE: usize = 220;
/// Receives kept posted in a ping-pong.
const RECEIVES: u64 = 32;

/// One end during a round.
pub(super) struct CaseEnd<'a> {
    pub(super) connection: &'a Connection,
    pub(super) ring: Ring,
    pub(super) peer: RemoteRegion,
    pub(super) work: Work,
    /// Whether this end asked for the measurement.
    pub(super) asks: bool,
}

impl CaseEnd<'_> {
    fn sge(&self, offset: usize) -> anyhow::Result<[Sge; 1]> {
        let mr = self.ring.region.mr();
        let len = u32::try_from(self.work.size).context("a message has at most 2^31 bytes")?;
        Ok([Sge { addr: mr.addr() + offset as u64, len, lkey: mr.lkey() }])
    }

    /// Stamps a message before it is sent. A READ fetches the other end's bytes, which carry no
    /// stamp.
    fn number(&self, message: u64) -> anyhow::Result<()> {
        if matches!(self.work.op, Op::Write | Op::Send) { self.ring.stamp(message) } else { Ok(()) }
    }

    /// Message number `message` of this end.
    fn operation(&self, message: u64, announce: bool) -> Operation {
        let rkey = self.peer.rkey;
        let target = Remote { addr: self.ring.remote_target(&self.peer, message), rkey };
        match self.work.op {
            Op::Write if announce => Operation::WriteImmediate(target, 0),
            Op::Write => Operation::Write(target),
            Op::Send => Operation::Send,
            Op::Read => Operation::Read(Remote { addr: self.ring.remote_source(&self.peer, message), rkey }),
            Op::Atomic => {
                // The counter is the first word of the peer's first target slot.
                Operation::FetchAdd {
                    remote: Remote { addr: self.ring.remote_target(&self.peer, 0), rkey },
                    add: 1,
                }
            }
        }
    }

    /// The scatter/gather list of message number `message`: its source, or the place of its
    /// response.
    fn local(&self, message: u64) -> anyhow::Result<[Sge; 1]> {
        match self.work.op {
            Op::Write | Op::Send => self.sge(self.ring.source(message)),
            Op::Read | Op::Atomic => self.sge(self.ring.target(message)),
        }
    }

    /// Posts a receive for message number `message`. Its `wr_id` is the index of the queue pair.
    fn post_receive(&self, qp: usize, message: u64) -> anyhow::Result<()> {
        let sges = self.sge(self.ring.target(message))?;
        let list: &[Sge] = if self.work.op == Op::Send { &sges } else { &[] };
        Ok(self.connection.qp(qp).post_recv(&RecvRequest { wr_id: qp as u64, sges: list })?)
    }

    /// One operation at a time; the requesting end gets a sample in microseconds for each.
    pub(super) fn latency(&self, messages: u64) -> anyhow::Result<Vec<f64>> {
        match (self.work.op, self.work.wait) {
            (Op::Read | Op::Atomic, _) if self.asks => self.one_by_one(messages),
            // The other end has nothing to do but to be driven.
            (Op::Read | Op::Atomic, _) => self.serve(0),
            (Op::Write | Op::Send, Wait::Cq) => self.ping_pong(messages),
            (Op::Write | Op::Send, Wait::Memory | Wait::Perftest) => self.ping_pong_on_memory(messages),
        }
    }

    /// READ or atomic, the whole operation timed.
    fn one_by_one(&self, messages: u64) -> anyhow::Result<Vec<f64>> {
        let mut samples = Vec::with_capacity(usize::try_from(messages).unwrap_or(0));
        let (mut got, mut watch) = (Vec::with_capacity(4), Watch::new(self.connection));
        for message in 0..messages {
            let sges = self.local(message)?;
            let request = SendRequest::new(1, self.operation(message, false), &sges);
            let start = Instant::now();
            self.connection.qp(0).post_send(&request)?;
            while watch.poll(&mut got)? == 0 {}
            samples.push(start.elapsed().as_secs_f64() * 1e6);
        }
        self.say_done(&mut got, &mut watch)?;
        Ok(samples)
    }

    /// SEND, or WRITE with immediate data: each end polls its completion queue for the other's
    /// message.
    fn ping_pong(&self, messages: u64) -> anyhow::Result<Vec<f64>> {
        let qp = self.connection.qp(0);
        let mut samples = Vec::with_capacity(usize::try_from(messages).unwrap_or(0));
        let (mut got, mut watch) = (Vec::with_capacity(64), Watch::new(self.connection));
        let (mut arrived, mut unsent, mut unasked) = (0, 0, 0);
        let ahead = RECEIVES.min(messages);
        for message in 0..ahead {
            self.post_receive(0, message)?;
        }
        let mut wait_for = |wanted: u64, unsent: &mut u64| -> anyhow::Result<()> {
            while arrived < wanted {
                watch.poll(&mut got)?;
                for completion in &got {
                    match completion.kind {
                        WorkKind::Receive | WorkKind::ReceiveWriteImmediate => arrived += 1,
                        _ => *unsent -= completion.wr_id,
                    }
                }
            }
            Ok(())
        };
        // Stamp it while the previous message is in flight, if that one has another slot.
        let early = self.ring.slots() > 1;
        if early {
            self.number(0)?;
        }
        let mut start = Instant::now();
        for message in 0..messages {
            if !self.asks {
                wait_for(message + 1, &mut unsent)?;
            }
            if !early {
                self.number(message)?;
            }
            let sges = self.local(message)?;
            unsent += 1;
            unasked += 1;
            let signaled = asks_for_completion(message, messages);
            let request =
                SendRequest { signaled, ..SendRequest::new(unasked, self.operation(message, true), &sges) };
            qp.post_send(&request)?;
            unasked = if signaled { 0 } else { unasked };
            // While the message is in flight, and not while the other end waits for it.
            if message + ahead < messages {
                self.post_receive(0, message + ahead)?;
            }
            if early && message + 1 < messages {
                self.number(message + 1)?;
            }
            if self.asks {
                wait_for(message + 1, &mut unsent)?;
                // One clock read per round trip, as in perftest: it is part of the measurement.
                let now = Instant::now();
                samples.push((now - start).as_secs_f64() / 2.0 * 1e6);
                start = now;
            }
        }
        self.settle(unsent)?;
        Ok(samples)
    }

    /// WRITE: each end spins on the last byte of its buffer; the engine thread drives the device.
    /// In perftest mode, each end first polls for the completion of its own message, and so drives
    /// the device itself, and short messages are inline.
    fn ping_pong_on_memory(&self, messages: u64) -> anyhow::Result<Vec<f64>> {
        let (qp, region) = (self.connection.qp(0), &self.ring.region);
        let size = usize::try_from(self.work.size)?;
        let last = |slot: usize| slot + size - 1;
        let mut samples = Vec::with_capacity(usize::try_from(messages).unwrap_or(0));
        let (mut got, mut watch) = (Vec::with_capacity(64), Watch::new(self.connection));
        let (mut unsent, mut unasked) = (0, 0);
        let as_perftest = self.work.wait == Wait::Perftest;
        let mut inline = vec![0; size];
        let is_inline = as_perftest && size <= PERFTEST_INLINE.min(qp.limits().inline);
        region.read_at(self.ring.source(0), &mut inline)?;
        // The last byte counts from 1; the guard byte there must not be taken for a message.
        region.write_at(last(self.ring.target(0)), &[0])?;
        super::exchange::say(self.connection, &super::exchange::Step::Ready)?;
        super::exchange::hear_ready(self.connection)?;
        let (sges, operation) = (self.local(0)?, self.operation(0, false));
        let awaited = last(self.ring.target(0));
        let wait_for = |number: u8, watch: &mut Watch<'_>| -> anyhow::Result<()> {
            let mut byte = [0];
            loop {
                region.read_at(awaited, &mut byte)?;
                if byte[0] == number {
                    watch.moved();
                    return Ok(());
                }
                watch.check()?;
            }
        };
        let mut start = Instant::now();
        for message in 0..messages {
            let number = u8::try_from(message % 255).unwrap_or(0) + 1;
            if !self.asks {
                wait_for(number, &mut watch)?;
            }
            if is_inline {
                inline[size - 1] = number;
            } else {
                region.write_at(last(self.ring.source(0)), &[number])?;
            }
            unsent += 1;
            unasked += 1;
            let signaled = as_perftest || asks_for_completion(message, messages);
            let request = if is_inline {
                SendRequest::inline(unasked, operation, &inline)
            } else {
                SendRequest { signaled, ..SendRequest::new(unasked, operation, &sges) }
            };
            qp.post_send(&request)?;
            if signaled {
                unasked = 0;
                // Without perftest mode, poll the completion queue only to free send-queue slots.
                while watch.poll(&mut got)? == 0 && as_perftest {}
                unsent -= got.iter().map(|completion| completion.wr_id).sum::<u64>();
            }
            if self.asks {
                wait_for(number, &mut watch)?;
                let now = Instant::now();
                samples.push((now - start).as_secs_f64() / 2.0 * 1e6);
                start = now;
            }
        }
        self.settle(unsent)?;
        Ok(samples)
    }

    /// Waits for the completions of a ping-pong's last requests. The last one is signaled, so
    /// polling drives the device until its message has left.
    fn settle(&self, mut unsent: u64) -> anyhow::Result<()> {
        let (mut got, mut watch) = (Vec::with_capacity(64), Watch::new(self.connection));
        while unsent > 0 {
            watch.poll(&mut got)?;
            unsent -= got.iter().filter(|c| !is_receive(c)).map(|c| c.wr_id).sum::<u64>();
        }
        Ok(())
    }

    /// Sends the final message in band, behind everything else.
    fn say_done(&self, got: &mut Vec<WorkCompletion>, watch: &mut Watch<'_>) -> anyhow::Result<()> {
        let remote = Remote { addr: self.peer.addr, rkey: self.peer.rkey };
        self.connection.qp(0).post_send(&SendRequest::new(0, Operation::WriteImmediate(remote, 0), &[]))?;
        while watch.poll(got)? == 0 {}
        Ok(())
    }

    /// Drives the device until the other end is done, taking `receives` messages before.
    fn serve(&self, receives: u64) -> anyhow::Result<Vec<f64>> {
        self.stream(0, receives)?;
        Ok(Vec::new())
    }

    /// Sends `sends` messages over all queue pairs with a useful number outstanding, while taking
    /// `receives` (counted for SENDs only). If the other end sends too, waits for its final
    /// message. Returns the seconds until our own messages were done and, in both directions, the
    /// other end's as well.
    pub(super) fn stream(&self, sends: u64, receives: u64) -> anyhow::Result<f64> {
        let awaits_done = receives > 0 || sends == 0;
        let qps = self.connection.lanes() as u64;
        let share = |total: u64, qp: u64| total / qps + u64::from(qp < total % qps);
        let mut lanes: Vec<Lane> =
            (0..qps).map(|qp| Lane { to_send: share(sends, qp), ..Lane::default() }).collect();
        if awaits_done {
            for (lane, qp) in lanes.iter_mut().zip(0..) {
                // One more on the first queue pair, for the final message.
                let messages = if self.work.op == Op::Send { share(receives, qp) } else { 0 };
                lane.to_receive = messages + u64::from(qp == 0);
            }
        }
        self.top_up_receives(&mut lanes, qps)?;
        let mut left = sends;
        let mut awaited = lanes.iter().map(|lane| lane.to_receive).sum::<u64>();
        let window = (STREAM_BYTES / self.work.size.max(1)).clamp(2, WINDOW);
        let (mut got, mut watch) = (Vec::with_capacity(64), Watch::new(self.connection));
        let start = Instant::now();
        let (mut said, mut seconds) = (sends == 0, 0.0);
        let mut next = 0;
        while left > 0 || awaited > 0 || !said {
            if left == 0 && !said {
                // Our part is over; the final message is outside the measured time.
                seconds = start.elapsed().as_secs_f64();
                said = true;
                let remote = Remote { addr: self.peer.addr, rkey: self.peer.rkey };
                let done = SendRequest::new(LAST_WORD, Operation::WriteImmediate(remote, 0), &[]);
                self.connection.qp(0).post_send(&done)?;
                left = 1;
            } else if !said {
                for _ in 0..lanes.len() {
                    self.top_up_sends(&mut lanes[next], next, qps, window)?;
                    next = (next + 1) % lanes.len();
                }
            }
            watch.poll(&mut got)?;
            let mut freed = false;
            for completion in &got {
                if is_receive(completion) {
                    awaited = awaited.checked_sub(1).context("more messages arrived than were sent")?;
                    lanes[usize::try_from(completion.wr_id)?].received += 1;
                    freed = true;
                } else if completion.wr_id == LAST_WORD {
                    left = 0;
                } else {
                    let (qp, count) = (completion.wr_id >> 32, completion.wr_id & 0xffff_ffff);
                    lanes[usize::try_from(qp)?].done += count;
                    left -= count;
                }
            }
            if freed {
                self.top_up_receives(&mut lanes, qps)?;
            }
        }
        if awaits_done && sends > 0 {
            seconds = start.elapsed().as_secs_f64();
        }
        Ok(seconds)
    }

    /// Posts receives in message order, until all are posted or the limit of outstanding ones is
    /// reached.
    ///
    /// A receive counts as outstanding until its completion is polled. The device frees it earlier,
    /// and would accept more than the completion queue has room for.
    fn top_up_receives(&self, lanes: &mut [Lane], qps: u64) -> anyhow::Result<()> {
        for (qp, lane) in lanes.iter_mut().enumerate() {
            while lane.posted < lane.to_receive && lane.posted - lane.received < 2 * WINDOW {
                self.post_receive(qp, lane.posted * qps + qp as u64)?;
                lane.posted += 1;
            }
        }
        Ok(())
    }

    fn top_up_sends(&self, lane: &mut Lane, qp: usize, qps: u64, window: u64) -> anyhow::Result<()> {
        let list = if self.work.size < LISTED_BELOW { LIST as u64 } else { 1 };
        let queue = self.connection.qp(qp);
        loop {
            let room = window.saturating_sub(lane.sent - lane.done).min(lane.to_send - lane.sent);
            // A list at a time, but for the end.
            if room == 0 || (room < list && lane.sent + room < lane.to_send) {
                return Ok(());
            }
            let count = room.min(list);
            let mut sges = [[Sge { addr: 0, len: 0, lkey: 0 }; 1]; LIST];
            for (i, sge) in (0..count).zip(&mut sges) {
                let message = (lane.sent + i) * qps + qp as u64;
                self.number(message)?;
                *sge = self.local(message)?;
            }
            let wr_id = ((qp as u64) << 32) | count;
            let requests: Vec<SendRequest<'_>> = (0..count)
                .zip(&sges)
                .map(|(i, sge)| {
                    let operation = self.operation((lane.sent + i) * qps + qp as u64, false);
                    SendRequest { signaled: i + 1 == count, ..SendRequest::new(wr_id, operation, sge) }
                })
                .collect();
            queue.post_sends(&requests).map_err(|(_, error)| error)?;
            lane.sent += count;
        }
    }
}

/// Whether a ping-pong request is signaled: some, so that the send queue does not fill, and the
/// last. Its number says for how many it stands.
pub(super) fn asks_for_completion(message: u64, messages: u64) -> bool {
    let count = message + 1;
    count.is_multiple_of(SIGNAL_EVERY) || count == messages
}

/// The request number of the message that ends a round.
const LAST_WORD: u64 = u64::MAX;

/// What one queue pair has to do, and how far it is.
#[derive(Default)]
struct Lane {
    to_send: u64,
    to_receive: u64,
    sent: u64,
    done: u64,
    posted: u64,
    received: u64,
}
