//! A reader of a message's last byte sees all of it; a reader of a flag sees everything that was
//! written before it.

use std::ops::Range;

use nobounce_memory::gpu::copy_engine::CopyEngine;
use nobounce_memory::gpu::{GpuMemory, GpuOptions, Shadowed};

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
            stage.place(0, message.bytes(i));
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
        let shows = match words {
            512 => Shows::Known,
            _ => Shows::Perhaps(
                "of a long message all but its end has left the processor by itself when the end does",
            ),
        };
        judge(&rule, kept, &[("no sfence before the last 64", shows, bare)]);
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
        // The product completes the first message too, which is one more fence: here the flag's own
        // fence stands alone.
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
        &[("no sfence before the flag", Shows::Known, bare)],
    );
}

/// A kernel polls a signal that an atomic counts up after the payload, as GPU-initiated puts do.
/// The atomic takes the old value from host memory: no load drives the payload out.
#[test]
fn signal_comes_after_the_payload() {
    const SIGNAL: usize = 1 << 20;
    let Some(stage) = Stage::with_kernels() else { return };
    let options = GpuOptions { shadow: Shadowed::Words, ..GpuOptions::default() };
    for (words, most) in [(5, 100_000), (512, 100_000), (8192, 10_000)] {
        let mut message = Message::of_words(words);
        // The copy in host memory begins at 0, too.
        stage.clear();
        let signals = GpuMemory::register(stage.on_gpu(SIGNAL), 4096, &options).unwrap();
        let window = signals.window().unwrap();
        let kept = stage.play_reader(words, Some(SIGNAL), most, |i, _| {
            // The product completes the message too, which is one more fence: here the atomic's own
            // fence stands alone.
            stage.window().store(0, message.bytes(i)).unwrap();
            assert_eq!(window.fetch_add(0, 1).unwrap(), i - 1);
        });
        let bare = stage.play_reader(words, Some(SIGNAL), most, |i, _| {
            // SAFETY: the window has room for both, and the word is aligned.
            unsafe {
                sequences::store(stage.base(), message.round(i));
                stage.base().add(SIGNAL).cast::<u64>().write_volatile(i);
            }
            sequences::sfence();
        });
        let rule = format!("old words of {} bytes when the signal behind them is seen", words * 8);
        let shows =
            Shows::Perhaps("the processor drained its write-combining buffers in the order of the stores");
        judge(&rule, kept, &[("no sfence before the signal", shows, bare)]);
    }
}

/// The same where the copy engine places both: one stream orders its copies. Two streams do not,
/// and inside one copy no order is guaranteed.
#[test]
fn flag_copy_comes_after_the_payload() {
    const LEN: usize = 256 << 10;
    const FLAG: usize = LEN - 8;
    // All of the stage: its copy takes longer than it takes to start the next one.
    const LONG: usize = 2 << 20;
    const LONG_FLAG: usize = LONG - 8;
    let Some(stage) = Stage::with_kernels() else { return };
    let engine = CopyEngine::new(&stage.gpu, 4, LONG).unwrap();
    // Has a stream of its own.
    let other = CopyEngine::new(&stage.gpu, 4, LONG).unwrap();
    let play = |pieces: &[(&CopyEngine, Range<usize>)]| {
        let len = pieces.last().map_or(0, |(_, range)| range.end);
        let mut message = Message::of_words(len / 8);
        stage.play_reader(len / 8, Some(len - 8), 20_000, |i, _| {
            let bytes = message.bytes(i);
            let chunks = pieces.iter().map(|(engine, range)| {
                let mut chunk = engine.take_chunk().expect("a chunk is free");
                let piece = &bytes[range.clone()];
                chunk.get_mut().expect("the chunk is ours alone")[..piece.len()].copy_from_slice(piece);
                chunk
            });
            // All are started, one right after the other, before one is waited for.
            let chunks: Vec<_> = chunks.collect();
            let started = pieces.iter().zip(chunks).map(|((engine, range), chunk)| {
                engine.start_write(&stage.memory, range.start, chunk, range.len()).unwrap()
            });
            let started: Vec<_> = started.collect();
            for ((engine, _), copy) in pieces.iter().zip(&started) {
                while !engine.poll(copy).unwrap() {}
            }
        })
    };
    let kept = play(&[(&engine, 0..FLAG), (&engine, FLAG..LEN)]);
    let two_streams = play(&[(&engine, 0..FLAG), (&other, FLAG..LEN)]);
    let two_streams_long = play(&[(&engine, 0..LONG_FLAG), (&other, LONG_FLAG..LONG)]);
    let joined = play(&[(&engine, 0..LEN)]);
    judge(
        "old words when a flag copied after its 256 KiB is seen",
        kept,
        &[
            (
                "the flag's copy on another stream",
                Shows::Perhaps("both streams have the same engine, which takes one copy after the other"),
                two_streams,
            ),
            (
                "the same behind 2 MiB",
                Shows::Perhaps("both streams have the same engine, which takes one copy after the other"),
                two_streams_long,
            ),
            (
                "flag and payload in one copy",
                Shows::Perhaps(
                    "this engine writes a copy from its first byte to its last, which is not guaranteed",
                ),
                joined,
            ),
        ],
    );
}
