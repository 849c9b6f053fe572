//! Flows of nb0: connections with a queue pair each, and WRITEs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, bail};
use nobounce::nic::soft::LinkChoice;
use nobounce::{ConnectOptions, Connection, Device, Region, RemoteRegion, WaitError};

use super::flow::{FlowFigures, Flows, NB0_PORT, TIMEOUT, address};

/// Bytes of a WRITE, and WRITEs in flight.
const MESSAGE: usize = 64 << 10;
const DEPTH: usize = 64;
const MEMORY: usize = MESSAGE * DEPTH;
/// How long a sender sleeps at most until it looks whether it has to stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Connections to the receiving process.
pub(super) struct Nb0Flows {
    device: Device,
    flows: Vec<Arc<Flow>>,
    senders: Vec<JoinHandle<anyhow::Result<()>>>,
    stop: Arc<AtomicBool>,
}

struct Flow {
    connection: Connection,
    local: Region,
    remote: RemoteRegion,
    done: AtomicU64,
}

fn open() -> anyhow::Result<Device> {
    let mut config = nobounce::Config::from_env()?;
    config.link = LinkChoice::Udp;
    Ok(Device::open_with(&config)?)
}

fn options() -> ConnectOptions {
    ConnectOptions { timeout: TIMEOUT, ..ConnectOptions::default() }
}

impl Nb0Flows {
    pub(super) fn connect(count: usize, ping: bool) -> anyhow::Result<Self> {
        let device = open()?;
        let mut flows = Vec::new();
        for number in 0..count {
            let connection = device.connect(address(NB0_PORT), &options())?;
            connection.send_message(&[u8::from(ping)])?;
            let local = device.register(MEMORY)?;
            let pattern: Vec<u8> =
                (0..MEMORY).map(|at| u8::try_from((at / 7 + number) % 251).unwrap_or(0)).collect();
            local.write_at(0, &pattern)?;
            let remote = connection.recv_region(TIMEOUT)?;
            flows.push(Arc::new(Flow { connection, local, remote, done: AtomicU64::new(0) }));
        }
        Ok(Self { device, flows, senders: Vec::new(), stop: Arc::default() })
    }
}

impl Flows for Nb0Flows {
    fn acknowledged(&self) -> anyhow::Result<Vec<u64>> {
        if !self.stop.load(Ordering::Relaxed) && self.senders.iter().any(JoinHandle::is_finished) {
            bail!("an nb0 connection has failed");
        }
        Ok(self.flows.iter().map(|flow| flow.done.load(Ordering::Relaxed) * MESSAGE as u64).collect())
    }

    fn start(&mut self) -> anyhow::Result<()> {
        for flow in &self.flows {
            let (flow, stop) = (Arc::clone(flow), Arc::clone(&self.stop));
            self.senders.push(std::thread::spawn(move || flow.send(&stop)));
        }
        Ok(())
    }

    fn stop(&mut self, figures: &mut FlowFigures) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for sender in self.senders.drain(..) {
            match sender.join() {
                Ok(ended) => ended?,
                Err(_) => bail!("a sender panicked"),
            }
        }
        for flow in &self.flows {
            figures.wrong_bytes += flow.compare(&self.device)?;
        }
        figures.retransmitted = self.device.nic().soft().map_or(0, |nic| nic.counters().qps.retransmitted);
        Ok(())
    }

    fn round_trip(&mut self) -> anyhow::Result<()> {
        let flow = self.flows.first().context("no flow")?;
        let answer = flow.connection.recv(&flow.local, 8..16)?;
        let sent = flow.connection.send(&flow.local, 0..8)?;
        flow.connection.wait(answer, TIMEOUT)?;
        flow.connection.wait(sent, TIMEOUT)?;
        Ok(())
    }
}

impl Flow {
    /// WRITEs one message after the other until it has to stop, and waits for the last.
    fn send(&self, stop: &AtomicBool) -> anyhow::Result<()> {
        let (mut sent, mut done) = (0_usize, 0_usize);
        loop {
            while sent - done < DEPTH && !stop.load(Ordering::Relaxed) {
                let at = sent % DEPTH * MESSAGE;
                self.connection.write(&self.local, at..at + MESSAGE, &self.remote, at as u64)?;
                sent += 1;
            }
            if sent == done {
                return Ok(());
            }
            match self.connection.wait_any(LOOK_EVERY) {
                Ok(_) => {
                    done += 1;
                    self.done.fetch_add(1, Ordering::Relaxed);
                }
                Err(WaitError::Timeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Reads back what was written; how many bytes are wrong.
    fn compare(&self, device: &Device) -> anyhow::Result<u64> {
        let written = MESSAGE * usize::try_from(self.done.load(Ordering::Relaxed))?.min(DEPTH);
        let back = device.register(MEMORY)?;
        if written == 0 {
            return Ok(0);
        }
        let read = self.connection.read(&back, 0..written, &self.remote, 0)?;
        self.connection.wait(read, TIMEOUT)?;
        let (mut want, mut found) = (vec![0; written], vec![0; written]);
        self.local.read_at(0, &mut want)?;
        back.read_at(0, &mut found)?;
        Ok(want.iter().zip(&found).filter(|(want, found)| want != found).count() as u64)
    }
}

/// Offers memory and answers round trips, on threads of its own.
pub(super) fn listen(addr: SocketAddr) -> anyhow::Result<()> {
    let device = open()?;
    let listener = device.listen_with(addr, &options())?;
    std::thread::spawn(move || {
        loop {
            // A handshake that fails is reported by the other end.
            let Ok(connection) = listener.accept(TIMEOUT) else { continue };
            let device = device.clone();
            std::thread::spawn(move || _ = receive(&device, &connection));
        }
    });
    Ok(())
}

fn receive(device: &Device, connection: &Connection) -> anyhow::Result<()> {
    let ping = connection.recv_message(TIMEOUT)? == [1];
    let memory = device.register(MEMORY)?;
    let mut message = ping.then(|| connection.recv(&memory, 0..8)).transpose()?;
    connection.send_region(&memory)?;
    while let Some(arrived) = message {
        connection.wait(arrived, TIMEOUT)?;
        message = Some(connection.recv(&memory, 0..8)?);
        let sent = connection.send(&memory, 0..8)?;
        connection.wait(sent, TIMEOUT)?;
    }
    // Until the sender closes.
    while let Ok(_) | Err(nobounce::MessageError::Timeout(_)) = connection.recv_message(TIMEOUT) {}
    Ok(())
}
