//! What `--memory gpu` measures: GPU memory by the best path, against staging, against naive
//! staging, and against host memory.

use std::time::Duration;

use super::case::{Amount, Case, CaseKind, Link, Op, Place, TIME, Wait};
use super::plan_error::{MAX_REGISTERED, PlanError};

/// A sweep for the direct path; the comparisons are made at the sizes in [`COMPARED`].
const LATENCY_SIZES: &[u64] = &[8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20];
const BANDWIDTH_SIZES: &[u64] = &[4 << 10, 32 << 10, 256 << 10, 1 << 20, 8 << 20];
const BOTH_WAYS_SIZES: &[u64] = &[4 << 10, 32 << 10, 256 << 10, 1 << 20, 8 << 20];
const COMPARED: &[u64] = &[8, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 8 << 20];
const QUICK_LATENCY_SIZES: &[u64] = &[8, 4 << 10];
const QUICK_BANDWIDTH_SIZES: &[u64] = &[1 << 20];
/// A flag that a kernel polls.
const FLAG: u64 = 8;
/// For the headline figures.
const HEADLINE_TIME: Duration = Duration::from_secs(1);

/// The compared paths, in this order and back to back, so that other load on the machine affects
/// all of them.
const COMPARISON: &[Place] = &[Place::Direct, Place::Staged, Place::Naive, Place::Host];
/// Naive staging is a program that writes.
const WITHOUT_NAIVE: &[Place] = &[Place::Direct, Place::Staged, Place::Host];
/// Sizes for the shares of the other operations, and of writes over another link: each in
/// microseconds or GB/s.
const SHORT_ENOUGH: &[u64] = &[8, 4 << 10];
const LONG_ENOUGH: &[u64] = &[1 << 20, 8 << 20];

/// The request, checked.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) ops: Vec<Op>,
    pub(super) kinds: Vec<CaseKind>,
    /// As typed; empty for the usual ones.
    pub(super) sizes: Vec<u64>,
    pub(super) qps: Vec<u32>,
    pub(super) mtu: u32,
    pub(super) amount: Amount,
    pub(super) quick: bool,
}

/// The operations and kinds that are measured unless others are named.
pub(super) fn defaults(quick: bool) -> (&'static [Op], &'static [CaseKind]) {
    let kinds = &[CaseKind::Latency, CaseKind::GpuVisible, CaseKind::Bandwidth, CaseKind::Bidirectional];
    if quick { (&[Op::Write], kinds) } else { (&[Op::Write, Op::Read, Op::Send], kinds) }
}

pub(super) fn cases(wanted: &Wanted) -> Result<Vec<Case>, PlanError> {
    let mut cases = Vec::new();
    for &kind in &wanted.kinds {
        if kind == CaseKind::GpuVisible {
            // Naive staging is left out: its copies would deadlock with the polling kernel.
            for place in [Place::Direct, Place::Staged] {
                cases.push(wanted.case(Op::Write, kind, place, FLAG, 1));
            }
            continue;
        }
        for &op in &wanted.ops {
            for size in wanted.sizes_of(op, kind) {
                for &place in wanted.places(op, kind, size) {
                    for &qps in if kind == CaseKind::Latency { &[1][..] } else { &wanted.qps } {
                        // A naive program uses one queue pair, and one message at a time.
                        if place == Place::Naive && (qps > 1 || size == 0 || kind == CaseKind::Rate) {
                            continue;
                        }
                        if u64::from(qps) * size > MAX_REGISTERED {
                            return Err(PlanError::Registered { qps, size });
                        }
                        cases.push(wanted.case(op, kind, place, size, qps));
                    }
                }
            }
        }
    }
    Ok(cases)
}

impl Wanted {
    fn case(&self, op: Op, kind: CaseKind, place: Place, size: u64, qps: u32) -> Case {
        let judged = match kind {
            CaseKind::Latency | CaseKind::GpuVisible => op == Op::Write && size == 8,
            CaseKind::Bandwidth | CaseKind::Bidirectional => op == Op::Write && size == 1 << 20,
            CaseKind::Rate => false,
        };
        let amount = match self.amount {
            Amount::Time(TIME) if judged => Amount::Time(HEADLINE_TIME),
            amount => amount,
        };
        Case { op, kind, place, size, qps, wait: Wait::Cq, mtu: self.mtu, amount, over: None }
    }

    fn sizes_of(&self, op: Op, kind: CaseKind) -> Vec<u64> {
        let bulk = matches!(kind, CaseKind::Bandwidth | CaseKind::Bidirectional);
        let usual = match (kind, self.quick) {
            _ if op == Op::Atomic => return if bulk { Vec::new() } else { vec![8] },
            (CaseKind::Rate | CaseKind::GpuVisible, _) => &[8],
            (CaseKind::Latency, true) => QUICK_LATENCY_SIZES,
            (CaseKind::Latency, false) => LATENCY_SIZES,
            (CaseKind::Bandwidth | CaseKind::Bidirectional, true) => QUICK_BANDWIDTH_SIZES,
            (CaseKind::Bandwidth, false) => BANDWIDTH_SIZES,
            (CaseKind::Bidirectional, false) => BOTH_WAYS_SIZES,
        };
        let sizes = if self.sizes.is_empty() { usual } else { &self.sizes };
        sizes.iter().copied().filter(|size| *size > 0 || !bulk).collect()
    }

    /// Writes are compared at some sizes, or at the given ones; reads and sends at fewer. Atomics
    /// show the direct path only.
    fn places(&self, op: Op, kind: CaseKind, size: u64) -> &'static [Place] {
        let typed = !self.sizes.is_empty();
        match op {
            Op::Write if typed || COMPARED.contains(&size) => COMPARISON,
            Op::Read | Op::Send if typed || tells_shares(kind, size) => WITHOUT_NAIVE,
            _ => &COMPARISON[..1],
        }
    }
}

fn tells_shares(kind: CaseKind, size: u64) -> bool {
    match kind {
        CaseKind::Latency => SHORT_ENOUGH.contains(&size),
        CaseKind::Bandwidth => LONG_ENOUGH.contains(&size),
        CaseKind::Bidirectional | CaseKind::Rate | CaseKind::GpuVisible => false,
    }
}

/// The writes of a plan that show the shares over another link: direct, staged and host, back to
/// back.
pub(super) fn over(link: Link, cases: &[Case]) -> Vec<Case> {
    let wanted = |case: &&Case| {
        let (place, qps) = (WITHOUT_NAIVE.contains(&case.place), case.qps == 1);
        case.op == Op::Write && place && qps && tells_shares(case.kind, case.size)
    };
    cases.iter().filter(wanted).map(|case| Case { over: Some(link), ..case.clone() }).collect()
}
