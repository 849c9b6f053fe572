//! `--explain-device`, and `--device auto`: which device a run uses, and why.

use std::collections::BTreeMap;
use std::io::Write;

use nobounce::Device;
use nobounce::hard::{self, Library};
use nobounce::memory::gpu::Gpu;
use nobounce_topology::facts::Facts;
use nobounce_topology::nearest::{self, Choice};
use nobounce_topology::sysfs::{self, Root, Surroundings};

use super::case::Memory;
use super::peer;
use super::plan::Plan;

/// The word for «whichever is nearest».
pub(super) const AUTO: &str = "auto";

/// Puts the adapter that is nearest into a plan that asks for it.
pub(super) fn resolve(plan: &mut Plan) -> anyhow::Result<()> {
    if plan.device.as_deref() != Some(AUTO) {
        return Ok(());
    }
    let choice = choose(plan);
    let Some(nic) = choice.nic else {
        let seen =
            if choice.lines.is_empty() { "the kernel has none".to_owned() } else { choice.lines.join("; ") };
        anyhow::bail!("--device auto finds no hardware device to use ({seen}); nb0 is the software NIC");
    };
    plan.device = Some(nic);
    Ok(())
}

fn choose(plan: &Plan) -> Choice {
    let environment = BTreeMap::new();
    let facts = sysfs::read(&Root::new("/"), &Surroundings { environment, home: None })
        .unwrap_or_else(|_| Facts::default());
    let gpu = (plan.memory == Memory::Gpu)
        .then(|| Gpu::list().ok()?.first().map(|gpu| gpu.pci_address().to_owned()));
    nearest::nic_for(&facts, gpu.flatten().as_deref())
}

/// Says what there is, what would be used, and why.
pub(super) fn print(plan: &Plan, out: &mut dyn Write) -> anyhow::Result<()> {
    let choice = choose(plan);
    let memory = if plan.memory == Memory::Gpu { "memory of the first GPU" } else { "host memory" };
    writeln!(out, "adapters for {memory}, as --device {AUTO} ranks them:")?;
    for line in &choice.lines {
        writeln!(out, "  {line}")?;
    }
    if choice.lines.is_empty() {
        writeln!(out, "  the kernel shows none (/sys/class/infiniband)")?;
    }
    match Library::load() {
        Ok(library) => {
            writeln!(out, "libibverbs: {} ({})", library.path().display(), library.why())?;
            match hard::names(&library) {
                Ok(names) => writeln!(
                    out,
                    "its devices: {}",
                    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
                )?,
                Err(error) => writeln!(out, "its devices: {error}")?,
            }
        }
        Err(error) => writeln!(out, "libibverbs: {error}")?,
    }
    let named = plan.device.clone().or_else(|| std::env::var("NOBOUNCE_DEVICE").ok());
    let (name, why) = match named.as_deref() {
        Some(AUTO) => (choice.nic, "the best of the list"),
        Some(name) => (Some(name.to_owned()), "it was named"),
        None => (None, "none was named (--device, NOBOUNCE_DEVICE)"),
    };
    let name = name.unwrap_or_else(|| "nb0".to_owned());
    writeln!(out, "used: {name}: {why}")?;
    if !Device::is_hardware(&name) {
        writeln!(out, "  the software NIC: the CPU moves the bytes, over UDP or shared memory")?;
        return Ok(());
    }
    let opened = peer::open(&peer::PeerArgs { device: Some(name), ..super::device_of(plan) });
    match opened {
        Ok(device) => {
            if let Some(hard) = device.nic().hard() {
                writeln!(out, "  {}", super::describe(hard))?;
                for line in &hard.port().why_gid {
                    writeln!(out, "  {line}")?;
                }
            }
        }
        Err(error) => writeln!(out, "  it cannot be used: {error:#}")?,
    }
    Ok(())
}
