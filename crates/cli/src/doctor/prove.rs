//! `doctor --prove`: registers memory, moves bytes, and compares their path with the diagnosis.
//!
//! Both ends are in this process, or the other one is at `--peer` (`doctor --prove --serve` there).
//! The devices are the software NIC and, in this process, every adapter with an active port, which
//! talks to itself.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nobounce::memory::gpu::Gpu;
use nobounce::{ConnectOptions, Connection, Device, GpuOptions, PathTotals, Region, RemoteRegion};
use nobounce_topology::facts::{Facts, Nic, Port, Probe, Transfer};
use serde::Serialize;

const SOON: Duration = Duration::from_secs(20);
/// How long a server waits for its peer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(300);
/// Bytes of the memory on each end, and of one WRITE.
const LEN: usize = 16 << 20;
const PIECE: usize = 1 << 20;
/// How long bytes are moved for a figure.
const MEASURE: Duration = Duration::from_millis(400);
/// The software NIC, which facts have only below `nobounce run`.
const SOFTWARE: &str = "nb0";
/// WRITEs under way.
const DEPTH: usize = 8;

/// What was proved of one memory.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Proof {
    /// `GPU 0`, or `host memory`.
    pub(super) memory: String,
    /// The device.
    pub(super) nic: String,
    /// Bytes that were moved.
    pub(super) bytes: u64,
    /// Whether what arrived is what was sent.
    pub(super) verified: bool,
    /// GB/s.
    pub(super) gbs: f64,
    /// The ways out of the memory, by bytes.
    pub(super) out: String,
    /// The paths into the memory, by bytes; those of this end's device if the other end is remote.
    pub(super) inward: String,
    /// What the probes had promised.
    pub(super) promised: String,
    /// Whether it came true.
    pub(super) kept: bool,
    /// Whether bytes were staged although a direct path was promised.
    #[serde(skip)]
    staged: bool,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verified = if self.verified { "all bytes verified" } else { "WRONG BYTES" };
        write!(
            f,
            "  {} on {}: {} MB moved, {verified}, {:.2} GB/s; out: {}; in: {}; {}: {}",
            self.memory,
            self.nic,
            self.bytes / 1_000_000,
            self.gbs,
            self.out,
            self.inward,
            if self.kept { "as diagnosed" } else { "NOT AS DIAGNOSED" },
            self.promised
        )
    }
}

/// The memory of one end.
#[derive(Debug, Clone)]
enum ProofMemory {
    Host,
    Gpu { ordinal: i32, name: String, address: String },
}

impl ProofMemory {
    fn register(&self, device: &Device) -> anyhow::Result<Region> {
        match self {
            Self::Host => Ok(device.register(LEN)?),
            Self::Gpu { ordinal, .. } => Ok(device.register_gpu_on(*ordinal, LEN, GpuOptions::default())?),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Host => "host memory".to_owned(),
            Self::Gpu { name, .. } => name.clone(),
        }
    }

    /// The diagnosis from the facts: whether bytes reach it directly, and in words.
    fn promised(&self, facts: &Facts) -> (bool, String) {
        let Self::Gpu { address, .. } = self else { return (true, "direct (cpu)".to_owned()) };
        let probe =
            facts.gpus.iter().find(|gpu| gpu.address == *address).and_then(|gpu| gpu.window_probe.known());
        match probe {
            Some(probe) if probe.ok => (true, "direct (window)".to_owned()),
            Some(probe) => (false, format!("staged ({})", probe.detail)),
            None => (false, "staged (window not probed)".to_owned()),
        }
    }
}

/// Every memory to test: each GPU, or the host's where there is none.
fn places(facts: &Facts) -> Vec<ProofMemory> {
    let gpus = Gpu::list().unwrap_or_default();
    let places: Vec<ProofMemory> = gpus
        .iter()
        .map(|gpu| {
            let address = gpu.pci_address().to_owned();
            let label = facts
                .gpus
                .iter()
                .find(|fact| fact.address == address)
                .map(nobounce_topology::facts::Gpu::label);
            ProofMemory::Gpu {
                ordinal: gpu.ordinal(),
                name: label.unwrap_or_else(|| gpu.to_string()),
                address,
            }
        })
        .collect();
    if places.is_empty() { vec![ProofMemory::Host] } else { places }
}

/// Moves bytes between two devices of this process, for each kind of memory: with the software NIC,
/// and with each adapter. An adapter that cannot is reported; if none can, that is an error.
pub(super) fn here(facts: &mut Facts) -> anyhow::Result<Vec<Proof>> {
    let (mut proofs, mut failed) = (Vec::new(), None);
    for name in devices(facts) {
        match on(facts, &name) {
            Ok(more) => proofs.extend(more),
            Err(error) => {
                eprintln!("nobounce: cannot prove {name}: {error:#}");
                note_failure(facts, &name, &error);
                failed.get_or_insert(error);
            }
        }
    }
    note_proofs(facts, &proofs);
    match failed {
        Some(error) if proofs.is_empty() => Err(error),
        _ => Ok(proofs),
    }
}

/// What moved, and what did not, becomes a fact of the pair.
fn note_proofs(facts: &mut Facts, proofs: &[Proof]) {
    for proof in proofs {
        let gpu = facts.gpus.iter().find(|gpu| gpu.label() == proof.memory).map(|gpu| gpu.address.clone());
        let known = proof.nic == SOFTWARE || facts.nics.iter().any(|nic| nic.name == proof.nic);
        let Some(gpu) = gpu.filter(|_| known) else { continue };
        let probe = match (proof.verified, proof.staged) {
            (true, false) => Probe::worked(format!("{:.2} GB/s", proof.gbs)),
            (true, true) => Probe::failed(
                None,
                format!(
                    "staged, although {} was promised; out: {}; in: {}",
                    proof.promised, proof.out, proof.inward
                ),
            ),
            (false, _) => Probe::failed(None, "wrong bytes arrived"),
        };
        facts.transfers.push(Transfer { gpu, nic: proof.nic.clone(), bytes: proof.bytes, probe });
    }
}

/// Memory that was registered with the adapter before, and did not move, is a fact of its pair.
fn note_failure(facts: &mut Facts, nic: &str, error: &anyhow::Error) {
    let registered: Vec<String> =
        facts.registrations.iter().filter(|r| r.nic == nic && r.probe.ok).map(|r| r.gpu.clone()).collect();
    for gpu in registered {
        let probe = Probe::failed(None, format!("{error:#}"));
        if !facts.transfers.iter().any(|transfer| transfer.gpu == gpu && transfer.nic == nic) {
            facts.transfers.push(Transfer { gpu, nic: nic.to_owned(), bytes: 0, probe });
        }
    }
}

/// The software NIC, and the adapters that may be active.
fn devices(facts: &Facts) -> Vec<String> {
    let works =
        |nic: &&Nic| nic.ports.iter().any(Port::may_be_active) && nic.driver.as_deref() != Some("nobounce");
    std::iter::once(SOFTWARE.to_owned())
        .chain(facts.nics.iter().filter(works).map(|nic| nic.name.clone()))
        .collect()
}

fn on(facts: &Facts, name: &str) -> anyhow::Result<Vec<Proof>> {
    let near = Device::open_named(name).context("cannot open the device")?;
    let far = Device::open_named(name).context("cannot open the device a second time")?;
    let listener = far.listen(("127.0.0.1", 0)).context("cannot listen on loopback")?;
    let addr = listener.local_addr();
    let mut proofs = Vec::new();
    for place in places(facts) {
        let (other, seat) = (&listener, &place);
        let (accepted, connected) = std::thread::scope(|scope| {
            let accepting = scope.spawn(move || other.accept(SOON));
            let connected = near.connect(addr, &ConnectOptions::default());
            (accepting.join(), connected)
        });
        let passive = accepted.map_err(|_| anyhow::anyhow!("the accepting thread ended early"))??;
        let active = connected?;
        let target = seat.register(&far).with_context(|| format!("cannot register {}", seat.name()))?;
        if near.nic().hard().is_some() && !target.paths().are_direct() {
            eprintln!("nobounce: {name} cannot access {}: {}", seat.name(), target.paths());
            continue;
        }
        passive.send_region(&target)?;
        let remote = active.recv_region(SOON)?;
        let before = far.nic().path_counters().inbound;
        let mut proof = drive(&near, &active, &place, &remote, facts)?;
        let inbound = far.nic().path_counters().inbound;
        proof.inward = ways(&inbound, &before);
        let staged = inbound.staged.bytes > before.staged.bytes;
        let promised = place.promised(facts).0;
        proof.kept = proof.verified && staged != promised;
        proof.staged = staged && promised;
        if near.nic().hard().is_some() {
            // The adapter moved the bytes by DMA: the registration gives the path.
            (proof.out, proof.inward) = (target.paths().to_string(), target.paths().to_string());
            (proof.promised, proof.kept) = (target.paths().to_string(), proof.verified);
            proof.staged = false;
        }
        // Check the far end's memory itself, too, and not only what a READ returns.
        let mut bytes = vec![0; PIECE];
        target.read_at(LEN - PIECE, &mut bytes)?;
        proof.verified &= bytes == pattern(LEN - PIECE);
        proofs.push(proof);
    }
    Ok(proofs)
}

/// The same with a peer that serves.
pub(super) fn with_peer(facts: &mut Facts, peer: &str) -> anyhow::Result<Vec<Proof>> {
    let device = Device::open().context("cannot open the software NIC")?;
    let mut proofs = Vec::new();
    for place in places(facts) {
        let conn = device.connect(peer, &ConnectOptions::default()).with_context(|| {
            format!("cannot connect to {peer}; start `nobounce doctor --prove --serve` there")
        })?;
        let remote = conn.recv_region(SOON)?;
        let before = device.nic().path_counters().outbound;
        let mut proof = drive(&device, &conn, &place, &remote, facts)?;
        let outbound = device.nic().path_counters().outbound;
        proof.inward = conn_message(&conn)?;
        // The peer tells about its own end.
        let staged = outbound.staged.bytes > before.staged.bytes;
        proof.staged = staged && place.promised(facts).0;
        proof.kept = proof.verified && !proof.staged;
        proofs.push(proof);
    }
    note_proofs(facts, &proofs);
    for proof in &mut proofs {
        proof.nic = format!("{} to {peer}", proof.nic);
    }
    Ok(proofs)
}

/// Exports memory to one peer after the other, until none connects for a while.
pub(super) fn serve(facts: &Facts, addr: &str) -> anyhow::Result<()> {
    let device =
        Device::open().context("cannot open the software NIC; NOBOUNCE_ADDR selects its interface")?;
    let listener = device.listen(addr).with_context(|| format!("cannot listen on {addr}"))?;
    eprintln!(
        "nobounce: serving at {}; exits after {} s without a client",
        listener.local_addr(),
        PROBE_TIMEOUT.as_secs()
    );
    let place = places(facts).into_iter().next().unwrap_or(ProofMemory::Host);
    while let Ok(conn) = listener.accept(PROBE_TIMEOUT) {
        let region = place.register(&device)?;
        conn.send_region(&region)?;
        let before = device.nic().path_counters().inbound;
        // The peer's final message; if it disconnected instead, wait for the next peer.
        if conn.recv_message(SOON * 3).is_ok() {
            let told = format!("{} ({})", ways(&device.nic().path_counters().inbound, &before), place.name());
            let _ = conn.send_message(told.as_bytes());
        }
    }
    Ok(())
}

fn conn_message(conn: &Connection) -> anyhow::Result<String> {
    conn.send_message(b"done")?;
    Ok(String::from_utf8_lossy(&conn.recv_message(SOON)?).into_owned())
}

/// Fills our memory, writes it to the peer's for a while, reads it back, and compares.
fn drive(
    device: &Device,
    conn: &Connection,
    place: &ProofMemory,
    remote: &RemoteRegion,
    facts: &Facts,
) -> anyhow::Result<Proof> {
    let local = place.register(device).with_context(|| format!("cannot register {}", place.name()))?;
    let back = place.register(device)?;
    for at in (0..LEN).step_by(PIECE) {
        local.write_at(at, &pattern(at))?;
    }
    let before = device.nic().path_counters().outbound;
    let mut tickets = std::collections::VecDeque::new();
    let (mut moved, started) = (0_u64, Instant::now());
    let mut at = 0;
    // Everything at least once, and then for as long as the figure wants.
    while moved < LEN as u64 || started.elapsed() < MEASURE {
        if tickets.len() >= DEPTH
            && let Some(ticket) = tickets.pop_front()
        {
            conn.wait(ticket, SOON)?;
        }
        tickets.push_back(conn.write(&local, at..at + PIECE, remote, u64::try_from(at)?)?);
        moved += PIECE as u64;
        at = (at + PIECE) % LEN;
    }
    for ticket in tickets {
        conn.wait(ticket, SOON)?;
    }
    let seconds = started.elapsed().as_secs_f64();
    let out = ways(&device.nic().path_counters().outbound, &before);
    let mut verified = true;
    for at in (0..LEN).step_by(PIECE) {
        let ticket = conn.read(&back, at..at + PIECE, remote, u64::try_from(at)?)?;
        conn.wait(ticket, SOON)?;
        let mut bytes = vec![0; PIECE];
        back.read_at(at, &mut bytes)?;
        verified &= bytes == pattern(at);
    }
    ensure!(moved > 0, "no bytes moved");
    let megabytes = u32::try_from(moved / 1_000_000).unwrap_or(u32::MAX);
    Ok(Proof {
        memory: place.name(),
        nic: device.nic().name().to_owned(),
        bytes: moved,
        verified,
        gbs: f64::from(megabytes) / 1000.0 / seconds,
        out,
        inward: String::new(),
        promised: place.promised(facts).1,
        kept: verified,
        staged: false,
    })
}

/// Bytes that tell where they belong.
fn pattern(at: usize) -> Vec<u8> {
    (at as u64..)
        .step_by(8)
        .take(PIECE / 8)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect()
}

/// The ways that bytes took since `before`.
fn ways(now: &PathTotals, before: &PathTotals) -> String {
    let words: Vec<String> = now
        .list()
        .iter()
        .zip(before.list())
        .filter(|((_, now), (_, before))| now.bytes > before.bytes)
        .map(|((name, now), (_, before))| format!("{name} {} MB", (now.bytes - before.bytes) / 1_000_000))
        .collect();
    if words.is_empty() { "nothing".to_owned() } else { words.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proof(nic: &str, verified: bool, staged: bool) -> Proof {
        Proof {
            memory: "GPU 0".to_owned(),
            nic: nic.to_owned(),
            bytes: 16 << 20,
            verified,
            gbs: 2.0,
            out: "staged 16 MB".to_owned(),
            inward: "staged 16 MB".to_owned(),
            promised: "direct (window)".to_owned(),
            kept: verified && !staged,
            staged,
        }
    }

    #[test]
    fn a_staged_transfer_is_a_failed_one_where_direct_was_promised() {
        let mut facts = nobounce_topology::machines::machine("dgx-h100").unwrap();
        let before = facts.transfers.len();
        let proofs = [
            proof("mlx5_0", true, true),
            proof("mlx5_1", true, false),
            proof("mlx5_2", false, false),
            proof(SOFTWARE, true, false),
            proof("gone", true, false),
        ];
        note_proofs(&mut facts, &proofs);
        let noted: Vec<_> = facts.transfers[before..].iter().map(|noted| noted.probe.ok).collect();
        assert_eq!(noted, [false, true, false, true]);
        let first = &facts.transfers[before];
        assert!(first.probe.detail.contains("direct (window) was promised"), "{first:?}");
        // What the table says follows.
        let diagnosis = nobounce_diagnose::diagnose(&facts);
        let verdict = diagnosis.verdicts.iter().find(|v| v.gpu == first.gpu && v.nic == "mlx5_0").unwrap();
        assert_eq!(verdict.path, nobounce_diagnose::verdict::PathKind::Staged, "{verdict:?}");
    }
}
