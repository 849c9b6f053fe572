//! The copy engine reads what was stored through the window before, and what the GPU wrote before its flag.

use nobounce_memory::gpu::copy_engine::CopyEngine;

use crate::sequences;
use crate::stage::{Count, GO, Message, Shows, Stage, judge, play};

const LEN: usize = 16 << 10;
const WORDS: usize = LEN / 8;

/// The product's read-back is inside `start_read`, and made where the product's own stores have asked for it: the tests' own stores
/// have not.
#[test]
fn copy_engine_reads_what_the_window_stored() {
    let Some(stage) = Stage::with_kernels() else { return };
    let engine = CopyEngine::new(&stage.gpu, 4, LEN).unwrap();
    let mut message = Message::of_words(WORDS);
    let kept = count(|i| {
        stage.window().store_last(0, message.bytes(i)).unwrap();
        old_words(&stage, &engine, WORDS, i)
    });
    let unread = count(|i| {
        assert!(!stage.window().is_dirty());
        // SAFETY: the window has room for the message.
        unsafe { sequences::store(stage.base(), message.round(i)) };
        sequences::sfence();
        old_words(&stage, &engine, WORDS, i)
    });
    // The last word lies alone on its line, which therefore stays in its buffer until something drives it out.
    let mut odd = Message::of_words(WORDS - 7);
    let bare = count(|i| {
        // SAFETY: the window has room for the message.
        unsafe { sequences::store(stage.base(), odd.round(i)) };
        let old = old_words(&stage, &engine, WORDS - 7, i);
        sequences::sfence();
        old
    });
    judge(
        "old words read by the copy engine after stores",
        kept,
        &[("sfence but no read-back", Shows::Perhaps, unread), ("neither", Shows::Perhaps, bare)],
    );
}

/// The kernel that wrote is still running; nothing but its flag was waited for.
#[test]
fn copy_engine_reads_what_the_gpu_wrote_before_its_flag() {
    const MOST: u64 = 50_000;
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

/// Plays rounds, each of which says how many words it found old.
fn count(mut round: impl FnMut(u64) -> u64) -> Count {
    let mut violations = 0;
    let rounds = play(50_000, |i| violations += round(i));
    Count { rounds, violations }
}

/// Has the copy engine fetch the message, and counts the words that are not `i`.
fn old_words(stage: &Stage, engine: &CopyEngine, words: usize, i: u64) -> u64 {
    let chunk = engine.take_chunk().expect("a chunk is free");
    let copy = engine.start_read(&stage.memory, 0, words * 8, chunk).unwrap();
    while !engine.poll(&copy).unwrap() {}
    let chunk = copy.into_chunk().expect("the copy is over");
    let (found, _) = chunk[..words * 8].as_chunks::<8>();
    found.iter().map(|bytes| u64::from(u64::from_ne_bytes(*bytes) != i)).sum()
}
