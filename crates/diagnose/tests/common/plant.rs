//! The files of a machine, written below a folder as its kernel would show them: the other
//! direction of `sysfs::read`.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use nobounce_topology::facts::{Facts, PciDevice, Port};

/// Writes the files of a machine.
pub(crate) fn plant(facts: &Facts, root: &Path) -> io::Result<()> {
    let put = |path: &str, text: &str| -> io::Result<()> {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        fs::write(path, text)
    };
    for device in &facts.pci {
        plant_device(facts, device, root)?;
    }
    for nic in &facts.nics {
        let class = format!("sys/class/infiniband/{}", nic.name);
        let Some(device) = nic.address.as_deref().and_then(|address| facts.pci_device(address)) else {
            continue;
        };
        fs::create_dir_all(root.join(&class))?;
        symlink(
            format!("../../../{}", folder(facts, device).trim_start_matches("sys/")),
            root.join(&class).join("device"),
        )?;
        put(&format!("{class}/fw_ver"), nic.firmware.known().map_or("", String::as_str))?;
        if let Some(Some(uverbs)) = nic.uverbs.known() {
            fs::create_dir_all(root.join(format!("{}/infiniband_verbs/{uverbs}", folder(facts, device))))?;
        }
        for port in &nic.ports {
            plant_port(&put, &class, port)?;
        }
    }
    plant_machine(facts, &put)?;
    plant_kernel(facts, root, &put)?;
    for node in facts.devices.known().into_iter().flatten() {
        put(node.path.trim_start_matches('/'), "")?;
    }
    Ok(())
}

type Put<'a> = dyn Fn(&str, &str) -> io::Result<()> + 'a;

/// Where the kernel keeps a device: below its root bus and bridges.
fn folder(facts: &Facts, device: &PciDevice) -> String {
    match device.parent.as_deref().and_then(|parent| facts.pci_device(parent)) {
        Some(parent) => format!("{}/{}", folder(facts, parent), device.address),
        None => format!("sys/devices/{}/{}", device.root, device.address),
    }
}

fn plant_device(facts: &Facts, device: &PciDevice, root: &Path) -> io::Result<()> {
    let place = folder(facts, device);
    let at = root.join(&place);
    fs::create_dir_all(&at)?;
    fs::write(at.join("class"), format!("{:#08x}\n", device.class))?;
    fs::write(at.join("vendor"), format!("{:#06x}\n", device.vendor))?;
    fs::write(at.join("device"), format!("{:#06x}\n", device.device))?;
    if let Some(node) = device.numa_node.known() {
        fs::write(at.join("numa_node"), format!("{node}\n"))?;
    }
    if let Some(link) = &device.link {
        fs::write(at.join("current_link_speed"), format!("{:.1} GT/s PCIe\n", link.speed))?;
        fs::write(at.join("max_link_speed"), format!("{:.1} GT/s PCIe\n", link.max_speed))?;
        fs::write(at.join("current_link_width"), format!("{}\n", link.width))?;
        fs::write(at.join("max_link_width"), format!("{}\n", link.max_width))?;
    }
    let mut resource = String::new();
    for index in 0..13 {
        match device.bars.iter().find(|bar| bar.index == index) {
            Some(bar) => {
                let flags = if bar.prefetchable { 0x14_220c } else { 0x4_0200 };
                let start = 0x3000_0000_0000_u64 + (u64::from(index) << 40);
                resource += &format!("{start:#018x} {:#018x} {flags:#018x}\n", start + bar.bytes - 1);
            }
            None => resource += &format!("{0:#018x} {0:#018x} {0:#018x}\n", 0),
        }
    }
    fs::write(at.join("resource"), resource)?;
    if let Some(config) = device.config.known() {
        fs::write(at.join("config"), config_space(config))?;
    }
    // Links go up to the folder `sys`: one step for each part of the place but that one.
    let up = "../".repeat(place.split('/').count() - 1);
    if let Some(driver) = &device.driver {
        fs::create_dir_all(root.join(format!("sys/bus/pci/drivers/{driver}")))?;
        symlink(format!("{up}bus/pci/drivers/{driver}"), at.join("driver"))?;
    }
    if let Some(Some(iommu)) = device.iommu.known() {
        let group = format!("kernel/iommu_groups/{}", iommu.group);
        fs::create_dir_all(root.join("sys").join(&group))?;
        if let Some(kind) = &iommu.kind {
            fs::write(root.join("sys").join(&group).join("type"), format!("{kind}\n"))?;
        }
        symlink(format!("{up}{group}"), at.join("iommu_group"))?;
    }
    let list = root.join("sys/bus/pci/devices");
    fs::create_dir_all(&list)?;
    symlink(format!("../../../{}", place.trim_start_matches("sys/")), list.join(&device.address))
}

fn plant_port(put: &Put<'_>, class: &str, port: &Port) -> io::Result<()> {
    let at = format!("{class}/ports/{}", port.number);
    put(&format!("{at}/state"), &format!("4: {}\n", port.state))?;
    put(&format!("{at}/phys_state"), &format!("5: {}\n", port.physical_state))?;
    put(&format!("{at}/link_layer"), &format!("{}\n", port.link_layer))?;
    if let Some(rate) = port.rate_gbps.known() {
        put(&format!("{at}/rate"), &format!("{rate} Gb/sec ({}X NDR)\n", port.lanes.unwrap_or(4)))?;
    }
    // The table has more places than entries.
    for place in 0..16 {
        put(&format!("{at}/gids/{place}"), "0000:0000:0000:0000:0000:0000:0000:0000\n")?;
    }
    for gid in port.gids.known().into_iter().flatten() {
        put(&format!("{at}/gids/{}", gid.index), &format!("{}\n", gid.value))?;
        put(&format!("{at}/gid_attrs/types/{}", gid.index), &format!("{}\n", gid.kind))?;
        if let Some(netdev) = &gid.netdev {
            put(&format!("{at}/gid_attrs/ndevs/{}", gid.index), &format!("{netdev}\n"))?;
        }
    }
    for (name, value) in &port.counters {
        put(&format!("{at}/hw_counters/{name}"), &format!("{value}\n"))?;
    }
    if let Some(netdev) = &port.netdev {
        let net = format!("sys/class/net/{}", netdev.name);
        put(&format!("{net}/mtu"), &format!("{}\n", netdev.mtu.get().unwrap_or(1500)))?;
        put(&format!("{net}/operstate"), if netdev.up.get() == Some(true) { "up\n" } else { "down\n" })?;
        let ecn = u8::from(netdev.ecn.get() == Some(true));
        put(&format!("{net}/ecn/roce_np/enable/3"), &format!("{ecn}\n"))?;
    }
    Ok(())
}

fn plant_machine(facts: &Facts, put: &Put<'_>) -> io::Result<()> {
    let machine = &facts.machine;
    let cpu = &machine.cpu;
    let info = if cpu.vendor == "ARM" {
        format!("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: {:#x}\n", cpu.model.unwrap_or(0))
    } else {
        let flags = if facts.is_virtual() { "fpu hypervisor sse" } else { "fpu sse" };
        format!(
            "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: {}\nflags\t\t: {flags}\n",
            cpu.vendor,
            cpu.family.unwrap_or(0),
            cpu.model.unwrap_or(0),
            cpu.name
        )
    };
    put("proc/cpuinfo", &format!("{info}\n"))?;
    put("proc/sys/kernel/arch", &format!("{}\n", machine.arch))?;
    put("proc/sys/kernel/hostname", &format!("{}\n", facts.host.as_deref().unwrap_or("host")))?;
    if let Some(product) = machine.product.known() {
        put("sys/class/dmi/id/product_name", &format!("{product}\n"))?;
    }
    if let Some(Some(hypervisor)) = machine.hypervisor.known() {
        put("sys/class/dmi/id/sys_vendor", &format!("{hypervisor}\n"))?;
    }
    for node in &machine.numa {
        put(&format!("sys/devices/system/node/node{}/cpulist", node.id), &format!("{}\n", node.cpus))?;
        for cpu in nobounce_topology::cpu_list::parse(&node.cpus).unwrap_or_default() {
            let package = node.socket.unwrap_or(0);
            put(
                &format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"),
                &format!("{package}\n"),
            )?;
        }
    }
    let process = &facts.process;
    let capabilities =
        if process.ipc_lock.get() == Some(true) { "0000000000004000" } else { "0000000000000000" };
    let cpus = process.cpus.known().map_or("0", String::as_str);
    let uid = process.uid.get().unwrap_or(0);
    put(
        "proc/self/status",
        &format!(
            "Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{capabilities}\nCpus_allowed_list:\t{cpus}\n"
        ),
    )?;
    let limit = match process.memlock_bytes.known() {
        Some(Some(bytes)) => bytes.to_string(),
        _ => "unlimited".to_owned(),
    };
    put(
        "proc/self/limits",
        &format!(
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {limit}      {limit}      bytes\n"
        ),
    )?;
    let map = if process.user_namespace.get() == Some(true) { "0 100000 65536" } else { "0 0 4294967295" };
    put("proc/self/uid_map", &format!("         {map}\n"))?;
    put("proc/1/cgroup", "0::/init.scope\n")?;
    if facts.is_container() {
        put(".dockerenv", "")?;
    }
    Ok(())
}

fn plant_kernel(facts: &Facts, root: &Path, put: &Put<'_>) -> io::Result<()> {
    let kernel = &facts.kernel;
    put("proc/sys/kernel/osrelease", &format!("{}\n", kernel.release))?;
    put("proc/cmdline", &format!("{}\n", kernel.command_line.known().map_or("", String::as_str)))?;
    if let Some(options) = kernel.options.known() {
        let text: String = options.iter().map(|(name, value)| format!("CONFIG_{name}={value}\n")).collect();
        put(&format!("boot/config-{}", kernel.release), &format!("# options\n{text}"))?;
    }
    fs::create_dir_all(root.join("sys/module"))?;
    for (name, module) in kernel.modules.known().into_iter().flatten() {
        fs::create_dir_all(root.join(format!("sys/module/{name}")))?;
        if let Some(version) = &module.version {
            put(&format!("sys/module/{name}/version"), &format!("{version}\n"))?;
        }
    }
    if let Some(installed) = kernel.installed.known() {
        let text: String = installed
            .iter()
            .map(|name| format!("extra/{}.ko.zst: kernel/x.ko\n", name.replace('_', "-")))
            .collect();
        put(&format!("lib/modules/{}/modules.dep", kernel.release), &text)?;
    }
    if let Some(at_boot) = kernel.at_boot.known() {
        let text: String = at_boot.iter().map(|name| format!("{}\n", name.replace('_', "-"))).collect();
        put("etc/modules-load.d/gpu.conf", &format!("# at boot\n{text}"))?;
    }
    if kernel.peer_memory_api.get() == Some(true) {
        fs::create_dir_all(root.join("sys/kernel/mm/memory_peers"))?;
        for client in kernel.peer_memory_clients.known().into_iter().flatten() {
            put(&format!("sys/kernel/mm/memory_peers/{client}/version"), "1.0\n")?;
        }
    } else {
        put("proc/kallsyms", "0000000000000000 T ib_register_client\t[ib_core]\n")?;
    }
    if let Some(Some(module)) = kernel.nvidia.known() {
        let kind =
            if module.open == Some(true) { "Open Kernel Module for x86_64" } else { "x86_64 Kernel Module" };
        put(
            "proc/driver/nvidia/version",
            &format!("NVRM version: NVIDIA UNIX {kind}  {}  Release Build\n", module.version),
        )?;
    }
    Ok(())
}

/// A configuration space of 4096 bytes with these capabilities.
fn config_space(config: &nobounce_topology::facts::ConfigSpace) -> Vec<u8> {
    let mut bytes = vec![0_u8; 4096];
    let mut word = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    let code = |size: Option<u32>| size.map_or(0, |size| (size / 128).trailing_zeros());
    word(0x04, 0x10 << 16);
    word(0x34, 0x60);
    word(0x60, 0x10);
    word(0x64, code(config.max_payload_supported));
    let relaxed = u32::from(config.relaxed_ordering == Some(true)) << 4;
    word(0x68, relaxed | code(config.max_payload) << 5 | code(config.max_read_request) << 12);
    let mut chain: Vec<(u32, [u32; 3])> = Vec::new();
    if let Some(acs) = config.acs {
        chain.push((0x0d, [acs.control << 16, 0, 0]));
    }
    if let Some(on) = config.ats {
        chain.push((0x0f, [u32::from(on) << 31, 0, 0]));
    }
    if let Some(largest) = config.resizable_bar_max {
        chain.push((0x15, [1 << (4 + (largest >> 20).trailing_zeros()), 1 << 5, 0]));
    }
    for (index, (id, rest)) in chain.iter().enumerate() {
        let at = 0x100 + index * 0x10;
        let next = if index + 1 < chain.len() { u32::try_from(at).unwrap_or(0) + 0x10 } else { 0 };
        word(at, next << 20 | 1 << 16 | id);
        for (offset, value) in rest.iter().enumerate() {
            word(at + 4 + offset * 4, *value);
        }
    }
    bytes
}
