//! Packets as lines people can read.

use std::fmt::Write as _;

use crate::timing::{MICROSECOND, Nanos};
use crate::wire::{Header, ICRC_LEN, Syndrome};

/// One packet, sent by endpoint `from` in a datagram of `len` bytes.
pub(crate) fn line(now: Nanos, from: usize, header: &Header, len: usize) -> String {
    let opcode = header.opcode;
    let (micros, hundredths) = (now / MICROSECOND, now % MICROSECOND / 10);
    let mut line = String::new();
    // Writing to a string cannot fail.
    let _ = write!(line, "{micros:>6}.{hundredths:02} {} {opcode:?} {}", name(from), header.psn);
    let payload = len.saturating_sub(header.len() + usize::from(header.pad) + ICRC_LEN);
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
