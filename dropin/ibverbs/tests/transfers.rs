//! A C program does every kind of transfer, by every interface.

mod common;

use common::{Folder, run, waived};

fn transfer(name: &str, address: &str) {
    if waived() {
        return;
    }
    let folder = Folder::new(name);
    let program = folder.compile_client("transfers");
    run(folder.program(&program, address).arg(name), 60);
}

#[test]
fn reliable_connections() {
    transfer("rc", "127.40.0.1");
}

#[test]
fn unreliable_connections() {
    transfer("uc", "127.40.0.2");
}

#[test]
fn datagrams() {
    transfer("ud", "127.40.0.3");
}

#[test]
fn datagrams_over_ipv6() {
    transfer("ud", "::1");
}

#[test]
fn shared_receive_queues() {
    transfer("srq", "127.40.0.4");
}

#[test]
fn extended_queues() {
    transfer("extended", "127.40.0.5");
}

#[test]
fn events_resizing_and_reregistration_between_two_contexts() {
    transfer("events", "127.40.0.6");
}

#[test]
fn queries_and_what_is_not_offered() {
    transfer("queries", "127.40.0.7");
}

/// As NVSHMEM's proxy thread uses an adapter, between two processes.
fn proxies(link: &str, address: &str, fault: &str) {
    if waived() {
        return;
    }
    let folder = Folder::new(&format!("proxy-{link}-{}", fault.len()));
    let program = folder.compile_client("proxy");
    let mut command = folder.program(&program, address);
    command.env("NOBOUNCE_LINK", link).env("NOBOUNCE_FAULT", fault).env("NOBOUNCE_LOG", "warn");
    run(command.arg("60"), 60);
}

#[test]
fn proxies_of_a_shared_heap_over_udp() {
    proxies("udp", "127.40.0.8", "");
}

#[test]
fn proxies_of_a_shared_heap_over_udp_with_losses() {
    proxies("udp", "127.40.0.9", "loss=0.01,seed=7");
}

#[test]
fn proxies_of_a_shared_heap_over_shared_memory() {
    proxies("shm", "127.40.0.10", "");
}
