//! Arbitrary messages to the serving end of a bench and to the page's server: for the fuzz targets
//! `bench` and `http`, and for their corpora in the tests.

pub use crate::bench::exchange::fuzz_step as bench;
pub use crate::ui::fuzz_request as http;

#[cfg(test)]
mod tests {
    /// The files of a corpus.
    fn corpus(name: &str) -> Vec<Vec<u8>> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
        let files = std::fs::read_dir(folder).expect("the corpus must be there");
        files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect()
    }

    #[test]
    fn changed_requests_to_the_page_get_no_data() {
        let inputs = corpus("http");
        assert!(inputs.len() >= 4);
        for input in &inputs {
            super::http(input);
            for at in 0..input.len() {
                for byte in [0, b' ', b'/', b'%', b'?', b'\n', 0xff] {
                    let mut changed = input.clone();
                    changed[at] = byte;
                    super::http(&changed);
                }
            }
        }
    }

    #[test]
    fn the_corpus_and_chance_find_nothing() {
        let inputs = corpus("bench");
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
