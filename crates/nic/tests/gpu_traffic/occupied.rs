//! A GPU without room for further kernels.

use std::time::Duration;

use fake_cuda::client::StandIn;
use nobounce_memory::gpu::kernel::{Spin, SpinKernel};

use crate::rig::Rig;

/// Ends by itself after this long, should the test be stuck.
const LIMIT: Duration = Duration::from_secs(15);

/// Ready to occupy the GPU.
pub(crate) enum Occupier {
    Kernel(SpinKernel),
    StandIn(&'static StandIn),
}

/// The GPU while it is occupied.
pub(crate) enum Occupied<'a> {
    Kernel(Spin<'a>),
    StandIn(&'static StandIn),
}

impl Occupier {
    pub(crate) fn new(rig: &Rig) -> Self {
        if rig.is_stand_in() {
            Self::StandIn(StandIn::load())
        } else {
            Self::Kernel(SpinKernel::load(&rig.gpu).unwrap())
        }
    }

    /// All multiprocessors spin when this returns, until the result is dropped.
    pub(crate) fn start(&mut self) -> Occupied<'_> {
        match self {
            Self::Kernel(kernel) => Occupied::Kernel(kernel.start(LIMIT).unwrap()),
            Self::StandIn(stand_in) => {
                stand_in.spin(1);
                Occupied::StandIn(stand_in)
            }
        }
    }
}

impl Occupied<'_> {
    /// Fails the test where the kernel ended by itself: nothing was shown then.
    #[track_caller]
    pub(crate) fn still(&self) {
        if let Self::Kernel(spin) = self {
            assert!(spin.goes_on().unwrap(), "the kernel ended by itself: nothing was tested");
        }
    }
}

impl Drop for Occupied<'_> {
    fn drop(&mut self) {
        if let Self::StandIn(stand_in) = self {
            stand_in.spin(0);
        }
    }
}
