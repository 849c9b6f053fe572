//! What reports must say, and must not, on machines where a sentence was wrong before.

#[path = "common/edit.rs"]
mod edit;

use nobounce_diagnose::{Style, diagnose, diagnose_with_peer, report};
use nobounce_topology::facts::Facts;
use nobounce_topology::machines;
use serde_json::{Value, json};

/// The changes that a machine with the closed module needs: no dma-buf.
fn closed() -> Vec<(&'static str, Value)> {
    vec![
        ("/kernel/nvidia/open", json!(false)),
        ("/gpus/*/dma_buf", json!(false)),
        ("/gpus/*/export_probe", json!({"ok": false, "detail": "CUDA_ERROR_NOT_SUPPORTED"})),
    ]
}

fn facts(base: &str, remove: &[&str], set: &[(&str, Value)]) -> Facts {
    let remove: Vec<String> = remove.iter().map(|path| (*path).to_owned()).collect();
    let set: Vec<(String, Value)> =
        set.iter().map(|(path, value)| ((*path).to_owned(), value.clone())).collect();
    edit::edit(&machines::machine(base).unwrap(), &remove, &set, base)
}

/// The whole report in one line.
fn said(facts: &Facts) -> String {
    let text = report(facts, &diagnose(facts), Style { color: false, width: 120, all: true });
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn no_variable_is_named_that_is_not_set() {
    let mut set = closed();
    set.push(("/kernel/peer_memory_clients", json!([])));
    set.push(("/libraries/nccl/version", json!("2.12.9")));
    let facts = facts("dgx-a100", &["/kernel/modules/nvidia_peermem"], &set);
    let text = said(&facts);
    assert!(!text.contains("NCCL_DMABUF_ENABLE"), "{text}");
    assert!(text.contains("NCCL 2.12 has no dma-buf support"), "{text}");
}

#[test]
fn a_tesla_with_an_old_driver_is_not_told_to_buy_another_gpu() {
    let set = [
        ("/kernel/nvidia", json!({"version": "450.80.02", "open": false})),
        ("/libraries/nvml/version", json!("450.80.02")),
        ("/gpus/*/name", json!("Tesla V100-SXM2-32GB")),
        ("/gpus/*/compute_capability", json!(70)),
        ("/gpus/*/gpudirect_rdma", json!({"unread": "the driver does not know attribute 116"})),
        ("/gpus/*/dma_buf", json!({"unread": "the driver does not know attribute 124"})),
        ("/gpus/*/export_probe", json!({"ok": false, "detail": "cuMemGetHandleForAddressRange is missing"})),
        ("/kernel/peer_memory_clients", json!([])),
    ];
    let facts = facts("dgx-a100", &["/kernel/modules/nvidia_peermem"], &set);
    let text = said(&facts);
    assert!(!text.contains("data-centre or RTX professional GPU"), "{text}");
    // Drivers before 470 do not ship nvidia_peermem.
    assert!(text.contains("modprobe nv_peer_mem") && !text.contains("modprobe nvidia_peermem"), "{text}");
}

#[test]
fn a_module_is_not_loaded_into_a_kernel_without_its_interface() {
    let mut set = closed();
    set.push(("/kernel/peer_memory_clients", json!({"unread": "no such folder"})));
    set.push(("/kernel/peer_memory_api", json!(false)));
    let facts = facts("dgx-a100", &["/kernel/modules/nvidia_peermem"], &set);
    let text = said(&facts);
    assert!(text.contains("nstall DOCA-OFED, whose ib_core has the peer-memory interface"), "{text}");
}

#[test]
fn the_other_method_is_named_in_the_right_direction() {
    let works = |text: &str, wanted: &str, wrong: &str| {
        assert!(text.contains(wanted), "{text}");
        assert!(!text.contains(wrong), "{text}");
    };
    // Peer memory works, dma-buf does not.
    works(&said(&facts("dgx-a100", &[], &closed())), "Peer memory works here", "dma-buf works here");
    // dma-buf works, peer memory does not.
    let set = [("/kernel/peer_memory_clients", json!([]))];
    let without = facts("dgx-a100", &["/kernel/modules/nvidia_peermem"], &set);
    works(&said(&without), "dma-buf works here", "Peer memory works here");
}

#[test]
fn a_failed_registration_is_not_blamed_on_an_export_that_worked() {
    let refused = json!([{"gpu": "0000:18:00.0", "nic": "mlx5_0", "way": "dma-buf", "bytes": 2_097_152,
        "probe": {"ok": false, "errno": 22, "detail": "ibv_reg_dmabuf_mr: Invalid argument"}}]);
    let set = [("/registrations", refused), ("/kernel/peer_memory_clients", json!([]))];
    let facts = facts("workstation", &["/kernel/modules/nvidia_peermem"], &set);
    let text = said(&facts);
    assert!(!text.contains("cannot be exported") && !text.contains("dmabuf-export"), "{text}");
    assert!(
        text.contains("refused GPU memory that was exported") && text.contains("Invalid argument"),
        "{text}"
    );
}

#[test]
fn links_of_one_chain_are_one_finding_with_complete_ways_out() {
    let mut set = closed();
    set.push(("/kernel/peer_memory_clients", json!([])));
    set.push(("/kernel/release", json!("5.4.0-150-generic")));
    set.push(("/kernel/ofed", json!(null)));
    set.push((
        "/nics/*/dma_buf_probe",
        json!({"ok": false, "errno": 95, "detail": "Operation not supported"}),
    ));
    let facts = facts("dgx-a100", &["/kernel/modules/nvidia_peermem"], &set);
    let found = diagnose(&facts).findings;
    let heads: Vec<_> =
        found.iter().filter(|finding| finding.under.is_none()).map(|finding| finding.id).collect();
    assert_eq!(heads, ["peermem-not-loaded"], "{found:#?}");
    let below: Vec<_> = found.iter().filter_map(|finding| Some((finding.id, finding.under?))).collect();
    assert_eq!(below.len(), 2, "{below:?}");
    assert!(below.iter().all(|(_, under)| *under == "peermem-not-loaded"), "{below:?}");
    // The easy way first, and each way complete.
    let fix = found[0].fix.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    let at = |text: &str| fix.find(text).unwrap_or_else(|| panic!("{text}: {fix}"));
    assert!(at("by peer memory") < at("by dma-buf, step 1 of 2"), "{fix}");
    assert!(at("nvidia-open") < at("by dma-buf, step 2 of 2") && fix.contains("kernel 5.12"), "{fix}");
}

#[test]
fn what_the_hardware_makes_moot_goes_below_it() {
    let set = [
        ("/nics/*/driver", json!("hfi1")),
        ("/pci/*/iommu", json!({"group": 7, "kind": "DMA-FQ"})),
        ("/nics/*/dma_buf_probe", json!({"ok": false, "errno": 95, "detail": "Operation not supported"})),
    ];
    // Neither with the module nor without it is loading it the way out.
    let without = facts("dgx-h100", &["/kernel/modules/nvidia_peermem"], &set);
    let text = said(&without);
    assert!(text.contains("error nic-no-dmabuf") && !text.contains("modprobe"), "{text}");
    let facts = facts("dgx-h100", &[], &set);
    let found = diagnose(&facts).findings;
    assert_eq!(found[0].id, "nic-no-dmabuf", "{found:#?}");
    for finding in &found[1..] {
        let is_moot = finding.id == "iommu-translates" || finding.id.starts_with("peermem");
        assert_eq!(finding.under.is_some(), is_moot, "{}", finding.id);
    }
}

#[test]
fn a_gpu_has_one_name() {
    let mut set = closed();
    set.push(("/kernel/peer_memory_clients", json!([])));
    let facts = facts("dgx-a100", &["/kernel/modules/nvidia_peermem"], &set);
    let diagnosis = diagnose(&facts);
    let address = &facts.gpus[0].address;
    for finding in &diagnosis.findings {
        assert!(!finding.title.contains(address) && !finding.why.contains(address), "{}", finding.title);
    }
    assert!(
        diagnosis.findings[0].cost.as_ref().is_some_and(|cost| cost.starts_with("GPU ")),
        "{diagnosis:#?}"
    );
}

#[test]
fn the_facts_of_the_peer_show_what_differs() {
    let own = machines::machine("hgx-h100-roce").unwrap();
    assert_eq!(diagnose_with_peer(&own, &own).ids(), diagnose(&own).ids());
    let set = [("/nics/*/ports/*/active_mtu", json!(1024)), ("/libraries/nccl/version", json!("2.20.5"))];
    let peer = facts("hgx-h100-roce", &[], &set);
    let ids: Vec<_> = diagnose_with_peer(&own, &peer).ids().into_iter().map(|(id, _)| id).collect();
    assert!(ids.contains(&"peer-mtu") && ids.contains(&"peer-version"), "{ids:?}");
    let other = machines::machine("dgx-h100").unwrap();
    let found = diagnose_with_peer(&own, &other).findings;
    assert_eq!(found[0].id, "peer-link-layer", "{found:?}");
}

#[test]
fn a_soft_limit_is_raised_where_the_hard_one_allows_it() {
    let limited = |hard: Value| {
        let set = [
            ("/process/container", json!("docker")),
            ("/process/memlock_bytes", json!(8 << 20)),
            ("/process/memlock_hard_bytes", hard),
        ];
        said(&facts("dgx-h100", &[], &set))
    };
    let text = limited(Value::Null);
    assert!(
        text.contains("ulimit -l $(ulimit -H -l)") && text.contains("its hard limit: unlimited"),
        "{text}"
    );
    // The hard limit is as small, or not known: the container has to start with another one.
    for hard in [json!(8 << 20), json!({"unread": "Permission denied"})] {
        let text = limited(hard);
        assert!(!text.contains("ulimit -H") && text.contains("--ulimit memlock=-1:-1"), "{text}");
    }
}

#[test]
fn a_container_with_a_part_of_the_gpus_says_so() {
    let set = [
        ("/process/container", json!("kubernetes")),
        ("/process/ipc_namespace", json!(true)),
        ("/devices/-", json!({"path": "/dev/nvidia-caps", "open": {"ok": true}})),
    ];
    let remove: Vec<String> = (1..8).map(|index| format!("/devices/path=~1dev~1nvidia{index}")).collect();
    let remove: Vec<&str> = remove.iter().map(String::as_str).collect();
    let text = said(&facts("dgx-h100", &remove, &set));
    assert!(text.contains("GPUs of this container: 1 of 8"), "{text}");
}

#[test]
fn the_module_that_is_loaded_is_the_one_that_is_named() {
    let mut set = closed();
    set.push(("/kernel/peer_memory_clients", json!([])));
    set.push(("/kernel/modules/nv_peer_mem", json!({})));
    let facts = facts("dgx-a100", &["/kernel/modules/nvidia_peermem"], &set);
    let text = said(&facts);
    assert!(text.contains("/sys/module/nv_peer_mem: loaded"), "{text}");
    assert!(
        !text.contains("/sys/module/nvidia_peermem: loaded") && text.contains("rmmod nv_peer_mem"),
        "{text}"
    );
}

#[test]
fn software_devices_are_no_lack_of_devices() {
    let soft = json!([{"name": "rxe0", "driver": "rxe", "ports": [{"number": 1, "state": "ACTIVE"}]}]);
    let text = said(&facts("dgx-h100", &[], &[("/nics", soft.clone())]));
    assert!(text.contains("nic-no-rdma") && text.contains("only rxe0 (rxe)"), "{text}");
    assert!(text.contains("sudo modprobe -a mlx5_ib ib_uverbs rdma_ucm"), "{text}");
    let mut set = vec![("/nics", soft), ("/process/container", json!("docker"))];
    set.push(("/kernel/modules/mlx5_ib", json!({})));
    let text = said(&facts("dgx-h100", &[], &set));
    assert!(text.contains("nic-other-namespace") && text.contains("only rxe0 (rxe), although"), "{text}");
}

#[test]
fn the_module_of_an_adapter_is_its_vendors() {
    let efa = said(&facts("p5-efa", &[], &[("/nics", json!([]))]));
    assert!(efa.contains("sudo modprobe -a efa ib_uverbs") && !efa.contains("mlx5"), "{efa}");
    let mut facts = machines::machine("dgx-h100").unwrap();
    facts.nics.clear();
    for device in facts.pci.iter_mut().filter(|device| device.is_network()) {
        (device.device, device.driver) = (0x1003, None);
    }
    let text = said(&facts);
    assert!(text.contains("sudo modprobe -a mlx4_core mlx4_ib ib_uverbs"), "{text}");
}

#[test]
fn a_refused_pair_names_the_adapters_that_register() {
    let registration = |nic: &str, ok: bool| {
        json!({"gpu": "0000:18:00.0", "nic": nic, "way": "dma-buf", "bytes": 2_097_152,
            "probe": {"ok": ok, "errno": 14, "detail": "Bad address"}})
    };
    let mut machine = machines::machine("dgx-h100").unwrap();
    let all: Vec<Value> = [("mlx5_0", true), ("mlx5_1", true), ("mlx5_2", false)]
        .into_iter()
        .map(|(nic, ok)| registration(nic, ok))
        .collect();
    machine.registrations = serde_json::from_value(json!(all)).unwrap();
    for registration in &mut machine.registrations {
        registration.gpu.clone_from(&machine.gpus[0].address);
    }
    let text = said(&machine);
    let wanted = "NCCL_IB_HCA==mlx5_0,mlx5_1 UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1";
    assert!(text.contains("For processes of GPU 0") && text.contains(wanted), "{text}");
    // Ports that are active, and no adapter that refused the GPU otherwise.
    let mut first = machine.nics[0].ports[0].clone();
    first.number = 2;
    machine.nics[0].ports.push(first);
    machine.nics[0].ports[0].state = "DOWN".to_owned();
    let mut other = machine.registrations[2].clone();
    (other.way, other.probe.ok) = ("peermem".to_owned(), true);
    other.bytes = 4096;
    machine.registrations.push(other);
    let text = said(&machine);
    let wanted = "NCCL_IB_HCA==mlx5_0,mlx5_1 UCX_NET_DEVICES=mlx5_0:2,mlx5_1:1";
    assert!(text.contains("For processes of GPU 0") && text.contains(wanted), "{text}");
}

#[test]
fn words_of_the_kernel_command_line_come_with_a_command() {
    let translated = [("/pci/*/iommu", json!({"group": 7, "kind": "DMA-FQ"}))];
    let text = said(&facts("dgx-h100", &[], &translated));
    assert!(text.contains("intel_iommu=on iommu=pt/' /etc/default/grub && sudo update-grub"), "{text}");
    let grubby = "sudo grubby --update-kernel=ALL --remove-args='iommu intel_iommu";
    assert!(text.contains(grubby) && text.contains("--args='intel_iommu=on iommu=pt'"), "{text}");
}

#[test]
fn the_open_module_is_of_the_drivers_branch() {
    for (version, package) in [
        ("550.90.07", "nvidia-driver-550-open "),
        ("570.86.15", "nvidia-open-570 "),
        ("595.45.04", "nvidia-open "),
    ] {
        let set = [("/kernel/nvidia/version", json!(version)), ("/libraries/nvml/version", json!(version))];
        let set: Vec<_> = closed().into_iter().chain(set).collect();
        let text = said(&facts("dgx-a100", &[], &set));
        assert!(text.contains(&format!("sudo apt install {package}")), "{version}: {text}");
    }
}

#[test]
fn a_driver_without_the_call_is_no_fault_of_the_pair() {
    let mut machine = machines::machine("dgx-h100").unwrap();
    let gpu = machine.gpus[0].address.clone();
    let registration = |nic: &str, ok: bool| {
        json!({"gpu": gpu, "nic": nic, "way": "dma-buf", "bytes": 2_097_152,
            "probe": {"ok": ok, "errno": 95, "detail": "Operation not supported"}})
    };
    let all = json!([registration("mlx5_0", true), registration("mlx5_2", false)]);
    machine.registrations = serde_json::from_value(all).unwrap();
    let text = said(&machine);
    assert!(text.contains("Operation not supported") && !text.contains("registration-pair"), "{text}");
}
