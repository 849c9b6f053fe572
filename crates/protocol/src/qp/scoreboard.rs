//! What became of each packet that was sent: the memory of selective retransmission.
//!
//! Every transmission has a number. A packet is lost if one that was sent sufficiently later has
//! arrived, as in RACK (RFC 8985): so a packet that was sent again can be lost again.

use std::collections::{BTreeSet, VecDeque};

use crate::timing::Nanos;

/// A packet is lost once one has arrived that was sent so many transmissions later.
const TOLERANCE: u64 = 3;
/// The most that reordering raises this to.
const MAX_TOLERANCE: u64 = 96;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransmissionState {
    InFlight,
    /// It is to be sent again.
    Lost,
    Arrived,
}

/// The last transmission of one PSN. For a READ, that of the request which covers the PSN.
#[derive(Clone, Copy, Debug)]
struct Sent {
    order: u64,
    at: Nanos,
    cost: u32,
    fate: TransmissionState,
    fetches: bool,
    again: bool,
    /// It was found overdue. (A probe sends what may only be slow.)
    overdue: bool,
}

/// Whether an arrival was news, and how it may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    Known,
    /// Which transmission arrived is unknown.
    Ambiguous,
    /// The transmission with this number.
    Of(u64),
}

/// What arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct News {
    /// Packets.
    pub(super) arrived: u64,
    /// When the one sent last was sent, if it was sent once.
    pub(super) sent: Option<Nanos>,
    /// A packet was sent again although it was not lost.
    pub(super) spurious: bool,
    /// Packets sent again.
    pub(super) resent: u64,
}

/// The packets between the first one that is not answered and the last one sent.
#[derive(Debug)]
pub(super) struct Scoreboard {
    first: u64,
    sent: VecDeque<Sent>,
    orders: u64,
    /// Number and time of the latest transmission that is known to have arrived.
    newest: (u64, Nanos),
    lost: BTreeSet<u64>,
    /// Packets in flight, and their bytes.
    in_flight: u64,
    bytes: u64,
    /// Packets behind the first one that have arrived, and those sent more than once.
    arrived: usize,
    again: usize,
    tolerance: u64,
    /// Transmissions up to this number have raised it already.
    raised: u64,
    /// The PSN sent last.
    last: u64,
    /// The peer has accepted SENDs and WRITEs before this PSN. Those behind it that have arrived
    /// wait for their turn, and may still be refused.
    accepted: u64,
    news: News,
}

impl Scoreboard {
    pub(super) fn new(first: u64) -> Self {
        Self {
            first,
            sent: VecDeque::new(),
            orders: 0,
            newest: (0, 0),
            lost: BTreeSet::new(),
            in_flight: 0,
            bytes: 0,
            arrived: 0,
            again: 0,
            tolerance: TOLERANCE,
            raised: 0,
            last: 0,
            accepted: 0,
            news: News::default(),
        }
    }

    pub(super) const fn in_flight(&self) -> u64 {
        self.in_flight
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) const fn tolerance(&self) -> u64 {
        self.tolerance
    }

    /// Whether this PSN was sent last and is still in flight.
    pub(super) fn is_last(&self, psn: u64) -> bool {
        self.last == psn && self.get(psn).is_some_and(|sent| sent.fate == TransmissionState::InFlight)
    }

    pub(super) const fn last(&self) -> u64 {
        self.last
    }

    /// The first PSN to send again.
    pub(super) fn first_lost(&self) -> Option<u64> {
        self.lost.first().copied()
    }

    /// How many PSNs from this one on are lost, before `end`.
    pub(super) fn lost_run(&self, psn: u64, end: u64) -> u64 {
        (psn..end).take_while(|psn| self.lost.contains(psn)).count() as u64
    }

    pub(super) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    fn index(&self, psn: u64) -> Option<usize> {
        usize::try_from(psn.checked_sub(self.first)?).ok().filter(|index| *index < self.sent.len())
    }

    fn get(&self, psn: u64) -> Option<&Sent> {
        self.sent.get(self.index(psn)?)
    }

    pub(super) fn has_arrived(&self, psn: u64) -> bool {
        self.get(psn).is_some_and(|sent| sent.fate == TransmissionState::Arrived)
    }

    /// Whether all of these have arrived or are answered already.
    pub(super) fn have_arrived(&self, from: u64, to: u64) -> bool {
        (from.max(self.first)..to).all(|psn| self.has_arrived(psn))
    }

    /// Whether this PSN is answered by a response of its own.
    pub(super) fn fetches(&self, psn: u64) -> bool {
        self.get(psn).is_some_and(|sent| sent.fetches)
    }

    /// The number of the only transmission of this PSN.
    pub(super) fn order(&self, psn: u64) -> Option<u64> {
        self.get(psn).filter(|sent| !sent.again).map(|sent| sent.order)
    }

    /// New packets leave. The packets of a READ have one request.
    pub(super) fn push(&mut self, now: Nanos, packets: u64, cost: u64, fetches: bool) {
        let cost = u32::try_from(cost).unwrap_or(u32::MAX);
        for nth in 0..packets {
            if nth == 0 || !fetches {
                self.orders += 1;
            }
            let fate = TransmissionState::InFlight;
            let (order, again, overdue) = (self.orders, false, false);
            self.sent.push_back(Sent { order, at: now, cost, fate, fetches, again, overdue });
        }
        self.in_flight += packets;
        self.bytes += packets * u64::from(cost);
        let end = self.first + self.sent.len() as u64;
        self.last = if fetches { end - packets } else { end - 1 };
    }

    /// Lost packets leave again, in one transmission.
    pub(super) fn resend(&mut self, now: Nanos, psn: u64, packets: u64) {
        self.news.resent += packets;
        self.orders += 1;
        for psn in psn..psn + packets {
            let Some(index) = self.index(psn) else { continue };
            if !self.lost.remove(&psn) {
                continue;
            }
            let sent = &mut self.sent[index];
            self.again += usize::from(!sent.again);
            (sent.order, sent.at, sent.fate, sent.again) =
                (self.orders, now, TransmissionState::InFlight, true);
            self.in_flight += 1;
            self.bytes += u64::from(sent.cost);
        }
        self.last = psn;
    }

    /// The packet, or its answer, has arrived. `soonest` is the shortest time an answer takes.
    pub(super) fn arrive(&mut self, now: Nanos, psn: u64, soonest: Nanos) -> Arrival {
        let Some(index) = self.index(psn) else { return Arrival::Known };
        let sent = self.sent[index];
        if sent.fate == TransmissionState::Arrived {
            return Arrival::Known;
        }
        self.leave_flight(psn, TransmissionState::Arrived);
        self.arrived += 1;
        self.news.arrived += 1;
        self.note(now, sent, soonest)
    }

    /// The request of a READ or an atomic has arrived; its answer has not.
    pub(super) fn hear(&mut self, psn: u64) {
        if let Some(&sent) = self.get(psn).filter(|sent| !sent.again) {
            self.newest = self.newest.max((sent.order, sent.at));
        }
    }

    fn note(&mut self, now: Nanos, sent: Sent, soonest: Nanos) -> Arrival {
        if sent.again && now.saturating_sub(sent.at) < soonest {
            // No answer is as fast: it is to the transmission before, which was only late.
            self.news.spurious = true;
            if sent.overdue && sent.order > self.raised {
                self.tolerance = (2 * self.tolerance).min(MAX_TOLERANCE);
                self.raised = self.orders;
            }
            return Arrival::Ambiguous;
        }
        if sent.fate == TransmissionState::Lost {
            return Arrival::Ambiguous;
        }
        if sent.order > self.newest.0 {
            self.newest = (sent.order, sent.at);
            self.news.sent = Some(sent.at).filter(|_| !sent.again);
        }
        Arrival::Of(sent.order)
    }

    fn leave_flight(&mut self, psn: u64, fate: TransmissionState) {
        let Some(index) = self.index(psn) else { return };
        let sent = &mut self.sent[index];
        if sent.fate == TransmissionState::InFlight {
            self.in_flight -= 1;
            self.bytes -= u64::from(sent.cost);
        }
        self.arrived -= usize::from(sent.fate == TransmissionState::Arrived);
        sent.fate = fate;
        match fate {
            TransmissionState::Lost => self.lost.insert(psn),
            TransmissionState::Arrived | TransmissionState::InFlight => self.lost.remove(&psn),
        };
    }

    /// The packet is to be sent again: a probe does so, or it has not left.
    pub(super) fn lose(&mut self, psn: u64) {
        self.leave_flight(psn, TransmissionState::Lost);
    }

    /// The packet is overdue.
    pub(super) fn miss(&mut self, psn: u64) {
        self.leave_flight(psn, TransmissionState::Lost);
        if let Some(index) = self.index(psn) {
            self.sent[index].overdue = true;
        }
    }

    /// The peer does not have this packet, whatever was known before: it is on its way, or lost.
    pub(super) fn distrust(&mut self, psn: u64) {
        let Some(index) = self.index(psn) else { return };
        let sent = &mut self.sent[index];
        if sent.fate == TransmissionState::Arrived && !sent.fetches {
            sent.fate = TransmissionState::InFlight;
            self.arrived -= 1;
            self.in_flight += 1;
            self.bytes += u64::from(sent.cost);
        }
    }

    /// All packets are to be sent again, except for answers that are here.
    pub(super) fn lose_all(&mut self) {
        for psn in self.first..self.first + self.sent.len() as u64 {
            if !(self.has_arrived(psn) && self.fetches(psn)) {
                self.lose(psn);
            }
        }
    }

    /// Whether the transmission of this PSN is overdue: one that was sent sufficiently later has
    /// arrived, counted in transmissions or as a part of the shortest round trip.
    pub(super) fn is_overdue(&self, psn: u64, soonest: Nanos) -> bool {
        let (order, at) = self.newest;
        let reordering_window = soonest / 4 * (self.tolerance / TOLERANCE);
        self.get(psn).is_some_and(|sent| {
            let overtaken = order >= sent.order + self.tolerance;
            let late = order > sent.order && at >= sent.at.saturating_add(reordering_window.max(1));
            sent.fate == TransmissionState::InFlight && (overtaken || late)
        })
    }

    /// Finds SENDs and WRITEs that are lost; returns how many.
    pub(super) fn detect(&mut self, soonest: Nanos) -> u64 {
        if self.arrived == 0 && self.again == 0 {
            return 0;
        }
        let mut found = 0;
        for psn in self.first..self.first + self.sent.len() as u64 {
            if !self.fetches(psn) && self.is_overdue(psn, soonest) {
                self.miss(psn);
                found += 1;
            }
        }
        found
    }

    /// A response has arrived that the peer sends after those before `end` to transmissions up to
    /// this number: they are lost. Returns how many.
    pub(super) fn detect_answers(&mut self, end: u64, order: u64) -> u64 {
        let mut found = 0;
        for psn in self.first..end.min(self.first + self.sent.len() as u64) {
            let lost =
                |sent: &Sent| sent.fetches && sent.fate == TransmissionState::InFlight && sent.order <= order;
            if self.get(psn).is_some_and(lost) {
                self.miss(psn);
                found += 1;
            }
        }
        found
    }

    /// The peer has accepted SENDs and WRITEs before this PSN.
    pub(super) fn accept(&mut self, end: u64) {
        self.accepted = self.accepted.max(end);
    }

    /// Forgets the first packet, if it is answered; whether it was.
    pub(super) fn pop(&mut self) -> bool {
        let is_done = |sent: &&Sent| sent.fetches || self.first < self.accepted;
        let arrived = self.sent.front().filter(|sent| sent.fate == TransmissionState::Arrived);
        let Some(sent) = arrived.filter(is_done) else { return false };
        self.arrived -= 1;
        self.again -= usize::from(sent.again);
        self.sent.pop_front();
        self.first += 1;
        true
    }

    /// What happened since the last call.
    pub(super) fn take_news(&mut self) -> News {
        std::mem::take(&mut self.news)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_TRIP: Nanos = 1000;

    fn board(packets: u64) -> Scoreboard {
        let mut board = Scoreboard::new(100);
        (0..packets).for_each(|n| board.push(n, 1, 10, false));
        board
    }

    #[test]
    fn a_packet_is_lost_when_three_sent_later_have_arrived_and_can_be_lost_again() {
        let mut board = board(8);
        assert_eq!((board.in_flight(), board.bytes()), (8, 80));
        board.arrive(ROUND_TRIP, 102, 0);
        assert_eq!(board.detect(ROUND_TRIP), 0);
        board.arrive(ROUND_TRIP, 103, 0);
        assert_eq!((board.detect(ROUND_TRIP), board.first_lost()), (1, Some(100)));
        board.resend(ROUND_TRIP, 100, 1);
        board.push(ROUND_TRIP, 1, 10, false);
        for psn in 104..109 {
            board.arrive(2 * ROUND_TRIP, psn, 0);
        }
        assert_eq!(
            (board.detect(5 * ROUND_TRIP), board.first_lost()),
            (1, Some(101)),
            "100 may be on its way"
        );
        board.push(ROUND_TRIP, 2, 10, false);
        board.arrive(2 * ROUND_TRIP, 110, 0);
        board.detect(5 * ROUND_TRIP);
        assert_eq!(board.first_lost(), Some(100), "it was lost again");
        assert!(!board.pop());
    }

    #[test]
    fn one_that_was_sent_some_time_later_is_enough() {
        let mut board = board(1);
        board.push(ROUND_TRIP / 4, 1, 10, false);
        board.arrive(2 * ROUND_TRIP, 101, 0);
        assert_eq!(board.detect(ROUND_TRIP + 4), 0);
        assert_eq!(board.detect(ROUND_TRIP), 1);
    }

    #[test]
    fn an_answer_that_comes_too_soon_is_to_the_first_copy() {
        let mut board = board(4);
        board.miss(100);
        board.resend(ROUND_TRIP, 100, 1);
        assert_eq!(board.arrive(ROUND_TRIP + 10, 100, 500), Arrival::Ambiguous);
        let news = board.take_news();
        assert_eq!((board.tolerance(), news.arrived, news.spurious), (2 * TOLERANCE, 1, true));
        assert_eq!(board.arrive(ROUND_TRIP + 10, 100, 500), Arrival::Known);
    }

    #[test]
    fn counts_stay_true_whatever_happens() {
        let mut rng = crate::rng::Rng::new(3);
        let mut board = board(64);
        for now in 0..20_000 {
            let psn = 100 + rng.below(board.sent.len() as u64 + 8);
            match rng.below(8) {
                0 => _ = board.arrive(now, psn, 100),
                1 => board.lose(psn),
                2 => board.resend(now, psn, 1 + rng.below(3)),
                3 => board.distrust(psn),
                4 => _ = board.detect(50),
                5 => _ = board.detect_answers(psn, rng.below(board.orders + 1)),
                6 if rng.below(100) == 0 => board.lose_all(),
                _ => board.push(now, rng.below(2), 10, rng.below(2) == 0),
            }
            let count = |fate| board.sent.iter().filter(|sent| sent.fate == fate).count();
            assert_eq!(board.in_flight, count(TransmissionState::InFlight) as u64);
            assert_eq!(board.bytes, 10 * board.in_flight);
            assert_eq!(
                (board.arrived, board.lost.len()),
                (count(TransmissionState::Arrived), count(TransmissionState::Lost))
            );
            assert_eq!(board.again, board.sent.iter().filter(|sent| sent.again).count());
        }
    }
}
