//! The device behind `auto`: the adapter nearest to a GPU, or the fastest. Without any adapter it
//! is the software NIC.

use std::collections::BTreeMap;

use nobounce_memory::gpu::Gpu;
use nobounce_nic::any::OpenError;
use nobounce_nic::hard::{self, Library};
use nobounce_topology::facts::{Facts, Nic};
use nobounce_topology::nearest;
use nobounce_topology::sysfs::{self, Root, Surroundings};

/// The name that selects the nearest device.
pub const AUTO: &str = "auto";
/// The software NIC.
const SOFTWARE: &str = "nb0";

/// A device, and the reason for the choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceChoice {
    /// Its name; `None` if there are adapters but none is usable.
    pub name: Option<String>,
    /// Why this one, or why none.
    pub why: String,
    /// A line for each adapter of this machine, best first.
    pub adapters: Vec<String>,
}

impl DeviceChoice {
    /// What `auto` is on this machine: for memory of CUDA device `gpu`, or for host memory. It
    /// reads files and opens no device; only the GPU's PCI address comes from CUDA.
    pub fn of(gpu: Option<i32>) -> Self {
        if Library::is_named() {
            return Self::of_named_library();
        }
        let surroundings = Surroundings { environment: BTreeMap::new(), home: None };
        let facts = sysfs::read(&Root::new("/"), &surroundings).unwrap_or_else(|_| Facts::default());
        let place = gpu.and_then(|ordinal| {
            let gpus = Gpu::list().ok()?;
            gpus.iter().find(|gpu| gpu.ordinal() == ordinal).map(|gpu| gpu.pci_address().to_owned())
        });
        Self::on(&facts, gpu, place.as_deref())
    }

    /// The same for a machine described by facts. `place` is the GPU's PCI address, if known.
    pub fn on(facts: &Facts, gpu: Option<i32>, place: Option<&str>) -> Self {
        let choice = nearest::nic_for(facts, place);
        let hardware = facts.nics.iter().any(|nic| !Nic::is_software(nic));
        let (name, why) = match (choice.nic, hardware, gpu, place) {
            (Some(nic), _, Some(gpu), Some(_)) => (Some(nic), format!("the best adapter for GPU {gpu}")),
            (Some(nic), _, Some(gpu), None) => (
                Some(nic),
                format!("the fastest adapter (CUDA does not report the PCI address of GPU {gpu})"),
            ),
            (Some(nic), ..) => (Some(nic), "the fastest adapter".to_owned()),
            (None, false, ..) => (Some(SOFTWARE.to_owned()), "no RDMA adapter found".to_owned()),
            (None, true, ..) => (None, "no usable adapter".to_owned()),
        };
        Self { name, why, adapters: choice.lines }
    }

    /// For an explicitly named libibverbs, sysfs says nothing: take its first device.
    fn of_named_library() -> Self {
        let none = |why: String| Self { name: None, why, adapters: Vec::new() };
        let names = Library::load().map_err(|error| error.to_string());
        match names.and_then(|library| hard::names(&library).map_err(|error| error.to_string())) {
            Ok(names) => Self {
                why: "the first device of the libibverbs in NOBOUNCE_VERBS".to_owned(),
                adapters: names.clone(),
                name: names.into_iter().next(),
            },
            Err(why) => none(why),
        }
    }

    /// The name, or an error with the reason and all adapters.
    pub(crate) fn into_name(self) -> Result<String, OpenError> {
        tracing::debug!("device {AUTO}: {:?}, {} ({})", self.name, self.why, self.adapters.join("; "));
        let (why, adapters) = (self.why, self.adapters.join("; "));
        self.name.ok_or(OpenError::NoneUsable { why, adapters })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nobounce_topology::machines::machine;

    #[test]
    fn near_a_gpu_the_adapter_beside_it_and_else_the_fastest() {
        let facts = machine("dgx-h100").unwrap();
        let near = DeviceChoice::on(&facts, Some(0), Some(&facts.gpus[0].address));
        assert!(near.name.is_some() && near.why.contains("GPU 0") && !near.adapters.is_empty(), "{near:?}");
        let fastest = DeviceChoice::on(&facts, None, None);
        assert!(fastest.name.is_some() && fastest.why.contains("fastest"), "{fastest:?}");
        let names: std::collections::BTreeSet<_> = (0..)
            .zip(&facts.gpus)
            .map(|(gpu, at)| DeviceChoice::on(&facts, Some(gpu), Some(&at.address)).name.expect("an adapter"))
            .collect();
        assert_eq!(names.len(), facts.gpus.len(), "another one for each GPU: {names:?}");
        let blind = DeviceChoice::on(&facts, Some(3), None);
        assert!(blind.why.contains("does not report the PCI address of GPU 3"), "{blind:?}");
    }

    #[test]
    fn no_adapter_is_the_software_nic_and_one_that_cannot_be_used_is_an_error() {
        let none = DeviceChoice::on(&Facts::default(), None, None);
        assert_eq!((none.name.as_deref(), none.adapters.len()), (Some("nb0"), 0));
        let mut facts = machine("dgx-h100").unwrap();
        for port in facts.nics.iter_mut().flat_map(|nic| &mut nic.ports) {
            port.state = "DOWN".to_owned();
        }
        let error = DeviceChoice::on(&facts, None, None).into_name().unwrap_err().to_string();
        assert!(error.contains("no active port") && error.contains("nb0"), "{error}");
    }
}
