//! A fork under GPU regions: the child can drop everything and end, and takes nothing away from its
//! parent.

use nobounce_nic::soft::{CqError, RegisterError};
use nobounce_nic::work::{Mtu, Operation, RecvRequest, SendRequest};

use crate::common::{ALL_ACCESS, outcome, pair};
use crate::rig::{self, GpuMethod, Kind, Memory, Rig};

const LEN: usize = 2 << 20;

#[test]
fn child_ends_and_parent_goes_on() {
    let Some(rig) = Rig::new("fork::child_ends_and_parent_goes_on") else { return };
    for round in 0..12_u64 {
        let way = GpuMethod::ALL[round as usize % 3];
        let kind = [Kind::Buffer, Kind::Malloc][round as usize / 3 % 2];
        let (a, b) = pair(&format!("127.85.95.{}", round + 1), 4096, Mtu::Mtu4096);
        let (from, to) = (Memory::new(&rig, kind, LEN), Memory::new(&rig, kind, LEN));
        let (at_a, at_b) = (rig::register(&a, &from, way), rig::register(&b, &to, way));
        rig.fill(from.addr, LEN, round << 40);
        let write = Operation::Write(rig::remote(&at_b, 0));
        let sges = rig::sge(&at_a, 0, LEN);
        // Traffic, so that the fork finds locks held and copies in flight.
        for _ in 0..10 {
            a.qps[0].post_send(&SendRequest::new(1, write, &sges)).unwrap();
        }
        // SAFETY: the child calls nothing but the device and allocation.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: the memory is not used through it: registration is refused.
            let again = unsafe { a.pd.register_gpu(from.addr, LEN, ALL_ACCESS, &way.options()) };
            let checks = [
                again.is_err(),
                a.cq.poll(&mut Vec::new(), 8) == Err(CqError::Forked),
                a.qps[0].post_send(&SendRequest::new(1, write, &sges)).is_err(),
                a.qps[0].post_recv(&RecvRequest { wr_id: 1, sges: &sges }).is_err(),
                !matches!(again, Err(RegisterError::TooMany)),
                at_b.gpu_memory().is_some_and(|memory| memory.check_alive().is_err()),
            ];
            let code = checks.iter().position(|right| !right).map_or(0, |at| at + 1);
            drop((at_a, at_b, again));
            drop((a, b));
            drop((from, to));
            if round % 2 == 0 {
                // SAFETY: ends the child without running what belongs to the parent.
                unsafe { libc::_exit(i32::try_from(code).unwrap_or(99)) };
            }
            // SAFETY: what programs do that do not know better: the handlers of libraries run.
            unsafe { libc::exit(i32::try_from(code).unwrap_or(99)) };
        }
        rig::succeed(&a, 10);
        assert_eq!(outcome(child), 0, "the number of the check that failed in the child, round {round}");
        rig.check(to.addr, LEN, round << 40, &format!("round {round}, around the fork"));
        // What the child dropped is still the parent's.
        rig.fill(from.addr, LEN, (round << 40) + (1 << 30));
        a.qps[0].post_send(&SendRequest::new(1, write, &sges)).unwrap();
        rig::succeed(&a, 1);
        rig.check(to.addr, LEN, (round << 40) + (1 << 30), &format!("round {round}, after the child's end"));
    }
}
