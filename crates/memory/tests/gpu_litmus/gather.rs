//! The copy engine reads earlier stores through the window, and what the GPU wrote before its flag.

use std::sync::atomic::{AtomicBool, Ordering};

use nobounce_memory::gpu::copy_engine::CopyEngine;

use crate::relay::play_relay;
use crate::sequences;
use crate::stage::{Count, GO, Message, Shows, Stage, judge, play};

const LEN: usize = 16 << 10;
const BY_THEMSELVES: Shows = Shows::Perhaps("whole lines leave the processor by themselves");
/// Why no missing read-back shows: the engine's start signal takes the same link as the stores.
/// PCIe lets neither a posted write (the doorbell) nor a read completion (of the GPU's command
/// fetch) pass earlier posted writes.
const SAME_LINK: Shows = Shows::Perhaps(
    "the engine's doorbell comes over the same link, behind the stores, which PCIe keeps in order",
);

/// One thread stores, another starts the copy. The product's read-back is inside `start_read`, and
/// happens where the product's own stores require it: the tests' own stores do not.
#[test]
fn copy_engine_reads_what_the_window_stored() {
    let Some(stage) = Stage::with_kernels() else { return };
    let engine = CopyEngine::new(&stage.gpu, 4, LEN).unwrap();
    // The partial line at the end of a message stays in its write-combining buffer until a fence
    // flushes it.
    for words in [5, LEN / 8 - 3] {
        let mut message = Message::of_words(words);
        let kept = gathers(&stage, &engine, words, |i| stage.place(0, message.bytes(i)), || {});
        let mut own = |fence: fn(), read_back: bool| {
            let store = |i| {
                // SAFETY: the window has room for the message.
                unsafe { sequences::store(stage.base(), message.round(i)) };
                fence();
            };
            let before_copy = || {
                if read_back {
                    stage.window().read_back().unwrap();
                }
            };
            gathers(&stage, &engine, words, store, before_copy)
        };
        let unfenced = own(|| {}, true);
        let unread = own(sequences::sfence, false);
        let bare = own(|| {}, false);
        // Concurrent stores keep the link to the GPU saturated.
        let crowded = beside_stores(&stage, || own(sequences::sfence, false));
        judge(
            &format!("old words of {} bytes read by the copy engine after stores", words * 8),
            kept,
            &[
                ("read-back but no sfence", if words < 8 { Shows::Known } else { BY_THEMSELVES }, unfenced),
                ("sfence but no read-back", SAME_LINK, unread),
                ("the same beside another thread's stores", SAME_LINK, crowded),
                ("neither", BY_THEMSELVES, bare),
            ],
        );
    }
}

/// Calls `play` while another thread stores through the window all the time, elsewhere.
fn beside_stores<T>(stage: &Stage, play: impl FnOnce() -> T) -> T {
    const ELSEWHERE: usize = 1 << 20;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let noise = vec![7; 8192];
            while !is_over.load(Ordering::Relaxed) {
                // SAFETY: the window is longer than this.
                unsafe { sequences::store(stage.base().add(ELSEWHERE), &noise) };
            }
        });
        let _over = Over(&is_over);
        play()
    })
}

/// Ends the other thread however this scope is left.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// One thread stores a message; another, after `before_copy`, has the copy engine fetch it. Counts
/// stale words.
fn gathers(
    stage: &Stage,
    engine: &CopyEngine,
    words: usize,
    store: impl FnMut(u64) + Send,
    before_copy: impl Fn(),
) -> Count {
    stage.clear();
    stage.window().settle().unwrap();
    let mut violations = 0;
    let rounds = play_relay(50_000, store, |i| {
        before_copy();
        violations += old_words(stage, engine, words, i);
    });
    Count { rounds, violations }
}

/// The kernel that wrote is still running; nothing but its flag was waited for.
#[test]
fn copy_engine_reads_what_the_gpu_wrote_before_its_flag() {
    const MOST: u64 = 50_000;
    const WORDS: usize = LEN / 8;
    let Some(stage) = Stage::with_kernels() else { return };
    let engine = CopyEngine::new(&stage.gpu, 4, LEN).unwrap();
    let running = stage.start("writer", |_| vec![stage.on_gpu(0), WORDS as u64, MOST]);
    let mut violations = 0;
    let rounds = play(MOST, |i| {
        running.acknowledged(i);
        violations += old_words(&stage, &engine, WORDS, i);
        running.words.set(GO, i);
    });
    running.stop();
    judge("old words read by the copy engine after the GPU's flag", Count { rounds, violations }, &[]);
}

/// Has the copy engine fetch the message, and counts the words that are not `i`.
fn old_words(stage: &Stage, engine: &CopyEngine, words: usize, i: u64) -> u64 {
    let chunk = engine.take_chunk().expect("a chunk is free");
    let copy = engine.start_read(&stage.memory, 0, words * 8, chunk).unwrap();
    // Fails without the read-back even where the bytes would have arrived.
    assert!(!stage.window().is_dirty(), "start_read did not settle the stores");
    while !engine.poll(&copy).unwrap() {}
    let chunk = copy.into_chunk().expect("the copy is over");
    let (found, _) = chunk[..words * 8].as_chunks::<8>();
    found.iter().map(|bytes| u64::from(u64::from_ne_bytes(*bytes) != i)).sum()
}
