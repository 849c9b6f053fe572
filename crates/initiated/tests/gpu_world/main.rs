//! Kernels of two ranks on a real GPU. Without one, the tests waive themselves.

use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nobounce_initiated::options::Options;
use nobounce_initiated::table::Refusal;
use nobounce_initiated::world::World;
use nobounce_memory::gpu::kernel::{Module, PinnedWords, Stream};
use nobounce_memory::gpu::{Driver, Gpu};

const PTX: &str = include_str!("world.ptx");
const LIMIT: Duration = Duration::from_secs(30);
/// Set for a process that is rank 1, until it is killed.
const VICTIM: &str = "NOBOUNCE_TEST_VICTIM";

fn gpu() -> Option<Arc<Gpu>> {
    let is_real = Driver::get().is_ok_and(|driver| !driver.is_stand_in());
    let found = is_real.then(|| Gpu::by_ordinal(0).ok().flatten()).flatten();
    if found.is_none() {
        println!("waived: no GPU");
    }
    found
}

fn free_addr() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn join(rank: u32, rendezvous: SocketAddr) -> World {
    let options = Options { rank, ranks: 2, rendezvous, heap: 4 << 20, limit: LIMIT, ..Options::default() };
    World::join(&options).unwrap()
}

/// Both ranks in this process.
fn both() -> [World; 2] {
    let addr = free_addr();
    let other = std::thread::spawn(move || join(1, addr));
    [join(0, addr), other.join().unwrap()]
}

/// Launches a kernel at both ranks, and returns the words in which each has answered.
fn launch(
    gpu: &Arc<Gpu>,
    worlds: &[World; 2],
    name: &str,
    threads: u32,
    arguments: &[u64],
) -> [PinnedWords; 2] {
    let kernel = Module::load(gpu, PTX).unwrap().kernel(name).unwrap();
    let run = |world: &World| {
        let (stream, words) = (Stream::new(gpu).unwrap(), PinnedWords::new(gpu, 8).unwrap());
        let mut all = vec![world.channel(0).unwrap(), u64::from(1 - world.rank())];
        all.extend(arguments);
        all.push(words.address(0));
        // SAFETY: the arguments of that kernel; the worlds outlive it, since it is waited for.
        unsafe { kernel.launch(&stream, 1, threads, &all) }.unwrap();
        (stream, words)
    };
    let running = [run(&worlds[0]), run(&worlds[1])];
    running.map(|(stream, words)| {
        stream.wait("a kernel of the test", LIMIT).unwrap();
        words
    })
}

/// A kernel that sees the signal sees all of the put, whatever its length.
#[test]
fn a_kernel_that_sees_the_signal_sees_the_whole_put() {
    let Some(gpu) = gpu() else { return };
    for (bytes, rounds) in [(8, 3000), (64, 3000), (4096, 2000), (64 << 10, 500), (1 << 20, 100)] {
        let worlds = both();
        for words in launch(&gpu, &worlds, "exchange", 256, &[rounds, bytes]) {
            let found = [0, 1, 2].map(|at| words.get(at));
            assert_eq!(found, [0, 0, rounds], "{bytes} bytes: failed waits, wrong words, rounds");
        }
        assert!(worlds.iter().all(|world| world.reports().is_empty()));
    }
}

#[test]
fn every_operation_does_what_it_says() {
    let Some(gpu) = gpu() else { return };
    let worlds = both();
    for words in launch(&gpu, &worlds, "operations", 1, &[]) {
        assert_eq!(words.get(0), 0, "a bit for each that went wrong");
    }
    assert!(worlds.iter().all(|world| world.reports().is_empty()));
}

#[test]
fn wrong_descriptors_fail_with_a_reason_and_the_channel_goes_on() {
    let Some(gpu) = gpu() else { return };
    let worlds = both();
    for words in launch(&gpu, &worlds, "wrong_descriptors", 1, &[]) {
        assert_eq!(words.get(0), 0, "a bit for each that passed");
    }
    for world in &worlds {
        let reasons: Vec<Refusal> = world.reports().into_iter().map(|report| report.reason).collect();
        assert_eq!(reasons.len(), 5, "{reasons:?}");
    }
}

/// Kernels that wait return when the host leaves, and the memory is freed after they have ended.
#[test]
fn leaving_a_world_ends_its_kernels() {
    let Some(gpu) = gpu() else { return };
    let [first, second] = both();
    let kernel = Module::load(&gpu, PTX).unwrap().kernel("until_lost").unwrap();
    let (stream, words) = (Stream::new(&gpu).unwrap(), PinnedWords::new(&gpu, 8).unwrap());
    // SAFETY: the arguments of that kernel, whose end the world waits for.
    unsafe { kernel.launch(&stream, 2, 32, &[first.channel(0).unwrap(), 1, words.address(0)]) }.unwrap();
    while words.get(2) == 0 {
        std::thread::yield_now();
    }
    drop(first);
    stream.wait("kernels of a world that was left", LIMIT).unwrap();
    assert_eq!((words.get(0), words.get(1)), (1, 1));
    drop(second);
}

/// The process that is killed.
struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Kernels return within a second: those that wait for a signal, and those whose puts are under
/// way.
#[test]
fn kernels_return_when_the_other_rank_is_killed() {
    if let Ok(addr) = std::env::var(VICTIM) {
        let _world = join(1, addr.parse().unwrap());
        std::thread::sleep(LIMIT);
        return;
    }
    let Some(gpu) = gpu() else { return };
    let addr = free_addr();
    let name = "kernels_return_when_the_other_rank_is_killed";
    let command = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(VICTIM, addr.to_string())
        .spawn();
    let mut victim = Victim(command.unwrap());
    let world = join(0, addr);
    let kernel = Module::load(&gpu, PTX).unwrap().kernel("until_lost").unwrap();
    let (stream, words) = (Stream::new(&gpu).unwrap(), PinnedWords::new(&gpu, 8).unwrap());
    // SAFETY: the arguments of that kernel; the world outlives it, since it is waited for.
    unsafe { kernel.launch(&stream, 2, 32, &[world.channel(0).unwrap(), 1, words.address(0)]) }.unwrap();
    while words.get(2) == 0 {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((words.get(0), words.get(1)), (0, 0), "nothing has failed yet");
    victim.0.kill().unwrap();
    let began = Instant::now();
    stream.wait("kernels that wait for a rank that is gone", LIMIT).unwrap();
    println!("kernels returned {:?} after the other rank was killed", began.elapsed());
    assert_eq!((words.get(0), words.get(1)), (1, 1));
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert!(
        matches!(world.reports()[0].reason, Refusal::Unreachable { rank: 1, .. }),
        "{:?}",
        world.reports()
    );
}
