//! A reader that sees the GPU's flag and then loads through the window gets what the GPU wrote
//! before the flag.

use std::time::Instant;

use crate::sequences::{self, Fence};
use crate::stage::{Count, GO, ROUND, Shows, Stage, judge, play};

const WORDS: usize = 32;

#[test]
fn loads_come_after_the_gpus_flag() {
    let Some(stage) = Stage::with_kernels() else { return };
    let kept = read(&stage, |words| {
        let mut found = [0; WORDS * 8];
        stage.window().load(0, &mut found).unwrap();
        let (whole, _) = found.as_chunks::<8>();
        words.iter_mut().zip(whole).for_each(|(word, bytes)| *word = u64::from_ne_bytes(*bytes));
    });
    let own = |fence| {
        read(&stage, |words| {
            // SAFETY: the window has room, starts on a line, and the words are whole lines.
            unsafe { sequences::load(words, stage.base(), fence) };
        })
    };
    let (fenced, bare) = (own(Fence::Kept), own(Fence::TakenOut));
    assert_eq!(fenced.violations, 0, "the tests' own sequence with its fence: {fenced}");
    judge(
        "messages read old through the window after the GPU's flag",
        kept,
        &[("no mfence before the loads", Shows::Known, bare)],
    );
}

/// The single-word load, which a 1-byte flush READ and an atomic make.
#[test]
fn word_loads_come_after_the_gpus_flag() {
    let Some(stage) = Stage::with_kernels() else { return };
    let kept = read(&stage, |words| {
        words.iter_mut().enumerate().for_each(|(at, word)| *word = stage.window().load_u64(at * 8).unwrap());
    });
    let bare = read(&stage, |words| {
        let base = stage.base().cast::<u64>();
        // SAFETY: the window has room for the words and is aligned.
        words.iter_mut().enumerate().for_each(|(at, word)| *word = unsafe { base.add(at).read_volatile() });
    });
    judge(
        "messages read old word by word after the GPU's flag",
        kept,
        &[(
            "no mfence before the loads",
            Shows::Perhaps(
                "a single load is not read ahead, and the flag's is over long before it reaches the GPU",
            ),
            bare,
        )],
    );
}

/// The same where the flag arrives late: the processor may load the word speculatively before the
/// flag's load is complete. Write-combining memory may be read out of order.
#[test]
fn word_load_waits_for_a_flag_that_is_known_late() {
    let Some(stage) = Stage::with_kernels() else { return };
    let kept = read_after_late_flag(&stage, |at| stage.window().load_u64(at * 8).unwrap());
    let base = stage.base().cast::<u64>();
    // SAFETY: the window has room for the words and is aligned.
    let bare = read_after_late_flag(&stage, |at| unsafe { base.add(at).read_volatile() });
    judge(
        "words read old after a flag that is known late",
        kept,
        &[(
            "no mfence before the load",
            Shows::Perhaps(
                "this processor begins no plain load from write-combined memory before earlier loads are over (streaming loads it does)",
            ),
            bare,
        )],
    );
}

/// Plays rounds against `writer`: reads the flag late and a word behind it, again and again until
/// the flag is set. Counts words that were stale then.
fn read_after_late_flag(stage: &Stage, load: impl Fn(usize) -> u64) -> Count {
    const MOST: u64 = 50_000;
    let running = stage.start("writer", |_| vec![stage.on_gpu(0), WORDS as u64, MOST]);
    let flag = running.flag();
    let mut violations = 0;
    let rounds = play(MOST, |i| {
        let (at, started) = (usize::try_from(i).unwrap_or(0) % WORDS, Instant::now());
        loop {
            // SAFETY: the words live as long as the kernel.
            let seen = unsafe { sequences::load_late(flag) };
            let word = load(at);
            if seen == i {
                violations += u64::from(word != i);
                break;
            }
            assert!(started.elapsed() < ROUND, "round {i}: the kernel stands at {seen}");
        }
        running.words.set(GO, i);
    });
    running.stop();
    Count { rounds, violations }
}

/// Plays rounds against `writer`: it writes the message, then the flag; `load` reads the message.
/// Counts messages with a stale word.
fn read(stage: &Stage, mut load: impl FnMut(&mut [u64; WORDS])) -> Count {
    const MOST: u64 = 200_000;
    let running = stage.start("writer", |_| vec![stage.on_gpu(0), WORDS as u64, MOST]);
    let mut violations = 0;
    let rounds = play(MOST, |i| {
        running.acknowledged(i);
        let mut words = [0; WORDS];
        load(&mut words);
        violations += u64::from(words.iter().any(|&word| word != i));
        running.words.set(GO, i);
    });
    running.stop();
    Count { rounds, violations }
}
