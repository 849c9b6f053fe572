//! Our kernels on a real GPU: they fill and check the same pattern as the CPU, and those that wait
//! can be stopped.

mod gpu_common;

use std::time::{Duration, Instant};

use nobounce_memory::gpu::kernel::{FlagKernel, KernelError, Patterns, SpinKernel, Stream, pattern};
use nobounce_memory::gpu::{GpuBuffer, GpuMemory, GpuOptions, GpuWindow};

fn window(buffer: &GpuBuffer) -> GpuMemory {
    let memory = GpuMemory::register(buffer.addr(), buffer.len(), &GpuOptions::default()).unwrap();
    assert!(memory.window().is_some(), "no window: {:?}", memory.refusals());
    memory
}

fn at(memory: &GpuMemory) -> &GpuWindow {
    memory.window().unwrap()
}

#[test]
fn gpu_fills_what_the_cpu_computes() {
    let Some((gpu, _alone)) = gpu_common::gpu(true) else { return };
    let patterns = Patterns::load(&gpu).unwrap();
    let buffer = GpuBuffer::new(&gpu, 1 << 20).unwrap();
    let memory = window(&buffer);
    for (offset, len) in [(0, 0), (0, 1), (0, 8), (64, 4096), (1, 4096), (7, 13), (8, 1003), (0, 1 << 20)] {
        patterns.fill_byte(&buffer, 0..1 << 20, 0xa5).unwrap();
        patterns.fill(&buffer, offset..offset + len, 99).unwrap();
        let (mut expected, mut found) = (vec![0xa5; 1 << 20], vec![0; 1 << 20]);
        pattern(99, &mut expected[offset..offset + len]);
        at(&memory).load(0, &mut found).unwrap();
        assert!(found == expected, "{len} bytes at {offset}");
        assert!(patterns.check(&buffer, offset..offset + len, 99).unwrap().is_clean());
        assert!(patterns.check_byte(&buffer, 0..offset, 0xa5).unwrap().is_clean());
        assert!(patterns.check_byte(&buffer, offset + len..1 << 20, 0xa5).unwrap().is_clean());
    }
    let outside = patterns.fill(&buffer, 1..(1 << 20) + 1, 1);
    assert!(matches!(outside, Err(KernelError::OutOfBounds { .. })), "{outside:?}");
}

#[test]
fn gpu_finds_every_wrong_byte() {
    let Some((gpu, _alone)) = gpu_common::gpu(true) else { return };
    let patterns = Patterns::load(&gpu).unwrap();
    let buffer = GpuBuffer::new(&gpu, 1 << 20).unwrap();
    let memory = window(&buffer);
    for (offset, len) in [(0, 4099), (3, 4099)] {
        let range = offset..offset + len;
        patterns.fill(&buffer, range.clone(), 5).unwrap();
        let mut bytes = vec![0; len];
        pattern(5, &mut bytes);
        for (count, wrong) in (1u64..).zip([4098, 4000, 1001, 1000, 17]) {
            at(&memory).store_last(offset + wrong, &[!bytes[wrong]]).unwrap();
            at(&memory).read_back().unwrap();
            let finding = patterns.check(&buffer, range.clone(), 5).unwrap();
            assert_eq!((finding.wrong, finding.first), (count, Some(wrong as u64)), "{offset}: {finding}");
        }
        assert!(!patterns.check(&buffer, range.clone(), 6).unwrap().is_clean(), "another seed");
    }
    patterns.fill_byte(&buffer, 0..1 << 20, 7).unwrap();
    assert_eq!(patterns.check_byte(&buffer, 5..1 << 20, 8).unwrap().wrong, (1 << 20) - 5);
}

#[test]
fn kernel_polling_gpu_memory_sees_the_flag() {
    const ROUNDS: u64 = 20_000;
    let Some((gpu, _alone)) = gpu_common::gpu(true) else { return };
    let kernel = FlagKernel::load(&gpu).unwrap();
    let patterns = Patterns::load(&gpu).unwrap();
    let buffer = GpuBuffer::new(&gpu, 4096).unwrap();
    patterns.fill_byte(&buffer, 0..4096, 0).unwrap();
    let memory = window(&buffer);
    let wait = kernel.start(&buffer, 128, 1, ROUNDS).unwrap();
    let mut times = Vec::new();
    for i in 1..=ROUNDS {
        let started = Instant::now();
        at(&memory).store_last(128, &i.to_ne_bytes()).unwrap();
        at(&memory).complete().unwrap();
        while wait.seen() != i {
            assert!(started.elapsed() < Duration::from_secs(5), "round {i} stands at {}", wait.seen());
        }
        times.push(started.elapsed());
    }
    times.sort();
    println!("figure: store, seen by a polling kernel, seen by the CPU: median {:?}", times[times.len() / 2]);
    drop(wait);
    // A wait without an answer ends when it is dropped.
    let started = Instant::now();
    drop(kernel.start(&buffer, 256, 1, 1).unwrap());
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert!(kernel.start(&buffer, 4092, 1, 1).is_err());
}

/// Registration, deregistration and a stream of our own make progress while a kernel occupies every
/// multiprocessor.
#[test]
fn nothing_of_ours_waits_for_a_spinning_kernel() {
    let Some((gpu, _alone)) = gpu_common::gpu(true) else { return };
    let mut kernel = SpinKernel::load(&gpu).unwrap();
    let buffer = GpuBuffer::new(&gpu, 4 << 20).unwrap();
    // The window is verified once per process, on its own memory, whether or not a kernel spins:
    // both must work.
    let spin = kernel.start(Duration::from_secs(10)).unwrap();
    let started = Instant::now();
    for _ in 0..10 {
        let memory = window(&buffer);
        at(&memory).store_last(64, &[1; 4096]).unwrap();
        let mut found = [0; 4096];
        at(&memory).load(64, &mut found).unwrap();
        assert_eq!(found, [1; 4096]);
    }
    drop(Stream::new(&gpu).unwrap());
    let took = started.elapsed();
    assert!(spin.goes_on().unwrap(), "the kernel ended by itself: nothing was tested");
    assert!(took < Duration::from_secs(3), "{took:?}");
    println!(
        "figure: {} blocks spinning, 10 registrations with a store and a load: {took:?}",
        spin.started()
    );
    drop(spin);
}
