//! Congestion marks (ECN): a receiver echoes them, and a sender obeys the echo.

use super::{Handled, Qp, QpState};
use crate::congestion::CongestionControl;
use crate::timing::{MICROSECOND, Nanos};
use crate::wire::{CongestionNotification, Opcode};

/// Time between two notifications of one queue pair, as the notification point of DCQCN has it (Zhu
/// et al., SIGCOMM 2015).
const NOTIFY_EVERY: Nanos = 50 * MICROSECOND;

/// The notifications that a queue pair sends.
#[derive(Debug, Default)]
pub(super) struct Notifier {
    due: bool,
    /// Before that time none is sent.
    quiet_until: Nanos,
}

impl Qp {
    /// Lets this algorithm control what the queue pair sends. Connecting begins it; a reset brings
    /// back the default, a [`Aimd`](crate::congestion::Aimd).
    pub fn set_congestion_control(&mut self, mut control: Box<dyn CongestionControl>) {
        control.begin(self.params.mtu);
        self.requester.set_control(control);
    }

    /// Packets with this opcode arrived with a congestion mark (ECN CE).
    pub fn handle_mark(&mut self, now: Nanos, opcode: Opcode, packets: u32) {
        if self.unreliable.is_some() {
            return;
        }
        self.counters.np_ecn_marked_roce_packets += u64::from(packets);
        if now >= self.notifier.quiet_until {
            (self.notifier.due, self.notifier.quiet_until) = (true, now + NOTIFY_EVERY);
        }
        if opcode.is_response() && opcode != Opcode::Ack {
            // Nothing paces the peer's responses but the requests for them.
            self.requester.handle_congestion(now);
        }
    }

    /// Whether [`Qp::poll_congestion_notification`] is to be called.
    #[inline]
    pub const fn has_congestion_notification(&self) -> bool {
        self.notifier.due
    }

    /// The congestion notification to send now, if one is due.
    pub fn poll_congestion_notification(&mut self) -> Option<CongestionNotification> {
        let connected = matches!(self.attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        let due = std::mem::take(&mut self.notifier.due) && connected;
        self.counters.np_cnp_sent += u64::from(due);
        due.then_some(CongestionNotification { to: self.params.dest_qpn })
    }

    /// The peer has received marked packets of this queue pair.
    pub fn handle_congestion_notification(&mut self, now: Nanos) -> Handled {
        if self.unreliable.is_some() {
            return Handled::WrongService;
        }
        if !matches!(self.attr.state, QpState::Rts | QpState::Sqd) {
            return Handled::WrongState;
        }
        self.counters.rp_cnp_handled += 1;
        self.requester.handle_congestion(now);
        Handled::Taken
    }
}
