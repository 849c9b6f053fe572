//! `--explain-device`, and `--device auto`: which device a run uses, and why.

use std::io::Write;

use nobounce::hard::{self, Library};
use nobounce::{AUTO, Device, DeviceChoice};

use super::case::Memory;
use super::peer;
use super::plan::{self, Plan};

/// Puts the adapter that is nearest into a plan that asks for it, and says which and why.
pub(super) fn resolve(plan: &mut Plan) -> anyhow::Result<Option<String>> {
    let named = plan.device.clone().or_else(|| std::env::var("NOBOUNCE_DEVICE").ok());
    if named.as_deref() != Some(AUTO) {
        return Ok(None);
    }
    let DeviceChoice { name, why, adapters } = choose(plan);
    let Some(name) = name else {
        anyhow::bail!("no hardware device to use: {why} ({}); nb0 is the software NIC", adapters.join("; "));
    };
    let note = format!("device {AUTO} is {name}: {why}");
    plan.device = Some(name);
    Ok(Some(note))
}

fn choose(plan: &Plan) -> DeviceChoice {
    DeviceChoice::of((plan.memory == Memory::Gpu).then_some(0))
}

/// Says what there is, what would be used, and why.
pub(super) fn print(plan: &Plan, out: &mut dyn Write) -> anyhow::Result<()> {
    let choice = choose(plan);
    let memory = if plan.memory == Memory::Gpu { "memory of the first GPU" } else { "host memory" };
    writeln!(out, "adapters for {memory}, as --device {AUTO} ranks them:")?;
    for line in &choice.adapters {
        writeln!(out, "  {line}")?;
    }
    if choice.adapters.is_empty() {
        writeln!(out, "  the kernel shows none (/sys/class/infiniband)")?;
    }
    match Library::load() {
        Ok(library) => {
            writeln!(out, "libibverbs: {} ({})", library.path().display(), library.why())?;
            match hard::list(&library) {
                Ok(devices) if devices.is_empty() => writeln!(out, "its devices: none")?,
                Ok(devices) => {
                    writeln!(out, "its devices:")?;
                    for device in devices {
                        match device {
                            Ok(device) => writeln!(out, "  {device}")?,
                            Err(error) => writeln!(out, "  {error}")?,
                        }
                    }
                }
                Err(error) => writeln!(out, "its devices: {error}")?,
            }
        }
        Err(error) => writeln!(out, "libibverbs: {error}")?,
    }
    let named = plan.device.clone().or_else(|| std::env::var("NOBOUNCE_DEVICE").ok());
    let (name, why) = match named.as_deref() {
        Some(AUTO) => (choice.name, choice.why.as_str()),
        Some(name) => (Some(name.to_owned()), "it was named"),
        None => (Some("nb0".to_owned()), "none was named (--device, NOBOUNCE_DEVICE)"),
    };
    let Some(name) = name else {
        writeln!(out, "used: none: {why}; nb0 is the software NIC")?;
        return Ok(());
    };
    // Several are the rails of every transfer.
    plan::devices(&name).try_for_each(|name| print_used(plan, name, why, out))
}

fn print_used(plan: &Plan, name: &str, why: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out, "used: {name}: {why}")?;
    if !Device::is_hardware(name) {
        writeln!(out, "  the software NIC: the CPU moves the bytes, over UDP or shared memory")?;
        return Ok(());
    }
    let opened = peer::open(&peer::PeerArgs { device: Some(name.to_owned()), ..super::device_of(plan) });
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
