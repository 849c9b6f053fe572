//! The data path between memory and the wire: a property of every registration, per direction.

use std::fmt;
use std::sync::Arc;

/// The mechanism that moves bytes between memory and the link's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mechanism {
    /// Host memory, copied by the CPU.
    Cpu,
    /// GPU memory through a CPU window onto it (BAR1): loads and stores.
    Window,
    /// The GPU's copy engine, straight from or into the link's buffer.
    CopyEngine,
    /// A network adapter's own DMA; the memory was registered by dma-buf.
    DmaBuf,
    /// A network adapter's own DMA; the memory was registered by nvidia-peermem.
    Peermem,
}

impl Mechanism {
    /// Its name in reports and counters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Window => "window",
            Self::CopyEngine => "copy-engine",
            Self::DmaBuf => "dma-buf",
            Self::Peermem => "peermem",
        }
    }
}

/// Why a path is not direct: a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reason(Arc<str>);

impl Reason {
    /// A reason in words.
    #[must_use]
    pub fn new(words: impl Into<Arc<str>>) -> Self {
        Self(words.into())
    }

    /// The words.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The data path in one direction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// The only resting place in host memory is the buffer handed to, or filled by, the link.
    Direct(Mechanism),
    /// Direct by the claim of the device's driver: it accepted the memory. The reason says why a
    /// transfer could not be tested.
    Believed(Mechanism, Reason),
    /// One more host copy, or the copy engine places bytes because no window could be mapped.
    Staged(Reason),
}

impl Path {
    /// Whether it is direct: verified, or claimed by the driver.
    #[must_use]
    pub const fn is_direct(&self) -> bool {
        matches!(self, Self::Direct(_) | Self::Believed(..))
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct(mechanism) => write!(f, "direct ({})", mechanism.name()),
            Self::Believed(mechanism, why) => {
                write!(f, "direct ({}), believed, not proved: {why}", mechanism.name())
            }
            Self::Staged(reason) => write!(f, "staged ({reason})"),
        }
    }
}

/// The data paths of one registration, per direction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Paths {
    /// From the wire into the memory.
    pub inbound: Path,
    /// From the memory to the wire. Where the copy engine serves long messages, short ones may
    /// still use the window.
    pub outbound: Path,
}

impl Paths {
    /// The same path in both directions.
    #[must_use]
    pub fn both(path: Path) -> Self {
        Self { inbound: path.clone(), outbound: path }
    }

    /// Whether both directions are direct.
    #[must_use]
    pub const fn are_direct(&self) -> bool {
        self.inbound.is_direct() && self.outbound.is_direct()
    }
}

impl fmt::Display for Paths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.inbound == self.outbound {
            write!(f, "{}", self.inbound)
        } else {
            write!(f, "in {}, out {}", self.inbound, self.outbound)
        }
    }
}

/// Requirements on a registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Require {
    /// Any path will do; which one it is, is known and counted.
    #[default]
    Any,
    /// Both directions must be direct: otherwise the registration fails, with the reason. A
    /// driver's claim that could not be tested suffices ([`Path::Believed`]): no bytes may be
    /// staged anywhere, and only the driver could break that.
    Direct,
}
