//! The connection manager of a device.

use parking_lot::MutexGuard;
use std::io;

use nobounce_protocol::cm::{Accept, Agent, AgentCounters, CmConfig, CmError, CommId, Connect};
use nobounce_protocol::wire::Qpn;

use crate::links::now_ns;
use crate::process::random::random_u64;
use crate::soft::engine::Engine;
use crate::soft::engine::gsi::{LocalAgent, ServiceOwner};
use crate::soft::error::CreateQpError;
use crate::soft::events::cm_channel::CmChannel;
use crate::soft::objects::device::Device;

/// Why a service could not be bound.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The service is taken.
    #[error("service {service:#x} of {local} belongs to another process, or to another part of this one")]
    #[allow(missing_docs)]
    InUse { service: u64, local: std::net::IpAddr },
    /// The system refuses.
    #[error("cannot bind the name of service {service:#x}: {source} (too many open files? see ulimit -n)")]
    #[allow(missing_docs)]
    Os { service: u64, source: io::Error },
    /// The device is gone.
    #[error("the device was opened before a fork: the child must open its own")]
    Forked,
}

/// The connection manager of a device: sends connection requests and replies as MADs on queue pair
/// 1.
///
/// Events are reported to the given [`CmChannel`], with the given tag.
#[derive(Clone, Debug)]
pub struct Cm {
    device: Device,
}

impl Device {
    /// The device's connection manager. The device is reachable from now on.
    ///
    /// # Errors
    /// The device cannot be made reachable.
    pub fn cm(&self) -> Result<Cm, CreateQpError> {
        self.listen()?;
        let mut engine = self.shared.engines.first().lock().ok_or(CreateQpError::Forked)?;
        let config = CmConfig { slot: engine.link.slot(), ca_guid: guid(self), seed: random_u64() };
        engine.core.gsi.agent.get_or_insert_with(|| Box::new(LocalAgent::new(config)));
        drop(engine);
        Ok(Cm { device: self.clone() })
    }
}

/// The adapter's GUID, which distinguishes hosts: derived from the address.
fn guid(device: &Device) -> u64 {
    match device.local() {
        std::net::IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            u64::from_be_bytes([0x02, a, b, 0xff, 0xfe, c, d, 0x01])
        }
        std::net::IpAddr::V6(v6) => {
            let o = v6.octets();
            let mut folded: [u8; 8] = std::array::from_fn(|i| o[i].rotate_left(1) ^ o[i + 8]);
            folded[0] = (folded[0] | 0x02) & !0x01;
            u64::from_be_bytes(folded)
        }
    }
}

impl Cm {
    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Calls the agent, then sends the resulting MADs.
    fn with<T>(&self, what: impl FnOnce(&mut LocalAgent) -> Result<T, CmError>) -> Result<T, CmError> {
        let mut engine = self.device.shared.engines.first().lock().ok_or(CmError::Unknown)?;
        let result = engine.core.gsi.agent.as_deref_mut().ok_or(CmError::Unknown).and_then(what);
        self.finish(engine);
        result
    }

    fn finish(&self, mut engine: MutexGuard<'_, Engine>) {
        engine.serve_gsi(now_ns());
        engine.route_own_mads();
        let deadline = engine.unattended_deadline();
        drop(engine);
        for other in self.device.shared.engines.iter().skip(1) {
            if let Some(mut engine) = other.lock() {
                engine.route_own_mads();
                other.let_go(engine);
            }
        }
        // No poll may follow: the engine thread must know the retransmission deadline of this MAD.
        self.device.shared.engines.first().waker.wake_by(deadline);
    }

    /// Binds a service ID: no other process of this address can bind it until it is unbound.
    ///
    /// # Errors
    /// The service is taken.
    pub fn bind(&self, service: u64) -> Result<(), BindError> {
        let mut engine = self.device.shared.engines.first().lock().ok_or(BindError::Forked)?;
        let local = engine.link.local();
        match engine.link.bind_service(service) {
            Ok(true) => Ok(()),
            Ok(false) => Err(BindError::InUse { service, local }),
            Err(source) => Err(BindError::Os { service, source }),
        }
    }

    /// Releases a service ID.
    pub fn unbind(&self, service: u64) {
        if let Some(mut engine) = self.device.shared.engines.first().lock() {
            engine.link.unbind_service(service);
        }
    }

    /// Listens on a bound service; at most `backlog` requests await a reply.
    ///
    /// # Errors
    /// The service already has a listener.
    pub fn listen(&self, service: u64, backlog: usize, channel: &CmChannel, tag: u64) -> Result<(), CmError> {
        self.with(|agent| {
            agent.cm.listen(service, backlog)?;
            agent.listeners.insert(service, ServiceOwner { notices: channel.0.clone(), tag });
            Ok(())
        })
    }

    /// Stops listening.
    pub fn unlisten(&self, service: u64) {
        let _ = self.with(|agent| {
            agent.cm.unlisten(service);
            agent.listeners.remove(&service);
            Ok(())
        });
    }

    /// Sends a connection request.
    ///
    /// # Errors
    /// Too much private data, or too many communications.
    pub fn connect(&self, connect: Connect, channel: &CmChannel, tag: u64) -> Result<CommId, CmError> {
        let (local, to) = (self.device.local(), connect.to);
        self.begin(channel, tag, |cm| cm.connect(now_ns(), connect), (local, to))
    }

    /// Resolves the queue pair of a datagram service (SIDR).
    ///
    /// # Errors
    /// Too much private data, or too many communications.
    pub fn ask_service(
        &self,
        to: std::net::IpAddr,
        service: u64,
        private: Vec<u8>,
        channel: &CmChannel,
        tag: u64,
    ) -> Result<CommId, CmError> {
        let ends = (self.device.local(), to);
        self.begin(channel, tag, |cm| cm.ask_service(now_ns(), to, service, private), ends)
    }

    fn begin(
        &self,
        channel: &CmChannel,
        tag: u64,
        what: impl FnOnce(&mut Agent) -> Result<CommId, CmError>,
        (local, peer): (std::net::IpAddr, std::net::IpAddr),
    ) -> Result<CommId, CmError> {
        self.with(|agent| {
            let id = what(&mut agent.cm)?;
            agent.owners.insert(id, ServiceOwner { notices: channel.0.clone(), tag });
            agent.watch(local, peer);
            Ok(id)
        })
    }

    /// Reports further events of a communication to this channel: for a new request, or one that
    /// moves between channels.
    pub fn adopt(&self, id: CommId, channel: &CmChannel, tag: u64) {
        let _ = self.with(|agent| {
            agent.owners.insert(id, ServiceOwner { notices: channel.0.clone(), tag });
            Ok(())
        });
    }

    /// As [`adopt`](Self::adopt), for the requests to a service.
    pub fn adopt_service(&self, service: u64, channel: &CmChannel, tag: u64) {
        let _ = self.with(|agent| {
            agent.listeners.insert(service, ServiceOwner { notices: channel.0.clone(), tag });
            Ok(())
        });
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// No such request is pending, or there is too much private data.
    pub fn accept(&self, id: CommId, accept: Accept) -> Result<(), CmError> {
        self.with(|agent| agent.cm.accept(now_ns(), id, accept))
    }

    /// Replies to a service resolution request.
    ///
    /// # Errors
    /// No such request is pending, or there is too much private data.
    pub fn answer_service(
        &self,
        id: CommId,
        status: u8,
        qpn: Qpn,
        qkey: u32,
        private: Vec<u8>,
    ) -> Result<(), CmError> {
        self.with(|agent| agent.cm.answer_service(now_ns(), id, status, qpn, qkey, private))
    }

    /// Reports that the local queue pair is connected to the accepted one.
    ///
    /// # Errors
    /// No such reply is pending.
    pub fn establish(&self, id: CommId) -> Result<(), CmError> {
        self.with(|agent| agent.cm.establish(id))
    }

    /// A packet arrived on an accepted connection before its ready-to-use message.
    ///
    /// # Errors
    /// There is no such connection.
    pub fn note_traffic(&self, id: CommId) -> Result<(), CmError> {
        self.with(|agent| agent.cm.note_traffic(id))
    }

    /// Rejects a request.
    ///
    /// # Errors
    /// No such request is pending, or there is too much private data.
    pub fn reject(&self, id: CommId, reason: u16, private: Vec<u8>) -> Result<(), CmError> {
        self.with(|agent| agent.cm.reject(id, reason, private))
    }

    /// Disconnects.
    ///
    /// # Errors
    /// The connection is not established.
    pub fn disconnect(&self, id: CommId) -> Result<(), CmError> {
        self.with(|agent| agent.cm.disconnect(now_ns(), id))
    }

    /// Releases a communication: no further events are reported.
    pub fn release(&self, id: CommId) {
        let _ = self.with(|agent| {
            agent.cm.release(now_ns(), id);
            agent.owners.remove(&id);
            Ok(())
        });
    }

    /// Counters so far.
    pub fn counters(&self) -> AgentCounters {
        self.with(|agent| Ok(agent.cm.counters())).unwrap_or_default()
    }

    /// Number of known communications, including those in time-wait.
    pub fn communications(&self) -> usize {
        self.with(|agent| Ok(agent.cm.len())).unwrap_or(0)
    }
}
