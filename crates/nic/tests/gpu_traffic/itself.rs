//! A loopback queue pair, connected to itself, with which programs reach their own GPU memory.
//! UCX's perftest sets a word at the end of each of its buffers that way, whatever their size.

use nobounce_nic::soft::{Mr, Qp};
use nobounce_nic::work::{Mtu, Operation, Psn, QpAttr, QpLimits, Remote, SendRequest};

use crate::common::{ALL_ACCESS, End, config};
use crate::rig::{self, GpuMethod, Kind, Memory, Rig};

const WORD: usize = 8;

fn to_itself(end: &End) -> Qp {
    let qp = end.pd.create_qp(&end.cq, &end.cq, QpLimits::default()).unwrap();
    qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
    qp.modify(&QpAttr::to_rtr(end.device.local(), qp.qpn(), Psn::new(9), Mtu::Mtu4096)).unwrap();
    qp.modify(&QpAttr::to_rts(Psn::new(9))).unwrap();
    qp
}

/// Memory of `len` bytes and a word, registered up to the next multiple of 16, as UCX does.
fn rounded(rig: &Rig, end: &End, len: usize) -> (Memory, Mr) {
    let mut memory = Memory::new(rig, Kind::Malloc, len + WORD);
    memory.len = memory.len.next_multiple_of(16);
    let region = rig::register(end, &memory, GpuMethod::Direct);
    (memory, region)
}

/// A word is written, the write is flushed by an empty one that names no memory, and the word is
/// read back.
#[test]
fn words_at_the_end_of_buffers_of_all_sizes() {
    let Some(rig) = Rig::new("itself::words_at_the_end_of_buffers_of_all_sizes") else { return };
    let end = End::open(&config("127.85.95.1"), 4096);
    let qp = to_itself(&end);
    for len in [8, 4096, 65536, 1 << 20, 16 << 20] {
        let buffers = [rounded(&rig, &end, len), rounded(&rig, &end, len)];
        for round in 0..3_u64 {
            // Long messages are sent from registrations of their own, which come and go.
            let again = rig::register(&end, &buffers[0].0, GpuMethod::Direct);
            let over = Operation::Write(rig::remote(&buffers[1].1, 0));
            qp.post_send(&SendRequest::new(4, over, &rig::sge(&again, 0, len))).unwrap();
            rig::succeed(&end, 1);
            drop(again);
            for (which, (memory, region)) in (1..).zip(&buffers) {
                let word = ((which << 56) | (round << 8) | which).to_le_bytes();
                // All of it, and its last byte once more.
                for part in [0, WORD - 1] {
                    let to = Operation::Write(rig::remote(region, len - WORD + part));
                    let write = SendRequest::inline(1, to, &word[part..]);
                    qp.post_send(&SendRequest { signaled: false, ..write }).unwrap();
                }
                let nowhere = Operation::Write(Remote { addr: 0, rkey: 0 });
                qp.post_send(&SendRequest::inline(2, nowhere, &[])).unwrap();
                rig::succeed(&end, 1);
                let from = Operation::Read(rig::remote(region, len - WORD));
                qp.post_send(&SendRequest::new(3, from, &end.sge(0, WORD as u32))).unwrap();
                rig::succeed(&end, 1);
                assert_eq!(end.bytes(0, WORD), word, "{len} bytes, buffer {which}, round {round}");
                assert_eq!(memory.get(len - WORD, WORD), word, "{len} bytes, buffer {which}, round {round}");
            }
        }
    }
}
