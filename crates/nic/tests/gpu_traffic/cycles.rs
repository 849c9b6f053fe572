//! Register, use, deregister, again and again: nothing is left behind.

use std::fs;
use std::time::{Duration, Instant};

use nobounce_nic::work::{Mtu, Operation, SendRequest};

use crate::common::{MIB, pair, resident};
use crate::occupancy::Occupancy;
use crate::rig::{self, GpuMethod, Kind, Memory, Rig};

const CYCLES: usize = 10_000;
/// Warm-up cycles, after which all caches are filled.
const WARM: usize = 100;
const LEN: usize = 2 << 20;
/// So often the memory is new, and freed afterwards: what a registration kept of it would be
/// missing on the GPU, 2 MiB each time.
const RENEWALS: usize = 400;
const RENEWALS_WARM: usize = 40;
/// Tolerance for memory that other processes take meanwhile.
const SLACK: u64 = 32 << 20;
/// Until what was given back is free again.
const SOON: Duration = Duration::from_secs(2);

/// Descriptors, mappings, resident bytes, threads of this process.
type Used = (usize, usize, u64, usize);

fn count(folder: &str) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}

fn used() -> Used {
    let mappings = fs::read_to_string("/proc/self/maps").map_or(0, |maps| maps.lines().count());
    (count("/proc/self/fd"), mappings, resident(), count("/proc/self/task"))
}

#[test]
fn nothing_is_left_behind() {
    let Some(rig) = Rig::new("cycles::nothing_is_left_behind") else { return };
    let (a, b) = pair("127.85.81.1", 8192, Mtu::Mtu4096);
    let kinds = [Kind::Buffer, Kind::Malloc, Kind::Pool];
    let memories = kinds.map(|kind| Memory::new(&rig, kind, LEN));
    let cases =
        [(0, GpuMethod::Direct), (1, GpuMethod::Direct), (2, GpuMethod::Direct), (1, GpuMethod::Staged)];
    let use_once = |memory: &Memory, way, cycle: usize| {
        let begin = Instant::now();
        let mr = rig::register(&b, memory, way);
        let mut took = begin.elapsed();
        let bytes = [cycle as u8, (cycle >> 8) as u8, 3, 4, 5, 6, 7, 8];
        let write = Operation::Write(rig::remote(&mr, cycle % (LEN - 8)));
        a.qps[0].post_send(&SendRequest::inline(1, write, &bytes)).unwrap();
        rig::succeed(&a, 1);
        let begin = Instant::now();
        drop(mr);
        took += begin.elapsed();
        (took, bytes)
    };

    let (mut times, mut before) = ([Duration::ZERO; 4], None);
    for cycle in 0..CYCLES {
        if cycle == WARM {
            before = Some(used());
        }
        let case = cycle % cases.len();
        let (memory, way) = (&memories[cases[case].0], cases[case].1);
        let (took, bytes) = use_once(memory, way, cycle);
        times[case] += took;
        if cycle % 40 == case {
            assert_eq!(memory.get(cycle % (LEN - 8), 8), bytes, "cycle {cycle}");
        }
    }
    for ((memory, way), time) in cases.iter().zip(times) {
        let kind = ["VMM", "cudaMalloc", "pool"][*memory];
        let each = time / (CYCLES / cases.len()) as u32;
        println!("figure: registration and deregistration of 2 MiB, {kind}, {way:?}: {each:.1?} each");
    }
    let (before, after) = (before.unwrap(), used());
    println!(
        "figure: descriptors, mappings, resident bytes, threads: {before:?} after {WARM} cycles, {after:?} after {CYCLES}"
    );
    assert!(after.0 <= before.0 + 2, "descriptors");
    assert!(after.1 <= before.1 + 20, "mappings");
    assert!(after.2 < before.2 + 4 * MIB as u64, "memory");
    assert!(after.3 <= before.3, "threads");

    // What the driver itself keeps of memory that comes and goes.
    let before = used();
    for cycle in 0..RENEWALS {
        drop(Memory::new(&rig, kinds[cases[cycle % cases.len()].0], LEN));
    }
    println!(
        "figure: with memory that is new each time and not registered: {before:?} before, {:?} after {RENEWALS}",
        used()
    );
    let mut before = None;
    for cycle in 0..RENEWALS {
        if cycle == RENEWALS_WARM {
            before = Some((used(), Occupancy::now(&rig.gpu)));
        }
        let (kind, way) = cases[cycle % cases.len()];
        let memory = Memory::new(&rig, kinds[kind], LEN);
        let (_, bytes) = use_once(&memory, way, cycle);
        assert_eq!(memory.get(cycle % (LEN - 8), 8), bytes, "new memory, cycle {cycle}");
    }
    let ((before, occupied), after) = (before.unwrap(), used());
    println!(
        "figure: with memory that is new each time: {before:?} after {RENEWALS_WARM}, {after:?} after {RENEWALS}"
    );
    // The driver keeps a few things of its own (above); what we left behind would be one for each,
    // and a page at least.
    let few = (RENEWALS - RENEWALS_WARM) / 8;
    assert!(after.0 <= before.0 + few, "descriptors");
    assert!(after.1 <= before.1 + few, "mappings");
    assert!(after.2 < before.2 + 24 * MIB as u64, "memory");
    assert!(after.3 <= before.3, "threads");
    match occupied {
        Some(before) => {
            assert!(
                rig.is_stand_in() || before.bar1.is_some(),
                "NVML does not say how much of BAR1 is taken: a window that is left behind would not show"
            );
            given_back(&rig, before);
        }
        None => assert!(rig.is_stand_in(), "the driver does not say how much of its memory is taken"),
    }
}

/// The GPU's memory and BAR1 are as full as before.
fn given_back(rig: &Rig, before: Occupancy) {
    let begin = Instant::now();
    loop {
        let now = Occupancy::now(&rig.gpu).expect("it was told before");
        let bar1 = now.bar1.zip(before.bar1).is_none_or(|(now, before)| now <= before + SLACK);
        if now.memory <= before.memory + SLACK && bar1 {
            println!(
                "figure: bytes taken of the GPU's memory and of BAR1: {before:?} after {RENEWALS_WARM} times new memory, {now:?} after {RENEWALS}"
            );
            return;
        }
        assert!(begin.elapsed() < SOON, "GPU memory is left behind: {before:?} became {now:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
