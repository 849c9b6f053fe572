//! What reports must say, and must not, on machines where a sentence was wrong before.

#[path = "common/edit.rs"]
mod edit;

use nobounce_diagnose::{Style, diagnose, report};
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
    assert!(text.contains("install DOCA-OFED, whose ib_core has the peer-memory interface"), "{text}");
}

#[test]
fn fixes_in_a_container_name_the_side() {
    let mut set = closed();
    set.push(("/kernel/peer_memory_clients", json!([])));
    set.push(("/process/container", json!("docker")));
    let facts = facts("dgx-a100", &["/kernel/modules/nvidia_peermem"], &set);
    let text = said(&facts);
    assert!(
        text.contains("on the host, not in the container")
            || text.contains("On the host, not in the container"),
        "{text}"
    );
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
