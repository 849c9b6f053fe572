//! The inputs of the fuzz targets, replayed.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use nobounce_protocol::pcap::Reader;
use nobounce_protocol::seal;
use nobounce_protocol::sim::{Rng, fuzzing};

fn corpus(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target)
}

fn replay(target: &str, run: fn(&[u8])) {
    let mut inputs: Vec<PathBuf> = fs::read_dir(corpus(target))
        .unwrap_or_else(|error| panic!("fuzz/corpus/{target} must be there: {error}"))
        .map(|entry| entry.unwrap().path())
        .collect();
    inputs.sort();
    assert!(inputs.len() >= 10, "only {} inputs for {target}", inputs.len());
    for path in inputs {
        let data = fs::read(&path).unwrap();
        eprintln!("{}", path.display()); // shown if it fails
        run(&data);
    }
}

#[test]
fn parser() {
    replay("parser", fuzzing::parser);
}

#[test]
fn responder() {
    replay("responder", fuzzing::responder);
}

#[test]
fn operations() {
    replay("operations", fuzzing::operations);
}

#[test]
fn receiver() {
    replay("receiver", fuzzing::receiver);
}

#[test]
fn unreliable() {
    replay("unreliable", fuzzing::unreliable);
}

#[test]
fn management() {
    replay("management", fuzzing::management);
}

#[test]
fn sealed() {
    replay("sealed", seal::fuzzing::sealed);
}

/// Makes the first corpora: packets of the captures, one of each opcode and file; random bytes for
/// the others.
#[test]
#[ignore = "writes into fuzz/corpus"]
fn make_corpora() {
    for target in ["parser", "responder", "operations", "receiver", "unreliable", "management", "sealed"] {
        fs::create_dir_all(corpus(target)).unwrap();
    }
    for name in ["rxe", "rxe-mtu4096", "rxe-ipv6"] {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/{name}.pcap"));
        let file = fs::read(path).unwrap();
        let mut kinds = BTreeMap::new();
        for packet in Reader::new(&file).unwrap().map(Result::unwrap).filter(|p| p.packet.len() < 400) {
            kinds.entry(packet.packet[0]).or_insert(packet.packet);
        }
        for (opcode, packet) in kinds {
            fs::write(corpus("parser").join(format!("{name}-{opcode:02x}")), packet).unwrap();
        }
    }
    for (target, count, most) in [
        ("responder", 40, 400),
        ("operations", 40, 200),
        ("receiver", 40, 400),
        ("unreliable", 40, 200),
        ("management", 60, 600),
        ("sealed", 60, 400),
    ] {
        for seed in 0..count {
            let mut rng = Rng::new(seed);
            let data: Vec<u8> =
                (0..20 + rng.below(most)).map(|_| u8::try_from(rng.below(256)).unwrap()).collect();
            fs::write(corpus(target).join(format!("random-{seed:02}")), data).unwrap();
        }
    }
}
