//! Why a transfer cannot be predicted: parts that do not exist or do not fit.

use super::slot::Slot;

/// Parts that do not exist or do not fit together.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PartsError {
    /// No such link.
    #[error(
        "invalid link {0:?}: expected ib:sdr, ib:ddr, ib:qdr, ib:fdr10, ib:fdr, ib:edr, ib:hdr, ib:ndr, ib:xdr, or rocev1:, rocev2:, rocev2-ipv6:, iwarp:, efa: or tcp: with Gb/s, such as rocev2:400"
    )]
    Fabric(String),
    /// Faster than any.
    #[error("invalid rate {gbps} Gb/s: the fastest announced port has {most}")]
    TooFast {
        /// Asked for.
        gbps: f64,
        /// The most.
        most: f64,
    },
    /// No such slot.
    #[error("invalid PCIe link {0:?}: expected a generation and lanes, such as gen5x16")]
    Slot(String),
    /// No such generation.
    #[error("invalid PCIe generation {0}: expected 1 to 7")]
    Generation(u32),
    /// No such width.
    #[error("invalid number of PCIe lanes {0}: expected 1, 2, 4, 8, 12 or 16")]
    Lanes(u32),
    /// The processor's slots are slower.
    #[error(
        "{slot} is impossible behind {processor}: its slots are at most PCIe Gen{most}; a faster link needs a PCIe switch (--distance PIX)"
    )]
    TooNew {
        /// The given slot.
        slot: Slot,
        /// The processor.
        processor: &'static str,
        /// Its generation.
        most: u32,
    },
    /// No link was named.
    #[error("no link given; add --link, such as --link ib:ndr or --link rocev2:100, or --machine")]
    NoLink,
    /// No adapters.
    #[error("invalid --rails 0: expected 1 or more")]
    NoRails,
    /// More than any machine has.
    #[error("too many {what}: {count}, the maximum is {most}")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How many.
        count: u32,
        /// How many there may be.
        most: u32,
    },
    /// RDMA has these packet sizes only.
    #[error(
        "invalid path MTU {0}: expected 256, 512, 1024, 2048 or 4096; an Ethernet MTU of 1500 gives 1024"
    )]
    Mtu(u32),
    /// PCIe has these packet sizes only.
    #[error("invalid {what} {bytes}: expected 128, 256, 512, 1024, 2048 or 4096 bytes")]
    PcieSize {
        /// Which.
        what: &'static str,
        /// The given size.
        bytes: u32,
    },
    /// Nothing can be moved through it.
    #[error("{what} must be more than 0, not {value}")]
    NotPositive {
        /// What.
        what: &'static str,
        /// The given value.
        value: f64,
    },
    /// More than any machine has.
    #[error("{what} must be at most {most} GB/s, not {value:e}")]
    TooMuch {
        /// What.
        what: &'static str,
        /// The given value.
        value: f64,
        /// The most.
        most: f64,
    },
    /// No GPU has such a window.
    #[error("invalid BAR1 of {value} bytes: expected 1 to {most}")]
    Bar1 {
        /// The given size.
        value: u64,
        /// The largest.
        most: u64,
    },
    /// A GPU of the processor's own memory has no distance to cross.
    #[error(
        "a coherent GPU is attached to the processor, not to a PCIe slot: give either --gpu-slot or --coherent"
    )]
    CoherentSlot,
    /// Host memory has no GPU.
    #[error("{0} needs GPU memory, but the transfer uses host memory")]
    NoGpu(&'static str),
}
