//! Two ends that share a secret, other secrets, restarts, losses, and hostile peers.

use std::net::IpAddr;

use nobounce_protocol::rng::Rng;
use nobounce_protocol::seal::fuzzing::Pair;
use nobounce_protocol::seal::{
    Dropped, HEADER_LEN, KeyRing, OVERHEAD, Outcome, Seal, SealConfig, SealDecision, SealMode,
};
use nobounce_protocol::timing::{MILLISECOND, SECOND};
use nobounce_protocol::wire::Qpn;

const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
const NOW: (u64, u64) = (SECOND, 1_800_000_000);
const QPN: Qpn = Qpn::new(0x07);
const GSI: Qpn = Qpn::new(1);

fn keys(digits: &[&str]) -> KeyRing {
    KeyRing::parse(&digits.iter().map(|two| two.repeat(32)).collect::<Vec<_>>().join("\n")).unwrap()
}

fn end(local: IpAddr, keys: KeyRing, seed: u8) -> Seal {
    Seal::new(&SealConfig { keys, mode: SealMode::Encrypt, local, seed: [seed; 32] }).unwrap()
}

/// Delivers messages until there are none; returns what became of requests.
fn exchange(a: &mut Seal, b: &mut Seal) -> Vec<Outcome> {
    loop {
        let mut quiet = true;
        while let Some(message) = a.poll_message() {
            let _ = b.handle_packet(NOW, (A, None), &message.packet, &mut [0; 256]);
            quiet = false;
        }
        while let Some(message) = b.poll_message() {
            let _ = a.handle_packet(NOW, (B, None), &message.packet, &mut [0; 256]);
            quiet = false;
        }
        if quiet {
            return std::iter::from_fn(|| a.poll_outcome()).collect();
        }
    }
}

fn sealed(from: &mut Seal, to: IpAddr, qpn: Qpn, body: &[u8]) -> Vec<u8> {
    let SealDecision::Ready(flow) = from.route(NOW.0, to, qpn) else { panic!("no session") };
    let mut packet = vec![0; body.len() + OVERHEAD];
    packet[HEADER_LEN..HEADER_LEN + body.len()].copy_from_slice(body);
    assert!(from.seal(NOW.1, flow, qpn, 3, &mut packet));
    packet
}

fn opened(by: &mut Seal, from: IpAddr, packet: &[u8]) -> Result<Vec<u8>, Dropped> {
    let mut room = [0; 256];
    let opened = by.handle_packet(NOW, (from, None), packet, &mut room)?.expect("a packet");
    assert_eq!(opened.ip_id, 3);
    Ok(opened.packet.to_vec())
}

#[test]
fn a_session_begins_with_the_first_packet() {
    let (mut a, mut b) = (end(A, keys(&["01"]), 1), end(B, keys(&["01"]), 2));
    assert_eq!(a.route(NOW.0, B, QPN), SealDecision::Wait);
    assert_eq!(exchange(&mut a, &mut b), [Outcome::Ready(B, 0)]);
    for body in [&b"once"[..], b"twice", b""] {
        let packet = sealed(&mut a, B, QPN, body);
        assert!(body.is_empty() || !packet.windows(body.len()).any(|bytes| bytes == body), "encrypted");
        assert_eq!(opened(&mut b, A, &packet).as_deref(), Ok(body));
        assert_eq!(opened(&mut b, A, &packet), Err(Dropped::Replayed));
    }
    let elsewhere = sealed(&mut a, B, QPN, b"x");
    assert_eq!(opened(&mut b, [10, 0, 0, 9].into(), &elsewhere), Err(Dropped::UnknownSession));
}

#[test]
fn authenticated_packets_are_readable_and_protected() {
    let config = SealConfig { keys: keys(&["01"]), mode: SealMode::Authenticate, local: A, seed: [1; 32] };
    let (mut a, mut b) = (Seal::new(&config).unwrap(), end(B, keys(&["01"]), 2));
    a.route(NOW.0, B, QPN);
    exchange(&mut a, &mut b);
    let mut packet = sealed(&mut a, B, QPN, b"readable");
    assert_eq!(&packet[HEADER_LEN..HEADER_LEN + 8], b"readable");
    packet[HEADER_LEN] ^= 1;
    assert_eq!(opened(&mut b, A, &packet), Err(Dropped::Forged));
    packet[HEADER_LEN] ^= 1;
    packet[1] ^= 8; // "it is encrypted"
    assert_eq!(opened(&mut b, A, &packet), Err(Dropped::Forged));
    packet[1] ^= 8;
    assert_eq!(opened(&mut b, A, &packet).as_deref(), Ok(&b"readable"[..]));
}

/// Plain packets, requests included, and those of another secret.
#[test]
fn everything_else_is_dropped_and_counted() {
    let (mut a, mut b) = (end(A, keys(&["02"]), 1), end(B, keys(&["01"]), 2));
    a.route(NOW.0, B, QPN);
    assert_eq!(exchange(&mut a, &mut b), []);
    assert_eq!(b.counters().dropped(Dropped::UnknownKey), 1);
    assert_eq!(opened(&mut b, A, &[0x64; 60]), Err(Dropped::NotSealed));
    assert_eq!(opened(&mut b, A, &[]), Err(Dropped::NotSealed));
    assert_eq!(opened(&mut b, A, &[0xf8, 0x10]), Err(Dropped::Malformed));
    assert_eq!(b.counters().dropped(Dropped::NotSealed), 2);
}

#[test]
fn a_peer_that_does_not_answer_is_asked_seven_times() {
    let mut a = end(A, keys(&["01"]), 1);
    assert_eq!(a.route(NOW.0, B, QPN), SealDecision::Wait);
    let (mut now, mut asked) = (NOW.0, 0);
    while let Some(at) = a.poll_timeout() {
        asked += std::iter::from_fn(|| a.poll_message()).count();
        assert_eq!(a.route(now, B, QPN), SealDecision::Wait);
        now = at;
        a.handle_timeout(now);
    }
    assert_eq!((asked, now - NOW.0), (7, 635 * MILLISECOND));
    assert_eq!(a.poll_outcome(), Some(Outcome::Unanswered(B, 0)));
    assert_eq!(a.route(now, B, QPN), SealDecision::Refused);
    assert_eq!(a.route(now + SECOND, B, QPN), SealDecision::Wait, "it may have come up");
}

/// A device that is opened anew takes nothing that was recorded, and its peers go on.
#[test]
fn a_restarted_receiver() {
    let (mut a, mut b) = (end(A, keys(&["01"]), 1), end(B, keys(&["01"]), 2));
    a.route(NOW.0, B, QPN);
    let hello = a.poll_message().unwrap();
    let _ = b.handle_packet(NOW, (A, None), &hello.packet, &mut [0; 256]);
    exchange(&mut a, &mut b);
    let packet = sealed(&mut a, B, QPN, b"recorded");
    assert!(opened(&mut b, A, &packet).is_ok());

    let mut b = end(B, keys(&["01"]), 3);
    let _ = b.handle_packet(NOW, (A, None), &hello.packet, &mut [0; 256]);
    assert_eq!(opened(&mut b, A, &packet), Err(Dropped::UnknownSession));
    let later = sealed(&mut a, B, QPN, b"lost");
    assert_eq!(opened(&mut b, A, &later), Err(Dropped::UnknownSession));
    // The notice makes the sender ask again.
    assert_eq!(exchange(&mut a, &mut b), [Outcome::Ready(B, 0)]);
    let later = sealed(&mut a, B, QPN, b"found");
    assert_eq!(opened(&mut b, A, &later).as_deref(), Ok(&b"found"[..]));
    assert!(opened(&mut b, A, &packet).is_err());
}

/// Both ends use the same seed by mistake: directions still have keys of their own.
#[test]
fn directions_have_their_own_keys() {
    let (mut a, mut b) = (end(A, keys(&["01"]), 1), end(B, keys(&["01"]), 1));
    a.route(NOW.0, B, QPN);
    b.route(NOW.0, A, QPN);
    exchange(&mut a, &mut b);
    let (there, back) = (sealed(&mut a, B, QPN, &[0; 64]), sealed(&mut b, A, QPN, &[0; 64]));
    assert_ne!(there[HEADER_LEN..], back[HEADER_LEN..]);
    assert!(opened(&mut a, B, &there).is_err(), "reflected");
    assert!(opened(&mut b, A, &there).is_ok() && opened(&mut a, B, &back).is_ok());
}

#[test]
fn keys_rotate_under_a_session() {
    let (mut a, mut b) = (end(A, keys(&["01"]), 1), end(B, keys(&["01"]), 2));
    a.route(NOW.0, B, QPN);
    exchange(&mut a, &mut b);
    b.set_keys(keys(&["01", "02"]));
    a.set_keys(keys(&["02", "01"]));
    let under_old = sealed(&mut a, B, QPN, b"old");
    assert!(opened(&mut b, A, &under_old).is_ok(), "no packet waits for the new key");
    exchange(&mut a, &mut b);
    let under_new = sealed(&mut a, B, QPN, b"new");
    assert_ne!(under_old[4], under_new[4]);
    assert!(opened(&mut b, A, &under_new).is_ok());
    let late = under_old;
    for end in [&mut a, &mut b] {
        end.set_keys(keys(&["02"]));
    }
    assert_eq!(opened(&mut b, A, &late), Err(Dropped::UnknownSession));
    let under_new = sealed(&mut a, B, QPN, b"new");
    assert!(opened(&mut b, A, &under_new).is_ok());
}

/// Management datagrams go to any device of an address, and need no session.
#[test]
fn datagrams_are_good_for_five_minutes_and_once() {
    let (mut a, mut b) = (end(A, keys(&["01"]), 1), end(B, keys(&["01"]), 2));
    let request = sealed(&mut a, B, GSI, b"REQ");
    assert_eq!(opened(&mut b, A, &request).as_deref(), Ok(&b"REQ"[..]));
    assert_eq!(opened(&mut b, A, &request), Err(Dropped::Replayed));
    assert_eq!(opened(&mut b, [10, 0, 0, 3].into(), &request), Err(Dropped::Forged));
    let mut restarted = end(B, keys(&["01"]), 3);
    let later = (NOW.0, NOW.1 + 301);
    let mut room = [0; 256];
    let dropped = restarted.handle_packet(later, (A, None), &request, &mut room);
    assert_eq!(dropped, Err(Dropped::OtherTime));

    let forwarded = b.forwarded(NOW.1, A, 3, b"REQ for another process");
    assert!(opened(&mut restarted, A, &forwarded).is_ok());
    let group: IpAddr = [239, 1, 1, 1].into();
    let said = sealed(&mut a, group, Qpn::MULTICAST, b"all");
    assert!(b.handle_packet(NOW, (A, Some(group)), &said, &mut [0; 256]).unwrap().is_some());
    assert_eq!(opened(&mut b, A, &said), Err(Dropped::Malformed), "sent to the group, not to us");
}

/// Recorded requests of a peer take four places, and none of a session in use.
#[test]
fn recorded_requests_take_bounded_room() {
    let (mut a, mut b) = (end(A, keys(&["01"]), 1), end(B, keys(&["01"]), 2));
    a.route(NOW.0, B, QPN);
    exchange(&mut a, &mut b);
    let packet = sealed(&mut a, B, QPN, b"in use");
    assert!(opened(&mut b, A, &packet).is_ok());
    for seed in 0..200 {
        let mut earlier = end(A, keys(&["01"]), 50 + seed);
        earlier.route(NOW.0, B, QPN);
        let hello = earlier.poll_message().unwrap();
        for _ in 0..3 {
            let _ = b.handle_packet(NOW, (A, None), &hello.packet, &mut [0; 256]);
        }
    }
    assert_eq!(b.peer_keys(), 5);
    let packet = sealed(&mut a, B, QPN, b"in use");
    assert!(opened(&mut b, A, &packet).is_ok());
}

fn place(rng: &mut Rng, packet: &[u8]) -> usize {
    usize::try_from(rng.below(u64::try_from(packet.len()).unwrap())).unwrap()
}

/// Forged, replayed, truncated and changed packets beside a session: none is opened, none harms it.
/// `NOBOUNCE_HOSTILE` sets how many.
#[test]
fn hostile_packets_beside_a_session() {
    let count = std::env::var("NOBOUNCE_HOSTILE").ok().and_then(|text| text.parse().ok()).unwrap_or(100_000);
    let mut rng = Rng::new(35);
    let mut pair = Pair::new([SealMode::Encrypt, SealMode::Authenticate]);
    let mut valid = 0_u64;
    for hostile in 0..count {
        if hostile % 8 == 0 {
            for from in 0..2 {
                assert!(pair.send_valid(from), "packet {valid} from {from} was not opened");
                valid += 1;
            }
        }
        let draw = rng.next();
        // What the ends say to each packet differs: a repeated request for a session is answered.
        let _ = match draw % 4 {
            0 => {
                let mut packet: Vec<u8> = (0..rng.below(160)).map(|_| rng.next().to_be_bytes()[0]).collect();
                for (byte, known) in packet.iter_mut().zip([0xf8, 0x18]).filter(|_| draw & 16 == 0) {
                    *byte = known;
                }
                pair.take(usize::from(draw & 8 == 0), &packet)
            }
            1 => pair.replay(draw >> 8, |_| {}),
            2 => pair.replay(draw >> 8, |packet| packet.truncate(place(&mut rng, packet))),
            _ => pair.replay(draw >> 8, |packet| {
                let at = place(&mut rng, packet);
                packet[at] ^= 1 << (draw >> 4 & 7);
            }),
        };
    }
    assert_eq!(pair.opened, valid);
    assert!(pair.ends.iter().all(|end| end.peer_keys() <= 8));
    println!("{count} hostile packets, {valid} valid ones, all of them opened once");
}

/// The fuzz target on random bytes, besides its corpus.
#[test]
fn random_attackers() {
    for seed in 0..2000 {
        let mut rng = Rng::new(seed);
        let data: Vec<u8> = (0..rng.below(600)).map(|_| rng.next().to_be_bytes()[0]).collect();
        nobounce_protocol::seal::fuzzing::sealed(&data);
    }
}

/// Who repeats recorded requests does not take the session of a sender that is about to use it.
#[test]
fn recorded_requests_displace_no_later_one() {
    let mut b = end(B, keys(&["01"]), 2);
    let recorded: Vec<_> = (0..20_u8)
        .map(|n| {
            let mut earlier = end(A, keys(&["01"]), 50 + n);
            earlier.set_time(NOW.0, 1_000_000 + u64::from(n));
            earlier.route(NOW.0, B, QPN);
            earlier.poll_message().unwrap().packet
        })
        .collect();
    let mut room = [0; 256];
    let mut replay = |b: &mut Seal| {
        for packet in &recorded {
            let _ = b.handle_packet(NOW, (A, None), packet, &mut room);
            while b.poll_message().is_some() {}
        }
    };
    replay(&mut b);
    let mut a = end(A, keys(&["01"]), 1);
    a.set_time(NOW.0, 2_000_000);
    a.route(NOW.0, B, QPN);
    assert_eq!(exchange(&mut a, &mut b), [Outcome::Ready(B, 0)]);
    (0..10).for_each(|_| replay(&mut b));
    let packet = sealed(&mut a, B, QPN, &[5; 40]);
    assert_eq!(opened(&mut b, A, &packet), Ok(vec![5; 40]));
}

/// Forged packets with an unknown session from one address use up the notices to that address only.
#[test]
fn forged_packets_of_one_address_silence_nothing_for_others() {
    let mut b = end(B, keys(&["01"]), 2);
    let mut a = end(A, keys(&["01"]), 1);
    a.route(NOW.0, B, QPN);
    exchange(&mut a, &mut b);
    let packet = sealed(&mut a, B, QPN, &[5; 40]);
    let mut restarted = end(B, keys(&["01"]), 3);
    let forger = IpAddr::from([10, 0, 0, 66]);
    let mut notices = |from| {
        assert_eq!(opened(&mut restarted, from, &packet), Err(Dropped::UnknownSession));
        std::iter::from_fn(|| restarted.poll_message()).filter(|message| message.to == from).count()
    };
    let sent: usize = (0..1000).map(|_| notices(forger)).sum();
    assert_eq!(sent, 8);
    assert_eq!(notices(A), 1);
    let all: usize = (0..=u8::MAX).map(|n| notices(IpAddr::from([10, 0, 1, n]))).sum();
    assert_eq!(all, 62, "64 addresses in an interval");
}

/// A new secret with the identifier of the old one is another secret.
#[test]
fn secrets_are_told_apart_by_all_of_them() {
    let ring = |n: u32| KeyRing::parse(&format!("{n:064x}")).unwrap();
    let first = ring(1);
    let twin = (2..).map(ring).find(|other| other.ids() == first.ids()).unwrap();
    let (mut a, mut b) = (end(A, first.clone(), 1), end(B, first, 2));
    a.route(NOW.0, B, QPN);
    exchange(&mut a, &mut b);
    let late = sealed(&mut a, B, QPN, &[5; 40]);
    a.set_keys(twin.clone());
    b.set_keys(twin);
    assert_eq!(opened(&mut b, A, &late), Err(Dropped::UnknownSession), "its session is gone");
    assert_eq!(a.route(NOW.0, B, QPN), SealDecision::Wait, "so is that of the sender");
}

#[test]
fn a_seed_is_not_printed() {
    let config = SealConfig { keys: keys(&["01"]), mode: SealMode::Encrypt, local: A, seed: [171; 32] };
    let shown = format!("{config:?} {:?}", Seal::new(&config));
    assert!(!shown.contains("171") && !shown.contains("ab"), "{shown}");
}
