//! The corpus of the fuzzer, and changes of it, on a stable compiler.

use std::fs;
use std::path::Path;

use nobounce_diagnose::fuzzing::readers;

#[test]
fn the_corpus_and_what_is_near_it_are_survived() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/readers");
    let mut seed = 11_u64;
    let mut next = move |most: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).unwrap_or(0) % most.max(1)
    };
    let mut count = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let bytes = fs::read(entry.unwrap().path()).unwrap();
        readers(&bytes);
        for _ in 0..150 {
            let mut changed = bytes.clone();
            for _ in 0..=next(4) {
                let at = next(changed.len());
                changed[at] = u8::try_from(next(256)).unwrap();
            }
            changed.truncate(1 + next(changed.len() * 2));
            readers(&changed);
        }
        count += 1;
    }
    assert!(count >= 6);
}
