//! A kernel launched after the completion sees the message.

use nobounce_memory::gpu::kernel::Stream;

use crate::sequences;
use crate::stage::{Count, Message, Shows, Stage, judge, play};

const WORDS: usize = 517;

#[test]
fn kernel_launched_after_the_completion_sees_the_message() {
    let Some(stage) = Stage::with_kernels() else { return };
    let mut message = Message::of_words(WORDS);
    let kept = launches(&stage, |i| {
        stage.window().store_last(0, message.bytes(i)).unwrap();
        stage.window().complete().unwrap();
    });
    let bare = launches(&stage, |i| {
        // SAFETY: the window has room for the message.
        unsafe { sequences::store(stage.base(), message.round(i)) };
    });
    sequences::sfence();
    judge(
        "old words seen by a kernel launched afterwards",
        kept,
        &[("no sfence before the launch", Shows::Perhaps, bare)],
    );
}

/// Stores a message, launches a kernel that looks at it, and counts the words that it found old.
fn launches(stage: &Stage, mut store: impl FnMut(u64)) -> Count {
    let kernel = stage.kernel("look");
    let stream = Stream::new(&stage.gpu).unwrap();
    let look = stage.start("look", |_| vec![stage.on_gpu(0), 0, 0]);
    let rounds = play(50_000, |i| {
        store(i);
        let arguments = [stage.on_gpu(0), WORDS as u64, i, look.words.address(0)];
        // SAFETY: the kernel's arguments; memory and words outlive the launch, which is waited for.
        unsafe { kernel.launch(&stream, 1, 256, &arguments) }.unwrap();
        look.acknowledged(i);
    });
    Count { rounds, violations: look.torn().0 }
}
