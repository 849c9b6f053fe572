//! How a transfer is split: a share for each rail, and pieces of a share.

use std::ops::Range;

/// Shares begin at multiples of this, so that no two rails write to one cache line.
const ALIGN: usize = 4096;
/// Default speed of ports that report none, so that all of them get the same share.
const UNKNOWN_SPEED: u64 = 10_000;

/// Splits a share into messages that its rail's port carries.
pub(crate) fn pieces(share: Range<usize>, longest: u32) -> impl Iterator<Item = Range<usize>> {
    let longest = usize::try_from(longest).unwrap_or(usize::MAX).max(1);
    let step = if longest > ALIGN { longest / ALIGN * ALIGN } else { longest };
    share.clone().step_by(step).map(move |start| start..share.end.min(start.saturating_add(step)))
}

/// Shares of a transfer in rail order, weighted by speed; whole pages, except at the end.
pub(crate) fn split(len: usize, speeds: &[u64]) -> Vec<Range<usize>> {
    let speeds: Vec<u128> =
        speeds.iter().map(|speed| if *speed == 0 { UNKNOWN_SPEED } else { *speed }.into()).collect();
    let total: u128 = speeds.iter().sum();
    let (mut before, mut start) = (0, 0);
    let mut shares = Vec::with_capacity(speeds.len());
    for speed in &speeds {
        before += speed;
        let end = usize::try_from(len as u128 * before / total).unwrap_or(len);
        let end = if before == total { len } else { (end / ALIGN * ALIGN).max(start) };
        shares.push(start..end);
        start = end;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_cut_into_messages_that_the_port_carries() {
        let of =
            |share, longest| pieces(share, longest).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>();
        assert_eq!(of(0..10, 1 << 31), [(0, 10)]);
        assert_eq!(of(4096..20_000, 8200), [(4096, 12_288), (12_288, 20_000)], "whole pages");
        assert_eq!(of(0..7, 3), [(0, 3), (3, 6), (6, 7)]);
        assert_eq!(of(5..5, 3), []);
    }

    #[test]
    fn shares_are_by_speed_and_leave_nothing_out() {
        assert_eq!(split(1 << 20, &[100, 300]), [0..262_144, 262_144..1 << 20]);
        assert_eq!(
            split(1 << 20, &[0, 0]),
            [0..1 << 19, 1 << 19..1 << 20],
            "ports that say nothing are alike"
        );
        assert_eq!(split(100, &[1, 1, 1]), [0..0, 0..0, 0..100], "what is short goes one way");
        for (len, speeds) in [(0, vec![5]), (12_345_678, vec![400, 200, 25, 1]), (4097, vec![1, 1])] {
            let shares = split(len, &speeds);
            assert_eq!(shares.len(), speeds.len());
            assert_eq!((shares[0].start, shares[shares.len() - 1].end), (0, len));
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start), "{shares:?}");
        }
    }
}
