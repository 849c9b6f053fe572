//! The devices of one resource, and the checks of requests that name them.
//!
//! The software NIC runs in each process, so all devices stand for the same CDI device. Their
//! number only limits how many containers of a node get it.

use std::collections::HashSet;

use crate::messages::{
    AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, ContainerPreferredAllocationResponse, Device,
    PreferredAllocationRequest, PreferredAllocationResponse,
};

/// Device IDs have at most 63 characters. Longer ones from a request are cut in messages.
const MAX_ID: usize = 63;

/// A request that cannot be met; the kubelet gets it as INVALID_ARGUMENT.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum RequestError {
    #[error("the request names no container")]
    NoContainer,
    #[error("container {container} of the request names no device")]
    NoDevice { container: usize },
    #[error("unknown device {id:?}: this plugin has nic-0 to nic-{last}")]
    Unknown { id: String, last: u32 },
    #[error("device {id:?} is named twice in the request")]
    Repeated { id: String },
    #[error("the request names {wanted} devices, and this plugin has {count} (--count)")]
    TooMany { wanted: usize, count: u32 },
    #[error("allocation_size is {size}, with {must} devices to include and {available} available")]
    Size { size: i32, must: usize, available: usize },
}

/// Devices `nic-0` to `nic-(count - 1)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Devices {
    pub(crate) count: u32,
}

impl Devices {
    pub(crate) fn list(self, health: &str) -> Vec<Device> {
        (0..self.count).map(|number| Device { id: id_of(number), health: health.to_owned() }).collect()
    }

    /// Each container gets the CDI device once, however many devices it names.
    pub(crate) fn allocate(
        self,
        request: &AllocateRequest,
        cdi_device: &str,
    ) -> Result<AllocateResponse, RequestError> {
        let containers = &request.container_requests;
        if containers.is_empty() {
            return Err(RequestError::NoContainer);
        }
        if let Some(container) = containers.iter().position(|container| container.devices_ids.is_empty()) {
            return Err(RequestError::NoDevice { container });
        }
        let ids: Vec<_> = containers.iter().flat_map(|container| &container.devices_ids).collect();
        self.check(&ids)?;
        let response =
            ContainerAllocateResponse { cdi_devices: vec![CdiDevice { name: cdi_device.to_owned() }] };
        Ok(AllocateResponse { container_responses: vec![response; containers.len()] })
    }

    /// For containers that are about to start.
    pub(crate) fn check_started(self, ids: &[String]) -> Result<(), RequestError> {
        if ids.is_empty() {
            return Err(RequestError::NoDevice { container: 0 });
        }
        self.check(&ids.iter().collect::<Vec<_>>())
    }

    /// All devices are alike: those that must be included, then the first available ones.
    pub(crate) fn prefer(
        self,
        request: &PreferredAllocationRequest,
    ) -> Result<PreferredAllocationResponse, RequestError> {
        if request.container_requests.is_empty() {
            return Err(RequestError::NoContainer);
        }
        let wanted = request.container_requests.len();
        if wanted > self.count as usize {
            return Err(RequestError::TooMany { wanted, count: self.count });
        }
        let responses: Result<_, _> =
            request.container_requests.iter().map(|container| self.prefer_for(container)).collect();
        Ok(PreferredAllocationResponse { container_responses: responses? })
    }

    fn prefer_for(
        self,
        request: &ContainerPreferredAllocationRequest,
    ) -> Result<ContainerPreferredAllocationResponse, RequestError> {
        self.check(&request.available.iter().collect::<Vec<_>>())?;
        self.check(&request.must_include.iter().collect::<Vec<_>>())?;
        let must: HashSet<_> = request.must_include.iter().collect();
        let others = request.available.iter().filter(|id| !must.contains(id));
        let size = usize::try_from(request.allocation_size).unwrap_or(0);
        let device_ids: Vec<_> = request.must_include.iter().chain(others).take(size).cloned().collect();
        if size == 0 || size < must.len() || device_ids.len() < size {
            return Err(RequestError::Size {
                size: request.allocation_size,
                must: must.len(),
                available: request.available.len(),
            });
        }
        Ok(ContainerPreferredAllocationResponse { device_ids })
    }

    fn check(self, ids: &[&String]) -> Result<(), RequestError> {
        if ids.len() > self.count as usize {
            return Err(RequestError::TooMany { wanted: ids.len(), count: self.count });
        }
        let mut seen = HashSet::new();
        for id in ids {
            if !self.contains(id) {
                return Err(RequestError::Unknown { id: shortened(id), last: self.count - 1 });
            }
            if !seen.insert(id) {
                return Err(RequestError::Repeated { id: shortened(id) });
            }
        }
        Ok(())
    }

    fn contains(self, id: &str) -> bool {
        let number = id.strip_prefix("nic-").and_then(|number| number.parse::<u32>().ok());
        number.is_some_and(|number| number < self.count && id_of(number) == id)
    }
}

fn id_of(number: u32) -> String {
    format!("nic-{number}")
}

fn shortened(id: &str) -> String {
    if id.chars().nth(MAX_ID).is_none() {
        return id.to_owned();
    }
    id.chars().take(MAX_ID).chain("...".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::ContainerAllocateRequest;

    const DEVICES: Devices = Devices { count: 3 };

    fn ids(ids: &[&str]) -> Vec<String> {
        ids.iter().map(|&id| id.to_owned()).collect()
    }

    fn allocate(containers: &[&[&str]]) -> Result<usize, RequestError> {
        let container_requests =
            containers.iter().map(|names| ContainerAllocateRequest { devices_ids: ids(names) }).collect();
        let response = DEVICES.allocate(&AllocateRequest { container_requests }, "a/b=c")?;
        for container in &response.container_responses {
            assert_eq!(container.cdi_devices, [CdiDevice { name: "a/b=c".to_owned() }]);
        }
        Ok(response.container_responses.len())
    }

    #[test]
    fn every_device_has_the_same_health() {
        let list = DEVICES.list("Healthy");
        let shown: Vec<_> = list.iter().map(|device| (device.id.as_str(), device.health.as_str())).collect();
        assert_eq!(shown, [("nic-0", "Healthy"), ("nic-1", "Healthy"), ("nic-2", "Healthy")]);
        assert!(list.iter().all(|device| DEVICES.contains(&device.id)));
    }

    #[test]
    fn each_container_gets_one_cdi_device() {
        assert_eq!(allocate(&[&["nic-0"]]), Ok(1));
        assert_eq!(allocate(&[&["nic-2", "nic-0"]]), Ok(1));
        assert_eq!(allocate(&[&["nic-2"], &["nic-1", "nic-0"]]), Ok(2));
    }

    #[test]
    fn wrong_allocations_name_the_fault() {
        assert_eq!(allocate(&[]), Err(RequestError::NoContainer));
        assert_eq!(allocate(&[&["nic-0"], &[]]), Err(RequestError::NoDevice { container: 1 }));
        for id in ["nic-3", "nic-00", "nic-+1", "nic--1", "nic-", "", "nb0", "nic-4294967296"] {
            assert_eq!(allocate(&[&[id]]), Err(RequestError::Unknown { id: id.to_owned(), last: 2 }));
        }
        assert_eq!(
            allocate(&[&["nic-0"], &["nic-0"]]),
            Err(RequestError::Repeated { id: "nic-0".to_owned() })
        );
        assert_eq!(allocate(&[&["x"; 4]]), Err(RequestError::TooMany { wanted: 4, count: 3 }));
    }

    #[test]
    fn long_identifiers_are_cut_in_messages() {
        let Err(RequestError::Unknown { id, .. }) = allocate(&[&["ä".repeat(1 << 20).as_str()]]) else {
            panic!("accepted");
        };
        assert_eq!(id.chars().count(), MAX_ID + 3);
        assert_eq!(shortened(&"a".repeat(MAX_ID)).len(), MAX_ID);
    }

    #[test]
    fn containers_that_start_name_known_devices() {
        assert_eq!(DEVICES.check_started(&ids(&["nic-1"])), Ok(()));
        assert_eq!(DEVICES.check_started(&[]), Err(RequestError::NoDevice { container: 0 }));
        assert!(DEVICES.check_started(&ids(&["other"])).is_err());
    }

    fn prefer(available: &[&str], must: &[&str], size: i32) -> Result<Vec<String>, RequestError> {
        let container = ContainerPreferredAllocationRequest {
            available: ids(available),
            must_include: ids(must),
            allocation_size: size,
        };
        let request = PreferredAllocationRequest { container_requests: vec![container] };
        Ok(DEVICES.prefer(&request)?.container_responses.remove(0).device_ids)
    }

    #[test]
    fn preferred_devices_include_the_required_ones() {
        assert_eq!(prefer(&["nic-0", "nic-2"], &["nic-2"], 2), Ok(ids(&["nic-2", "nic-0"])));
        assert_eq!(prefer(&["nic-0", "nic-2"], &[], 1), Ok(ids(&["nic-0"])));
        for size in [-1, 0, 3, i32::MAX, i32::MIN] {
            let error = prefer(&["nic-0", "nic-2"], &["nic-2"], size).unwrap_err();
            assert_eq!(error, RequestError::Size { size, must: 1, available: 2 });
        }
        assert!(matches!(prefer(&["nic-9"], &[], 1), Err(RequestError::Unknown { .. })));
        assert!(matches!(prefer(&["nic-0"; 4], &[], 1), Err(RequestError::TooMany { .. })));
        assert!(matches!(
            DEVICES.prefer(&PreferredAllocationRequest::default()),
            Err(RequestError::NoContainer)
        ));
    }
}
