//! An aligned 8-byte word of GPU memory is never torn, neither our stores seen by the GPU nor the
//! GPU's stores seen by our loads.

use crate::sequences;
use crate::stage::{Count, Shows, Stage, bytes, judge, play};

const WORDS: usize = 256;

/// A word whose halves are equal.
fn twin(i: u64) -> u64 {
    let half = i & 0xffff_ffff;
    half << 32 | half
}

#[test]
fn stored_words_are_never_torn() {
    let Some(stage) = Stage::with_kernels() else { return };
    let kept = watch(&stage, |i| {
        // Every place and length in words, from every alignment of the source.
        let step = usize::try_from(i % 1024).unwrap();
        let (first, shift) = (step % 9, step % 8);
        let words = 1 + (step * 37) % (WORDS - 8);
        let mut source = vec![0; shift];
        source.extend_from_slice(bytes(&vec![twin(i); words]));
        stage.window().store_last(first * 8, &source[shift..]).unwrap();
        stage.window().complete().unwrap();
    });
    let halves = watch(&stage, |i| {
        // SAFETY: the window has room.
        unsafe { sequences::store_halves(stage.base(), &[twin(i); WORDS]) };
    });
    judge(
        "words seen torn by the GPU, in messages stored",
        kept,
        &[("stored as halves", Shows::Known, halves)],
    );
}

/// Stores again and again while a kernel reads.
fn watch(stage: &Stage, store: impl FnMut(u64)) -> Count {
    let running = stage.start("torn_reader", |_| vec![stage.on_gpu(0), WORDS as u64]);
    let rounds = play(u64::MAX, store);
    running.stop();
    let (violations, reads, changes) = running.torn();
    assert!(changes > 1000, "the kernel saw {changes} changes in {reads} reads: nothing was tested");
    Count { rounds, violations }
}

#[test]
fn loaded_words_are_never_torn() {
    let Some(stage) = Stage::with_kernels() else { return };
    let mut found = vec![0; WORDS * 8];
    let kept = gaze(&stage, |i| {
        let step = usize::try_from(i % 1024).unwrap();
        let (first, words) = (step % 9, 1 + (step * 37) % (WORDS - 8));
        let found = &mut found[step % 8..][..words * 8 - 8];
        stage.window().load(first * 8, &mut *found).unwrap();
        let (whole, _) = found.as_chunks::<8>();
        whole.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect()
    });
    let halves = gaze(&stage, |i| {
        let at = usize::try_from(i).unwrap() % WORDS;
        // SAFETY: a word inside the window.
        vec![unsafe { sequences::load_halves(stage.base().add(at * 8)) }]
    });
    judge("words loaded torn, in loads", kept, &[("loaded as halves", Shows::Known, halves)]);
}

/// Loads again and again while a kernel writes.
fn gaze(stage: &Stage, mut load: impl FnMut(u64) -> Vec<u64>) -> Count {
    let running = stage.start("torn_writer", |_| vec![stage.on_gpu(0), WORDS as u64]);
    let (mut violations, mut changes, mut before) = (0, 0, 0);
    let rounds = play(u64::MAX, |i| {
        for word in load(i) {
            violations += u64::from(word != twin(word));
            changes += u64::from(word != before);
            before = word;
        }
    });
    running.stop();
    assert!(changes > 1000, "only {changes} changes in {rounds} loads: nothing was tested");
    Count { rounds, violations }
}
