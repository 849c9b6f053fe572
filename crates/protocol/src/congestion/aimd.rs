//! A window by losses and congestion marks: the default of a queue pair.
//!
//! It grows by slow start and then by one packet per round trip, and shrinks at most once per round
//! trip when packets are lost, as TCP's does: flows that share a bottleneck converge to equal
//! shares. With selective retransmission, a loss is a sign of congestion only where round trips are
//! long and more than one packet in 16 is lost: a path that damages packets loses fewer, and a
//! queue that overflows loses more as the window grows.
//!
//! A congestion notification takes 15 % of the window, at least a packet and at most half of it.
//! While they come, the window grows more slowly the smaller it is: one packet per round trip of
//! each of 64 senders would fill a queue between two notifications, which come 50 us apart. It
//! falls below one packet, as many senders of one receiver need: packets then leave further apart
//! than a round trip, as with Swift (Kumar et al., SIGCOMM 2020).
//!
//! No delay is a sign of congestion by itself: a sender does not know the round trip of an empty
//! path, and who began while a queue stood would take the shares of others.

use super::{Ack, CongestionControl, Loss};
use crate::timing::{MILLISECOND, Nanos};

/// Most bytes in flight. Beyond this, a software NIC fills buffers, not the pipe.
const LARGEST: u32 = 1 << 20;
/// Bytes in flight at the start, and after a pause.
const FIRST: u32 = 16 << 10;
/// Packets in flight after any number of losses.
const SMALLEST: f64 = 2.0;
/// The share of lost packets above which a queue overflows: one in so many.
const LOSS_SHARE: u64 = 16;
/// Packets that have to be seen before that share means anything.
const LOSS_SAMPLE: u64 = 128;
/// The same after any number of notifications.
const SMALLEST_MARKED: f64 = 1.0 / 64.0;
/// Part of the window that a loss leaves.
const AFTER_LOSS: f64 = 0.7;
/// Part of the window that a notification takes.
const CUT: f64 = 0.15;
/// What it takes at least, in packets, and at most.
const LEAST_CUT: f64 = 1.0;
const LARGEST_CUT: f64 = 0.5;
/// While notifications come, so many round trips add the square root of the window, in packets.
const CAREFUL_WINDOWS: f64 = 40.0;
/// What a round trip adds at least, in packets.
const LEAST_GROWTH: f64 = 1.0 / 64.0;
/// How long after a notification the congestion is over.
const CALM_AFTER: Nanos = 10 * MILLISECOND;

/// The window and its threshold of slow start, in packets.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Size {
    packets: f64,
    threshold: f64,
}

impl Size {
    /// Ends slow start.
    fn shrink_to(&mut self, packets: f64) {
        *self = Self { packets, threshold: packets };
    }
}

/// Recent packets: what arrived and what was lost.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    arrived: u64,
    lost: u64,
}

impl Tally {
    const fn seen(self) -> u64 {
        self.arrived + self.lost
    }

    /// Older packets count less and less.
    const fn arrive(&mut self, packets: u64) {
        self.arrived += packets;
        if self.seen() > 2 * LOSS_SAMPLE {
            self.arrived /= 2;
            self.lost /= 2;
        }
    }

    const fn is_heavy(self) -> bool {
        self.seen() >= LOSS_SAMPLE && self.lost * LOSS_SHARE > self.seen()
    }
}

/// A window by losses and marks.
#[derive(Debug)]
pub struct Aimd {
    mtu: u32,
    size: Size,
    first: f64,
    largest: f64,
    shortest: Nanos,
    /// The latest two round trips. One alone may have waited for a CPU at the other end.
    latest: [Nanos; 2],
    /// Until then, further notifications do not shrink the window.
    slowed_until: Nanos,
    calm_at: Nanos,
    tally: Tally,
    /// The window before silence closed it, to restore if nothing was lost.
    undo: Option<Size>,
}

impl Default for Aimd {
    fn default() -> Self {
        let mut window = Self {
            mtu: 0,
            size: Size { packets: 0.0, threshold: 0.0 },
            first: 0.0,
            largest: 0.0,
            shortest: Nanos::MAX,
            latest: [0; 2],
            slowed_until: 0,
            calm_at: 0,
            tally: Tally::default(),
            undo: None,
        };
        window.begin(1024);
        window
    }
}

impl Aimd {
    /// Whether packets wait in queues for as long as they travel.
    const fn is_inflated(&self) -> bool {
        let [latest, before] = self.latest;
        let waited = if latest < before { latest } else { before };
        waited > self.shortest.saturating_mul(2)
    }

    /// Growth in a round trip, in packets.
    fn growth(&self, now: Nanos) -> f64 {
        let Size { packets, threshold } = self.size;
        if packets < threshold {
            packets
        } else if now < self.calm_at {
            (packets.sqrt() / CAREFUL_WINDOWS).clamp(LEAST_GROWTH, 1.0)
        } else {
            1.0
        }
    }
}

impl CongestionControl for Aimd {
    fn begin(&mut self, mtu: u32) {
        self.mtu = mtu.max(1);
        self.largest = f64::from((LARGEST / self.mtu).max(64));
        self.first = f64::from((FIRST / self.mtu).max(1));
        self.size = Size { packets: self.first, threshold: self.largest };
    }

    fn on_ack(&mut self, now: Nanos, ack: Ack) {
        if let Some(round_trip) = ack.round_trip {
            self.latest = [round_trip, self.latest[0]];
            self.shortest = self.shortest.min(round_trip);
        }
        self.tally.arrive(ack.bytes / u64::from(self.mtu));
        if ack.in_use {
            let windows = float(ack.bytes) / f64::from(self.mtu) / self.size.packets.max(1.0);
            self.size.packets = (self.size.packets + self.growth(now) * windows).min(self.largest);
        }
    }

    fn on_mark(&mut self, now: Nanos) {
        self.calm_at = now + CALM_AFTER;
        // What was marked before the window shrank is no news.
        if now < self.slowed_until {
            return;
        }
        self.slowed_until = now + if self.shortest == Nanos::MAX { 0 } else { self.shortest };
        let Size { packets, threshold } = self.size;
        let most = packets * LARGEST_CUT;
        // Slow start has doubled the window in the last round trip.
        let cut = if packets < threshold { most } else { (packets * CUT).max(LEAST_CUT).min(most) };
        self.size.shrink_to((packets - cut).max(SMALLEST_MARKED));
    }

    fn on_loss(&mut self, _now: Nanos, loss: Loss) -> bool {
        self.undo = None;
        self.tally.lost += loss.packets;
        // Go-back-N sends so much again after each loss that it must slow down whatever the cause.
        let slows = loss.resends_all || (self.tally.is_heavy() && self.is_inflated());
        if slows {
            self.tally = Tally::default();
            let packets = self.size.packets;
            self.size.shrink_to((packets * AFTER_LOSS).max(SMALLEST).min(packets));
        }
        slows
    }

    fn on_silence(&mut self, _now: Nanos) {
        self.undo.get_or_insert(self.size);
        let threshold = (self.size.packets / 2.0).max(2.0 * SMALLEST);
        self.size = Size { packets: SMALLEST, threshold };
    }

    fn on_spurious(&mut self) {
        if let Some(size) = self.undo.take() {
            self.size = size;
        }
    }

    fn on_restart(&mut self, _now: Nanos) {
        // What was known of the path is old.
        self.size.packets = self.size.packets.max(self.first);
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive and small")]
    fn window(&self) -> u64 {
        (self.size.packets * f64::from(self.mtu)) as u64
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive and small")]
    fn gap(&mut self, _now: Nanos, bytes: u64) -> Nanos {
        if self.size.packets >= 1.0 {
            return 0; // acknowledgements pace it
        }
        (float(self.latest[0]) * float(bytes) / f64::from(self.mtu) / self.size.packets) as u64
    }
}

#[allow(clippy::cast_precision_loss, reason = "times and sizes below 2^53")]
const fn float(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timing::MICROSECOND;

    const ROUND_TRIP: Nanos = 10 * MICROSECOND;
    const ONE: Loss = Loss { packets: 1, resends_all: false };
    const ALL: Loss = Loss { packets: 1, resends_all: true };

    /// A window's worth of acknowledgements.
    fn round(w: &mut Aimd, now: Nanos) {
        let bytes = w.window().max(1024) / 1024 * 1024;
        w.on_ack(now, Ack { bytes, round_trip: Some(ROUND_TRIP), in_use: true });
    }

    #[test]
    fn notifications_shrink_it_below_a_packet_and_then_it_grows_carefully() {
        let mut w = Aimd::default();
        w.on_mark(0);
        assert_eq!(w.window(), u64::from(FIRST / 2), "slow start was too fast");
        w.on_mark(0);
        assert_eq!(w.size.packets, 8.0 * (1.0 - CUT));
        (0..100).for_each(|_| w.on_mark(0));
        assert_eq!(w.size.packets, SMALLEST_MARKED);
        (0..32).for_each(|_| round(&mut w, 0));
        assert!((0.3..0.7).contains(&w.size.packets), "{}", w.size.packets);
        let before = w.size.packets;
        (0..9).for_each(|_| round(&mut w, CALM_AFTER));
        assert!(w.size.packets > before + 8.0, "one packet per round trip: {}", w.size.packets);
    }

    #[test]
    fn it_shrinks_once_in_a_round_trip() {
        let mut w = Aimd::default();
        round(&mut w, 0);
        w.on_mark(1);
        let once = w.window();
        w.on_mark(ROUND_TRIP);
        assert_eq!(w.window(), once);
        w.on_mark(ROUND_TRIP + 1);
        assert!(w.window() < once);
    }

    #[test]
    fn windows_of_less_than_a_packet_are_paced_by_the_round_trip() {
        let mut w = Aimd::default();
        round(&mut w, 0);
        assert_eq!(w.gap(0, 1024), 0);
        w.size.packets = 0.25;
        assert_eq!(w.gap(0, 1024), 4 * ROUND_TRIP);
        w.on_restart(0);
        assert_eq!((w.gap(0, 1024), w.window()), (0, u64::from(FIRST)));
    }

    #[test]
    fn shrinks_on_loss_recovers_and_never_closes() {
        let mut w = Aimd::default();
        let start = w.size.packets;
        round(&mut w, 0);
        assert_eq!(w.size.packets, 2.0 * start, "slow start");
        w.on_loss(0, ALL);

        let after = w.size.packets;
        assert!(after < 2.0 * start);
        round(&mut w, 0);
        assert!(w.size.packets > after + 0.9 && w.size.packets <= after + 1.0);
        (0..100).for_each(|_| _ = w.on_loss(0, ALL));
        assert_eq!(w.size.packets, SMALLEST);
        w.on_silence(0);
        (0..10_000).for_each(|_| round(&mut w, 0));
        assert_eq!(w.window(), u64::from(LARGEST));
    }

    /// One packet in `every` is lost, on a path whose queue makes round trips `times` as long.
    fn slows(every: u64, times: u64) -> bool {
        let mut w = Aimd::default();
        round(&mut w, 0);
        (0..40).any(|_| {
            let round_trip = Some(times * ROUND_TRIP);
            w.on_ack(0, Ack { bytes: 1024 * (every - 1), round_trip, in_use: true });
            w.on_loss(0, ONE)
        })
    }

    #[test]
    fn losses_slow_it_where_they_are_many_and_packets_wait() {
        assert!(slows(8, 3));
        assert!(!slows(8, 1), "there is no queue");
        assert!(!slows(25, 3), "a queue that overflows loses more");
    }

    #[test]
    fn a_burst_of_losses_tells_even_after_much_has_arrived() {
        let mut w = Aimd::default();
        (0..1000).for_each(|_| round(&mut w, 0));
        for _ in 0..2 {
            w.on_ack(0, Ack { bytes: 1024, round_trip: Some(3 * ROUND_TRIP), in_use: true });
        }
        assert!(!w.on_loss(0, ONE));
        assert!(w.on_loss(0, Loss { packets: 20, resends_all: false }));
        assert!(!w.on_loss(0, ONE), "the count begins anew");
    }

    #[test]
    fn silence_that_lost_nothing_costs_nothing() {
        let mut w = Aimd::default();
        w.on_silence(0);
        assert_eq!(w.size.packets, SMALLEST);
        w.on_spurious();
        assert_eq!(w.window(), u64::from(FIRST));
        w.on_silence(0);
        w.on_loss(0, ALL);
        w.on_spurious();
        assert_eq!(w.size.packets, SMALLEST, "something was lost");
    }
}
