//! What was typed against what it means.

use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Typed {
    #[command(flatten)]
    bench: BenchArgs,
}

fn typed(line: &str) -> Result<Plan, PlanError> {
    let words = std::iter::once("bench").chain(line.split_whitespace());
    plan(&Typed::try_parse_from(words).expect("clap accepts the line").bench, None)
}

/// The same with `NOBOUNCE_DEVICE` set.
fn typed_with(variable: &str, line: &str) -> Result<Plan, PlanError> {
    let words = std::iter::once("bench").chain(line.split_whitespace());
    plan(&Typed::try_parse_from(words).expect("clap accepts the line").bench, Some(variable))
}

fn refused_by_clap(line: &str) -> bool {
    Typed::try_parse_from(std::iter::once("bench").chain(line.split_whitespace())).is_err()
}

fn measuring_time(plan: &Plan) -> Duration {
    let time = |case: &Case| match case.amount {
        Amount::Time(time) => time,
        Amount::Iters(_) => Duration::MAX,
    };
    plan.cases.iter().map(time).sum::<Duration>() * plan.passes
}

#[test]
fn passes_share_the_time_and_are_one_where_they_would_cost() {
    let (once, often) = (typed("--passes 1").unwrap(), typed("").unwrap());
    assert_eq!((once.passes, often.passes), (1, 5));
    assert_eq!(measuring_time(&once), measuring_time(&often));
    for line in ["--quick", "--iters 10", "--peer there", "--memory gpu", "--device rxe0"] {
        assert_eq!(typed(line).unwrap().passes, 1, "{line}");
    }
    assert_eq!(typed("--iters 10 --passes 3").unwrap().passes, 3);
    assert!(refused_by_clap("--passes 0") && refused_by_clap("--passes 1000"));
    assert!(matches!(typed("--listen --passes 2"), Err(PlanError::ListenTakesNoCases("--passes"))));
}

#[test]
fn the_default_covers_the_range_and_leaves_time_for_verification() {
    let plan = typed("").unwrap();
    assert_eq!(plan.ends, Ends::Here);
    assert_eq!((plan.loss, plan.tolerance, plan.seed), (0.0, 0.10, 1));
    for op in [Op::Write, Op::Read, Op::Send] {
        for kind in [CaseKind::Latency, CaseKind::Bandwidth, CaseKind::Bidirectional] {
            let sizes: Vec<u64> = plan
                .cases
                .iter()
                .filter(|c| (c.op, c.kind, c.qps) == (op, kind, 1))
                .map(|c| c.size)
                .collect();
            assert_eq!(sizes, SIZES, "{op} {kind}");
        }
        assert!(plan.cases.iter().any(|c| (c.op, c.kind, c.size) == (op, CaseKind::Rate, 8)));
    }
    assert!(plan.cases.iter().any(|c| (c.op, c.size, c.qps) == (Op::Write, 1 << 20, 64)));
    assert!(measuring_time(&plan) < Duration::from_secs(45), "{:?}", measuring_time(&plan));
}

#[test]
fn quick_is_quick_and_keeps_the_criteria() {
    let plan = typed("--quick").unwrap();
    assert!(measuring_time(&plan) < Duration::from_secs(6), "{:?}", measuring_time(&plan));
    let has = |kind, size| plan.cases.iter().any(|c| (c.op, c.kind, c.size) == (Op::Write, kind, size));
    assert!(has(CaseKind::Latency, 8) && has(CaseKind::Bandwidth, 1 << 20));
}

#[test]
fn what_was_typed_is_what_is_measured() {
    let plan =
        typed("--op write --kind bandwidth --size 64K --size 1M --qps 1 --qps 64 --mtu 1024 --iters 10")
            .unwrap();
    let seen: Vec<_> = plan.cases.iter().map(|c| (c.size, c.qps)).collect();
    assert_eq!(seen, [(65536, 1), (65536, 64), (1 << 20, 1), (1 << 20, 64)]);
    assert!(plan.cases.iter().all(|c| c.mtu == 1024 && c.amount == Amount::Iters(10)));
    // Repeating an argument repeats nothing.
    assert_eq!(typed("--op write,write --kind rate --size 8 --size 8").unwrap().cases.len(), 1);
    // A typed size also holds for the rate, which has but one by default.
    assert_eq!(typed("--op send --kind rate --size 1..4").unwrap().cases.len(), 3);
}

#[test]
fn latency_uses_one_queue_pair_even_when_others_use_more() {
    let plan = typed("--op write --size 8 --qps 64").unwrap();
    assert!(plan.cases.iter().all(|c| c.qps == if c.kind == CaseKind::Latency { 1 } else { 64 }));
    assert_eq!(typed("--kind latency --qps 64"), Err(PlanError::LatencyQps));
}

#[test]
fn waiting_on_memory_is_for_write_latency() {
    let plan = typed("--wait memory --size 8").unwrap();
    for case in &plan.cases {
        let spins = case.op == Op::Write && case.kind == CaseKind::Latency;
        assert_eq!(case.wait == Wait::Memory, spins, "{case}");
    }
    let as_perftest = typed("--wait perftest --op write --kind latency --size 8").unwrap();
    assert!(as_perftest.cases.iter().all(|case| case.wait == Wait::Perftest));
    assert_eq!(typed("--wait perftest --op send"), Err(PlanError::WaitMemory));
    assert_eq!(typed("--wait memory --op read"), Err(PlanError::WaitMemory));
    assert_eq!(typed("--wait memory --kind bandwidth"), Err(PlanError::WaitMemory));
    assert_eq!(typed("--wait memory --size 0"), Err(PlanError::EmptyMemory));
}

#[test]
fn atomics_have_one_size_and_no_bandwidth() {
    let plan = typed("--op atomic").unwrap();
    let seen: Vec<_> = plan.cases.iter().map(|c| (c.kind, c.size)).collect();
    assert_eq!(seen, [(CaseKind::Latency, 8), (CaseKind::Rate, 8)]);
    assert_eq!(typed("--op atomic --size 64"), Err(PlanError::AtomicSize));
    assert_eq!(typed("--op atomic --kind bandwidth"), Err(PlanError::AtomicKind(CaseKind::Bandwidth)));
    // Together with others the sizes are theirs.
    assert!(typed("--op atomic,write --size 64").is_ok());
}

#[test]
fn empty_messages_have_a_latency_and_no_bandwidth() {
    assert!(
        typed("--size 0").unwrap().cases.iter().all(|c| matches!(c.kind, CaseKind::Latency | CaseKind::Rate))
    );
    assert_eq!(typed("--size 0 --kind bandwidth"), Err(PlanError::EmptyBandwidth));
}

#[test]
fn limits_are_refused_with_a_sentence() {
    assert_eq!(typed("--mtu 1500"), Err(PlanError::Mtu(1500)));
    assert_eq!(typed("--qps 0"), Err(PlanError::Qps(0)));
    assert_eq!(typed("--qps 5000"), Err(PlanError::Qps(5000)));
    assert_eq!(typed("--iters 0"), Err(PlanError::Iters));
    let told = typed("--kind bandwidth --size 2G --qps 64").unwrap_err().to_string();
    assert!(told.contains("64 queue pairs x 2 GiB") && told.contains("8 GiB"), "{told}");
}

#[test]
fn shares_are_fractions_or_percent() {
    assert_eq!(typed("--loss 0.01").unwrap().loss, 0.01);
    assert_eq!(typed("--loss 1%").unwrap().loss, 0.01);
    assert_eq!(typed("--compare old.json --tolerance 25%").unwrap().tolerance, 0.25);
    for wrong in ["--loss 1", "--loss 100%", "--loss -0.1", "--loss NaN", "--loss much"] {
        // clap itself may take `-0.1` for an option; either way it is refused.
        assert!(refused_by_clap(wrong) || typed(wrong).is_err(), "{wrong}");
    }
    assert!(refused_by_clap("--tolerance 0.2"), "a tolerance without --compare means nothing");
}

#[test]
fn addresses_with_and_without_ports() {
    let peer = |text: &str| typed(&format!("--peer {text}")).map(|plan| plan.ends);
    let ends = |host: &str, port| Ok(Ends::Peer { host: host.to_owned(), port });
    assert_eq!(peer("node7"), ends("node7", DEFAULT_PORT));
    assert_eq!(peer("10.0.0.7:99"), ends("10.0.0.7", 99));
    assert_eq!(peer("fe80::1"), ends("fe80::1", DEFAULT_PORT));
    assert_eq!(peer("[fe80::1]:99"), ends("fe80::1", 99));
    for wrong in ["node7:", "node7:0", "node7:70000", ":99", "[fe80::1", "[::1]99"] {
        assert!(matches!(peer(wrong), Err(PlanError::Address { .. })), "{wrong}");
    }
}

#[test]
fn listening_serves_what_the_other_side_asks_for() {
    let ends = |line: &str| typed(line).map(|plan| (plan.ends, plan.cases.len()));
    let any = Ends::Listen { addr: String::new(), port: DEFAULT_PORT };
    assert_eq!(ends("--listen"), Ok((any, 0)));
    assert_eq!(ends("--listen 10.0.0.7:99"), Ok((Ends::Listen { addr: "10.0.0.7".to_owned(), port: 99 }, 0)));
    assert_eq!(ends("--listen --size 8"), Err(PlanError::ListenTakesNoCases("--size")));
    assert!(refused_by_clap("--listen --peer node7"));
}

#[test]
fn several_devices_are_rails_for_large_writes_and_reads() {
    let plan = typed("--device mlx5_0,mlx5_1").unwrap();
    assert!(plan.cases.iter().all(|c| c.kind == CaseKind::Bandwidth && c.qps == 1 && c.op != Op::Send));
    let sizes = |op| plan.cases.iter().filter(|c| c.op == op).map(|c| c.size).collect::<Vec<_>>();
    assert_eq!((sizes(Op::Write), sizes(Op::Read)), (RAIL_SIZES.to_vec(), RAIL_SIZES.to_vec()));
    let on_gpu = typed("--device mlx5_0,mlx5_1 --memory gpu --size 8M").unwrap();
    assert!(!on_gpu.cases.is_empty() && on_gpu.cases.iter().all(|c| c.place != Place::Naive));
    for line in ["--op send", "--kind latency", "--qps 2", "--addr eth0", "--op write,atomic"] {
        assert_eq!(typed(&format!("--device a,b {line}")), Err(PlanError::Rails), "{line}");
        assert_eq!(typed_with("a,b", line), Err(PlanError::Rails), "{line}");
    }
}

#[test]
fn devices_of_the_environment_mean_what_they_mean_as_an_argument() {
    for names in ["rxe0", "mlx5_0,mlx5_1", "nb0", "auto"] {
        let (set, said) = (typed_with(names, "").unwrap(), typed(&format!("--device {names}")).unwrap());
        assert_eq!(set, said, "{names}");
        assert_eq!(set.passes, 1, "{names}");
    }
    assert_eq!(typed_with("rxe0,rxe1", "--device nb0").unwrap(), typed("--device nb0").unwrap());
    assert_eq!(typed_with("", "").unwrap(), typed("").unwrap());
}

#[test]
fn a_gpu_is_named_for_its_memory() {
    let gpu = |line: &str| typed(line).map(|plan| plan.gpu);
    assert_eq!(gpu(""), Ok(None));
    assert_eq!(gpu("--memory gpu"), Ok(Some(0)));
    assert_eq!(gpu("--memory gpu --gpu 3"), Ok(Some(3)));
    assert_eq!(gpu("--listen --gpu 3"), Ok(Some(3)), "the asking end says which memory");
    assert_eq!(gpu("--gpu 3"), Err(PlanError::GpuMemory(3)));
    assert!(refused_by_clap("--memory gpu --gpu -1"));
}
