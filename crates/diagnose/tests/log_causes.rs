//! Logs against the verdicts, and causes that fit the machine.

use nobounce_diagnose::verdict::{UseKind, Verdict};
use nobounce_diagnose::{Diagnosis, Style, diagnose, log, report};
use nobounce_topology::facts::{Facts, Module, NvidiaModule, Read};
use nobounce_topology::machines;

fn reports(text: &str, facts: &Facts, diagnosis: &Diagnosis) -> Vec<log::LogReport> {
    let read = log::read_any(text.as_bytes(), |_| {}).unwrap();
    vec![
        log::join_nccl(&read.nccl, facts, diagnosis),
        log::join_ucx(&read.ucx, facts, diagnosis),
        log::join_fabric(&read.fabric, facts, diagnosis),
    ]
}

/// The diagnosis of a machine after a log.
fn overruled(text: &str, facts: &Facts) -> Diagnosis {
    let mut diagnosis = diagnose(facts);
    let reports = reports(text, facts, &diagnosis);
    log::overrule(&mut diagnosis, facts, &reports);
    diagnosis
}

/// A machine whose verdicts are all direct.
fn healthy(name: &str) -> Facts {
    let mut facts = machines::machine(name).unwrap();
    facts.host = Some("node-a.cluster".to_owned());
    assert!(!diagnose(&facts).direct_is_lost);
    facts
}

fn count(diagnosis: &Diagnosis) -> usize {
    diagnosis.findings.iter().filter(|finding| finding.id == "log-not-direct").count()
}

fn best(diagnosis: &Diagnosis) -> impl Iterator<Item = &Verdict> {
    diagnosis.verdicts.iter().filter(|verdict| verdict.best)
}

const SOCKETS: &str = "node-a:1:2 [0] NCCL INFO Using network Socket\n\
    node-a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n\
    node-a:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n";

#[test]
fn sockets_of_nccl_refute_the_plan() {
    let facts = healthy("dgx-h100");
    let diagnosis = overruled(SOCKETS, &facts);
    assert_eq!(count(&diagnosis), 1, "{:#?}", diagnosis.findings);
    let first = &diagnosis.findings[0];
    assert_eq!((first.id, first.severity.name()), ("log-not-direct", "warning"));
    assert!(first.title.contains("2 over sockets") && !first.fix.is_empty(), "{first:#?}");
    assert!(diagnosis.direct_is_lost);
    assert!(best(&diagnosis).all(|verdict| verdict.nccl.kind == UseKind::None));
    assert!(best(&diagnosis).all(|verdict| verdict.ucx.kind == UseKind::Direct));
    let text = report(&facts, &diagnosis, Style { color: false, width: 120, all: false });
    let last = "8 direct, 8 of them not used directly by NCCL; 0 errors, 1 warning";
    assert!(text.contains(last) && text.contains("not used"), "{text}");
}

#[test]
fn another_host_refutes_nothing() {
    let facts = healthy("dgx-h100");
    // Two hosts, and these facts are of neither; with one, its name is taken for another of ours.
    let other = SOCKETS.replace("node-a", "node-b") + &SOCKETS.replace("node-a", "node-c");
    assert_eq!(count(&overruled(&other, &facts)), 0);
    assert_eq!(count(&overruled(&SOCKETS.replace("node-a", "login"), &facts)), 1);
}

#[test]
fn sockets_of_ucx_refute_the_plan() {
    let facts = healthy("dgx-h100");
    let text = "[1.1] [h:10:0] ucp_worker.c:1763 UCX  INFO    ep_cfg[0]: tag(sysv/memory tcp/eth0)\n";
    let table = "\
[1.1] [h:10:0]   proto_debug.c:100  UCX  INFO  | ucp_context_0 inter-node cfg#2 | tagged message by ucp_tag_send* from cuda/GPU0 |
[1.1] [h:10:0]   proto_debug.c:100  UCX  INFO  |     0..inf | multi-frag copy-in | tcp/eth0 |
";
    for text in [text, table] {
        let diagnosis = overruled(text, &facts);
        assert_eq!(count(&diagnosis), 1, "{:#?}", diagnosis.findings);
        assert!(best(&diagnosis).all(|verdict| verdict.ucx.kind == UseKind::None));
        assert!(best(&diagnosis).all(|verdict| verdict.nccl.kind == UseKind::Direct));
    }
}

#[test]
fn libfabric_without_gpudirect_refutes_the_plan() {
    let facts = healthy("p5-efa");
    for text in [
        "[0] NCCL INFO NET/OFI Could not disable CUDA API usage for HMEM, disabling GDR\n",
        "libfabric:1:core:core:ofi_reg():1 Selected provider is tcp, fabric is 10.0.0.0\n",
    ] {
        let diagnosis = overruled(text, &facts);
        assert_eq!(count(&diagnosis), 1, "{text}: {:#?}", diagnosis.findings);
        let plans = || diagnosis.verdicts.iter().map(|verdict| verdict.nccl.kind);
        assert!(!plans().any(|kind| kind == UseKind::Direct), "{text}");
    }
    let fine = "[0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)\n";
    assert_eq!(count(&overruled(fine, &facts)), 0);
    // Another user of libfabric in the same job has tcp.
    let both =
        format!("{fine}libfabric:1:core:core:ofi_reg():1 Selected provider is tcp, fabric is 10.0.0.0\n");
    assert_eq!(count(&overruled(&both, &facts)), 0);
}

#[test]
fn libfabric_refutes_only_plans_that_use_it() {
    let tcp = "libfabric:1:core:core:ofi_reg():1 Selected provider is tcp, fabric is 10.0.0.0\n";
    let facts = healthy("dgx-h100");
    let mut diagnosis = diagnose(&facts);
    let before = diagnosis.verdicts.clone();
    let reports = reports(tcp, &facts, &diagnosis);
    log::overrule(&mut diagnosis, &facts, &reports);
    assert_eq!(count(&diagnosis), 0, "{:#?}", diagnosis.findings);
    assert!(diagnosis.verdicts == before && !diagnosis.direct_is_lost);
    assert!(reports[2].notes.iter().any(|note| note.contains("plans in the table stay")), "{reports:?}");
    let mut facts = healthy("dgx-h100");
    facts.nics.iter_mut().for_each(|nic| nic.driver = Some("cxi_ss1".to_owned()));
    let plans = diagnose(&facts).verdicts;
    assert!(plans.iter().any(|verdict| verdict.nccl.kind == UseKind::Direct), "{plans:#?}");
    let diagnosis = overruled(tcp, &facts);
    assert_eq!(count(&diagnosis), 1);
    assert!(diagnosis.verdicts.iter().all(|verdict| verdict.nccl.kind != UseKind::Direct));
}

/// A direct link of another host, or of another rank of this one, says nothing about a row.
#[test]
fn each_host_and_rank_decides_for_itself() {
    let facts = healthy("dgx-h100");
    let other = "node-b:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/0/GDRDMA\n";
    let diagnosis = overruled(&format!("{SOCKETS}{other}"), &facts);
    assert_eq!(count(&diagnosis), 1, "{:#?}", diagnosis.findings);
    assert!(best(&diagnosis).all(|verdict| verdict.nccl.kind == UseKind::None));
    // Without their GPUs, ranks of one host cannot be told apart.
    let own = other.replace("node-b", "node-a");
    assert_eq!(count(&overruled(&format!("{SOCKETS}{own}"), &facts)), 0);
    let bus = |at: usize| facts.gpus[at].address.replace("0000:", "").replace([':', '.'], "");
    let init = |rank: usize, bus: &str| {
        format!(
            "node-a:1:2 [0] NCCL INFO comm 0x1 rank {rank} nranks 2 cudaDev 0 nvmlDev 0 busId {bus} commId 0x65 - Init COMPLETE\n"
        )
    };
    let log = init(0, &bus(0)) + &init(1, &bus(1)) + SOCKETS + &own;
    let diagnosis = overruled(&log, &facts);
    let sockets = |diagnosis: &Diagnosis| -> Vec<String> {
        let mut gpus: Vec<_> = diagnosis
            .verdicts
            .iter()
            .filter(|v| v.nccl.kind == UseKind::None)
            .map(|v| v.gpu.clone())
            .collect();
        gpus.dedup();
        gpus
    };
    assert_eq!(sockets(&diagnosis), [facts.gpus[0].address.clone()]);
    // Rank 0 of another host has another GPU; rank 0 of a second communicator has no certain one.
    let log = init(0, &bus(1)).replace("node-a", "node-b") + &init(0, &bus(0)) + SOCKETS;
    assert_eq!(sockets(&overruled(&log, &facts)), [facts.gpus[0].address.clone()]);
    let log = init(0, &bus(0)) + &init(0, &bus(1)) + &init(0, &bus(0)) + SOCKETS;
    let read = log::read_nccl(log.as_bytes(), |_| {}).unwrap();
    assert_eq!(read.ranks[&("node-a".to_owned(), 0)].gpu, None);
    assert_eq!(sockets(&overruled(&log, &facts)).len(), facts.gpus.len());
}

/// Plans are about long messages of this host.
#[test]
fn short_protocols_and_other_hosts_of_ucx_refute_nothing() {
    let facts = healthy("dgx-h100");
    let row = |host: &str, range: &str, protocol: &str| {
        let line = format!("[1.1] [{host}:10:0]   proto_debug.c:100  UCX  INFO  ");
        format!(
            "{line}| ucp_context_0 inter-node cfg#2 | tagged message by ucp_tag_send* from cuda/GPU0 |\n\
             {line}| {range} | {protocol} | rc_mlx5/mlx5_0:1 |\n"
        )
    };
    let count = |text: &str| count(&overruled(text, &facts));
    assert_eq!(count(&row("h", "8K..256K", "multi-frag copy-in")), 0);
    assert_eq!(count(&row("h", "8K..inf", "multi-frag zero-copy")), 0);
    assert_eq!(count(&row("h", "8K..inf", "multi-frag copy-in")), 1);
    let two = row("h", "8K..inf", "multi-frag copy-in") + &row("g", "0..1K", "short");
    assert_eq!(count(&two), 0);
    let read = log::read_ucx(two.as_bytes(), |_| {}).unwrap();
    let report = log::join_ucx(&read, &facts, &diagnose(&facts));
    assert!(report.notes.iter().any(|note| note.starts_with("2 hosts logged")), "{report:?}");
}

#[test]
fn a_half_direct_plan_is_refuted_by_sockets() {
    let mut facts = healthy("dgx-h100");
    facts.environment.insert("NCCL_NET_GDR_READ".to_owned(), "0".to_owned());
    assert!(best(&diagnose(&facts)).all(|verdict| verdict.nccl.kind == UseKind::Half));
    assert!(best(&overruled(SOCKETS, &facts)).all(|verdict| verdict.nccl.kind == UseKind::None));
}

#[test]
fn a_log_that_agrees_adds_nothing() {
    let facts = healthy("dgx-h100");
    let text = "node-a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA\n";
    assert_eq!(count(&overruled(text, &facts)), 0);
    // The verdict is staged without the log.
    let mut facts = healthy("dgx-h100");
    facts.gpus.iter_mut().for_each(|gpu| gpu.gpudirect_rdma = Read::Yes(false));
    facts.registrations.clear();
    let text = "node-a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0\n";
    assert_eq!(count(&overruled(text, &facts)), 0);
}

#[test]
fn gpus_have_the_names_of_the_table_and_cut_lists_say_so() {
    let facts = healthy("dgx-h100");
    let address = &facts.gpus[0].address;
    let short = address.replace("0000:", "").replace([':', '.'], "");
    let mut text = format!(
        "node-a:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId {short} commId 0x65 - Init COMPLETE\n"
    );
    text += SOCKETS;
    for number in 0..30 {
        let letter = char::from(b'a' + u8::try_from(number % 26).unwrap());
        text += &format!(
            "[1.0] [h:1:0] x.c:1 UCX  ERROR problem {letter}{letter} of kind {}\n",
            "x".repeat(number)
        );
    }
    let diagnosis = diagnose(&facts);
    let reports = reports(&text, &facts, &diagnosis);
    let said = reports[0].text();
    assert!(said.contains("not direct: node-a, rank 0, GPU 0 via NET/Socket"), "{said}");
    assert!(reports[1].text().contains("... and 6 more"), "{}", reports[1].text());
}

/// The fixes of a line by the facts.
fn fixes(line: &str, facts: &Facts) -> String {
    let read = log::read_any(line.as_bytes(), |_| {}).unwrap();
    let report = log::join_other(&read.other, facts, &diagnose(facts));
    report.causes.iter().map(|cause| format!("{}: {}\n", cause.cause, cause.fix)).collect()
}

#[test]
fn the_module_of_a_cause_fits_the_machine() {
    let lines = [
        "ibv_reg_mr failed: Bad address",
        "ibv_reg_mr failed: Invalid argument",
        "Couldn't allocate MR",
        "mooncake runs without nvidia-peermem",
        "neither nv_peer_mem, or nvidia_peermem detected",
    ];
    let mut plain = machines::machine("dgx-a100").unwrap();
    let Read::Yes(modules) = &mut plain.kernel.modules else { panic!("no modules") };
    modules.remove("nvidia_peermem");
    let mut old = plain.clone();
    old.kernel.nvidia =
        Read::Yes(Some(NvidiaModule { version: "450.80.02".to_owned(), ..NvidiaModule::default() }));
    let mut bare = plain.clone();
    bare.kernel.peer_memory_api = Read::Yes(false);
    let mut loaded = plain.clone();
    let Read::Yes(modules) = &mut loaded.kernel.modules else { panic!("no modules") };
    modules.insert("nv_peer_mem".to_owned(), Module::default());
    let mut inside = plain.clone();
    inside.process.container = Read::Yes(Some("docker".to_owned()));
    let amd = machines::machine("mi300x").unwrap();
    for line in &lines[..3] {
        let said = fixes(line, &amd);
        assert!(said.contains("amdgpu has none here") && !said.contains("modprobe"), "{line}: {said}");
    }
    for line in lines {
        let said = fixes(line, &plain);
        assert!(said.contains("sudo modprobe nvidia_peermem") && !said.contains("host"), "{line}: {said}");
        // Drivers before 470 do not ship it.
        let said = fixes(line, &old);
        assert!(said.contains("modprobe nv_peer_mem") && !said.contains("modprobe nvidia_peermem"), "{said}");
        assert!(fixes(line, &bare).contains("DOCA-OFED"), "{line}");
        let said = fixes(line, &loaded);
        assert!(!said.contains("serves the GPU") && !said.contains("not loaded"), "{line}: {said}");
        assert!(fixes(line, &inside).contains("on the host, not in the container"), "{line}");
    }
}

#[test]
fn a_method_that_works_is_no_cause() {
    let staged = "node-a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0\n";
    let causes = |facts: &Facts| {
        let read = log::read_nccl(staged.as_bytes(), |_| {}).unwrap();
        let report = log::join_nccl(&read, facts, &diagnose(facts));
        report.causes.iter().map(|cause| format!("{}\n", cause.cause)).collect::<String>()
    };
    let mut facts = healthy("dgx-h100");
    let Read::Yes(modules) = &mut facts.kernel.modules else { panic!("no modules") };
    modules.remove("nvidia_peermem");
    let said = causes(&facts);
    assert!(said.contains("NCCL_NET_GDR_LEVEL") && !said.contains("nor dma-buf"), "{said}");
    assert!(causes(&Facts::default()).contains("neither peer memory nor dma-buf serves the GPU"));
    let said = fixes("mooncake runs without nvidia-peermem", &facts);
    assert!(!said.contains("exports no dma-bufs"), "{said}");
}

#[test]
fn causes_have_typed_parts() {
    let line = "libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.";
    let read = log::read_any(line.as_bytes(), |_| {}).unwrap();
    let facts = machines::machine("dgx-a100").unwrap();
    let report = log::join_other(&read.other, &facts, &diagnose(&facts));
    let cause = serde_json::to_value(&report.causes[0]).unwrap();
    let parts = cause["fix_parts"].as_array().unwrap();
    assert_eq!(parts[0]["command"], "ulimit -l unlimited", "{cause}");
    assert!(parts.iter().any(|part| part["option"] == "--ulimit memlock=-1:-1"), "{cause}");
    assert!(parts.iter().any(|part| part["line"]["text"] == "DefaultLimitMEMLOCK=infinity"), "{cause}");
    assert!(cause["fix"].as_str().unwrap().starts_with("ulimit -l unlimited; in a container: "), "{cause}");
    let text = report.text();
    assert!(text.lines().any(|line| line.trim() == "fix: ulimit -l unlimited"), "{text}");
    let option = "Add to docker or podman run: --ulimit memlock=-1:-1";
    assert!(text.lines().any(|line| line.trim() == option), "{text}");
}

#[test]
fn variables_of_causes_are_exported() {
    let line = "ibv_reg_dmabuf_mr failed: errno 524";
    let read = log::read_any(line.as_bytes(), |_| {}).unwrap();
    let facts = machines::machine("dgx-a100").unwrap();
    let report = log::join_other(&read.other, &facts, &diagnose(&facts));
    let text = report.text();
    assert!(text.lines().any(|line| line.trim() == "fix: export UCX_IB_DIRECT_NIC=n"), "{text}");
}
