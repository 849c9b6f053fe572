use super::*;

const US: u64 = 1000;

fn path(text: &str) -> PathModel {
    PathModel::new(&text.parse().unwrap(), 0)
}

/// A packet with a number, of that many bytes.
fn packet(number: u16, len: usize) -> Vec<u8> {
    let mut packet = vec![0x45; len];
    packet[1] = 1; // ECN-capable
    packet[len - 2..].copy_from_slice(&number.to_be_bytes());
    packet
}

/// Everything that leaves, as (time, number); the time passes as the path asks.
fn drain(path: &mut PathModel) -> Vec<(u64, u16)> {
    let mut all = Vec::new();
    while let Some(due) = path.next_due() {
        while let Some((at, bytes)) = path.pop_due(due) {
            assert_eq!(at, due, "it leaves when it is due");
            let tail = bytes.last_chunk::<2>().unwrap();
            all.push((at, u16::from_be_bytes(*tail)));
            path.recycle(bytes);
        }
    }
    all
}

#[test]
fn without_settings_packets_pass_at_once_and_in_order() {
    let mut path = path("");
    for number in 0..100 {
        assert_eq!(path.offer(5, &packet(number, 100)), None);
    }
    assert_eq!(drain(&mut path), (0..100).map(|number| (5, number)).collect::<Vec<_>>());
    assert_eq!(path.counts(), PathCounts { packets: 100, bytes: 10_000, ..PathCounts::default() });
}

#[test]
fn the_rate_spaces_packets_and_the_delay_adds_to_it() {
    // 1000 bytes at 1 Gb/s take 8 us.
    let mut path = path("rate=1G,delay=100us");
    for number in 0..3 {
        path.offer(0, &packet(number, 1000));
    }
    path.offer(50 * US, &packet(3, 500));
    let times: Vec<_> = drain(&mut path).into_iter().map(|(at, _)| at).collect();
    assert_eq!(times, [108 * US, 116 * US, 124 * US, 154 * US]);
}

#[test]
fn a_full_queue_drops_what_comes_last_and_empties_at_the_rate() {
    let mut path = path("rate=1G,queue=10000");
    for number in 0..20 {
        path.offer(0, &packet(number, 1000));
    }
    assert_eq!(path.counts().queue_full, 10);
    path.offer(16 * US, &packet(20, 1000));
    path.offer(16 * US, &packet(21, 1000));
    path.offer(16 * US, &packet(22, 1000));
    assert_eq!(path.counts().queue_full, 11, "two have left, so two have room");
    let numbers: Vec<_> = drain(&mut path).into_iter().map(|(_, number)| number).collect();
    assert_eq!(numbers, (0..10).chain(20..22).collect::<Vec<_>>());
}

/// A packet longer than the queue is no reason for a dead link.
#[test]
fn a_queue_shorter_than_a_packet_holds_one() {
    let mut path = path("rate=1G,queue=1");
    path.offer(0, &packet(0, 1000));
    path.offer(0, &packet(1, 1000));
    path.offer(8 * US, &packet(2, 1000));
    assert_eq!(drain(&mut path), [(8 * US, 0), (16 * US, 2)]);
}

#[test]
fn packets_behind_the_threshold_are_marked() {
    let mut path = path("rate=1G,ecn=3000");
    for number in 0..5 {
        path.offer(0, &packet(number, 1000));
    }
    assert_eq!(path.counts().marked, 2);
    let mut marks = Vec::new();
    while let Some((_, bytes)) = path.pop_due(u64::MAX) {
        marks.push(bytes[1] & 3 == 3);
    }
    assert_eq!(marks, [false, false, false, true, true]);
}

#[test]
fn shares_are_kept_and_the_same_seed_repeats_them() {
    let run = |seed: u64| {
        let text = format!("loss=5%,dup=1%,reorder=2%,corrupt=0.5%,mark=3%,seed={seed}");
        let mut path = PathModel::new(&text.parse().unwrap(), 0);
        let mut left = Vec::new();
        for number in 0..50_000_u16 {
            path.offer(u64::from(number) * US, &packet(number, 60));
            while let Some((_, bytes)) = path.pop_due(u64::from(number) * US) {
                left.push(bytes);
            }
        }
        left.extend(std::iter::from_fn(|| path.pop_due(u64::MAX).map(|(_, bytes)| bytes)));
        (path.counts(), left)
    };
    let (counts, left) = run(7);
    let near = |count: u64, share: f64| {
        #[allow(clippy::cast_precision_loss)] // far below 2^52
        let found = count as f64 / 50_000.0;
        assert!((found - share).abs() < share * 0.2, "{found} of {share}: {counts:?}");
    };
    near(counts.lost, 0.05);
    near(counts.marked, 0.03 * 0.95);
    near(counts.duplicated, 0.01 * 0.95);
    near(counts.reordered, 0.02 * 0.95);
    near(counts.corrupted, 0.005 * 0.95);
    assert_eq!(left.len() as u64, counts.packets - counts.lost + counts.duplicated);
    assert_eq!((counts, left), run(7));
    assert_ne!(counts, run(8).0);
}

#[test]
fn a_reordered_packet_is_overtaken_by_eight_at_most_or_waits_a_millisecond() {
    let mut path = path("reorder=30%,seed=3");
    for number in 0..1000 {
        path.offer(u64::from(number) * US, &packet(number, 60));
    }
    let numbers: Vec<_> = drain(&mut path).into_iter().map(|(_, number)| usize::from(number)).collect();
    assert!(numbers.iter().enumerate().any(|(at, number)| at > *number));
    // Packets that wait themselves overtake none.
    let passed = |at: usize| numbers[..at].iter().filter(|one| **one > numbers[at]).count();
    assert!((0..numbers.len()).all(|at| passed(at) <= 30), "{numbers:?}");

    let mut alone = PathModel::new(&"reorder=1,delay=10us".parse().unwrap(), 0);
    alone.offer(0, &packet(7, 60));
    assert_eq!(drain(&mut alone), [(1010 * US, 7)]);
}

#[test]
fn long_packets_meet_the_path_mtu_with_and_without_a_message() {
    let mut told = path("mtu=9000,path-mtu=1400");
    assert_eq!(told.offer(0, &packet(0, 1400)), None);
    let reply = told.offer(0, &packet(1, 1401)).unwrap();
    assert_eq!(reply[26..28], 1400_u16.to_be_bytes());
    let mut hole = path("mtu=9000,path-mtu=1400,icmp=no");
    assert_eq!(hole.offer(0, &packet(1, 1401)), None);
    assert_eq!((told.counts().too_long, hole.counts().too_long), (1, 1));
    assert_eq!((drain(&mut told).len(), drain(&mut hole).len()), (1, 0));
}

#[test]
fn the_path_holds_a_bounded_number_of_packets() {
    let mut path = path("delay=10s,dup=1");
    for _ in 0..MAX_HELD {
        path.offer(0, &packet(0, 40));
    }
    assert!(path.held.len() <= MAX_HELD, "{}", path.held.len());
    assert!(path.counts().queue_full >= (MAX_HELD / 2) as u64 - 1);
}
