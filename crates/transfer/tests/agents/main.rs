//! Agents in one process and in two: every byte, every tag, and what is left when one of them ends.

mod chaos;
mod death;
mod lists;
mod notifications;
mod regions;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use nobounce::{Config, Device};
use nobounce_transfer::{Agent, AgentOptions, Peer, Remote, View};

pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A device on a loopback address of its own, so that tests do not meet.
pub(crate) fn device() -> Device {
    device_with(|_| {})
}

pub(crate) fn device_with(change: impl FnOnce(&mut Config)) -> Device {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let addr = [127, 130 + high % 64, low, NEXT.fetch_add(1, Ordering::Relaxed)];
    let mut config = Config { addr: addr.into(), ..Config::from_env().unwrap() };
    change(&mut config);
    Device::open_with(&config).unwrap()
}

/// Two agents: the second is a peer of the first, and exports memory as "kv".
pub(crate) struct Pair {
    pub(crate) initiator: Agent,
    pub(crate) target: Agent,
    pub(crate) peer: Peer,
    pub(crate) local: View,
    pub(crate) exported: View,
    pub(crate) remote: Remote,
}

impl Pair {
    pub(crate) fn new(len: usize, options: &AgentOptions) -> Self {
        let target = Agent::listening(&device(), "target", "127.0.0.1:0", options.clone()).unwrap();
        let exported = target.register(len).unwrap();
        target.export("kv", &exported).unwrap();
        let initiator = Agent::new(&device(), "initiator", options.clone()).unwrap();
        let local = initiator.register(len).unwrap();
        let peer = initiator.connect(addr(&target), SOON).unwrap();
        let remote = peer.region("kv", SOON).unwrap();
        Self { initiator, target, peer, local, exported, remote }
    }
}

pub(crate) fn addr(agent: &Agent) -> SocketAddr {
    agent.local_addr().unwrap()
}

pub(crate) fn bytes_of(view: &View) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(view.len()).unwrap()];
    view.region().read_at(usize::try_from(view.offset()).unwrap(), &mut bytes).unwrap();
    bytes
}

/// Bytes that differ from page to page.
pub(crate) fn fill(view: &View, seed: u64) -> Vec<u8> {
    let word = |at: u64| (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).to_le_bytes();
    let mut bytes: Vec<u8> = (0..view.len().div_ceil(8)).flat_map(word).collect();
    bytes.truncate(usize::try_from(view.len()).unwrap());
    view.region().write_at(usize::try_from(view.offset()).unwrap(), &bytes).unwrap();
    bytes
}

/// A permutation of `0..count`.
pub(crate) fn shuffled(count: u64, seed: u64) -> Vec<u64> {
    let mut order: Vec<_> = (0..count).collect();
    order.sort_by_key(|at| (at ^ seed.rotate_left(7)).wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(31));
    order
}
