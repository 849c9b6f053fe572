//! Throughput of guarded copies, against memcpy. Run it by
//! `cargo run --release -p nobounce-memory --example copy_speed`.
//!
//! Small sizes walk through 512 KiB on either side, which stay in the L2 cache of server
//! processors. Each figure is the best of several runs. The second block shifts the private side by
//! 12 bytes, as a payload behind its header in a packet slab. The third has a window at an odd
//! address and a private side at a multiple of 16. "load+crc" is `Window::load_crc`, "crc" is
//! crc32fast over the private side alone.

use std::hint::black_box;
use std::time::Instant;

use nobounce_memory::{HostBuffer, Window, guard};

const SPAN: usize = 512 << 10;
const RUNS: usize = 9;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    guard::ensure_installed()?;
    for (window_shift, shift) in [(0, 0), (0, 12), (5, 16)] {
        println!("window shifted by {window_shift} bytes, private side by {shift}; GB/s");
        println!(
            "{:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "size", "load", "memcpy", "store", "memcpy", "load+crc", "crc"
        );
        for size in [64, 128, 256, 1024, 4 << 10, 64 << 10, 1 << 20] {
            let span = SPAN.max(size);
            let buffer = HostBuffer::new(span + window_shift)?;
            let private = HostBuffer::new(span + shift)?;
            // SAFETY: both buffers outlive the closures below; the slice into `private` is the only
            // access to it meanwhile.
            let (window, slab): (Window, &mut [u8]) = unsafe {
                (
                    Window::new(buffer.as_mut_ptr().add(window_shift), span),
                    std::slice::from_raw_parts_mut(private.as_mut_ptr().add(shift), span),
                )
            };
            slab.fill(1);
            buffer.write_at(0, slab)?;
            let base = buffer.as_mut_ptr().wrapping_add(window_shift);
            let load = best(size, |at| window.load(at, &mut slab[at..at + size]).expect("mapped"));
            let plain_load = best(size, |at| {
                // SAFETY: `at + size <= span`, and the two buffers are distinct.
                unsafe {
                    libc::memcpy(black_box(slab.as_mut_ptr().add(at).cast()), base.add(at).cast(), size)
                };
            });
            let store = best(size, |at| window.store(at, &slab[at..at + size]).expect("mapped"));
            let plain_store = best(size, |at| {
                // SAFETY: as above.
                unsafe { libc::memcpy(black_box(base.add(at).cast()), slab.as_ptr().add(at).cast(), size) };
            });
            let mut crc = 0;
            let load_crc = best(size, |at| {
                crc = window.load_crc(at, &mut slab[at..at + size], crc).expect("mapped");
            });
            let crc_alone = best(size, |at| {
                let mut hasher = crc32fast::Hasher::new_with_initial(crc);
                hasher.update(&slab[at..at + size]);
                crc = hasher.finalize();
            });
            black_box(crc);
            println!(
                "{size:>9} {load:>8.1} {plain_load:>8.1} {store:>8.1} {plain_store:>8.1} {load_crc:>8.1} {crc_alone:>8.1}"
            );
        }
    }
    Ok(())
}

/// Bytes per nanosecond of `copy(offset)` over offsets that walk through the span.
fn best(size: usize, mut copy: impl FnMut(usize)) -> f64 {
    let rounds = ((32 << 20) / SPAN.max(size)).max(4);
    let steps = SPAN.max(size) / size;
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Instant::now();
        for _ in 0..rounds {
            (0..steps).for_each(|step| copy(step * size));
        }
        best = best.min(start.elapsed().as_secs_f64());
    }
    let bytes = u32::try_from(rounds * steps * size).map_or(f64::NAN, f64::from);
    bytes / best / 1e9
}
