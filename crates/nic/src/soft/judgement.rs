//! Whether packets are the helper's business or the application's: judged by who finds them.

/// Polls between two looks by which an application is at work, even if packets were left over when we looked; or packets that its polls moved.
const AT_WORK: u64 = 100;
/// An application that moves so many times what the helper does needs no help: the helper finds packets because there are always some.
const BY_FAR: u64 = 8;
/// Wake-ups in a row at which somebody else was faster, before the helper steps back.
const MISSES: u32 = 2;
/// The same, for an application that turned out to leave packets lying after the helper stepped back.
const MAX_MISSES: u32 = 256;
/// Looks in a row that found nothing left lying, after which that is forgotten: being left alone for so many milliseconds has gained an
/// application more than the one that it costs when it was a mistake.
const FORGET_AFTER: u32 = 8;

/// Finds in a row between two at which the helper lets the application have the CPU first.
const TRY_EVERY: u32 = 16;

/// What the helper saw of one round: it was woken, or looked by itself, and served.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    /// It watched the sockets: a packet woke it.
    pub(super) watching: bool,
    /// It let the application have the CPU for a moment before it looked: whether that took packets meanwhile.
    pub(super) gave_way: Option<bool>,
    /// Packets it found.
    pub(super) found: usize,
    /// Packets that woke it before, and that somebody else took.
    pub(super) missed: u32,
    /// Packets that it took and sent.
    pub(super) served: u64,
    /// They lay there, and nobody was looking.
    pub(super) unattended: bool,
    /// For so long that nobody can be at work.
    pub(super) abandoned: bool,
    /// Calls of the application that drove the engine since the round before.
    pub(super) driven: u64,
    /// Packets that those calls took and sent.
    pub(super) moved: u64,
}

impl Round {
    /// Whether the application moves by far the most by itself.
    pub(super) fn is_led(&self) -> bool {
        self.moved >= BY_FAR * self.served.max(1)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Go on as before.
    Stay,
    /// The application is faster: watch the sockets no longer.
    StepBack,
    /// The application leaves packets lying: watch again.
    StepUp,
}

/// What the rounds so far come to.
#[derive(Debug)]
pub(super) struct Judgement {
    /// There are so few CPUs that the helper takes one away from the application.
    shares_cpus: bool,
    /// Wake-ups in a row at which somebody else was faster.
    misses: u32,
    /// How many of them it takes to step back. An application that polls for its own completions and then spins on memory is faster than
    /// the helper half of the time, and each time it is left alone costs it a millisecond.
    patience: u32,
    /// Looks since stepping back at which the application was found at work.
    quiet: u32,
    /// Rounds in a row that found packets, since the helper last gave way.
    finds: u32,
    /// How often in a row the application took the packets when the helper gave way.
    beaten: u32,
}

impl Judgement {
    pub(super) const fn new(shares_cpus: bool) -> Self {
        Self { shares_cpus, misses: 0, patience: MISSES, quiet: 0, finds: 0, beaten: 0 }
    }

    /// Whether the helper, woken by a packet, had better let the application have the CPU before it looks. On a CPU that it shares with one who polls
    /// it is first all the same, since it was woken, and cannot tell that nobody needed it.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.shares_cpus && self.finds >= TRY_EVERY
    }

    pub(super) fn judge(&mut self, round: Round) -> Verdict {
        let Round { watching, gave_way, found, missed, unattended, abandoned, driven, moved, .. } = round;
        if let Some(beaten) = gave_way {
            self.finds = 0;
            self.beaten = if beaten { self.beaten + 1 } else { 0 };
            if self.beaten >= self.patience.ilog2() && driven > 0 {
                (self.quiet, self.beaten) = (0, 0);
                return Verdict::StepBack;
            }
        }
        self.finds = if found > 0 { self.finds.saturating_add(1) } else { self.finds };
        let is_led = round.is_led();
        // They came before what was found, which is next to nothing where it is led.
        self.misses = self.misses.saturating_add(missed.max(u32::from(is_led)));
        if watching {
            // One that left packets lying once and moves nearly all of them itself now would be disturbed for each of them. Where there are CPUs for both,
            // nobody is disturbed, and stepping back from one that polls in fits and starts, as NCCL does, costs it a millisecond each time.
            let patience = if is_led && self.shares_cpus { MISSES } else { self.patience };
            if self.misses >= patience && driven > 0 {
                self.quiet = 0;
                return Verdict::StepBack;
            }
            self.misses = if found > 0 && !is_led { 0 } else { self.misses };
            return Verdict::Stay;
        }
        // In bulk traffic calls are few, and one of them may take as long as it takes to look abandoned.
        let left_lying = abandoned || moved < AT_WORK && (unattended || (found > 0 && driven < AT_WORK));
        if driven == 0 || left_lying {
            self.misses = 0;
            if unattended && driven > 0 {
                self.patience = (self.patience * 2).min(MAX_MISSES);
            }
            return Verdict::StepUp;
        }
        self.quiet = self.quiet.saturating_add(1);
        if self.quiet >= FORGET_AFTER {
            self.patience = MISSES;
        }
        Verdict::Stay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Woken by a packet that somebody else took, who drove meanwhile.
    const MISSED: Round = Round {
        watching: true,
        gave_way: None,
        found: 0,
        missed: 1,
        served: 0,
        unattended: false,
        abandoned: false,
        driven: 5,
        moved: 0,
    };
    /// Woken by a packet that nobody else took.
    const FOUND: Round = Round { found: 1, missed: 0, served: 1, ..MISSED };
    /// A look by itself: the application is at work.
    const AT_WORK_STILL: Round = Round { watching: false, ..MISSED };
    /// A look by itself: a packet lay there, and the application has called, but not for a while.
    const LEFT_LYING: Round = Round { watching: false, unattended: true, ..FOUND };

    /// Misses in a row until it steps back.
    fn patience(judgement: &mut Judgement) -> u32 {
        for missed in 1..=2 * MAX_MISSES {
            if judgement.judge(MISSED) == Verdict::StepBack {
                return missed;
            }
        }
        panic!("it never steps back");
    }

    #[test]
    fn it_steps_back_when_others_are_faster_twice_in_a_row() {
        let mut judgement = Judgement::new(true);
        for round in [MISSED, FOUND, MISSED, FOUND, MISSED] {
            assert_eq!(judgement.judge(round), Verdict::Stay);
        }
        assert_eq!(judgement.judge(MISSED), Verdict::StepBack);
    }

    /// On a CPU that it shares with who polls it is woken by every packet and finds it gone, without ever leaving its call: it was so for
    /// thousands of packets before they were counted.
    #[test]
    fn packets_that_were_gone_before_it_was_awake_count() {
        let mut judgement = Judgement::new(true);
        assert_eq!(judgement.judge(Round { missed: MISSES, ..FOUND }), Verdict::StepBack);
        judgement.judge(LEFT_LYING);
        assert_eq!(judgement.judge(Round { missed: 2 * MISSES - 1, ..MISSED }), Verdict::Stay);
        assert_eq!(judgement.judge(MISSED), Verdict::StepBack);
    }

    /// One missed and one found by turns: whoever polls for its own completions, and waits in memory for the peer's messages.
    #[test]
    fn it_stays_with_who_leaves_it_every_second_packet() {
        let mut judgement = Judgement::new(true);
        for _ in 0..10 {
            assert_eq!(judgement.judge(Round { missed: 1, ..FOUND }), Verdict::Stay);
        }
    }

    /// Where both share a CPU it is first whenever a packet wakes it, with one who polls all the time, too.
    #[test]
    fn it_gives_way_now_and_then_and_sees_whether_it_is_needed() {
        let found = |judgement: &mut Judgement| {
            for _ in 0..TRY_EVERY {
                assert!(!judgement.is_in_doubt());
                assert_eq!(judgement.judge(FOUND), Verdict::Stay);
            }
            assert!(judgement.is_in_doubt());
        };
        let lay = Round { gave_way: Some(false), ..FOUND };
        // What it finds after that is the next one.
        let gone = Round { gave_way: Some(true), ..FOUND };
        let mut judgement = Judgement::new(true);
        found(&mut judgement);
        assert_eq!(judgement.judge(lay), Verdict::Stay, "the packet lay there still");
        for _ in 1..TRY_EVERY {
            judgement.judge(FOUND);
        }
        assert!(judgement.is_in_doubt());
        assert_eq!(judgement.judge(gone), Verdict::StepBack, "somebody else had taken it");
        // One that left packets lying after that is given more tries.
        judgement.judge(LEFT_LYING);
        judgement.judge(LEFT_LYING);
        for _ in 0..2 {
            judgement.finds = TRY_EVERY;
            assert_eq!(judgement.judge(gone), Verdict::Stay);
        }
        assert_eq!(judgement.judge(gone), Verdict::StepBack);
    }

    #[test]
    fn it_does_not_step_back_where_nobody_drives() {
        let mut judgement = Judgement::new(true);
        for _ in 0..10 {
            assert_eq!(judgement.judge(Round { driven: 0, ..MISSED }), Verdict::Stay);
        }
        assert_eq!(judgement.judge(MISSED), Verdict::StepBack, "they count as soon as somebody does");
    }

    #[test]
    fn it_stays_away_while_the_application_is_at_work() {
        let mut judgement = Judgement::new(true);
        patience(&mut judgement);
        assert_eq!(judgement.judge(AT_WORK_STILL), Verdict::Stay);
        // Packets were there when we looked, as they are now and then where many come; somebody who polls so often takes them.
        assert_eq!(judgement.judge(Round { found: 3, driven: AT_WORK, ..AT_WORK_STILL }), Verdict::Stay);
    }

    #[test]
    fn it_comes_back_when_packets_are_left_lying() {
        for round in [
            Round { driven: 0, ..AT_WORK_STILL },
            Round { found: 3, driven: AT_WORK - 1, ..AT_WORK_STILL },
            LEFT_LYING,
        ] {
            let mut judgement = Judgement::new(true);
            patience(&mut judgement);
            assert_eq!(judgement.judge(round), Verdict::StepUp, "{round:?}");
            assert_eq!(judgement.judge(MISSED), Verdict::Stay, "misses are counted anew: {round:?}");
        }
    }

    /// Long messages: a poll takes as long as a hundred that find nothing, and whoever looks finds packets.
    #[test]
    fn it_leaves_bulk_traffic_to_an_application_that_moves_it() {
        let bulk = Round { found: 3, served: 12, driven: 20, moved: 400, ..FOUND };
        let mut judgement = Judgement::new(true);
        assert_eq!(judgement.judge(bulk), Verdict::Stay);
        assert_eq!(judgement.judge(bulk), Verdict::StepBack, "what it finds is next to nothing");
        for _ in 0..10 {
            assert_eq!(judgement.judge(Round { watching: false, unattended: true, ..bulk }), Verdict::Stay);
        }
        let over = Round { watching: false, driven: 1, moved: 2, ..bulk };
        assert_eq!(judgement.judge(over), Verdict::StepUp, "once it does not any more");
        assert_eq!(judgement.judge(bulk), Verdict::Stay);
        assert_eq!(judgement.judge(bulk), Verdict::StepBack);
        let stopped = Round { watching: false, unattended: true, abandoned: true, ..bulk };
        assert_eq!(judgement.judge(stopped), Verdict::StepUp, "or stopped a while ago");
        let shared = Round { served: 200, ..bulk };
        for _ in 0..10 {
            assert_eq!(judgement.judge(shared), Verdict::Stay, "half of it is the helper's");
        }
    }

    #[test]
    fn each_time_packets_were_left_lying_it_is_twice_as_patient() {
        let mut judgement = Judgement::new(true);
        let mut seen = Vec::new();
        for _ in 0..9 {
            seen.push(patience(&mut judgement));
            judgement.judge(LEFT_LYING);
        }
        assert_eq!(seen, [2, 4, 8, 16, 32, 64, 128, 256, 256]);
    }

    #[test]
    fn one_that_moves_nearly_all_is_left_alone_soon_only_where_cpus_are_shared() {
        for (shares_cpus, rounds) in [(true, MISSES), (false, 4 * MISSES)] {
            let mut judgement = Judgement::new(shares_cpus);
            judgement.judge(LEFT_LYING);
            judgement.judge(LEFT_LYING);
            let led = Round { moved: BY_FAR, ..FOUND };
            let stayed = (1..).find(|_| judgement.judge(led) == Verdict::StepBack);
            assert_eq!(stayed, Some(rounds));
        }
    }

    /// One that went to sleep altogether is no reason for patience: nothing was left lying while it was at work.
    #[test]
    fn an_application_that_pauses_does_not_make_it_patient() {
        let mut judgement = Judgement::new(true);
        patience(&mut judgement);
        judgement.judge(Round { driven: 0, ..LEFT_LYING });
        assert_eq!(patience(&mut judgement), MISSES);
    }

    #[test]
    fn patience_is_forgotten_after_looks_that_found_nothing() {
        let mut judgement = Judgement::new(true);
        patience(&mut judgement);
        judgement.judge(LEFT_LYING);
        assert_eq!(patience(&mut judgement), 2 * MISSES);
        for _ in 1..FORGET_AFTER {
            judgement.judge(AT_WORK_STILL);
        }
        judgement.judge(Round { driven: 0, ..AT_WORK_STILL });
        assert_eq!(patience(&mut judgement), 2 * MISSES, "one look too few");
        for _ in 0..FORGET_AFTER {
            judgement.judge(AT_WORK_STILL);
        }
        judgement.judge(Round { driven: 0, ..AT_WORK_STILL });
        assert_eq!(patience(&mut judgement), MISSES);
    }
}
