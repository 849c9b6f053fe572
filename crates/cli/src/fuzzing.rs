//! Arbitrary messages to the serving end of a bench: for the fuzz target `bench`, and for its
//! corpus in the tests.

pub use crate::bench::exchange::fuzz_step as bench;

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_and_chance_find_nothing() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/bench");
        let files = std::fs::read_dir(folder).expect("fuzz/corpus/bench must be there");
        let inputs: Vec<_> = files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
        assert!(!inputs.is_empty());
        let mut chance = 9_u64;
        for input in inputs.iter().cycle().take(20_000) {
            super::bench(input);
            let mut changed = input.clone();
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let [at, digit, ..] = chance.to_be_bytes();
            if let Some(byte) = changed.get_mut(usize::from(at)) {
                *byte = b'0' + digit % 10;
            }
            super::bench(&changed);
        }
    }
}
