//! An observer of a completion sees the message: the completion is a word of host memory, the
//! message is in GPU memory.

use nobounce_memory::barrier;
use nobounce_memory::gpu::copy_engine::CopyEngine;

use crate::sequences;
use crate::stage::{GO, Message, Shows, Stage, judge};

/// A kernel polls host memory, as one does that waits for a completion queue or a proxy's word.
#[test]
fn completion_comes_after_the_stores() {
    let Some(stage) = Stage::with_kernels() else { return };
    // Full lines leave on their own; a partial line stays in its write-combining buffer until a
    // fence flushes it.
    for (words, most) in [(5, 100_000), (512, 100_000), (8192, 10_000)] {
        let mut message = Message::of_words(words);
        let kept = stage.play_reader(words, None, most, |i, host| {
            stage.place(0, message.bytes(i));
            host.set(GO, i);
        });
        let bare = stage.play_reader(words, None, most, |i, host| {
            // SAFETY: the window has room for the message.
            unsafe { sequences::store(stage.base(), message.round(i)) };
            host.set(GO, i);
        });
        sequences::sfence();
        let rule = format!("old words when the completion of {} bytes is seen", words * 8);
        let shows = match words {
            0..8 => Shows::Known,
            _ => Shows::Perhaps(
                "whole lines leave the processor by themselves, before the kernel has heard of the completion",
            ),
        };
        judge(&rule, kept, &[("no sfence before the completion", shows, bare)]);
    }
}

/// The same where the copy engine places the message: the completion waits for its event.
#[test]
fn completion_comes_after_the_copy() {
    const LEN: usize = 256 << 10;
    let Some(stage) = Stage::with_kernels() else { return };
    let engine = CopyEngine::new(&stage.gpu, 4, LEN).unwrap();
    let mut message = Message::of_words(LEN / 8);
    let mut play = |wait: bool| {
        stage.play_reader(LEN / 8, None, 20_000, |i, host| {
            let mut chunk = engine.take_chunk().expect("a chunk is free");
            chunk.get_mut().expect("the chunk is ours alone").copy_from_slice(message.bytes(i));
            let copy = engine.start_write(&stage.memory, 0, chunk, LEN).unwrap();
            let finish = || while !engine.poll(&copy).unwrap() {};
            if wait {
                finish();
                barrier::before_completion();
            }
            host.set(GO, i);
            finish();
        })
    };
    let (kept, bare) = (play(true), play(false));
    judge(
        "old words when the completion of a copy of 256 KiB is seen",
        kept,
        &[("the event not waited for", Shows::Known, bare)],
    );
}
