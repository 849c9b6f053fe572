//! Logs of NCCL and UCX as people post them.

use nobounce_diagnose::{diagnose, log};
use nobounce_topology::facts::Facts;
use nobounce_topology::machines;

fn nccl(text: &str, facts: &Facts) -> log::LogReport {
    let read = log::read_nccl(text.as_bytes(), |_| {}).unwrap();
    log::join_nccl(&read, facts, &diagnose(facts))
}

/// NVIDIA/nccl#897: one node direct, the other not; two hosts in one file, with what mpirun and a
/// clock put before.
#[test]
fn one_node_is_direct_and_the_other_is_not() {
    let text = "\
[1,0]<stdout>:node-a:25668:27396 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
[1,1]<stdout>:node-b:11:12 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.2<0>
2026-01-01T00:00:00Z node-a:25668:27396 [0] NCCL INFO comm 0x55cc rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 14000 commId 0x65 - Init COMPLETE
node-b:11:12 [1] NCCL INFO comm 0x55cd rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 44000 commId 0x65 - Init COMPLETE
node-b:11:12 [1] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'
node-a:25668:27396 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
node-a:25668:27396 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMAnode-b:11:12 [1] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [receive] via NET/IB/0
node-b:11:12 [1] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/0
node-b:11:12 [1] NCCL INFO Channel 01/0 : 1[0] -> 2[1] via P2P/IPC
something else entirely
";
    let mut facts = machines::machine("dgx-a100").unwrap();
    facts.host = Some("node-a".to_owned());
    let report = nccl(text, &facts);
    assert_eq!(report.totals.get("direct"), Some(&2));
    assert_eq!(report.totals.get("staged"), Some(&2));
    assert_eq!(report.totals.get("local"), Some(&1));
    assert!(report.direct_is_lost);
    assert_eq!(report.not_direct.len(), 1);
    let row = &report.not_direct[0];
    assert_eq!(
        (row.host.as_str(), row.rank, row.gpu.as_deref(), row.adapter.as_deref(), row.count),
        ("node-b", Some(1), Some("0000:44:00.0"), Some("mlx5_0"), 2)
    );
    assert!(row.why[0].contains("Disabled"), "{row:?}");
    assert!(report.notes.iter().any(|note| note.contains("node-b")), "{report:?}");
    assert!(
        report.text().contains("not direct: node-b, rank 1, GPU 0000:44:00.0, mlx5_0 via NET/IB (2 times)"),
        "{}",
        report.text()
    );
}

/// The old form of lines, and findings that explain them.
#[test]
fn findings_explain_a_staged_connection() {
    let mut facts = machines::machine("dgx-a100").unwrap();
    facts.host = None;
    facts.environment.insert("NCCL_NET_GDR_LEVEL".to_owned(), "LOC".to_owned());
    let text = "h:1:2 [0] NCCL INFO NCCL_NET_GDR_LEVEL set by environment to LOC\n\
                h:1:2 [0] NCCL INFO Ring 00 : 7[14000] -> 8[4000] [send] via NET/IB/0\n";
    let report = nccl(text, &facts);
    assert_eq!(report.findings, ["nccl-gdr-level"]);
    assert_eq!(report.settings, ["NCCL_NET_GDR_LEVEL=LOC on h"]);
    assert!(report.not_direct[0].why.iter().any(|why| why.contains("distance")), "{report:?}");
}

/// NVIDIA/nccl#451: no device in the container, and sockets.
#[test]
fn sockets_are_named_with_their_cause() {
    let text = "h:1:2 [0] misc/ibvwrap.cc:212 NCCL WARN Call to ibv_open_device failed\n\
                h:1:2 [0] NCCL INFO NET/IB : No device found.\n\
                h:1:2 [0] NCCL INFO Using network Socket\n\
                h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n\
                h:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.1<1> with status=12 opcode=0 len=0 vendor err 129\n";
    let report = nccl(text, &machines::machine("container").unwrap());
    assert_eq!(report.totals.get("sockets"), Some(&1));
    assert_eq!(report.problems.len(), 2);
    assert_eq!(report.fatal.iter().map(|fatal| fatal.status).collect::<Vec<_>>(), [12]);
    assert_eq!(report.findings, ["no-dev-infiniband"]);
    assert!(report.not_direct[0].why.iter().any(|why| why.contains("/dev/infiniband")), "{report:?}");
}

#[test]
fn a_log_without_nccl_says_what_to_do() {
    let report = nccl("nothing\n\n", &machines::machine("dgx-h100").unwrap());
    assert!(report.notes[0].contains("NCCL_DEBUG=INFO") && !report.direct_is_lost);
}

#[test]
fn protocols_of_ucx_are_told_apart() {
    let text = "\
[1700000000.1] [h:10:0]     ucp_worker.c:1888 UCX  INFO  ucp_context_0 inter-node cfg#2 tag(rc_mlx5/mlx5_0:1)
[1700000000.1] [h:10:0]   proto_debug.c:100  UCX  INFO  | ucp_context_0 inter-node cfg#2 | tagged message by ucp_tag_send* from cuda/GPU0 |
[1700000000.1] [h:10:0]   proto_debug.c:100  UCX  INFO  +--------+
[1700000000.1] [h:10:0]   proto_debug.c:100  UCX  INFO  |     0..2038 | short            | rc_mlx5/mlx5_0:1 |
[1700000000.1] [h:10:0]   proto_debug.c:100  UCX  INFO  | 2039..inf   | (?) rendezvous zero-copy read from remote | rc_mlx5/mlx5_0:1 |
[1700000000.1] [h:10:0]   proto_debug.c:100  UCX  INFO  | ucp_context_0 inter-node cfg#3 | tagged message by ucp_tag_send* from cuda/GPU1 |
[1700000000.1] [h:10:0]   proto_debug.c:100  UCX  INFO  | 8247..inf   | rendezvous pipeline cuda_copy, fenced write to remote, frag host | rc_mlx5/mlx5_1:1 |
[1700000000.1] [h:10:0]   ib_md.c:1311 UCX  DEBUG mlx5_1: cuda GPUDirect RDMA is not detected by checking /sys/module/nvidia_peermem/version
[1700000000.1] [h:10:0]   ib_device.c:1 UCX  ERROR mlx5_0: ibv_create_cq(cqe=4096) failed: Cannot allocate memory
";
    let facts = machines::machine("dgx-a100").unwrap();
    let read = log::read_ucx(text.as_bytes(), |_| {}).unwrap();
    let report = log::join_ucx(&read, &facts, &diagnose(&facts));
    assert_eq!(report.totals.get("direct"), Some(&1));
    assert_eq!(report.not_direct.len(), 1, "{report:?}");
    assert_eq!(report.not_direct[0].adapter.as_deref(), Some("mlx5_1"));
    assert!(report.notes.iter().any(|note| note.contains("nvidia_peermem")), "{report:?}");
    assert!(report.problems.iter().any(|(_, seen)| seen.example.contains("ibv_create_cq")));
}

/// Debian's UCX 1.13 over nb0, as it logged.
#[test]
fn an_older_ucx_is_understood() {
    let text = "\
[1794758691.204992] [vm:8922 :0]     ucp_context.c:1849 UCX  INFO  Version 1.13.1 (loaded from /lib/x86_64-linux-gnu/libucp.so.0)
[1794758691.239082] [vm:8988 :0]          parser.c:1916 UCX  INFO  UCX_* env variables: UCX_LOG_LEVEL=info UCX_NET_DEVICES=nb0:1 UCX_TLS=tcp
[1794758691.283459] [vm:8922 :0]      ucp_worker.c:1763 UCX  INFO    ep_cfg[0]: tag(sysv/memory cma/memory rc_verbs/nb0:1)
";
    let facts = machines::machine("dgx-a100").unwrap();
    let read = log::read_ucx(text.as_bytes(), |_| {}).unwrap();
    assert_eq!(read.lanes.into_iter().collect::<Vec<_>>(), [("rc_verbs/nb0:1".to_owned(), 1)]);
    let read = log::read_ucx(text.replace("rc_verbs/nb0:1", "tcp/eth0").as_bytes(), |_| {}).unwrap();
    let report = log::join_ucx(&read, &facts, &diagnose(&facts));
    assert_eq!(report.settings, ["UCX_TLS=tcp", "UCX_NET_DEVICES=nb0:1"]);
    assert!(report.direct_is_lost && report.notes.iter().any(|note| note.contains("use TCP")), "{report:?}");
}

/// Whatever is in a log, reading it ends, and memory stays bounded.
#[test]
fn noise_is_survived() {
    let mut seed = 7_u32;
    let mut next = move || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        seed >> 8
    };
    let words = [
        "NCCL ",
        "INFO ",
        "WARN ",
        " via ",
        "NET/IB/",
        "->",
        "[",
        "]",
        "0",
        "99999999999999999999",
        "rank ",
        "busId ",
        "'",
        "\n",
        "UCX  ",
        "|",
        "..",
        "cfg#",
        "(",
        ")",
        "é",
        "GPU Direct RDMA ",
        ": ",
    ];
    for _ in 0..200 {
        let text: String = (0..200).map(|_| words[usize::try_from(next()).unwrap() % words.len()]).collect();
        let _ = log::read_nccl(text.as_bytes(), |_| {}).unwrap();
        let _ = log::read_ucx(text.as_bytes(), |_| {}).unwrap();
    }
}

#[test]
fn a_network_with_a_blank_in_its_name_is_direct() {
    let text = "h:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 8[0] [send] via NET/AWS Libfabric/3/GDRDMA\n\
               h:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 8[0] [send] via NET/AWS Libfabric/3 comm 0x1 nRanks 02\n";
    let found = log::read_nccl(text.as_bytes(), |_| {}).unwrap();
    let facts = machines::machine("dgx-h100").unwrap();
    let report = log::join_nccl(&found, &facts, &diagnose(&facts));
    assert_eq!((report.totals["direct"], report.totals["staged"]), (1, 1));
}

#[test]
fn merged_adapters_have_their_names() {
    let text = "h:1:2 [0] NCCL INFO NET/IB : Using [0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} [1]mlx5_4:1/IB [RO]; OOB eth0:10.0.0.1<0>\n";
    let found = log::read_nccl(text.as_bytes(), |_| {}).unwrap();
    assert_eq!(found.adapters["h"], ["mlx5_0+mlx5_1", "mlx5_4"]);
}

/// NVIDIA/nccl#1676 by its log alone: the job's NCCL is older than the one that is installed, and
/// its settings are not the shell's.
#[test]
fn version_and_settings_of_the_job_count() {
    let mut facts = machines::machine("dgx-h100").unwrap();
    facts.host = Some("learn01".to_owned());
    facts.kernel.nvidia = nobounce_topology::facts::Read::Yes(Some(nobounce_topology::facts::NvidiaModule {
        version: "580.95.05".to_owned(),
        open: Some(false),
        ..Default::default()
    }));
    for gpu in &mut facts.gpus {
        gpu.dma_buf = nobounce_topology::facts::Read::Yes(false);
        gpu.export_probe = nobounce_topology::facts::Read::default();
    }
    facts.kernel.peer_memory_clients = nobounce_topology::facts::Read::no("no such folder");
    facts.registrations.push(nobounce_topology::facts::Registration {
        gpu: "0000:15:00.0".to_owned(),
        nic: "mlx5_0".to_owned(),
        way: "peermem".to_owned(),
        bytes: 2 << 20,
        probe: nobounce_topology::facts::Probe::worked(""),
    });
    assert!(!diagnose(&facts).ids().iter().any(|(id, _)| *id == "nccl-too-old"));
    let text = "learn01:1:1 [0] NCCL INFO NCCL_IB_PCI_RELAXED_ORDERING set by environment to 1.\n\
                learn01:1:1 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'\n\
                NCCL version 2.21.5+cuda12.4\n\
                learn01:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0\n";
    let report = nccl(text, &facts);
    assert_eq!(report.findings, ["nccl-too-old"]);
    let text = "learn01:1:1 [0] NCCL INFO NCCL_NET_GDR_LEVEL set by environment to LOC\n\
                learn01:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0\n";
    assert_eq!(nccl(text, &facts).findings, ["nccl-gdr-level"]);
}

/// NVIDIA/nccl#426, #660 and nv_peer_memory#56: errors and reasons in the words of old and new
/// versions.
#[test]
fn errors_are_known_in_all_their_forms() {
    let text = "h:1:2 [0] NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129\n\
                h:1:2 [0] NCCL WARN NET/IB: Got completion from peer 1.2.3.4 status=IBV_WC_RETRY_EXC_ERR(12) opcode=1\n\
                h:1:2 [0] t/net_ib.cc:1192 NCCL WARN NET/IB : Got completion from peer 1.2.3.4<6> with error 4, opcode 3, len 0, vendor err 81\n\
                h:1:2 [3] NCCL INFO GPU Direct RDMA Disabled for GPU 3 / HCA 0 (distance 5 > 4)\n";
    let report = nccl(text, &Facts::default());
    let counts: Vec<_> = report
        .problems
        .iter()
        .map(|(meaning, seen)| (meaning.split(':').next().unwrap(), seen.count))
        .collect();
    assert_eq!(counts, [("a GPU and an adapter are farther apart than NCCL_NET_GDR_LEVEL allows", 1)]);
    let fatal: Vec<_> = report.fatal.iter().map(|fatal| (fatal.status, fatal.seen.count)).collect();
    assert_eq!(fatal, [(4, 1), (12, 2)]);
    assert!(report.direct_is_lost, "a fatal completion ends the job");
    assert!(report.text().contains("2 times: fatal completion 12 (RETRY_EXC_ERR)"), "{}", report.text());
}

/// NVIDIA/nccl#133: NCCL 2.1 wrote no name before the level.
#[test]
fn the_oldest_logs_are_understood() {
    let text = "CY4SCH102501002:6213:6213 [4] INFO 3 -> 12 via NET/IB/0/GDRDMA\n\
                CY4SCH102501002:6201:6201 [2] INFO 7 -> 10 via NET/IB/1\n\
                2026-01-01 12:00:00 [main] INFO 3 -> 4 via a proxy\n";
    let report = nccl(text, &Facts::default());
    assert_eq!(
        (report.totals.get("direct"), report.totals.get("staged")),
        (Some(&1), Some(&1)),
        "{report:?}"
    );
    assert_eq!(report.lines, 2);
}

#[test]
fn a_fatal_completion_is_tied_to_findings() {
    let mut facts = machines::machine("dgx-h100").unwrap();
    for device in &mut facts.pci {
        device.iommu = serde_json::from_value(serde_json::json!({"group": 7, "kind": "DMA-FQ"})).unwrap();
    }
    let text =
        "h:1:2 [0] NCCL WARN NET/IB : Got completion with error 4, opcode 1, len 21938, vendor err 81\n";
    let report = nccl(text, &facts);
    assert_eq!(report.fatal[0].findings, ["iommu-translates"], "{report:?}");
    assert!(
        report.text().contains("findings here that can be the cause: iommu-translates"),
        "{}",
        report.text()
    );
}

#[test]
fn software_emulation_is_explained_and_is_not_direct() {
    let text = "\
[1700000000.1] [h:10:0]   proto_debug.c:100  UCX  INFO  | ucp_context_0 inter-node cfg#2 | remote memory write by ucp_put* from cuda/GPU0 |
[1700000000.1] [h:10:0]   proto_debug.c:100  UCX  INFO  |     0..inf | software emulation | rc_verbs/mlx5_0:1 |
[1700000000.1] [h:10:0]   ib_mlx5_log.c:177  UCX  ERROR Transport retry count exceeded on mlx5_0:1/RoCE (synd 0x15 vend 0x81 hw_synd 0/0)
";
    let facts = machines::machine("dgx-a100").unwrap();
    let read = log::read_ucx(text.as_bytes(), |_| {}).unwrap();
    let report = log::join_ucx(&read, &facts, &diagnose(&facts));
    assert!(report.direct_is_lost && !report.totals.contains_key("direct"), "{report:?}");
    assert!(report.notes.iter().any(|note| note.contains("software emulation")), "{report:?}");
    assert_eq!(report.fatal[0].status, 12, "{report:?}");
    // The table of verdicts says what the log shows.
    let mut diagnosis = diagnose(&facts);
    log::overrule(&mut diagnosis, &facts, &[report]);
    let of_nic = diagnosis.verdicts.iter().filter(|verdict| verdict.nic == "mlx5_0");
    assert!(of_nic.clone().count() > 0);
    assert!(of_nic.clone().all(|verdict| verdict.ucx.text.contains("software emulation")), "{diagnosis:?}");
}

/// kvcache-ai/Mooncake#351 and others: programs with logs of their own.
#[test]
fn messages_of_other_programs_are_known() {
    let text = "\
E0511 07:42:36 rdma_context.cpp:198] Failed to register memory 0x2e1cbac200: Bad address [14]
E0325 09:33:41 worker_pool.cpp:294] Worker: Process failed for slice (local_nic: mlx5_9): transport retry counter exceeded
epoch 12, status 4, completion of error 12
";
    let facts = machines::machine("hgx-h100-roce").unwrap();
    let read = log::read_any(text.as_bytes(), |_| {}).unwrap();
    assert_eq!(read.nccl.lines + read.ucx.lines + read.fabric.lines, 0);
    let report = log::join_other(&read.other, &facts, &diagnose(&facts));
    assert!(report.causes[0].cause.contains("virtual memory"), "{report:?}");
    assert_eq!(report.fatal.iter().map(|fatal| fatal.status).collect::<Vec<_>>(), [12]);
    assert!(report.direct_is_lost && report.text().contains("fix: "), "{}", report.text());
}

/// Without facts that explain it, staged connections get their usual causes; a routed GID is none
/// of a lost answer's.
#[test]
fn causes_fit_the_line_and_the_facts() {
    let text = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0\n\
                h:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<1> with status=12 opcode=0 len=0 vendor err 129 localGid ::ffff:10.0.0.1 remoteGids::ffff:10.0.0.2\n";
    let facts = Facts::default();
    let read = log::read_nccl(text.as_bytes(), |_| {}).unwrap();
    let report = log::join_nccl(&read, &facts, &diagnose(&facts));
    let of = |begin: &str| report.causes.iter().find(|cause| cause.problem.contains(begin)).unwrap();
    assert!(of("status 12").cause.contains("MTU"), "{report:?}");
    assert!(of("GDRDMA").fix.to_string().contains("nvidia_peermem"), "{report:?}");
}

/// The log says which adapters NCCL chose.
#[test]
fn adapters_that_nccl_leaves_out_are_named() {
    let text = "h:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE; OOB eth0:10.0.0.1<0>\n";
    let facts = machines::machine("hgx-h100-roce").unwrap();
    let read = log::read_nccl(text.as_bytes(), |_| {}).unwrap();
    let report = log::join_nccl(&read, &facts, &diagnose(&facts));
    let note = report.notes.iter().find(|note| note.contains("NCCL uses mlx5_0 and mlx5_1"));
    assert!(note.is_some_and(|note| note.contains("and not mlx5_2")), "{report:?}");
}

/// NVIDIA/nccl-tests#245: the plugin switches GPUDirect off.
#[test]
fn logs_of_libfabric_are_read() {
    let text = "[0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)\n\
                [0] NCCL INFO NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR\n";
    let facts = machines::machine("p5-efa").unwrap();
    let read = log::read_fabric(text.as_bytes(), |_| {}).unwrap();
    let report = log::join_fabric(&read, &facts, &diagnose(&facts));
    assert!(report.direct_is_lost, "{report:?}");
    assert!(report.notes.iter().any(|note| note.contains("provider efa")), "{report:?}");
    let read = log::read_fabric(&b"hello\n"[..], |_| {}).unwrap();
    let report = log::join_fabric(&read, &facts, &diagnose(&facts));
    assert!(report.notes[0].contains("no line of libfabric's was recognised"), "{report:?}");
}

/// Errors are counted by adapter, and the facts of the one that has them say what ails its link.
#[test]
fn errors_of_a_log_are_counted_by_adapter() {
    let mut text = String::new();
    for _ in 0..7 {
        text += "h:1:2 [3] NCCL WARN NET/IB: Got completion from peer 10.0.0.1<4> with status=12 opcode=0 len=0 vendor err 129 (Recv) hca mlx5_3\n";
    }
    text += "h:1:2 [3] NCCL WARN NET/IB : mlx5_3:1 Got async event : port error\n";
    text += "h:1:2 [3] NCCL WARN NET/IB: Got completion from peer 10.0.0.1<4> with status=5 opcode=0 len=0 vendor err 249 (Recv) hca mlx5_0\n";
    let mut facts = machines::machine("dgx-h100").unwrap();
    facts.host = None;
    let nic = facts.nics.iter_mut().find(|nic| nic.name == "mlx5_3").unwrap();
    nic.ports[0].state = "DOWN".to_owned();
    nic.ports[0].physical_state = "Polling".to_owned();
    nic.ports[0].counters.insert("link_downed".to_owned(), 9);
    let address = nic.address.clone().unwrap();
    facts.kernel.log = nobounce_topology::facts::Read::Yes(vec![format!(
        "mlx5_core {address}: Port module event[error]: module 0, Cable error, High Temperature"
    )]);
    let report = nccl(&text, &facts);
    assert_eq!(report.adapters.len(), 1, "{:#?}", report.adapters);
    let row = &report.adapters[0];
    assert_eq!((row.adapter.as_str(), row.timeouts, row.others, row.port_errors), ("mlx5_3", 7, 0, 1));
    let why = row.why.join("; ");
    for word in ["8 of 8 errors", "DOWN now (Polling)", "link_downed 9", "too hot"] {
        assert!(why.contains(word), "{why}");
    }
    assert_eq!(row.fix.to_string(), format!("sudo mlxlink -d {address} -m -c"));
    let said = report.text();
    assert!(said.contains("errors of mlx5_3 on h: time-outs (status 12): 7, port errors: 1; "), "{said}");
    // Facts of another machine say nothing about the host of the log.
    facts.host = Some("other".to_owned());
    let both = text.clone() + &text.replace("h:1:2", "g:1:2");
    let lines = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\n\
                 g:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/0\n";
    let report = nccl(&(both + lines), &facts);
    assert_eq!(report.adapters.len(), 2);
    assert!(report.adapters.iter().all(|row| row.why.is_empty()), "{:#?}", report.adapters);
}

/// UCX names the adapter with its port; two adapters with errors are the network's, not one link's.
#[test]
fn errors_of_several_adapters_are_not_one_link() {
    let line = |nic: &str| {
        format!(
            "[1.0] [h:1:0] ib_mlx5_log.c:1 UCX  ERROR Transport retry count exceeded on {nic}:1/IB (synd 0x15 vend 0x81 hw_synd 0/0)\n"
        )
    };
    let text: String = [line("mlx5_0"), line("mlx5_1")].concat().repeat(4);
    let facts = machines::machine("dgx-h100").unwrap();
    let read = log::read_ucx(text.as_bytes(), |_| {}).unwrap();
    let report = log::join_ucx(&read, &facts, &diagnose(&facts));
    let counts: Vec<_> = report.adapters.iter().map(|row| (row.adapter.as_str(), row.timeouts)).collect();
    assert_eq!(counts, [("mlx5_0", 4), ("mlx5_1", 4)]);
    assert!(report.adapters.iter().all(|row| row.why.is_empty()), "{:#?}", report.adapters);
}
