//! Packets as lines people can read.

use std::fmt::Write as _;

use crate::timing::{MICROSECOND, Nanos};
use crate::wire::{Header, ICRC_LEN, SelectiveAck, Syndrome};

/// One packet, sent by endpoint `from` in this datagram.
pub(crate) fn line(now: Nanos, from: usize, header: &Header, datagram: &[u8]) -> String {
    let opcode = header.opcode;
    let (micros, hundredths) = (now / MICROSECOND, now % MICROSECOND / 10);
    let mut line = String::new();
    // Writing to a string cannot fail.
    if let Some(ack) = SelectiveAck::parse(datagram) {
        let arrived = ack.arrived().map(|ahead| ack.missing.plus(u32::try_from(ahead).unwrap_or(0)));
        let arrived = arrived.map(|psn| psn.to_string()).collect::<Vec<_>>().join(" ");
        let _ = write!(
            line,
            "{micros:>6}.{hundredths:02} {} SelectiveAck {} is missing, arrived {arrived}",
            name(from),
            ack.missing
        );
        return line;
    }
    let _ = write!(line, "{micros:>6}.{hundredths:02} {} {opcode:?} {}", name(from), header.psn);
    let payload = datagram.len().saturating_sub(header.len() + usize::from(header.pad) + ICRC_LEN);
    if payload > 0 {
        let _ = write!(line, " {payload} B");
    }
    if opcode.has_reth() {
        let _ = write!(line, " of {} B", header.reth.len);
    }
    if opcode.has_aeth() {
        match header.aeth.syndrome {
            Syndrome::Ack(_) => {}
            Syndrome::RnrNak(code) => drop(write!(line, " rnr timer {code}")),
            Syndrome::Nak(code) => drop(write!(line, " nak {code}")),
            Syndrome::Reserved(byte) => drop(write!(line, " reserved {byte:#x}")),
        }
        let _ = write!(line, " msn {}", header.aeth.msn);
    }
    if header.ack_req {
        line.push_str(" ack?");
    }
    line
}

fn name(index: usize) -> String {
    let side = if index.is_multiple_of(2) { "A ->" } else { "B <-" };
    if index < 2 { side.to_owned() } else { format!("{}{side}", index / 2) }
}
