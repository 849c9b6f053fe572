//! Fuzzing entry points: any bytes are facts, a log, a configuration space, a packed file, or an
//! error.

use crate::{Style, diagnose, draw, log, report, storage_report};
use nobounce_topology::facts::Facts;
use nobounce_topology::sysfs;

/// Feeds the bytes to a parser, chosen by the first byte, and its result to all later stages.
pub fn readers(data: &[u8]) {
    let Some((which, rest)) = data.split_first() else { return };
    match which % 5 {
        0 => {
            let _ = sysfs::parse_config_space(rest);
        }
        1 => {
            let Ok(facts) = Facts::from_json(&String::from_utf8_lossy(rest)) else { return };
            let facts = Facts::from_json(&facts.to_json()).unwrap_or(facts).redacted();
            let diagnosis = diagnose(&facts);
            let style = Style { color: true, width: 80, all: true };
            let _ = report(&facts, &diagnosis, style);
            if let (Some(storage), Some(found)) = (&facts.storage, &diagnosis.storage) {
                let _ = storage_report(&facts, storage, found, style);
            }
            let topology = draw::Topology::of(&facts);
            let _ = (draw::text(&topology, style), draw::svg(&topology));
        }
        2 => {
            if let Ok(read) = log::read_nccl(rest, |_| {}) {
                let facts = Facts::default();
                let _ = log::join_nccl(&read, &facts, &diagnose(&facts)).text();
            }
        }
        4 => {
            let _ = sysfs::gzip::unpack(rest);
        }
        _ => {
            if let Ok(read) = log::read_ucx(rest, |_| {}) {
                let facts = Facts::default();
                let _ = log::join_ucx(&read, &facts, &diagnose(&facts)).text();
            }
        }
    }
}
