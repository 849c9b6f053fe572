//! Random operations by both sides over a bad network, against an oracle. A failure shrinks to a
//! short list of operations, which is then kept below as a `regression_*` test.

use nobounce_protocol::qp::{Mtu, Service};
use nobounce_protocol::sim::plan::{Op, OpKind, Plan, run};
use nobounce_protocol::sim::{Conditions, Rng, fuzzing, unreliable};
use proptest::prelude::*;

fn kind() -> impl Strategy<Value = OpKind> {
    let mut choices = OpKind::ALL.to_vec();
    choices.retain(|k| *k != OpKind::Bad);
    prop_oneof![30 => proptest::sample::select(choices), 1 => Just(OpKind::Bad)]
}

fn op() -> impl Strategy<Value = Op> {
    let post = (0..2_u8, kind(), 0..1401_u16, any::<u16>(), any::<bool>(), prop::bool::weighted(0.1))
        .prop_map(|(side, kind, len, at, signaled, fence)| Op::Post { side, kind, len, at, signaled, fence });
    prop_oneof![
        8 => post,
        2 => (0..2_u8).prop_map(|side| Op::Receive { side }),
        2 => (0..200_u16).prop_map(|micros| Op::Wait { micros }),
        1 => (0..2_u8, 0..150_000_u32).prop_map(|(pipe, ppm)| Op::Loss { pipe, ppm }),
    ]
}

fn conditions() -> impl Strategy<Value = Conditions> {
    // Shrinks towards a network that does nothing wrong.
    (0..100_000_u32, 0..300_000_u32, 0..300_000_u32, 0..50_000_u32, 0..100_000_u64).prop_map(
        |(loss, duplicate, reorder, corrupt, hold)| Conditions {
            loss,
            duplicate,
            reorder,
            corrupt,
            hold,
            ..Conditions::default()
        },
    )
}

fn plan() -> impl Strategy<Value = Plan> {
    let psn = prop_oneof![Just(0_u32), 0xff_ffc0..0x100_0000_u32];
    (
        proptest::sample::select(Mtu::ALL.to_vec()),
        (psn.clone(), psn),
        1..5_u8,
        conditions(),
        (any::<bool>(), 0..1000_u64),
        prop::collection::vec(op(), 0..40),
    )
        .prop_map(|(mtu, psn, max_rd_atomic, conditions, (selective, seed), ops)| Plan {
            mtu,
            psn: [psn.0, psn.1],
            max_rd_atomic,
            conditions,
            selective,
            seed,
            ops,
        })
}

proptest! {
    // PROPTEST_CASES overrides this; nothing is written into the source tree.
    #![proptest_config(ProptestConfig {
        cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(400),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_operations_over_any_network_end_as_the_oracle_says(plan in plan()) {
        if let Err(why) = run(&plan) {
            prop_assert!(false, "{}", why);
        }
    }

    #[test]
    fn unreliable_messages_over_any_network_are_whole_or_absent(plan in plan(), datagrams: bool) {
        let service = if datagrams { Service::Ud } else { Service::Uc };
        if let Err(why) = unreliable::run(&plan, service) {
            prop_assert!(false, "{}", why);
        }
    }
}

/// A post as the lists below have it.
fn post(side: u8, kind: OpKind, len: u16) -> Op {
    Op::Post { side, kind, len, at: 0, signaled: true, fence: false }
}

/// While the receiver was not ready, packets that were overtaken used up the retries meant for
/// losses, although each RNR NAK proved that the peer had everything up to there.
#[test]
fn regression_overtaken_packets_while_the_receiver_is_not_ready() {
    for seed in 0..200 {
        let plan = Plan {
            mtu: Mtu::Mtu256,
            psn: [0, 0],
            max_rd_atomic: 1,
            selective: false,
            conditions: Conditions { reorder: 300_000, ..Conditions::default() },
            seed,
            ops: vec![
                post(0, OpKind::Send, 0),
                post(0, OpKind::Send, 0),
                post(0, OpKind::Send, 1025),
                Op::Wait { micros: 900 },
                Op::Wait { micros: 900 },
            ],
        };
        assert_eq!(run(&plan), Ok(()), "seed {seed}");
    }
}

/// Random bytes through the fuzz targets. `FUZZ_RUNS` makes it longer.
#[test]
fn random_bytes_through_the_fuzz_targets() {
    let runs: u64 = std::env::var("FUZZ_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(1000);
    let start: u64 = std::env::var("FUZZ_START").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    for seed in start..start + runs {
        let mut rng = Rng::new(seed);
        let len = rng.below(300);
        let data: Vec<u8> = (0..len).map(|_| u8::try_from(rng.below(256)).unwrap()).collect();
        let result = std::panic::catch_unwind(|| {
            fuzzing::parser(&data);
            fuzzing::responder(&data);
            fuzzing::operations(&data);
            fuzzing::receiver(&data);
            fuzzing::unreliable(&data);
            fuzzing::management(&data);
        });
        assert!(result.is_ok(), "seed {seed}");
    }
}
