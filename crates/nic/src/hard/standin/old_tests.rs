//! A libibverbs that lacks what was added later, and devices that do not offer everything.

use std::fs;
use std::path::PathBuf;

use nobounce_memory::HostBuffer;
use nobounce_memory::gpu::GpuOptions;
use nobounce_protocol::qp::Access;
use nobounce_verbs as verbs;

use super::tests::{ALL, LEN, calls, gpu_memory, register};
use super::{Call, world};
use crate::hard::{Device, GidKind, OpenError, Options, standin};

/// A folder as the kernel's of RDMA devices, with what it says about the two GIDs of fake0. It goes
/// with the test.
struct KernelFolder(PathBuf);

impl KernelFolder {
    fn new(test: &str, types: [&str; 2], interfaces: [&str; 2]) -> Self {
        let folder = std::env::temp_dir().join(format!("nobounce-{test}-{}", std::process::id()));
        for (what, entries) in [("types", types), ("ndevs", interfaces)] {
            let attrs = folder.join("fake0/ports/1/gid_attrs").join(what);
            fs::create_dir_all(&attrs).unwrap();
            for (index, text) in entries.iter().enumerate() {
                fs::write(attrs.join(index.to_string()), format!("{text}\n")).unwrap();
            }
        }
        Self(folder)
    }
}

impl Drop for KernelFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn open_old(kernel: PathBuf) -> Result<Device, OpenError> {
    Device::open_in(&standin::old_library(kernel), "fake0", &Options::default())
}

#[test]
fn an_old_libibverbs_has_no_dma_buf_and_says_so() {
    let addr = gpu_memory();
    world(|world| world.peermem = libc::EFAULT);
    let device = open_old("/nowhere".into()).unwrap();
    let mr = register(&device.alloc_pd().unwrap(), addr, LEN, GpuOptions::default()).unwrap();
    let words = mr.paths().to_string();
    assert!(words.contains("has no ibv_reg_dmabuf_mr"), "{words}");
    assert!(!calls().iter().any(|call| matches!(call, Call::RegDmaBuf { .. })));
}

#[test]
fn an_old_libibverbs_leaves_it_to_the_kernel_s_files_what_a_gid_speaks_and_whose_it_is() {
    let address = |last| std::net::Ipv4Addr::new(127, 0, 0, last).to_ipv6_mapped().octets();
    world(|world| world.gids = vec![address(1), address(2)]);
    let kernel = KernelFolder::new("gids", ["IB/RoCE v1", "RoCE v2"], ["lo", "lo"]);
    let device = open_old(kernel.0.clone()).unwrap();
    let gid = &device.port().gid;
    assert_eq!(
        (gid.index, gid.kind, gid.addr().to_string()),
        (1, Some(GidKind::RoceV2), "127.0.0.2".to_owned())
    );
    assert_eq!(gid.interface.as_deref(), Some("lo"));
    let why = device.port().why_gid.join("; ");
    assert!(
        why.contains("RoCE v1, which no router passes") && why.contains("used: an IPv4 address"),
        "{why}"
    );
    // An entry whose interface is in another network namespace is not ours, though the address is.
    let kernel = KernelFolder::new("elsewhere", ["RoCE v2", "RoCE v2"], ["not-here9", "lo"]);
    assert_eq!(open_old(kernel.0.clone()).unwrap().port().gid.index, 1);
    // Without sysfs (a container without /sys, a kernel before 4.5) the entry is used, and reported
    // with unknown RoCE version.
    let device = open_old("/nowhere".into()).unwrap();
    assert_eq!((device.port().gid.index, device.port().gid.kind), (0, None));
    assert!(device.port().why_gid[0].contains("RoCE version unknown"), "{:?}", device.port().why_gid);
}

#[test]
fn relaxed_ordering_that_is_not_offered_is_done_without() {
    const RELAXED: u32 = verbs::IBV_ACCESS_RELAXED_ORDERING;
    let options = Options { relaxed_ordering: true, ..Options::default() };
    let host = HostBuffer::new(4096).unwrap();
    let (at, len) = (host.addr(), 4096);
    let tried = |pd: &crate::hard::Pd| {
        world(|world| world.calls.clear());
        // SAFETY: the buffer outlives the region.
        let mr = unsafe { pd.register(host.as_mut_ptr(), 4096, Access::LOCAL_WRITE) };
        drop(mr.map_err(|error| error.to_string()).unwrap());
        calls().into_iter().filter(|call| matches!(call, Call::RegMr { .. })).collect::<Vec<_>>()
    };
    let access = verbs::IBV_ACCESS_LOCAL_WRITE;
    let strict = Call::RegMr { addr: at, len, access, relaxed: false };
    // A libibverbs without the function that knows of it.
    let old = Device::open_in(&standin::old_library("/nowhere".into()), "fake0", &options).unwrap();
    assert_eq!(tried(&old.alloc_pd().unwrap()), std::slice::from_ref(&strict));
    // A driver that refuses it.
    let pd = Device::open_in(&standin::library(), "fake0", &options).unwrap().alloc_pd().unwrap();
    world(|world| world.relaxed = libc::EINVAL);
    let relaxed = Call::RegMr { addr: at, len, access: access | RELAXED, relaxed: true };
    assert_eq!(tried(&pd), [relaxed, strict]);
    // The same of GPU memory by dma-buf, which stays direct.
    let addr = gpu_memory();
    world(|world| world.calls.clear());
    let mr = register(&pd, addr, LEN, GpuOptions::default()).unwrap();
    assert_eq!(mr.paths().to_string(), "direct (dma-buf)");
    let rights: Vec<u32> = calls()
        .into_iter()
        .filter_map(|call| match call {
            Call::RegDmaBuf { iova, access, .. } if iova == addr => Some(access),
            _ => None,
        })
        .collect();
    assert_eq!(rights, [ALL | RELAXED, ALL]);
    // An unrelated refusal is reported, not swallowed by the second try.
    world(|world| world.host = libc::ENOMEM);
    // SAFETY: the buffer outlives the region.
    let refused =
        unsafe { pd.register(host.as_mut_ptr(), 4096, Access::LOCAL_WRITE) }.unwrap_err().to_string();
    assert!(refused.contains("lock"), "{refused}");
}
