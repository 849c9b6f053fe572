//! Two ends in one process, each with a device of its own.
#![allow(dead_code)] // each test binary uses a part of it

use std::net::IpAddr;
use std::time::{Duration, Instant};

use nobounce_memory::HostBuffer;
use nobounce_nic::soft::{
    Access, Config, Cq, Device, Mr, Mtu, Operation, Pd, Psn, Qp, QpAttr, QpLimits, RecvRequest, Remote, SendRequest,
    Sge, WorkCompletion,
};

pub(crate) const ALL_ACCESS: Access = Access::all();

/// One end: a device with a domain, a region, a completion queue and queue pairs.
pub(crate) struct End {
    pub(crate) qps: Vec<Qp>,
    pub(crate) cq: Cq,
    pub(crate) mr: Mr,
    pub(crate) buffer: HostBuffer,
    pub(crate) pd: Pd,
    pub(crate) device: Device,
}

impl End {
    pub(crate) fn open(config: &Config, bytes: usize) -> Self {
        let device = Device::open(config).unwrap();
        let pd = device.alloc_pd();
        let buffer = HostBuffer::new(bytes).unwrap();
        // SAFETY: the buffer outlives the region (field order), and is only touched through windows.
        let mr = unsafe { pd.register(buffer.as_mut_ptr(), bytes, ALL_ACCESS) }.unwrap();
        let cq = device.create_cq(4096, None);
        Self { qps: Vec::new(), cq, mr, buffer, pd, device }
    }

    pub(crate) fn add_qp(&mut self, limits: QpLimits) -> &Qp {
        let qp = self.pd.create_qp(&self.cq, &self.cq, limits).unwrap();
        qp.modify(&QpAttr::to_init(ALL_ACCESS)).unwrap();
        self.qps.push(qp);
        self.qps.last().unwrap()
    }

    pub(crate) fn sge(&self, offset: u64, len: u32) -> [Sge; 1] {
        [Sge { addr: self.mr.addr() + offset, len, lkey: self.mr.lkey() }]
    }

    pub(crate) fn remote(&self, offset: u64) -> Remote {
        Remote { addr: self.mr.addr() + offset, rkey: self.mr.rkey() }
    }

    pub(crate) fn post(&self, op: Operation, offset: u64, len: u32) {
        self.qps[0].post_send(&SendRequest::new(7, op, &self.sge(offset, len))).unwrap();
    }

    pub(crate) fn post_recv(&self, wr_id: u64, offset: u64, len: u32) {
        self.qps[0].post_recv(&RecvRequest { wr_id, sges: &self.sge(offset, len) }).unwrap();
    }

    /// Polls until `count` completions came, or fails the test.
    pub(crate) fn completions(&self, count: usize) -> Vec<WorkCompletion> {
        let mut got = Vec::new();
        let end = Instant::now() + Duration::from_secs(20);
        while got.len() < count {
            self.cq.poll(&mut got, count).unwrap();
            assert!(
                Instant::now() < end,
                "{} of {count} completions after 20 s; {:?}; {:?}",
                got.len(),
                self.device.counters(),
                self.device.link_counters()
            );
        }
        got
    }

    pub(crate) fn fill(&self, seed: u8) {
        let bytes: Vec<u8> = (0..self.buffer.len()).map(|i| pattern(seed, i)).collect();
        self.buffer.write_at(0, &bytes).unwrap();
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.buffer.read_at(offset, &mut bytes).unwrap();
        bytes
    }
}

pub(crate) fn pattern(seed: u8, i: usize) -> u8 {
    (i.wrapping_mul(31) ^ (i >> 8) ^ usize::from(seed)) as u8
}

pub(crate) fn config(addr: &str) -> Config {
    Config { addr: addr.parse::<IpAddr>().unwrap(), ..Config::default() }
}

/// Connects queue pair `i` of one end with queue pair `j` of the other.
pub(crate) fn connect(a: &End, i: usize, b: &End, j: usize, mtu: Mtu) {
    let (pa, pb) = (Psn::new(0xff_fff0), Psn::new(0x12_3456));
    for (me, qp, peer, peer_qp, mine, theirs) in
        [(a, &a.qps[i], b, &b.qps[j], pa, pb), (b, &b.qps[j], a, &a.qps[i], pb, pa)]
    {
        let _ = me;
        qp.modify(&QpAttr::to_rtr(peer.device.local(), peer_qp.qpn(), theirs, mtu)).unwrap();
        qp.modify(&QpAttr { timeout: 16, ..QpAttr::to_rts(mine) }).unwrap();
    }
}

/// Two connected ends on one address.
pub(crate) fn pair(addr: &str, bytes: usize, mtu: Mtu) -> (End, End) {
    pair_with(&config(addr), &config(addr), bytes, mtu)
}

pub(crate) fn pair_with(ca: &Config, cb: &Config, bytes: usize, mtu: Mtu) -> (End, End) {
    let (mut a, mut b) = (End::open(ca, bytes), End::open(cb, bytes));
    a.add_qp(QpLimits::default());
    b.add_qp(QpLimits::default());
    connect(&a, 0, &b, 0, mtu);
    (a, b)
}
