//! Who sees the last byte of a message sees all of it; who sees a flag sees everything that was written before it.

use crate::sequences::{self, Fence};
use crate::stage::{Message, Shows, Stage, judge};

/// A kernel polls the last word of the message itself.
#[test]
fn last_64_bytes_come_last() {
    let Some(stage) = Stage::with_kernels() else { return };
    for (words, most) in [(512, 100_000), (8192, 10_000)] {
        let last = Some((words - 1) * 8);
        let mut message = Message::of_words(words);
        let kept = stage.play_reader(words, last, most, |i, _| {
            stage.window().store_last(0, message.bytes(i)).unwrap();
            stage.window().complete().unwrap();
        });
        let mut own = |fence| {
            stage.play_reader(words, last, most, |i, _| {
                // SAFETY: the window has room for the message.
                unsafe { sequences::store_message(stage.base(), message.round(i), fence) };
            })
        };
        let (fenced, bare) = (own(Fence::Kept), own(Fence::TakenOut));
        assert_eq!(fenced.violations, 0, "the tests' own sequence with its fence: {fenced}");
        let rule = format!("old words when the last of {} bytes is seen", words * 8);
        judge(&rule, kept, &[("no sfence before the last 64", Shows::Known, bare)]);
    }
}

/// A kernel polls a flag that a second, 8-byte message writes elsewhere in GPU memory.
#[test]
fn flag_write_comes_after_the_payload() {
    const WORDS: usize = 512;
    const FLAG: usize = 64 << 10;
    let Some(stage) = Stage::with_kernels() else { return };
    let mut message = Message::of_words(WORDS);
    let kept = stage.play_reader(WORDS, Some(FLAG), 100_000, |i, _| {
        stage.window().store_last(0, message.bytes(i)).unwrap();
        stage.window().store_last(FLAG, &i.to_ne_bytes()).unwrap();
        stage.window().complete().unwrap();
    });
    let bare = stage.play_reader(WORDS, Some(FLAG), 100_000, |i, _| {
        // SAFETY: the window has room for both.
        unsafe {
            sequences::store(stage.base(), message.round(i));
            sequences::store(stage.base().add(FLAG), &[i]);
        }
        sequences::sfence();
    });
    judge(
        "old words when the flag of a second WRITE is seen",
        kept,
        &[("no sfence before the flag", Shows::Perhaps, bare)],
    );
}
