//! Ends with queue pairs of the unreliable services.

use nobounce_nic::soft::{Config, Qp, QpInit, Srq};
use nobounce_nic::work::{
    Datagram, IpOptions, Mtu, Operation, Psn, QpAttr, QpLimits, QpState, SendRequest, Service,
};

use super::{ALL_ACCESS, End, config};

pub(crate) const QKEY: u32 = 0x1234_5678;

/// Deep enough that nothing here fills it.
pub(crate) const DEEP: QpLimits = QpLimits {
    send_depth: 1024,
    recv_depth: 1024,
    send_sges: 4,
    recv_sges: 4,
    inline: 256,
    signal_all: false,
};

impl End {
    fn create(&self, service: Service, srq: Option<&Srq>) -> Qp {
        let init = QpInit { service, send_cq: &self.cq, recv_cq: &self.cq, srq, limits: DEEP };
        self.pd.create_qp_with(&init).unwrap()
    }

    pub(crate) fn add_uc(&mut self, srq: Option<&Srq>) {
        let qp = self.create(Service::Uc, srq);
        qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
        self.qps.push(qp);
    }

    /// Adds a datagram queue pair that is ready.
    pub(crate) fn add_ud(&mut self, srq: Option<&Srq>) {
        let qp = self.create(Service::Ud, srq);
        qp.modify(&QpAttr::ud_to_init(QKEY)).unwrap();
        qp.modify(&QpAttr::to_state(QpState::Rtr)).unwrap();
        qp.modify(&QpAttr::unreliable_to_rts(Psn::new(0xff_fffe))).unwrap();
        self.qps.push(qp);
    }

    /// The queue pair added last.
    pub(crate) fn last_qp(&self) -> &Qp {
        self.qps.last().unwrap()
    }

    /// Where a datagram to its last queue pair goes.
    pub(crate) fn at(&self) -> Datagram {
        Datagram {
            remote: self.device.local(),
            dest_qpn: self.last_qp().qpn(),
            qkey: QKEY,
            ip_options: IpOptions::default(),
        }
    }

    /// Sends a datagram from its last queue pair.
    pub(crate) fn send_to(&self, to: &Self, op: Operation, offset: u64, len: u32) {
        let sges = self.sge(offset, len);
        let request = SendRequest::new(7, op, &sges).to(to.at());
        self.last_qp().post_send(&request).unwrap();
    }
}

/// Connects the last queue pair of `a` with the last of `b`, in this direction.
pub(crate) fn connect_uc(a: &End, b: &End, mtu: Mtu) {
    let psn = Psn::new(0xff_fff0);
    a.last_qp().modify(&QpAttr::uc_to_rtr(b.device.local(), b.last_qp().qpn(), psn, mtu)).unwrap();
    a.last_qp().modify(&QpAttr::unreliable_to_rts(psn)).unwrap();
}

pub(crate) fn uc_pair(a: &Config, b: &Config, bytes: usize, mtu: Mtu) -> (End, End) {
    let (mut a, mut b) = (End::open(a, bytes), End::open(b, bytes));
    a.add_uc(None);
    b.add_uc(None);
    connect_uc(&a, &b, mtu);
    connect_uc(&b, &a, mtu);
    (a, b)
}

pub(crate) fn ud_end(addr: &str, bytes: usize) -> End {
    ud_end_with(&config(addr), bytes)
}

pub(crate) fn ud_end_with(config: &Config, bytes: usize) -> End {
    let mut end = End::open(config, bytes);
    end.add_ud(None);
    end
}
