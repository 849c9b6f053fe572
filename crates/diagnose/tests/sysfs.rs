//! Facts from files: whole machines planted below a folder and read again, and trees that are
//! broken or meant to harm.

#[path = "common/plant.rs"]
mod plant;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nobounce_diagnose::diagnose;
use nobounce_topology::facts::{Facts, Read};
use nobounce_topology::machines;
use nobounce_topology::sysfs::{self, Root, Surroundings};

/// A folder that goes when the test does.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nobounce-topology-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn read(folder: &Path) -> Facts {
    sysfs::read(&Root::new(folder), &Surroundings::default()).unwrap()
}

/// What files do not tell is taken from the machine itself, as libraries and probes would.
fn complete(mut read: Facts, known: &Facts) -> Facts {
    read.written_by.clone_from(&known.written_by);
    read.gpus.clone_from(&known.gpus);
    read.kernel.log = known.kernel.log.clone();
    read.process.memlock_hard_bytes = known.process.memlock_hard_bytes.clone();
    read.libraries = known.libraries.clone();
    for device in &mut read.pci {
        if known.pci_device(&device.address).is_some_and(|known| known.config.is_not_recorded()) {
            device.config = Read::default();
        }
    }
    for (nic, known) in read.nics.iter_mut().zip(&known.nics) {
        nic.open_probe = known.open_probe.clone();
        nic.dma_buf_probe = known.dma_buf_probe.clone();
        nic.listed = known.listed.clone();
        for (port, known) in nic.ports.iter_mut().zip(&known.ports) {
            port.active_mtu = known.active_mtu.clone();
            if let (Some(netdev), Some(known)) = (&mut port.netdev, &known.netdev) {
                netdev.pfc = known.pfc.clone();
            }
        }
    }
    read
}

#[test]
fn machines_come_back_from_their_files() {
    for name in ["dgx-a100", "hgx-h100-roce", "dual-socket", "gh200", "workstation", "vm-flat"] {
        let folder = Folder::new(name);
        let mut known = machines::machine(name).unwrap();
        plant::plant(&known, &folder.0).unwrap();
        let found = complete(read(&folder.0), &known);
        // Files come in the order of addresses, adapters in that of their names.
        known.pci.sort_by(|a, b| a.address.cmp(&b.address));
        if let Read::Yes(nodes) = &mut known.devices {
            nodes.sort_by(|a, b| a.path.cmp(&b.path));
        }
        let mut found = found;
        if let Read::Yes(nodes) = &mut found.devices {
            nodes.sort_by(|a, b| a.path.cmp(&b.path));
        }
        // The table of options names those that are not set, and IB ports have an interface that no
        // file names.
        if let (Read::Yes(found), Read::Yes(known)) = (&mut found.kernel.options, &known.kernel.options) {
            found.retain(|name, _| known.contains_key(name));
        }
        for nic in &mut found.nics {
            for port in nic.ports.iter_mut().filter(|port| !port.is_ethernet()) {
                port.netdev = None;
            }
        }
        for (one, other) in known.to_json().lines().zip(found.to_json().lines()) {
            assert_eq!(one, other, "{name}");
        }
        assert_eq!(diagnose(&known).ids(), diagnose(&found).ids(), "{name}");
    }
}

#[test]
fn a_large_machine_is_read_and_judged_in_time() {
    // Twice the adapters of the machine that was asked for: 8 GPUs, 32 adapters, two sockets.
    let folder = Folder::new("large");
    let known = machines::machine("p5-efa").unwrap();
    plant::plant(&known, &folder.0).unwrap();
    let started = Instant::now();
    let found = read(&folder.0);
    let _ = diagnose(&found);
    let took = started.elapsed();
    assert_eq!((found.gpus.len(), found.nics.len()), (8, 32));
    // 300 ms is asked for of an optimised build; here other tests run beside.
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[test]
fn without_root_the_configuration_space_is_unknown() {
    let folder = Folder::new("unprivileged");
    let known = machines::machine("dgx-a100").unwrap();
    plant::plant(&known, &folder.0).unwrap();
    for device in &known.pci {
        let path = folder.0.join(format!("sys/bus/pci/devices/{}/config", device.address));
        if let Ok(bytes) = fs::read(&path) {
            fs::write(&path, &bytes[..64]).unwrap();
        }
    }
    let found = complete(read(&folder.0), &known);
    let ids: Vec<_> = diagnose(&found).ids().into_iter().map(|(id, _)| id).collect();
    assert_eq!(ids, ["acs-unread", "pcie-unread"]);
}

#[test]
fn broken_trees_are_survived() {
    let folder = Folder::new("broken");
    let known = machines::machine("hgx-h100-roce").unwrap();
    plant::plant(&known, &folder.0).unwrap();
    let devices = folder.0.join("sys/bus/pci/devices");
    // A link to itself, a link to nowhere, a folder instead of a file, a name that is no address,
    // bytes that are no text.
    symlink("0000:ff:1f.7", devices.join("0000:ff:1f.7")).unwrap();
    symlink("../../../nowhere", devices.join("0000:ff:1f.6")).unwrap();
    fs::create_dir_all(devices.join("0000:ff:1f.5/class")).unwrap();
    fs::create_dir_all(devices.join("not-an-address")).unwrap();
    let gpu = devices.join(&known.gpus[0].address);
    fs::write(gpu.join("resource"), [0xff_u8; 300]).unwrap();
    fs::write(gpu.join("config"), vec![0xff_u8; 4096]).unwrap();
    fs::write(gpu.join("numa_node"), "seven").unwrap();
    fs::write(gpu.join("current_link_speed"), "Unknown").unwrap();
    let port = folder.0.join("sys/class/infiniband/mlx5_0/ports/1");
    fs::write(port.join("rate"), "-nan Gb/sec").unwrap();
    fs::write(port.join("state"), "").unwrap();
    fs::write(port.join("gids/3"), vec![b'x'; 1 << 20]).unwrap();
    fs::create_dir_all(port.join("gids/9999999999999999999999")).unwrap();
    fs::write(folder.0.join("proc/self/limits"), "Max locked memory  lots").unwrap();
    fs::write(folder.0.join("proc/cpuinfo"), vec![b'a'; 1 << 20]).unwrap();
    fs::write(folder.0.join("sys/devices/system/node/node0/cpulist"), "0-4000000000").unwrap();
    // Opening a FIFO blocks.
    let fifo = gpu.join("vendor");
    fs::remove_file(&fifo).unwrap();
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let found = read(&folder.0);
    let diagnosis = diagnose(&found);
    assert!(!diagnosis.findings.is_empty());
    let _ = nobounce_diagnose::draw::svg(&nobounce_diagnose::draw::Topology::of(&found));
}

#[test]
fn parents_that_go_round_are_survived() {
    let mut facts = machines::machine("dgx-h100").unwrap();
    let addresses: Vec<String> = facts.pci.iter().map(|device| device.address.clone()).collect();
    let count = addresses.len();
    for (index, device) in facts.pci.iter_mut().enumerate() {
        device.parent = Some(addresses[(index + 1) % count].clone());
    }
    let _ = diagnose(&facts);
    let topology = nobounce_diagnose::draw::Topology::of(&facts);
    let _ = nobounce_diagnose::draw::svg(&topology);
    facts.pci[0].parent = Some(facts.pci[0].address.clone());
    let _ = diagnose(&facts);
}

#[test]
fn a_folder_that_is_no_machine_is_refused() {
    let folder = Folder::new("empty");
    let error = sysfs::read(&Root::new(&folder.0), &Surroundings::default()).unwrap_err();
    assert!(error.to_string().contains("no copy of a machine's files"), "{error}");
}

/// The machines this project is built and tried on.
#[test]
fn real_machines_without_an_adapter_are_fine() {
    for (name, wanted) in [("h200", &["no-nic"][..]), ("plain-ci", &["no-nic"])] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/facts/{name}.json"));
        let facts = Facts::from_json(&fs::read_to_string(path).unwrap()).unwrap();
        let diagnosis = diagnose(&facts);
        let ids: Vec<_> = diagnosis.ids().into_iter().map(|(id, _)| id).collect();
        assert_eq!(ids, wanted, "{name}");
        assert!(!diagnosis.direct_is_lost);
    }
}

#[test]
fn facts_files_that_are_not_are_told_apart() {
    let whole = machines::machine("gh200").unwrap().to_json();
    for cut in [0, 1, 10, 100, 1000, whole.len() / 2, whole.len() - 4] {
        let error = Facts::from_json(&whole[..cut]).unwrap_err().to_string();
        assert!(error.contains("cut off"), "{cut}: {error}");
    }
    for (text, word) in [
        ("{}", "no facts file"),
        ("[]", "no facts file"),
        ("nonsense", "cannot be understood"),
        ("{\"kind\": \"nobounce facts\", \"schema\": 99, \"written_by\": \"nobounce 7\"}", "version 99"),
        ("{\"kind\": \"nobounce facts\", \"schema\": 1, \"surprise\": 1}", "surprise"),
    ] {
        let error = Facts::from_json(text).unwrap_err().to_string();
        assert!(error.contains(word), "{text}: {error}");
    }
    // Any byte changed: an error or facts, never a panic, also not in the checks.
    let mut seed = 3_usize;
    for _ in 0..300 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut bytes = whole.clone().into_bytes();
        let at = (seed >> 20) % bytes.len();
        bytes[at] = b"0{}[]\",:x-9e"[(seed >> 8) % 12];
        if let Ok(facts) = Facts::from_json(&String::from_utf8_lossy(&bytes)) {
            let _ = diagnose(&facts);
        }
    }
}

#[test]
fn versions_come_from_python_and_debian_too() {
    let folder = Folder::new("versions");
    let put = |path: &str, text: &str| {
        let path = folder.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    put("proc/cpuinfo", "");
    put("opt/env/lib/python3.11/site-packages/nvidia_nccl_cu12-2.21.5.dist-info/METADATA", "");
    put("usr/lib/x86_64-linux-gnu/libnccl.so.2.28.9", "");
    put("usr/lib/x86_64-linux-gnu/libucp.so.0", "");
    put("usr/lib/x86_64-linux-gnu/ucx/libuct_ib.so.0", "");
    put("usr/lib/x86_64-linux-gnu/ucx/libuct_ib.a", "");
    put(
        "var/lib/dpkg/status",
        "Package: libucx-dev\nVersion: 9\n\nPackage: libucx0\nStatus: install ok\nVersion: 1.13.1-1+b1\n\n",
    );
    let read = |environment: &[(&str, &str)]| {
        let environment =
            environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let surroundings = Surroundings { environment, home: None };
        sysfs::read(&Root::new(&folder.0), &surroundings).unwrap().libraries
    };
    let version = |libraries: &nobounce_topology::facts::Libraries| {
        libraries.nccl.known().unwrap().as_ref().unwrap().version.clone().unwrap()
    };
    assert_eq!(version(&read(&[])), "2.28.9");
    let active = read(&[("VIRTUAL_ENV", "/opt/env")]);
    assert_eq!(version(&active), "2.21.5");
    let ucx = active.ucx.known().unwrap().as_ref().unwrap();
    assert_eq!(
        (ucx.version.as_deref(), ucx.modules.as_slice()),
        (Some("1.13.1"), ["ib".to_owned()].as_slice())
    );
}

#[test]
fn options_of_the_kernel_come_from_its_packed_file_too() {
    let folder = Folder::new("packed");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/readers/packed-options");
    // The first byte is the fuzzer's.
    let bytes = fs::read(corpus).unwrap().split_off(1);
    fs::create_dir_all(folder.0.join("proc")).unwrap();
    fs::write(folder.0.join("proc/cpuinfo"), "").unwrap();
    fs::write(folder.0.join("proc/config.gz"), &bytes).unwrap();
    let kernel = read(&folder.0).kernel;
    assert_eq!(
        (kernel.has_option("PCI_P2PDMA"), kernel.has_option("HSA_AMD_P2P")),
        (Some(true), Some(false))
    );
    // Cut off, it tells nothing: options that are not read are not taken for absent.
    fs::write(folder.0.join("proc/config.gz"), &bytes[..bytes.len() / 2]).unwrap();
    assert_eq!(read(&folder.0).kernel.has_option("PCI_P2PDMA"), None);
}

#[test]
fn gdrdrv_and_its_library_tell_version_and_flavour() {
    let folder = Folder::new("gdrdrv");
    let put = |path: &str, text: &str| {
        let path = folder.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    put("proc/cpuinfo", "");
    put("sys/module/nvidia/version", "580.95.05\n");
    assert_eq!(read(&folder.0).kernel.gdrdrv, Read::Yes(None));
    put("sys/module/gdrdrv/version", "2.4\n");
    let facts = read(&folder.0);
    let module = facts.kernel.gdrdrv.known().unwrap().clone().unwrap();
    assert_eq!((module.version.as_deref(), module.open), (Some("2.4"), None));
    assert_eq!(facts.libraries.gdrapi, Read::Yes(None));
    put(
        "proc/driver/gdrdrv/params",
        "Version: 2.5\nBuilt for NVIDIA driver flavor: proprietary\nUse persistent mapping: yes\n",
    );
    put("usr/lib/x86_64-linux-gnu/libgdrapi.so.2", "");
    put("usr/lib/x86_64-linux-gnu/libgdrapi.so.2.5", "");
    let facts = read(&folder.0);
    assert_eq!(facts.kernel.gdrdrv.known().unwrap().as_ref().unwrap().open, Some(false));
    let library = facts.libraries.gdrapi.known().unwrap().as_ref().unwrap();
    assert_eq!(library.version.as_deref(), Some("2.5"));
}

#[test]
fn both_limits_of_locked_memory_and_the_namespaces_are_read() {
    let folder = Folder::new("limits");
    let process = folder.0.join("proc/self");
    fs::create_dir_all(process.join("ns")).unwrap();
    fs::write(folder.0.join("proc/cpuinfo"), "").unwrap();
    fs::write(
        process.join("limits"),
        "Max locked memory         8388608              unlimited            bytes\n",
    )
    .unwrap();
    symlink("ipc:[4026531839]", process.join("ns/ipc")).unwrap();
    symlink("pid:[4026532199]", process.join("ns/pid")).unwrap();
    let found = read(&folder.0).process;
    assert_eq!((found.memlock_bytes, found.memlock_hard_bytes), (Read::Yes(Some(8 << 20)), Read::Yes(None)));
    assert_eq!((found.ipc_namespace, found.pid_namespace), (Read::Yes(false), Read::Yes(true)));
}
