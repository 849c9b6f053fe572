//! `--explain-device`, and `--device auto`: which device a run uses, and why.

use std::io::Write;

use nobounce::hard::{self, Library};
use nobounce::{AUTO, Device, DeviceChoice, GpuOptions};

use super::devices::Named;
use super::peer;
use super::plan::Plan;

/// Bytes of GPU memory that are registered to see how.
const PROBE: usize = 64 << 10;
/// The software NIC, the default device.
const SOFTWARE: &str = "nb0";

/// Resolves `auto` in a plan to the nearest adapter, and reports which and why. Where no
/// device is named, reports an adapter that stays idle.
pub(super) fn resolve(plan: &mut Plan) -> anyhow::Result<Option<String>> {
    if plan.devices.are_none() && !Device::is_hardware(SOFTWARE) {
        // (The GPU's location would need CUDA, and any adapter will do here.)
        return Ok(idle(&DeviceChoice::of(None)));
    }
    if !plan.devices.are_auto() {
        return Ok(None);
    }
    let DeviceChoice { name, why, adapters } = DeviceChoice::of(plan.gpu);
    let Some(name) = name else {
        anyhow::bail!(
            "no usable hardware device: {why} ({}); use --device nb0 for the software NIC",
            adapters.join("; ")
        );
    };
    let note = format!("device {AUTO} is {name}: {why}");
    plan.devices = Named::of(Some(&name), None);
    Ok(Some(note))
}

/// Reports adapters that stay unused because the software NIC is the default.
fn idle(choice: &DeviceChoice) -> Option<String> {
    let name = choice.name.as_deref().filter(|name| *name != SOFTWARE)?;
    Some(format!(
        "{name} is idle: the default device is {SOFTWARE}, the software NIC; --device {AUTO} would use {name}, {}",
        choice.why
    ))
}

/// Says what there is, what would be used, and why.
pub(super) fn print(plan: &Plan, out: &mut dyn Write) -> anyhow::Result<()> {
    let choice = DeviceChoice::of(plan.gpu);
    print_adapters(plan, &choice, out)?;
    print_library(out)?;
    for (name, why) in used(plan, &choice) {
        match name {
            Some(name) => print_used(plan, name, why, out)?,
            None => writeln!(out, "used: none: {why}; use --device nb0 for the software NIC")?,
        }
    }
    Ok(())
}

/// The adapters of this machine as `auto` ranks them.
fn print_adapters(plan: &Plan, choice: &DeviceChoice, out: &mut dyn Write) -> anyhow::Result<()> {
    let memory = plan.gpu.map_or("host memory".to_owned(), |gpu| format!("memory of GPU {gpu}"));
    writeln!(out, "adapters for {memory}, in the order of --device {AUTO}:")?;
    for line in &choice.adapters {
        writeln!(out, "  {line}")?;
    }
    if choice.adapters.is_empty() {
        writeln!(out, "  none in /sys/class/infiniband")?;
    }
    Ok(())
}

fn print_library(out: &mut dyn Write) -> anyhow::Result<()> {
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
    Ok(())
}

/// The devices that would be used, one for each rail, and why; empty if `auto` finds none.
fn used<'a>(plan: &'a Plan, choice: &'a DeviceChoice) -> Vec<(Option<&'a str>, &'a str)> {
    if plan.devices.are_auto() {
        vec![(choice.name.as_deref(), &choice.why)]
    } else if plan.devices.are_none() {
        vec![(Some(SOFTWARE), "the default (--device and NOBOUNCE_DEVICE are not set)")]
    } else {
        plan.devices
            .names()
            .iter()
            .map(|name| (Some(name.as_str()), "set by --device or NOBOUNCE_DEVICE"))
            .collect()
    }
}

fn print_used(plan: &Plan, name: &str, why: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    writeln!(out, "used: {name}: {why}")?;
    if !Device::is_hardware(name) {
        writeln!(out, "  software NIC: the CPU moves the bytes, over UDP or shared memory")?;
        return Ok(());
    }
    let opened = peer::open(Some(name), &super::device_of(plan));
    match opened {
        Ok(device) => {
            if let Some(hard) = device.nic().hard() {
                writeln!(out, "  {}", super::describe(hard))?;
                for line in &hard.port().why_gid {
                    writeln!(out, "  {line}")?;
                }
                if let Some(gpu) = plan.gpu {
                    print_gpu_memory(&device, gpu, out)?;
                }
            }
        }
        Err(error) => writeln!(out, "  not usable: {error:#}")?,
    }
    Ok(())
}

/// How the device reaches GPU memory: registers a little of it and tries the path.
fn print_gpu_memory(device: &Device, gpu: i32, out: &mut dyn Write) -> anyhow::Result<()> {
    match device.register_gpu_on(gpu, PROBE, GpuOptions::default()) {
        Ok(region) => {
            writeln!(out, "  memory of GPU {gpu}: {}", region.paths())?;
            for refusal in super::gpu::passed_over(&region) {
                writeln!(out, "  not used: {refusal}")?;
            }
        }
        Err(error) => writeln!(out, "  memory of GPU {gpu}: {error}")?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::args::BenchArgs;
    use super::super::case::Memory;
    use super::super::flow_tests::plan_of;
    use super::*;
    use nobounce_topology::facts::Facts;
    use nobounce_topology::machines::machine;

    fn plan(gpu: Option<i32>, device: &str) -> Plan {
        let memory = gpu.map(|_| Memory::Gpu);
        plan_of(&BenchArgs { gpu, memory, device: Some(device.to_owned()), ..BenchArgs::default() })
    }

    fn adapters(plan: &Plan, choice: &DeviceChoice) -> String {
        let mut out = Vec::new();
        print_adapters(plan, choice, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn each_gpu_of_a_server_is_explained_with_the_adapter_beside_it() {
        let facts = machine("dgx-h100").unwrap();
        let mut chosen = Vec::new();
        for (gpu, at) in (0..).zip(&facts.gpus) {
            let plan = plan(Some(gpu), "auto");
            let choice = DeviceChoice::on(&facts, plan.gpu, Some(&at.address));
            let words = adapters(&plan, &choice);
            assert!(words.starts_with(&format!("adapters for memory of GPU {gpu}, ")), "{words}");
            let [(Some(name), why)] = used(&plan, &choice)[..] else { panic!("{choice:?}") };
            assert!(why.contains(&format!("GPU {gpu}")), "{why}");
            let line = words.lines().find(|line| line.trim_start().starts_with(&format!("{name}:"))).unwrap();
            assert!(line.ends_with("chosen") && line.contains("PXB") || line.contains("PIX"), "{line}");
            chosen.push(name.to_owned());
        }
        chosen.sort();
        chosen.dedup();
        assert_eq!(chosen.len(), facts.gpus.len(), "one of its own for each GPU: {chosen:?}");
    }

    #[test]
    fn an_adapter_that_lies_idle_is_told_of() {
        let facts = machine("dgx-h100").unwrap();
        let said = idle(&DeviceChoice::on(&facts, None, None)).unwrap();
        assert!(said.contains("mlx5_") && said.contains("nb0") && said.contains("--device auto"), "{said}");
        assert_eq!(idle(&DeviceChoice::on(&Facts::default(), None, None)), None);
    }

    #[test]
    fn names_are_used_as_they_are_whatever_is_nearer() {
        let facts = machine("dgx-h100").unwrap();
        let plan = plan(None, "mlx5_3,mlx5_4");
        let choice = DeviceChoice::on(&facts, plan.gpu, None);
        assert!(adapters(&plan, &choice).starts_with("adapters for host memory"));
        assert_eq!(
            used(&plan, &choice),
            ["mlx5_3", "mlx5_4"].map(|name| (Some(name), "set by --device or NOBOUNCE_DEVICE"))
        );
    }
}
