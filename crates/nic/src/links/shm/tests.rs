//! The link between two processes, modelled by two links in one process.

use nobounce_memory::Sink;
use nobounce_memory::gpu::copy_engine::{CopyEngine, PinnedChunk};

use super::super::udp::{UdpConfig, UdpLink};
use super::*;
use crate::links::{PacketDestination, PacketShape, PayloadSource};

fn link(addr: &str) -> ShmLink<UdpLink> {
    let mut link = ShmLink::new(UdpLink::open(&UdpConfig::new(addr.parse().unwrap())).unwrap()).unwrap();
    link.listen().unwrap();
    link
}

#[test]
fn the_last_packets_of_one_who_goes_are_read_before_it_is_forgotten() {
    let (mut from, mut to) = (link("127.66.2.1"), link("127.66.2.1"));
    assert!(from.local_route((to.local(), to.slot())).is_some());
    let mut batch = TxBatch::new(from.capabilities());
    let count = MOST_FROM_ONE + 1; // more than one poll takes
    for _ in 0..count {
        assert!(batch.put(to.local(), 0, 64, |room| {
            room.fill(0);
            room[SLOT_BYTE] = to.slot();
        }));
    }
    from.send(&mut batch);
    drop(from);
    to.poll_control();
    let mut seen = 0;
    assert_eq!(to.receive(&mut |_| seen += 1), MOST_FROM_ONE);
    to.poll_control();
    to.receive(&mut |_| seen += 1);
    assert_eq!((seen, to.incoming.len()), (count, 0));
    assert!(to.poll.ready().is_empty(), "nothing that would wake us forever");
}

/// Space in the ring to that address.
fn begin<'a>(
    batch: &'a mut TxBatch,
    ring: &LocalRoute,
    addr: IpAddr,
    shape: PacketShape,
) -> Option<Sink<'a>> {
    let to = PacketDestination { addr: &addr, port_hint: 0, ecn: false, local: Some(ring) };
    batch.begin(&to, shape, PayloadSource::Copy).map(|space| space.bytes)
}

/// Queues one packet without payload.
fn bare(batch: &mut TxBatch, ring: &LocalRoute, to: &ShmLink<UdpLink>) {
    let mut room = begin(batch, ring, to.local(), PacketShape::single(16, 12)).unwrap();
    room.put(0, &vec![0; room.len()]);
    room.put(SLOT_BYTE, &[to.slot()]);
    batch.commit(None);
}

/// A polling reader sees packets before the sender has finished its bookkeeping.
#[test]
fn what_is_shown_is_read_before_it_is_sent() {
    let (mut from, mut to) = (link("127.66.2.7"), link("127.66.2.7"));
    let ring = from.local_route((to.local(), to.slot())).unwrap();
    to.poll_control();
    let mut batch = TxBatch::new(from.capabilities());
    bare(&mut batch, &ring, &to);
    assert_eq!(to.receive(&mut |_| {}), 0, "not shown to the reader yet");
    batch.show();
    assert_eq!(to.receive(&mut |_| {}), 1);
    bare(&mut batch, &ring, &to);
    from.send(&mut batch);
    assert_eq!(to.receive(&mut |_| {}), 1, "once each");
}

#[test]
fn a_ring_is_written_by_one_at_a_time() {
    let (mut from, to) = (link("127.66.2.8"), link("127.66.2.8"));
    let ring = from.local_route((to.local(), to.slot())).unwrap();
    let [mut batch, mut other] = [(); 2].map(|()| TxBatch::new(from.capabilities()));
    bare(&mut batch, &ring, &to);
    assert!(ring.ring().hold().is_none());
    let run = PacketShape { len: 16, head: 12, packets: 2 };
    assert!(begin(&mut other, &ring, to.local(), run).is_none(), "while others are writing there");
    from.send(&mut batch);
    assert!(begin(&mut other, &ring, to.local(), run).is_some());
    other.abort();
    assert!(ring.ring().hold().is_some(), "who gives up lets go");
}

/// The inner link is polled while a reply is in flight, not when it is due.
#[test]
fn sockets_are_looked_at_by_who_has_just_sent() {
    let (mut from, mut to) = (link("127.66.2.9"), link("127.66.2.9"));
    let ring = to.local_route((from.local(), from.slot())).unwrap();
    from.poll_control();
    let mut looks = |sends: bool| {
        let mut batch = TxBatch::new(to.capabilities());
        (1..).find(|_| {
            if sends {
                bare(&mut batch, &ring, &from);
                to.send(&mut batch);
                from.sent = true;
                while from.read(&mut |_| {}) > 0 {}
            }
            from.receive(&mut |_| {});
            from.since_inside == 0
        })
    };
    assert_eq!(looks(false), Some(1), "a wake-up polls the inner link, too");
    assert_eq!(looks(false), Some(INSIDE_EVERY));
    assert_eq!(looks(true), Some(INSIDE_EVERY * 3 / 4));
}

/// An abandoned packet that wrapped leaves a skipped ring end behind, which holds no packet.
#[test]
fn a_skipped_end_alone_keeps_no_thread_awake() {
    let (mut from, mut to) = (link("127.66.2.10"), link("127.66.2.10"));
    let ring = from.local_route((to.local(), to.slot())).unwrap();
    to.poll_control();
    let mut batch = TxBatch::new(from.capabilities());
    for _ in 0..40_000 {
        bare(&mut batch, &ring, &to);
        batch.show();
        assert_eq!(to.read(&mut |_| {}), 1);
        begin(&mut batch, &ring, to.local(), PacketShape { len: 4000, head: 12, packets: 2 }).unwrap();
        batch.abort();
        from.send(&mut batch);
        assert_eq!(to.read(&mut |_| {}), 0);
        let reader = &mut to.incoming[0].ring.as_mut().unwrap().1;
        assert_eq!(reader.memory().read_up_to(), reader.position());
    }
}

/// Packets that found the ring full while they were built go into it when they are sent.
#[test]
fn packets_beside_a_full_ring_are_one_packet_each() {
    let (mut from, mut to) = (link("127.66.2.11"), link("127.66.2.11"));
    let ring = from.local_route((to.local(), to.slot())).unwrap();
    to.poll_control();
    let [mut batch, mut other] = [(); 2].map(|()| TxBatch::new(from.capabilities()));
    bare(&mut other, &ring, &to); // holds the ring
    (0..3).for_each(|_| bare(&mut batch, &ring, &to));
    assert_eq!(batch.packets().len(), 3);
    from.send(&mut other);
    from.send(&mut batch);
    let mut packets = Vec::new();
    while to.receive(&mut |datagram| packets.push(datagram.packets)) > 0 {}
    assert_eq!(packets, [1; 4]);
}

/// Runs are long while the reader has a backlog, and short while it waits.
#[test]
fn a_reader_that_is_behind_gets_longer_pieces() {
    let (mut from, mut to) = (link("127.66.2.6"), link("127.66.2.6"));
    let ring = from.local_route((to.local(), to.slot())).unwrap();
    let mut batch = TxBatch::new(from.capabilities());
    let longest = |batch: &mut TxBatch| batch.longest_run(&ring);
    assert_eq!(longest(&mut batch), 16 << 10);
    let len = 12 + longest(&mut batch) + 4;
    for _ in 0..4 {
        let mut room =
            begin(&mut batch, &ring, to.local(), PacketShape { len, head: 12, packets: 4 }).unwrap();
        room.put(0, &vec![0; room.len()]);
        room.put(SLOT_BYTE, &[to.slot()]);
        batch.commit(None);
    }
    assert_eq!(longest(&mut batch), 60 << 10);
    from.send(&mut batch);
    let len_of_long = 12 + longest(&mut batch) + 4;
    let shape = PacketShape { len: len_of_long, head: 12, packets: 15 };
    let mut long = begin(&mut batch, &ring, to.local(), shape).unwrap();
    long.put(0, &vec![0; long.len()]);
    long.put(SLOT_BYTE, &[to.slot()]);
    batch.commit(None);
    from.send(&mut batch);
    to.poll_control();
    let mut sizes = Vec::new();
    while to.receive(&mut |datagram| sizes.push((datagram.packets, datagram.bytes.len()))) > 0 {}
    assert_eq!(sizes, [(4, len), (4, len), (4, len), (4, len), (15, 12 + (60 << 10) + 4)]);
    assert_eq!(longest(&mut batch), 16 << 10);
}

/// Queues one packet whose payload is the first bytes of a leased chunk, behind the headers.
/// Returns whether the ring took it.
fn lease(batch: &mut TxBatch, ring: &LocalRoute, slot: u8, chunk: &PinnedChunk) -> bool {
    let to = PacketDestination {
        addr: &"127.66.2.2".parse().unwrap(),
        port_hint: 0,
        ecn: false,
        local: Some(ring),
    };
    let chunk = chunk.share();
    let payload = PayloadSource::Chunk { chunk: &chunk, at: 64, len: 4096 };
    let Some(space) = batch.begin(&to, PacketShape::single(12 + 4096 + 4, 12), payload) else { return false };
    let mut room = space.bytes;
    room.put(0, &vec![0; room.len()]);
    room.put(SLOT_BYTE, &[slot]);
    batch.commit(None);
    true
}

/// A leased chunk stays unchanged until the peer has read it, even if the leasing device is gone;
/// then it is reused.
#[test]
fn a_chunk_stays_as_it_is_until_it_was_read() {
    let _gpu = fake_cuda::client::StandIn::program();
    let gpu = nobounce_memory::gpu::Gpu::by_ordinal(0).unwrap().unwrap();
    let engine = CopyEngine::new(&gpu, 2, 8192).unwrap();
    let (mut from, mut to) = (link("127.66.2.2"), link("127.66.2.2"));
    let ring = from.local_route((to.local(), to.slot())).unwrap();
    let mut chunk = engine.take_chunk().unwrap();
    chunk.get_mut().unwrap().fill(7);
    let mut batch = TxBatch::new(from.capabilities());
    assert!(lease(&mut batch, &ring, to.slot(), &chunk));
    from.send(&mut batch);
    drop((chunk, batch));
    let other = engine.take_chunk().expect("one of two is free");
    assert!(engine.take_chunk().is_none(), "the other one is lent");
    drop((ring, from));
    assert!(engine.take_chunk().is_none(), "it still is");
    to.poll_control();
    let mut seen = 0;
    to.receive(&mut |datagram| {
        assert_eq!((datagram.bytes.len(), datagram.packets), (12 + 4096 + 4, 1));
        assert!(datagram.whole.unwrap().slice(12..12 + 4096).to_vec().iter().all(|byte| *byte == 7));
        seen += 1;
    });
    assert_eq!(seen, 1);
    drop(other);
    // The next ring that closes reclaims the remaining chunks.
    let mut next = link("127.66.2.3");
    drop((next.local_route((to.local(), to.slot())), next));
    assert!(engine.take_chunk().is_some() && engine.take_chunk().is_some());
}

/// A reference to the ring of a departed peer keeps the connection open: it must not wake us for
/// ever.
#[test]
fn a_peer_that_is_gone_wakes_us_once() {
    let (mut from, to) = (link("127.66.2.5"), link("127.66.2.5"));
    let ring = from.local_route((to.local(), to.slot())).unwrap();
    drop(to);
    assert!(!from.poll.ready().is_empty());
    from.poll_control();
    assert!(from.departed().is_some() && from.outgoing.is_empty());
    assert!(from.poll.ready().is_empty(), "it is gone, and that was heard");
    drop(ring);
}

/// A peer that does not read holds eight leased chunks, not all of them.
#[test]
fn a_peer_that_does_not_read_does_not_get_all_chunks() {
    let _gpu = fake_cuda::client::StandIn::program();
    let gpu = nobounce_memory::gpu::Gpu::by_ordinal(0).unwrap().unwrap();
    let engine = CopyEngine::new(&gpu, 10, 8192).unwrap();
    let (mut from, to) = (link("127.66.2.4"), link("127.66.2.4"));
    let ring = from.local_route((to.local(), to.slot())).unwrap();
    let mut batch = TxBatch::new(from.capabilities());
    for _ in 0..8 {
        assert!(lease(&mut batch, &ring, to.slot(), &engine.take_chunk().unwrap()));
    }
    let ninth = engine.take_chunk().unwrap();
    assert!(!lease(&mut batch, &ring, to.slot(), &ninth));
    from.send(&mut batch);
}

/// Runs `what` while this process can open no further descriptor.
fn without_descriptors(what: impl FnOnce()) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: one live structure.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    let before = limit.rlim_cur;
    // The lowest free number: descriptors are allocated from the bottom.
    let next = std::fs::File::open("/dev/null").unwrap().as_raw_fd();
    let mut set = |most: u64| {
        limit.rlim_cur = most;
        // SAFETY: one live structure.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    };
    set(u64::try_from(next).unwrap());
    what();
    set(before);
}

/// A peer that has no descriptor left refuses, and lives: packets take UDP, with the reason.
#[test]
fn a_peer_short_of_descriptors_is_reached_by_udp() {
    let (mut from, mut to) = (link("127.66.2.11"), link("127.66.2.11"));
    let ring = from.local_route((to.local(), to.slot())).unwrap();
    without_descriptors(|| to.poll_control());
    assert!(to.incoming.is_empty() && to.listener.as_ref().unwrap().has_spare());
    from.poll_control();
    assert_eq!(from.departed(), Some(Departed { peer: (to.local(), to.slot()), died: false }));
    assert!(from.fallbacks().iter().any(|reason| reason.contains("no descriptor left")));
    drop(ring);
    assert!(from.local_route((to.local(), to.slot())).is_some(), "it is tried again for the next queue pair");
    to.poll_control();
    assert_eq!(to.incoming.len(), 1);
}

/// The ring itself came without a descriptor: the same.
#[test]
fn a_ring_that_finds_no_descriptor_is_refused() {
    let (mut from, mut to) = (link("127.66.2.12"), link("127.66.2.12"));
    let there = rendezvous::connect(to.local(), to.slot()).unwrap();
    let Some(Accepted::Connection(connection)) = to.listener.as_mut().unwrap().accept() else { panic!() };
    to.poll.add(connection.as_raw_fd()).unwrap();
    to.incoming.push(IncomingRing { connection: Some(connection), ..IncomingRing::default() });
    let file = shared_file::create(ring::FILE_LEN).unwrap();
    let hello = RingHello { src: to.local(), src_port: 4791 };
    rendezvous::send_ring(&there, hello, file.as_raw_fd()).unwrap();
    without_descriptors(|| to.poll_control());
    assert!(matches!(rendezvous::take(&there), Came::Refused));
    assert!(to.incoming.is_empty());
    from.poll_control();
}

/// So does a peer of another version.
#[test]
fn a_ring_of_another_version_is_refused() {
    let mut to = link("127.66.2.13");
    let there = rendezvous::connect(to.local(), to.slot()).unwrap();
    let file = shared_file::create(ring::FILE_LEN).unwrap();
    let mut unknown = *b"nbsm\x09\x04\0\0................";
    rendezvous::send_with(&there, &mut unknown, file.as_raw_fd()).unwrap();
    to.poll_control();
    to.poll_control();
    assert!(matches!(rendezvous::take(&there), Came::Refused));
}
