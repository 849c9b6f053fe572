//! What the fuzz target of the connection manager does with its bytes.

use std::net::{IpAddr, Ipv4Addr};

use super::fuzzing::Bytes;
use crate::cm::{
    Accept, Agent, CmConfig, CmMessage, CommId, Connect, Event, Ids, MAD_LEN, Mad, MessageKind, Mra, Rej,
    Rep, Req, SidrRep, SidrReq, emit_dreq, refusal,
};
use crate::timing::MILLISECOND;
use crate::wire::{Psn, Qpn};

const SERVICE: u64 = 0x0106_0001;
const BACKLOG: usize = 16;

fn peer(n: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, n % 2 + 1).into()
}

/// A message is written as it was read.
fn check_round_trip(kind: MessageKind, mad: &Mad) -> CmMessage {
    let transaction = mad.transaction();
    let message = CmMessage::read(kind, mad);
    let again = match &message {
        CmMessage::Req(req) => req.emit(transaction),
        CmMessage::Rep(rep) => rep.emit(transaction),
        CmMessage::Rej(rej) => rej.emit(transaction),
        CmMessage::Mra(mra) => mra.emit(transaction),
        CmMessage::SidrReq(req) => req.emit(transaction),
        CmMessage::SidrRep(rep) => rep.emit(transaction),
        CmMessage::Dreq { ids, remote_qpn } => emit_dreq(*ids, *remote_qpn, transaction),
        CmMessage::Rtu(ids) | CmMessage::Drep(ids) | CmMessage::Lap(ids) | CmMessage::Apr(ids) => {
            ids.emit(kind, transaction)
        }
    };
    let reread = Mad::parse(again.bytes()).map(|(kind, mad)| CmMessage::read(kind, &mad));
    assert_eq!(reread.as_ref(), Some(&message));
    message
}

/// A message that looks like one the agent may expect.
fn forge(bytes: &mut Bytes<'_>, ids: &[u32]) -> Mad {
    let pick = |n: u8| ids.get(usize::from(n) % ids.len().max(1)).copied().unwrap_or(0);
    let ids = Ids { local: u32::from(bytes.byte() % 8), remote: pick(bytes.byte()) };
    let private = vec![bytes.byte(); 8];
    let qpn = Qpn::new(u32::from(bytes.byte() % 8));
    let service = if bytes.byte().is_multiple_of(8) { 9 } else { SERVICE };
    match bytes.byte() % 10 {
        0..=1 => {
            let mut blank = [0; MAD_LEN];
            blank[..4].copy_from_slice(&[1, 7, 2, 3]);
            blank[17] = 0x10;
            let Some((_, blank)) = Mad::parse(&blank) else { unreachable!("a request") };
            let CmMessage::Req(req) = CmMessage::read(MessageKind::Req, &blank) else {
                unreachable!("a request")
            };
            Req { local_id: ids.local, service, qpn, transport: bytes.byte() % 4, private, ..*req }.emit(1)
        }
        2 => Rep {
            ids,
            qpn,
            starting_psn: Psn::new(1),
            responder_resources: 1,
            initiator_depth: 1,
            target_ack_delay: 0,
            flow_control: false,
            rnr_retry_count: 7,
            srq: false,
            ca_guid: 1,
            private,
        }
        .emit(1),
        3 => ids.emit(MessageKind::Rtu, 1),
        4 => Rej { ids, about: crate::cm::About::Req, reason: u16::from(bytes.byte()), private }.emit(1),
        5 => Mra { ids, about: crate::cm::About::Rep, service_timeout: bytes.byte() % 32 }.emit(1),
        6 => emit_dreq(ids, qpn, 1),
        7 => ids.emit(MessageKind::Drep, 1),
        8 => SidrReq { request: ids.local, pkey: 0xffff, service, private }.emit(1),
        _ => {
            SidrRep { request: ids.remote, status: bytes.byte() % 3, qpn, service, qkey: 1, private }.emit(1)
        }
    }
}

/// Whatever messages come, forged, damaged or replayed, and whatever the user does: nothing panics,
/// nothing grows without bound, and what the user lets go of is forgotten.
///
/// # Panics
/// One of these is not so.
pub fn management(data: &[u8]) {
    let mut agent = Agent::new(CmConfig { slot: 7, ca_guid: 1, seed: 5 });
    let _ = agent.listen(SERVICE, BACKLOG);
    let mut bytes = Bytes(data);
    let mut now = 1;
    let mut ids: Vec<CommId> = Vec::new();
    let mut heard: Vec<Mad> = Vec::new();
    while !bytes.0.is_empty() {
        let choice = bytes.byte();
        now += u64::from(choice) * MILLISECOND;
        let id = ids.get(usize::from(choice) % ids.len().max(1)).copied().unwrap_or(CommId(1));
        match bytes.byte() % 16 {
            0 => ids.extend(agent.connect(now, connect(peer(choice))).ok()),
            1 => ids.extend(agent.ask_service(now, peer(choice), 3, vec![1]).ok()),
            2 => drop(agent.accept(now, id, accept())),
            3 => drop(agent.establish(id)),
            4 => drop(agent.reject(id, 28, vec![2; 148])),
            5 => drop(agent.disconnect(now, id)),
            6 => agent.release(now, id),
            7 => drop(agent.answer_service(now, id, choice % 3, Qpn::new(5), 6, Vec::new())),
            8 => agent.handle_refused(id),
            9 => now = agent.poll_timeout().unwrap_or(now).max(now),
            10 => {
                // Any bytes behind a header that is right.
                let mut raw = [0; MAD_LEN];
                raw[..4].copy_from_slice(&[1, 7, 2, 3]);
                raw[17] = 0x10 + bytes.byte() % 12;
                let len = usize::from(bytes.byte());
                for (to, from) in raw[24..].iter_mut().zip(bytes.take(len)) {
                    *to = *from;
                }
                hear(&mut agent, now, peer(choice), &raw);
            }
            11 => {
                if let Some(mad) = heard.get(usize::from(choice) % heard.len().max(1)) {
                    hear(&mut agent, now, peer(bytes.byte()), mad.bytes());
                }
            }
            _ => {
                let known: Vec<u32> = ids.iter().map(|id| id.0).collect();
                let mad = forge(&mut bytes, &known);
                hear(&mut agent, now, peer(choice), mad.bytes());
                heard.push(mad);
            }
        }
        agent.handle_timeout(now);
        while let Some(event) = agent.poll_event() {
            if matches!(event, Event::Request { .. } | Event::SidrRequest { .. }) {
                ids.push(event.id());
            }
        }
        let answers = std::iter::from_fn(|| agent.poll_transmit()).count();
        assert!(answers <= 2 + ids.len(), "{answers} messages at once");
    }
    // The user lets go of everything: what is left ends by itself.
    ids.into_iter().for_each(|id| agent.release(now, id));
    for _ in 0..100_000 {
        while agent.poll_transmit().is_some() || agent.poll_event().is_some() {}
        let Some(at) = agent.poll_timeout() else { break };
        now = now.max(at);
        agent.handle_timeout(now);
    }
    assert!(agent.is_empty(), "{} communications never end", agent.len());
}

fn hear(agent: &mut Agent, now: u64, from: IpAddr, raw: &[u8]) {
    let Some((kind, mad)) = Mad::parse(raw) else { return };
    let message = check_round_trip(kind, &mad);
    let _ = refusal(&message, &mad);
    agent.handle_message(now, from, &message, &mad);
}

fn connect(to: IpAddr) -> Connect {
    Connect {
        to,
        service: SERVICE,
        qpn: Qpn::new(3),
        transport: 0,
        starting_psn: Psn::new(1),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: false,
        mtu: 5,
        local_gid: [0; 16],
        remote_gid: [0; 16],
        traffic_class: 0,
        local_ack_timeout: 14,
        private: vec![7; 92],
    }
}

fn accept() -> Accept {
    Accept {
        qpn: Qpn::new(4),
        starting_psn: Psn::new(2),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        rnr_retry_count: 7,
        srq: false,
        private: Vec::new(),
    }
}
