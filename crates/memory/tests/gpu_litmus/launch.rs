//! A kernel launched after the completion sees the message, whichever thread launches it.

use nobounce_memory::gpu::kernel::Stream;

use crate::relay::play_relay;
use crate::sequences;
use crate::stage::{Count, Message, Shows, Stage, judge};

#[test]
fn kernel_launched_after_the_completion_sees_the_message() {
    let Some(stage) = Stage::with_kernels() else { return };
    // The partial line at the end of a message stays in its write-combining buffer until a fence
    // flushes it.
    for words in [5, 517] {
        let mut message = Message::of_words(words);
        let kept = launches(&stage, words, |i| stage.place(0, message.bytes(i)));
        let bare = launches(&stage, words, |i| {
            // SAFETY: the window has room for the message.
            unsafe { sequences::store(stage.base(), message.round(i)) };
        });
        let rule = format!("old words of {} bytes seen by a kernel launched afterwards", words * 8);
        judge(&rule, kept, &[("no sfence before the other thread launches", Shows::Known, bare)]);
    }
}

/// NCCL's flush: the response to a READ of one byte alone guarantees that everything before it is
/// in GPU memory.
#[test]
fn read_of_a_byte_flushes_what_was_stored() {
    let Some(stage) = Stage::with_kernels() else { return };
    for words in [5, 517] {
        let mut message = Message::of_words(words);
        let kept = launches(&stage, words, |i| {
            // SAFETY: the window has room for the message.
            unsafe { sequences::store(stage.base(), message.round(i)) };
            stage.window().load(0, &mut [0]).unwrap();
        });
        let bare = launches(&stage, words, |i| {
            // SAFETY: as above.
            unsafe { sequences::store(stage.base(), message.round(i)) };
        });
        let rule = format!("old words of {} bytes seen after the READ of a byte", words * 8);
        judge(&rule, kept, &[("no load for the READ", Shows::Known, bare)]);
    }
}

/// One thread stores a message, another launches a kernel that checks it: counts stale words.
fn launches(stage: &Stage, words: usize, store: impl FnMut(u64) + Send) -> Count {
    let kernel = stage.kernel("look");
    let stream = Stream::new(&stage.gpu).unwrap();
    let look = stage.start("look", |_| vec![stage.on_gpu(0), 0, 0]);
    let rounds = play_relay(50_000, store, |i| {
        let arguments = [stage.on_gpu(0), words as u64, i, look.words.address(0)];
        // SAFETY: the kernel's arguments; memory and words outlive the launch, which is waited for.
        unsafe { kernel.launch(&stream, 1, 256, &arguments) }.unwrap();
        look.acknowledged(i);
    });
    Count { rounds, violations: look.torn().0 }
}
