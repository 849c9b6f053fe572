//! The queue pairs of a rank: one to each rank, itself included.

use nobounce::{ConnectOptions, Device, HandshakeError, Hello, QpHalf};
use nobounce_nic::any::{Cq, CreateError, ModifyError, Qp};
use nobounce_nic::work::{Access, QpAttr, QpLimits};

/// Work requests to one rank at a time.
const SEND_DEPTH: usize = 256;
/// 67 ms, 7 times: a rank that is gone is noticed within a second.
const ACK_TIMEOUT: u8 = 14;

/// Why there are no queue pairs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum MeshError {
    #[error(transparent)]
    Create(#[from] CreateError),
    #[error(transparent)]
    Modify(#[from] ModifyError),
}

/// The queue pairs of a rank.
#[derive(Debug)]
pub struct Mesh {
    /// One to each rank, in order.
    pub qps: Vec<Qp>,
    /// Their completions.
    pub cq: Cq,
    hello: Hello,
}

impl Mesh {
    /// Queue pairs to so many ranks.
    ///
    /// # Errors
    /// The device has no more of them.
    pub fn create(device: &Device, ranks: usize) -> Result<Self, MeshError> {
        let limits = QpLimits { send_depth: SEND_DEPTH, ..QpLimits::default() };
        let cq = device.nic().create_cq(ranks * (SEND_DEPTH + 1), None)?;
        let qps = (0..ranks).map(|_| {
            let qp = device.pd().create_qp(&cq, &cq, limits)?;
            qp.modify(&QpAttr::to_init(Access::all()), 0)?;
            Ok(qp)
        });
        let qps: Vec<Qp> = qps.collect::<Result<_, MeshError>>()?;
        let hello = Hello::of(device.nic(), None, qps.iter().map(QpHalf::of).collect());
        Ok(Self { qps, cq, hello })
    }

    /// What the other ranks need to know.
    #[must_use]
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Connects rank `rank` with all. They may send after all have connected.
    ///
    /// # Errors
    /// The device refuses, or a rank has no queue pair for this one.
    pub fn connect<'a>(
        &self,
        rank: usize,
        all: impl IntoIterator<Item = &'a Hello>,
    ) -> Result<(), HandshakeError> {
        let options = ConnectOptions { ack_timeout: ACK_TIMEOUT, ..ConnectOptions::default() };
        for ((qp, theirs), half) in self.qps.iter().zip(all).zip(&self.hello.qps) {
            let theirs = Hello { mtu: theirs.mtu.min(self.hello.mtu), ..theirs.clone() };
            let missing = HandshakeError::Malformed { what: "another number of ranks" };
            let to = theirs.qps.get(rank).copied().ok_or(missing)?;
            options.raise(qp, (*half, self.hello.max_rd_atomic), to, &theirs)?;
        }
        Ok(())
    }
}
