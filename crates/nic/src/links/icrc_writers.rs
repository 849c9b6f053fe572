//! Cache of ICRC writers for recent flows and packet lengths, sent and received.

use std::net::IpAddr;

use nobounce_protocol::wire::icrc::{Flow, IcrcWriter};

/// Cache size. Making an ICRC writer costs as much as the ICRCs of a few packets.
const KEPT: usize = 32;

/// The ICRC writers of a device in one direction. `K` is the cache key: less than a whole [`Flow`],
/// since one end is always ours.
#[derive(Clone, Debug)]
pub(crate) struct IcrcWriters<K> {
    kept: [Option<IcrcWriter>; KEPT],
    /// Key and index of the last hit.
    last: Option<((K, usize), usize)>,
}

impl<K: Copy + PartialEq> IcrcWriters<K> {
    pub(crate) const fn new() -> Self {
        Self { kept: [None; KEPT], last: None }
    }

    /// Index of the ICRC writer for packets of `len` bytes of this flow, valid until the next call.
    /// Creates it on a miss.
    // Always inlined: a key on the stack would cause store-forwarding stalls (see `Destination` in
    // batch.rs).
    #[inline(always)]
    pub(crate) fn find(&mut self, key: K, len: usize, flow: impl FnOnce() -> Flow) -> usize {
        // The previous packet mostly has the same key.
        if let Some((last, place)) = self.last
            && last == (key, len)
        {
            return place;
        }
        let place = self.look_up(flow(), len);
        self.last = Some(((key, len), place));
        place
    }

    #[cold]
    fn look_up(&mut self, flow: Flow, len: usize) -> usize {
        let place = place_of(&flow, len);
        let kept = &mut self.kept[place];
        if kept.as_ref().is_none_or(|s| s.packet_len() != len || *s.flow() != flow) {
            *kept = Some(IcrcWriter::new(flow, len));
        }
        place
    }

    /// The ICRC writer at that index.
    #[inline]
    pub(crate) fn get(&self, place: usize) -> Option<&IcrcWriter> {
        self.kept.get(place)?.as_ref()
    }
}

/// Hash: adjacent hosts, ports and lengths get different places.
fn place_of(flow: &Flow, len: usize) -> usize {
    let host = |addr: &IpAddr| match addr {
        IpAddr::V4(a) => usize::from(a.octets()[3]),
        IpAddr::V6(a) => usize::from(a.octets()[15]),
    };
    (len / 4 * 7 + (host(&flow.src) + host(&flow.dst)) * 5 + usize::from(flow.src_port) * 3) % KEPT
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(host: u8) -> Flow {
        Flow {
            src: [127, 0, 0, 1].into(),
            dst: [127, 0, 0, host].into(),
            src_port: 50_000,
            dst_port: nobounce_protocol::wire::ROCE_PORT,
        }
    }

    /// More flows and lengths than the cache holds, in any order: each gets its own ICRC writer.
    #[test]
    fn an_icrc_writer_is_always_that_of_its_flow_and_length() {
        let mut icrc_writers = IcrcWriters::new();
        for round in 0..3 {
            for host in 0..20 {
                for len in [16, 20, 1040, 4112] {
                    let place = icrc_writers.find(host, len, || flow(host));
                    let icrc_writer = icrc_writers.get(place).unwrap();
                    assert_eq!(
                        (*icrc_writer.flow(), icrc_writer.packet_len()),
                        (flow(host), len),
                        "round {round}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_same_again_asks_for_nothing() {
        let mut icrc_writers = IcrcWriters::new();
        let place = icrc_writers.find(1, 1040, || flow(1));
        assert_eq!(icrc_writers.find(1, 1040, || panic!("the flow was not needed")), place);
    }
}
