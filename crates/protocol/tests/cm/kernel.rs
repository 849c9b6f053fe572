//! The kernel's own messages, of the captures: each is read, and written as it was read. The last
//! capture is one of nb0 with the kernel, first as client, then as server.

use nobounce_protocol::cm::{CmMessage, CmRoute, GSI_QKEY, GSI_QPN, Mad, MessageKind, emit_dreq, ip};
use nobounce_protocol::pcap::Reader;
use nobounce_protocol::wire::Header;

const CAPTURES: [&[u8]; 4] = [
    include_bytes!("../data/rxe.pcap"),
    include_bytes!("../data/rxe-mtu4096.pcap"),
    include_bytes!("../data/rxe-ipv6.pcap"),
    include_bytes!("../../../../docs/reference/interop/connections-7.2.pcap"),
];

fn messages() -> Vec<(MessageKind, Mad)> {
    let mut found = Vec::new();
    for file in CAPTURES {
        for packet in Reader::new(file).unwrap().map(Result::unwrap) {
            let Ok(parsed) = Header::parse(packet.packet) else { continue };
            if parsed.header.dest_qpn.get() == GSI_QPN {
                assert_eq!(parsed.header.deth.qkey, GSI_QKEY);
                found.extend(Mad::parse(&packet.packet[parsed.payload]));
            }
        }
    }
    found
}

#[test]
fn the_captures_hold_connections_from_begin_to_end() {
    let kinds: Vec<_> = messages().into_iter().map(|(kind, _)| kind).collect();
    let whole = [MessageKind::Req, MessageKind::Rep, MessageKind::Rtu, MessageKind::Dreq, MessageKind::Drep];
    assert_eq!(kinds, [whole; 4].concat());
}

#[test]
fn each_is_written_as_it_was_read() {
    for (kind, mad) in messages() {
        let transaction = mad.transaction();
        let again = match CmMessage::read(kind, &mad) {
            CmMessage::Req(req) => req.emit(transaction),
            CmMessage::Rep(rep) => rep.emit(transaction),
            CmMessage::Rtu(ids) => ids.emit(MessageKind::Rtu, transaction),
            CmMessage::Dreq { ids, remote_qpn } => emit_dreq(ids, remote_qpn, transaction),
            CmMessage::Drep(ids) => ids.emit(MessageKind::Drep, transaction),
            other => panic!("{other:?}"),
        };
        let differs: Vec<_> = (0..256).filter(|at| mad.bytes()[*at] != again.bytes()[*at]).collect();
        // The kernel leaves the bits about failover, which it does not have either, at 0.
        let allowed: &[usize] = if kind == MessageKind::Rep { &[24 + 26] } else { &[] };
        assert!(differs.iter().all(|at| allowed.contains(at)), "{kind:?}: bytes {differs:?}");
    }
}

#[test]
fn a_request_says_what_tshark_says() {
    let (kind, mad) = &messages()[0];
    let CmMessage::Req(req) = CmMessage::read(*kind, mad) else { panic!("not a request") };
    assert_eq!((req.local_id, req.service, req.qpn.get()), (0xd099_445e, 0x0106_1c06, 0x18));
    assert_eq!((req.starting_psn.get(), req.mtu, req.local_ack_timeout), (0x00f0_286b, 3, 0x11));
    assert_eq!((req.retry_count, req.rnr_retry_count, req.max_cm_retries), (7, 7, 15));
    assert_eq!(ip::address_of(req.local_gid).to_string(), "10.99.0.3");
    let (header, user) = ip::IpHeader::parse(&req.private).unwrap();
    assert_eq!((header.port, user.len()), (0x8fd7, 56));
    assert_eq!(CmRoute::of(&CmMessage::Req(req)), CmRoute::Service(0x0106_1c06));
}
