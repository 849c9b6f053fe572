//! Naive staging: `cudaMemcpy` to pageable host memory, an RDMA WRITE with immediate from there,
//! and `cudaMemcpy` out of pageable host memory at the other end.
//!
//! Double buffering in each direction: one message is copied while another is in flight. The sender
//! waits for the other end's credit before it reuses a buffer.

use std::cell::Cell;
use std::time::Instant;

use anyhow::Context;
use nobounce::memory::HostBuffer;
use nobounce::memory::gpu::{GpuBuffer, naive};
use nobounce::nic::work::{Operation, RecvRequest, Remote, SendRequest, Sge, WorkCompletion};
use nobounce::{Connection, Region, RemoteRegion};

use super::case::{CaseKind, Place};
use super::exchange::{Work, exchange_regions};
use super::gpu;
use super::ring::{self, Ring};
use super::round::Round;
use super::side::{Side, Timed};
use super::watch::{Watch, is_receive};

/// Buffers for each direction.
const BUFFERS: u64 = 2;
/// Posted receives: each message and each credit consumes one.
const RECEIVES: u64 = 4 * BUFFERS;
/// The immediate values.
const MESSAGE: u32 = 1;
const FREE: u32 = 2;

/// One end of a naive program.
pub(super) struct Naive<'a> {
    connection: &'a Connection,
    /// The messages, in GPU memory. It is registered, but the device never touches it.
    ring: Ring,
    /// The buffers: those to send from, then those to receive into.
    host: Region,
    peer: RemoteRegion,
    work: Work,
    asks: bool,
    len: usize,
    stride: usize,
    /// Receives that wait for a message.
    posted: Cell<u64>,
}

impl<'a> Naive<'a> {
    pub(super) fn new(
        connection: &'a Connection,
        ring: Ring,
        work: Work,
        asks: bool,
    ) -> anyhow::Result<Self> {
        let len = usize::try_from(work.size)?;
        let stride = len.next_multiple_of(4096).max(4096);
        let host = ring::region(connection.device(), Place::Host, stride * usize::try_from(2 * BUFFERS)?)?;
        let peer = host.remote();
        let posted = Cell::new(0);
        Ok(Self { connection, ring, host, peer, work, asks, len, stride, posted })
    }

    /// Tells the other end where our buffers are.
    pub(super) fn connect(mut self) -> anyhow::Result<Self> {
        self.peer = exchange_regions(self.connection, &self.host)?;
        Ok(self)
    }

    fn buffers(&self) -> anyhow::Result<(&GpuBuffer, &HostBuffer)> {
        self.ring.region.gpu_buffer().zip(self.host.host_buffer()).context("memory of our own has a buffer")
    }

    fn outgoing(&self, message: u64) -> usize {
        usize::try_from(message % BUFFERS).unwrap_or(0) * self.stride
    }

    fn incoming(&self, message: u64) -> usize {
        self.outgoing(message) + usize::try_from(BUFFERS).unwrap_or(0) * self.stride
    }

    /// Keeps enough receives posted.
    fn post_receives(&self) -> anyhow::Result<()> {
        while self.posted.get() < RECEIVES {
            self.connection.qp(0).post_recv(&RecvRequest { wr_id: 0, sges: &[] })?;
            self.posted.set(self.posted.get() + 1);
        }
        Ok(())
    }

    /// Polls completions, and counts the consumed receives.
    fn poll(&self, got: &mut Vec<WorkCompletion>, watch: &mut Watch<'_>) -> anyhow::Result<()> {
        watch.poll(got)?;
        let ended = got.iter().filter(|completion| is_receive(completion)).count() as u64;
        self.posted.set(self.posted.get() - ended);
        Ok(())
    }

    /// From the GPU, and off.
    fn send(&self, message: u64) -> anyhow::Result<()> {
        let (gpu, host) = self.buffers()?;
        let at = self.outgoing(message);
        naive::copy_to_host(gpu, self.ring.source(message), host, at, self.len)?;
        let mr = self.host.mr();
        let sges = [Sge { addr: mr.addr() + at as u64, len: u32::try_from(self.len)?, lkey: mr.lkey() }];
        let remote = Remote { addr: self.peer.addr + self.incoming(message) as u64, rkey: self.peer.rkey };
        let request = SendRequest::new(1, Operation::WriteImmediate(remote, MESSAGE), &sges);
        Ok(self.connection.qp(0).post_send(&request)?)
    }

    /// Into the GPU.
    fn take(&self, message: u64) -> anyhow::Result<()> {
        let (gpu, host) = self.buffers()?;
        Ok(naive::copy_to_gpu(gpu, self.ring.target(message), host, self.incoming(message), self.len)?)
    }

    /// Tells the other end that a buffer may be filled again.
    fn say_free(&self) -> anyhow::Result<()> {
        let remote = Remote { addr: self.peer.addr, rkey: self.peer.rkey };
        let request = SendRequest::new(1, Operation::WriteImmediate(remote, FREE), &[]);
        Ok(self.connection.qp(0).post_send(&request)?)
    }

    fn ping_pong(&self, messages: u64) -> anyhow::Result<Vec<f64>> {
        let mut samples = Vec::new();
        let (mut got, mut watch) = (Vec::with_capacity(64), Watch::new(self.connection));
        let (mut arrived, mut unsent) = (0, 0_u64);
        self.post_receives()?;
        let mut wait_for = |wanted: u64, unsent: &mut u64| -> anyhow::Result<()> {
            while arrived < wanted {
                self.poll(&mut got, &mut watch)?;
                for completion in &got {
                    if is_receive(completion) {
                        arrived += 1;
                    } else {
                        *unsent -= 1;
                    }
                }
            }
            Ok(())
        };
        for message in 0..messages {
            let start = Instant::now();
            if !self.asks {
                wait_for(message + 1, &mut unsent)?;
                self.take(message)?;
            }
            self.send(message)?;
            unsent += 1;
            // While the message is in flight, and not while the other end waits for it.
            self.post_receives()?;
            if self.asks {
                wait_for(message + 1, &mut unsent)?;
                self.take(message)?;
                samples.push(start.elapsed().as_secs_f64() / 2.0 * 1e6);
            }
        }
        while unsent > 0 {
            self.poll(&mut got, &mut watch)?;
            unsent -= got.iter().filter(|completion| !is_receive(completion)).count() as u64;
        }
        Ok(samples)
    }

    /// Sends and receives until all messages are in place; returns the seconds.
    fn stream(&self, sends: u64, receives: u64) -> anyhow::Result<f64> {
        let (mut got, mut watch) = (Vec::with_capacity(64), Watch::new(self.connection));
        let (mut sent, mut freed, mut taken, mut under_way) = (0, 0, 0, 0_u64);
        self.post_receives()?;
        let start = Instant::now();
        while freed < sends || taken < receives || under_way > 0 {
            if sent < sends && sent - freed < BUFFERS {
                self.send(sent)?;
                sent += 1;
                under_way += 1;
            }
            self.poll(&mut got, &mut watch)?;
            for completion in &got {
                if !is_receive(completion) {
                    under_way -= 1;
                    continue;
                }
                self.post_receives()?;
                if completion.immediate == Some(FREE) {
                    freed += 1;
                } else {
                    self.take(taken)?;
                    taken += 1;
                    self.say_free()?;
                    under_way += 1;
                }
            }
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

impl Side for Naive<'_> {
    fn prepare(&self, round: Round) -> anyhow::Result<()> {
        self.ring.prepare(round)
    }

    fn timed(&self, Round { messages, .. }: Round) -> anyhow::Result<Timed> {
        let both = self.work.kind == CaseKind::Bidirectional;
        let timed = if self.work.kind == CaseKind::Latency {
            Timed::of_latencies(self.ping_pong(messages)?, true)
        } else {
            let (sends, receives) = match (both, self.asks) {
                (true, _) => (messages, messages),
                (false, true) => (messages, 0),
                (false, false) => (0, messages),
            };
            let messages = sends + receives;
            Timed { seconds: self.stream(sends, receives)?, messages, latencies: Vec::new() }
        };
        // Copies may still be in flight. The check that follows needs them complete.
        naive::settle(self.buffers()?.0)?;
        Ok(timed)
    }

    fn check(&self, round: Round) -> Result<(), String> {
        let arrives = self.work.kind != CaseKind::Bandwidth || !self.asks;
        self.ring.check(round, if arrives { round.messages } else { 0 }, false, false)
    }

    fn checkable(&self) -> u64 {
        self.ring.checkable()
    }

    fn path(&self) -> String {
        "naive staging".to_owned()
    }

    fn memory(&self) -> &'static str {
        gpu::memory_name(self.work.place)
    }
}
