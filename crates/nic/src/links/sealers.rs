//! Sealers kept for the flows and packet lengths lately used, of packets that leave and of those that arrive.

use std::net::IpAddr;

use nobounce_protocol::wire::icrc::{Flow, Sealer};

/// How many are kept: making one costs as much as closing a few packets.
const KEPT: usize = 32;

/// The sealers of a device in one direction. What tells the flows apart is `K`: less than a whole [`Flow`], for one end is always ours.
#[derive(Clone, Debug)]
pub(crate) struct Sealers<K> {
    kept: [Option<Sealer>; KEPT],
    /// What the last one was found for, and where.
    last: Option<((K, usize), usize)>,
}

impl<K: Copy + PartialEq> Sealers<K> {
    pub(crate) const fn new() -> Self {
        Self { kept: [None; KEPT], last: None }
    }

    /// Where the sealer for packets of `len` bytes of this flow is, until the next call; makes it if it is not there.
    // Always inlined: a key on the stack would be read back in other pieces than it was written in (see `Way` in batch.rs).
    #[inline(always)]
    pub(crate) fn find(&mut self, key: K, len: usize, flow: impl FnOnce() -> Flow) -> usize {
        // The packet before is mostly of the same kind.
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
            *kept = Some(Sealer::new(flow, len));
        }
        place
    }

    /// The one that `find` found there.
    #[inline]
    pub(crate) fn get(&self, place: usize) -> Option<&Sealer> {
        self.kept.get(place)?.as_ref()
    }
}

/// Neighbouring hosts, ports and lengths get places of their own.
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

    /// More flows and lengths than are kept, in and out of turn: each gets the sealer made for it.
    #[test]
    fn a_sealer_is_always_that_of_its_flow_and_length() {
        let mut sealers = Sealers::new();
        for round in 0..3 {
            for host in 0..20 {
                for len in [16, 20, 1040, 4112] {
                    let place = sealers.find(host, len, || flow(host));
                    let sealer = sealers.get(place).unwrap();
                    assert_eq!((*sealer.flow(), sealer.packet_len()), (flow(host), len), "round {round}");
                }
            }
        }
    }

    #[test]
    fn the_same_again_asks_for_nothing() {
        let mut sealers = Sealers::new();
        let place = sealers.find(1, 1040, || flow(1));
        assert_eq!(sealers.find(1, 1040, || panic!("the flow was not needed")), place);
    }
}
