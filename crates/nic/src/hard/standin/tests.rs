//! The calls to libibverbs, argument by argument, and the handling of its results.

use fake_cuda::client::StandIn;
use nobounce_memory::HostBuffer;
use nobounce_memory::gpu::GpuOptions;
use nobounce_protocol::qp::{Access, Mtu, Operation, QpAttr, Remote};
use nobounce_protocol::wire::{Psn, Qpn};
use nobounce_verbs as verbs;

use super::{Call, world};
use crate::hard::{self, Device, Mr, OpenError, Options, Pd, PostError, RegisterError, standin};
use crate::work::{QpLimits, RecvRequest, SendRequest, Sge};

pub(super) const LEN: usize = 1 << 20;
pub(super) const ALL: u32 = verbs::IBV_ACCESS_LOCAL_WRITE
    | verbs::IBV_ACCESS_REMOTE_WRITE
    | verbs::IBV_ACCESS_REMOTE_READ
    | verbs::IBV_ACCESS_REMOTE_ATOMIC;

pub(super) fn open() -> Device {
    Device::open_in(&standin::library(), "fake0", &Options::default()).unwrap()
}

/// Memory of the stand-in GPU, which the device tells from the host's by its address.
pub(super) fn gpu_memory() -> u64 {
    let addr = StandIn::program().malloc(LEN);
    world(|world| world.is_gpu = |addr| StandIn::program().holds(addr));
    addr
}

pub(super) fn register(pd: &Pd, addr: u64, len: usize, options: GpuOptions) -> Result<Mr, RegisterError> {
    // SAFETY: memory of the stand-in, which has no other user.
    unsafe { pd.register_gpu(addr, len, Access::all(), &options) }
}

pub(super) fn calls() -> Vec<Call> {
    world(|world| world.calls.clone())
}

#[test]
fn everything_goes_once_and_in_the_right_order() {
    let addr = gpu_memory();
    let device = open();
    let pd = device.alloc_pd().unwrap();
    let channel = device.create_channel().unwrap();
    let cq = device.create_cq(16, Some(&channel)).unwrap();
    let qp = pd.create_qp(&cq, &cq, QpLimits::default()).unwrap();
    let mr = register(&pd, addr, LEN, GpuOptions::default()).unwrap();
    world(|world| world.calls.clear());
    // In the worst order: parents first.
    drop(device);
    drop(pd);
    drop(channel);
    drop(cq);
    assert_eq!(standin::names(), [""; 0], "everything is still in use");
    drop(qp);
    assert_eq!(standin::names(), ["destroy_qp", "destroy_cq", "destroy_channel"]);
    drop(mr);
    let all = ["destroy_qp", "destroy_cq", "destroy_channel", "dereg_mr", "dealloc_pd", "close"];
    assert_eq!(standin::names(), all);
}

fn raise(device: &Device, remote: std::net::IpAddr, lid: u16) -> Vec<(u32, standin::PathAttr)> {
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(16, None).unwrap();
    let qp = pd.create_qp(&cq, &cq, QpLimits::default()).unwrap();
    qp.modify(&QpAttr::to_init(Access::all()), 0).unwrap();
    qp.modify(&QpAttr::to_rtr(remote, Qpn::new(5), Psn::new(6), Mtu::Mtu1024), lid).unwrap();
    qp.modify(&QpAttr::to_rts(Psn::new(7)), lid).unwrap();
    let states = calls().into_iter().filter_map(|call| match call {
        Call::Modify { state, attr, .. } => Some((state, attr)),
        _ => None,
    });
    states.collect()
}

#[test]
fn ethernet_is_addressed_by_gid_and_infiniband_by_lid() {
    let peer: std::net::IpAddr = "10.1.2.3".parse().unwrap();
    let device = open();
    assert_eq!(device.port().mtu, Mtu::Mtu2048, "the port's own");
    let states = raise(&device, peer, 0);
    let rtr = states[1].1;
    assert_eq!((states[1].0, rtr.is_global, rtr.sgid_index, rtr.dlid), (verbs::IBV_QPS_RTR, 1, 1, 0));
    assert_eq!(rtr.dgid, "10.1.2.3".parse::<std::net::Ipv4Addr>().unwrap().to_ipv6_mapped().octets());
    assert_eq!((rtr.mtu, rtr.port), (verbs::IBV_MTU_1024, 1));
    assert_eq!(states[2].1.retries, 6, "7 is without end for some drivers");

    world(|world| {
        world.calls.clear();
        (world.port.link_layer, world.port.lid) = (verbs::IBV_LINK_LAYER_INFINIBAND, 0x21);
    });
    let device = open();
    assert_eq!((device.port().lid, device.port().needs_grh), (0x21, false));
    let rtr = raise(&device, peer, 0x42)[1].1;
    assert_eq!((rtr.is_global, rtr.dlid, rtr.dgid), (0, 0x42, [0; 16]));
    world(|world| world.port.flags = verbs::IBV_QPF_GRH_REQUIRED);
    world(|world| world.calls.clear());
    assert_eq!(raise(&open(), peer, 0x42)[1].1.is_global, 1, "a subnet that asks for the header gets it");
}

#[test]
fn rights_and_ordering_are_what_was_asked_for() {
    let options = Options { relaxed_ordering: true, ..Options::default() };
    let device = Device::open_in(&standin::library(), "fake0", &options).unwrap();
    let pd = device.alloc_pd().unwrap();
    let host = HostBuffer::new(4096).unwrap();
    // SAFETY: the buffer outlives the region.
    let _mr = unsafe { pd.register(host.as_mut_ptr(), 4096, Access::LOCAL_WRITE) }.unwrap();
    let access = verbs::IBV_ACCESS_LOCAL_WRITE | verbs::IBV_ACCESS_RELAXED_ORDERING;
    assert_eq!(calls().last(), Some(&Call::RegMr { addr: host.addr(), len: 4096, access, relaxed: true }));
    let addr = gpu_memory();
    let _gpu = register(&pd, addr, LEN, GpuOptions::default()).unwrap();
    let relaxed = |call: &Call| matches!(call, Call::RegDmaBuf { access, .. } if access & verbs::IBV_ACCESS_RELAXED_ORDERING != 0);
    assert!(calls().iter().any(relaxed));
}

#[test]
fn what_a_device_refuses_is_said_in_a_sentence() {
    world(|world| world.open = libc::EACCES);
    let denied = Device::open_in(&standin::library(), "fake0", &Options::default()).unwrap_err();
    assert!(
        matches!(denied, OpenError::Open { .. }) && denied.to_string().contains("does not let this user in"),
        "{denied}"
    );
    world(|world| (world.open, world.devices) = (0, 0));
    let none = Device::open_in(&standin::library(), "fake0", &Options::default()).unwrap_err();
    assert!(matches!(none, OpenError::None { .. }), "{none}");
    world(|world| (world.devices, world.port.state) = (1, verbs::IBV_PORT_DOWN));
    let down = Device::open_in(&standin::library(), "fake0", &Options::default()).unwrap_err();
    assert!(down.to_string().contains("port 1: down"), "{down}");
    world(|world| (world.port.state, world.host) = (verbs::IBV_PORT_ACTIVE, libc::ENOMEM));
    let device = open();
    let pd = device.alloc_pd().unwrap();
    let buffer = HostBuffer::new(4096).unwrap();
    // SAFETY: the buffer outlives the region.
    let locked = unsafe { pd.register(buffer.as_mut_ptr(), 4096, Access::LOCAL_WRITE) }.unwrap_err();
    assert!(locked.to_string().contains("lock"), "{locked}");
    let deep = device.create_cq(1 << 20, None).unwrap_err();
    assert!(deep.to_string().contains("4096"), "{deep}");
    // Less inline data than was asked for is taken rather than nothing.
    world(|world| world.most_inline = 100);
    let cq = device.create_cq(16, None).unwrap();
    let qp = pd.create_qp(&cq, &cq, QpLimits::default()).unwrap();
    assert_eq!(qp.limits().inline, 64);
    world(|world| world.modify = libc::ETIMEDOUT);
    let to = QpAttr::to_rtr("10.9.9.9".parse().unwrap(), Qpn::new(5), Psn::new(6), Mtu::Mtu1024);
    let absent = qp.modify(&to, 0).unwrap_err().to_string();
    assert!(absent.contains("no answer from that address") && absent.contains("10.9.9.9"), "{absent}");
}

#[test]
fn events_tell_how_the_device_is() {
    let device = open();
    assert_eq!(device.health(), hard::Health::default());
    world(|world| world.events.push_back((verbs::IBV_EVENT_PORT_ERR, 1)));
    assert!(device.health().port_down);
    world(|world| world.events.push_back((verbs::IBV_EVENT_PORT_ACTIVE, 1)));
    assert!(!device.health().port_down);
    world(|world| world.events.push_back((verbs::IBV_EVENT_PORT_ERR, 2)));
    assert!(!device.health().port_down, "another port's");
    world(|world| world.events.push_back((verbs::IBV_EVENT_DEVICE_FATAL, 0)));
    assert!(device.health().gone && device.health().gone);
    let device = open();
    world(|world| world.port.state = verbs::IBV_PORT_DOWN);
    assert!(!device.health().port_down && device.examine().port_down, "no event yet, but the port says it");
}

#[test]
fn what_the_port_does_not_carry_at_once_is_refused_before_it_is_posted() {
    world(|world| world.port.max_msg_sz = 1 << 20);
    let device = open();
    assert_eq!(device.port().max_message, 1 << 20);
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(64, None).unwrap();
    let qp = pd.create_qp(&cq, &cq, QpLimits::default()).unwrap();
    let sge = |len| Sge { addr: 0x1000, len, lkey: 1 };
    let write = |sges: &[Sge]| {
        // Only what is too long: nothing is carried out.
        qp.post_send(&SendRequest::new(1, Operation::Send, sges))
    };
    for sges in [&[sge((1 << 20) + 1)][..], &[sge(1 << 20), sge(1)]] {
        let long = write(sges).unwrap_err();
        assert!(matches!(long, PostError::TooLong { len: 1_048_577, max: 1_048_576, .. }), "{long}");
        assert!(long.to_string().contains("fake0") && long.to_string().contains("several"), "{long}");
    }
    world(|world| world.port.max_msg_sz = 0);
    assert_eq!(open().port().max_message, 1 << 31, "the standard's, where a driver says nothing");
}

#[test]
fn a_forked_child_is_told_and_leaves_its_parent_s_objects_alone() {
    let device = open();
    let pd = device.alloc_pd().unwrap();
    let channel = device.create_channel().unwrap();
    let cq = device.create_cq(16, Some(&channel)).unwrap();
    let qp = pd.create_qp(&cq, &cq, QpLimits::default()).unwrap();
    let host = HostBuffer::new(4096).unwrap();
    // SAFETY: the buffer outlives the region.
    let mr = unsafe { pd.register(host.as_mut_ptr(), 4096, Access::all()) }.unwrap();
    world(|world| world.calls.clear());
    // SAFETY: the child allocates, which the allocators of today's C libraries allow, and ends
    // without running anything of the parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let told = |result: Result<(), String>| {
            result.err().is_some_and(|words| words.contains("fake0 was opened before a fork"))
        };
        // SAFETY: as above.
        let again = unsafe { pd.register(host.as_mut_ptr(), 4096, Access::all()) };
        let sge = Sge { addr: host.addr(), len: 8, lkey: mr.lkey() };
        let right = [
            told(qp.post_send(&SendRequest::new(1, Operation::Send, &[sge])).map_err(|e| e.to_string())),
            told(qp.post_recv(&RecvRequest { wr_id: 1, sges: &[sge] }).map_err(|e| e.to_string())),
            told(cq.poll(&mut Vec::new(), 1).map(drop).map_err(|e| e.to_string())),
            told(again.map(drop).map_err(|e| e.to_string())),
            told(device.alloc_pd().map(drop).map_err(|e| e.to_string())),
            told(device.create_cq(1, None).map(drop).map_err(|e| e.to_string())),
            qp.modify(&QpAttr::to_init(Access::all()), 0).is_err_and(|e| e.to_string().contains("fork")),
            device.health().forked && device.examine().forked,
            !channel.take(),
        ];
        drop((device, pd, channel, cq, qp, mr));
        let nothing = calls().is_empty();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!(nothing && right.iter().all(|one| *one)))) };
    }
    let mut status = 0;
    // SAFETY: a child of ours, and a valid place.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child saw something else");
    // The parent goes on.
    assert!(cq.poll(&mut Vec::new(), 1).is_ok());
    drop((qp, mr));
    assert!(standin::names().contains(&"destroy_qp"));
}

#[test]
fn the_port_s_own_word_counts_whatever_its_events_said() {
    let device = open();
    world(|world| world.events.push_back((verbs::IBV_EVENT_PORT_ERR, 1)));
    assert!(device.health().port_down);
    assert!(!device.examine().port_down, "it is back, without an event");
    assert!(!device.health().port_down, "and that is kept");
    let queues = [device.create_cq(8, None).unwrap(), device.create_cq(8, None).unwrap()];
    let which = queues[1].inner.raw.as_ptr().addr();
    world(|world| world.events.push_back((verbs::IBV_EVENT_CQ_ERR, which)));
    assert!(device.health().queue_failed && device.health().queue_failed);
    assert_eq!([queues[0].has_failed(), queues[1].has_failed()], [false, true]);
    drop(queues);
    assert!(device.health().is_well(), "a destroyed CQ does not count");
}

#[test]
fn the_list_says_what_each_device_is() {
    let library = standin::library();
    world(|world| (world.port.active_width, world.port.active_speed) = (2, 32));
    let listed = hard::list(&library).unwrap();
    let device = listed[0].as_ref().unwrap();
    assert_eq!((device.name.as_str(), device.attr.max_qp_wr, device.ports.len()), ("fake0", 1024, 1));
    let words = device.to_string();
    assert!(
        words.starts_with("fake0: ") && words.contains("port 1: active, RoCE, 100 Gb/s, MTU 2048"),
        "{words}"
    );
    assert_eq!(standin::names(), ["open", "close"], "nothing stays open");
    for errno in [libc::EACCES, libc::ENOENT] {
        world(|world| world.open = errno);
        let refused = hard::list(&library).unwrap().remove(0).unwrap_err().to_string();
        assert!(refused.contains("fake0 cannot be opened"), "{refused}");
        let opened = Device::open_in(&library, "fake0", &Options::default()).unwrap_err().to_string();
        assert_eq!(refused, opened, "list and open report the same error");
    }
}

#[test]
fn requests_are_signalled_fenced_and_inline_as_they_ask() {
    let device = open();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(64, None).unwrap();
    let qp = pd.create_qp(&cq, &cq, QpLimits { inline: 100, ..QpLimits::default() }).unwrap();
    let host = HostBuffer::new(4096).unwrap();
    // SAFETY: the buffer outlives the region.
    let mr = unsafe { pd.register(host.as_mut_ptr(), 4096, Access::all()) }.unwrap();
    let remote = Remote { addr: host.addr() + 1000, rkey: mr.rkey() };
    let bytes = [5; 100];
    let write = SendRequest::new(1, Operation::Write(remote), &[]);
    qp.post_send(&SendRequest { inline: Some(&bytes), signaled: false, ..write }).unwrap();
    let flags = || world(|world| std::mem::take(&mut world.flags));
    assert_eq!(flags(), [verbs::IBV_SEND_INLINE], "no completion is asked for");
    let mut found = [0; 101];
    host.read_at(1000, &mut found).unwrap();
    assert_eq!((&found[..100], found[100]), (&bytes[..], 0), "bytes that are in no region");
    let long = qp.post_send(&SendRequest { inline: Some(&[0; 101]), ..write }).unwrap_err();
    assert!(matches!(long, PostError::Limit { given: 101, max: 100, .. }), "{long}");
    // A list: one completion for all.
    let sges = [Sge { addr: host.addr(), len: 8, lkey: mr.lkey() }];
    let list: Vec<_> = (0..20)
        .map(|i| SendRequest {
            signaled: i == 19,
            fence: i == 3,
            sges: &sges,
            ..SendRequest::new(i, write.op, &[])
        })
        .collect();
    qp.post_sends(&list).unwrap();
    let seen = flags();
    assert_eq!((seen.len(), seen[3], seen[19]), (20, verbs::IBV_SEND_FENCE, verbs::IBV_SEND_SIGNALED));
    assert!(seen.iter().enumerate().all(|(i, flags)| matches!(i, 3 | 19) || *flags == 0));
    let mut got = Vec::new();
    cq.poll(&mut got, 64).unwrap();
    assert_eq!(got.iter().map(|one| one.wr_id).collect::<Vec<_>>(), [19]);
}

#[test]
fn a_poll_that_finds_little_has_made_room_for_little() {
    let device = open();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(256, None).unwrap();
    let qp = pd.create_qp(&cq, &cq, QpLimits::default()).unwrap();
    let polls = || world(|world| std::mem::take(&mut world.polls));
    let mut got = Vec::new();
    assert_eq!((cq.poll(&mut got, 64), polls()), (Ok(0), vec![4]));
    assert_eq!((cq.poll(&mut got, 1), polls()), (Ok(0), vec![1]));
    (0..70).for_each(|id| qp.post_send(&SendRequest::new(id, Operation::Send, &[])).unwrap());
    assert_eq!((cq.poll(&mut got, 64), polls()), (Ok(64), vec![4, 32, 28]));
    assert_eq!((cq.poll(&mut got, 64), polls()), (Ok(6), vec![4, 32]));
    assert_eq!(got.iter().map(|one| one.wr_id).collect::<Vec<_>>(), (0..70).collect::<Vec<_>>());
}

#[test]
fn a_gid_of_another_network_is_doubted_by_name() {
    // A documentation address, assigned to no host; the device refuses to modify a queue pair with
    // it.
    let other = std::net::Ipv4Addr::new(203, 0, 113, 7).to_ipv6_mapped().octets();
    world(|world| (world.gids[0], world.modify) = (other, libc::ENETUNREACH));
    let mut options = Options::default();
    options.gid.index = Some(0);
    let device = Device::open_in(&standin::library(), "fake0", &options).unwrap();
    let peer = std::net::Ipv4Addr::LOCALHOST.into();
    let doubt = device.doubt_gid(peer).expect("no interface has the address");
    assert!(doubt.starts_with("GID 0, 203.0.113.7, is of no interface"), "{doubt}");
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(8, None).unwrap());
    let qp = pd.create_qp(&cq, &cq, QpLimits::default()).unwrap();
    let to_rtr = QpAttr::to_rtr(peer, Qpn::new(5), Psn::new(1), Mtu::Mtu1024);
    let refused = qp.modify(&to_rtr, 0).unwrap_err().to_string();
    assert!(refused.contains("203.0.113.7 to 127.0.0.1") && refused.contains(&doubt), "{refused}");
    assert_eq!(open().doubt_gid(peer), None, "the entry of loopback is the right one");
}

#[test]
fn a_queue_that_goes_leaves_events_of_others_on_its_channel() {
    let device = open();
    let channel = device.create_channel().unwrap();
    let [first, second] = [(); 2].map(|()| device.create_cq(8, Some(&channel)).unwrap());
    let announce = |cq: &hard::Cq| cq.inner.raw.as_ptr().expose_provenance();
    let both = [announce(&first), announce(&second)];
    world(|world| world.announced.extend(both));
    drop(first);
    assert!(channel.take(), "the second one's");
    assert!(!channel.take(), "and the first one's went with it");
    drop(second);
}
