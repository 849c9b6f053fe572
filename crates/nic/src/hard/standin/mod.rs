//! A stand-in for libibverbs: one device, `fake0`, that records every call with its arguments and
//! executes requests at once. It fails or misreports as the test configures. GPU memory is that of
//! the stand-in driver.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

use fake_cuda::client::StandIn;
use nobounce_verbs as verbs;

use super::library::{Library, VerbsApi};

mod gpu_tests;
mod old_tests;
mod tests;
mod traffic;

pub(crate) use traffic::arrive;
use traffic::{poll_cq, post_recv, post_send};

/// A call that a test looks at.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Call {
    Named(&'static str),
    /// One of CUDA's driver, by its name there.
    Cuda(String),
    RegMr {
        addr: u64,
        len: usize,
        access: u32,
        relaxed: bool,
    },
    RegDmaBuf {
        offset: u64,
        len: usize,
        iova: u64,
        fd_len: u64,
        access: u32,
    },
    Modify {
        state: u32,
        mask: u32,
        attr: PathAttr,
    },
}

/// The path attributes of a transition.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PathAttr {
    pub(crate) dlid: u16,
    pub(crate) is_global: u8,
    pub(crate) dgid: [u8; 16],
    pub(crate) sgid_index: u8,
    pub(crate) mtu: u32,
    pub(crate) port: u8,
    pub(crate) retries: u8,
}

/// What a driver does that registers GPU memory by dma-buf and does not mean it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lie {
    /// Bytes for it go nowhere.
    Swallows,
    /// It takes the memory for what begins with the descriptor, wherever the range in it begins.
    ForgetsOffset,
}

/// A registration.
#[derive(Clone, Copy)]
struct Registered {
    is_dmabuf: bool,
    offset: u64,
}

/// How the device behaves.
pub(crate) struct World {
    pub(crate) calls: Vec<Call>,
    /// Error numbers; 0 where it works.
    pub(crate) open: c_int,
    pub(crate) dmabuf: c_int,
    pub(crate) host: c_int,
    pub(crate) peermem: c_int,
    pub(crate) modify: c_int,
    pub(crate) most_inline: u32,
    /// Of registrations that ask for relaxed ordering.
    pub(crate) relaxed: c_int,
    pub(crate) lie: Option<Lie>,
    /// No loopback: nothing sent is answered.
    pub(crate) is_deaf: bool,
    /// What it says of the length of a READ, where that is not the truth.
    pub(crate) says_of_reads: Option<u32>,
    pub(crate) devices: c_int,
    pub(crate) port: verbs::PortAttr,
    pub(crate) gids: Vec<[u8; 16]>,
    pub(crate) events: VecDeque<(u32, usize)>,
    /// CQs with a completion event on their channel that was not taken yet.
    pub(crate) announced: VecDeque<usize>,
    /// How many completions each poll asked for.
    pub(crate) polls: Vec<c_int>,
    /// The flags of requests that were posted.
    pub(crate) flags: Vec<u32>,
    pub(crate) is_gpu: fn(u64) -> bool,
    regions: HashMap<u32, Registered>,
    completions: VecDeque<verbs::Wc>,
    receives: VecDeque<(u64, Vec<verbs::Sge>)>,
    next: u32,
}

thread_local! {
    static WORLD: RefCell<World> = RefCell::new(World::new());
}

impl World {
    fn new() -> Self {
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut port: verbs::PortAttr = unsafe { std::mem::zeroed() };
        port.state = verbs::IBV_PORT_ACTIVE;
        port.active_mtu = verbs::IBV_MTU_2048;
        port.link_layer = verbs::IBV_LINK_LAYER_ETHERNET;
        port.gid_tbl_len = 2;
        let loopback = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
        Self {
            calls: Vec::new(),
            open: 0,
            dmabuf: 0,
            host: 0,
            peermem: 0,
            modify: 0,
            most_inline: 512,
            relaxed: 0,
            lie: None,
            is_deaf: false,
            says_of_reads: None,
            devices: 1,
            port,
            gids: vec![[0; 16], loopback],
            events: VecDeque::new(),
            announced: VecDeque::new(),
            polls: Vec::new(),
            flags: Vec::new(),
            is_gpu: |_| false,
            regions: HashMap::new(),
            completions: VecDeque::new(),
            receives: VecDeque::new(),
            next: 100,
        }
    }
}

/// Changes the world, or looks at it.
pub(crate) fn world<T>(change: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with(|world| change(&mut world.borrow_mut()))
}

/// The calls so far, by name only.
pub(crate) fn names() -> Vec<&'static str> {
    let name = |call: &Call| if let Call::Named(name) = call { Some(*name) } else { None };
    world(|world| world.calls.iter().filter_map(name).collect())
}

/// From now on CUDA's calls of this thread are among the recorded ones.
pub(crate) fn record_cuda() {
    extern "C" fn note(name: *const c_char) {
        // SAFETY: the stand-in of CUDA hands in the name of the function, which ends in zero.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        // Where the world is in use it is ourselves who call, and not the code under test.
        WORLD.with(|world| {
            if let Ok(mut world) = world.try_borrow_mut() {
                world.calls.push(Call::Cuda(name));
            }
        });
    }
    StandIn::load().watch_calls(note);
}

/// The library as of today.
pub(crate) fn library() -> Arc<Library> {
    Library::of_table(table(), "/nowhere".into())
}

/// One of before rdma-core 28, which has nothing that was added since. `kernel` is where the
/// kernel's files of RDMA devices are.
pub(crate) fn old_library(kernel: PathBuf) -> Arc<Library> {
    let old = VerbsApi { reg_mr_iova2: None, reg_dmabuf_mr: None, query_gid_ex: None, ..table() };
    Library::of_table(old, kernel)
}

fn table() -> VerbsApi {
    VerbsApi {
        get_device_list,
        free_device_list,
        get_device_name,
        open_device,
        close_device,
        get_async_event,
        ack_async_event,
        query_device,
        query_port,
        query_gid,
        alloc_pd,
        dealloc_pd,
        reg_mr,
        dereg_mr,
        create_comp_channel,
        destroy_comp_channel,
        get_cq_event,
        ack_cq_events,
        create_cq,
        destroy_cq,
        create_qp,
        modify_qp,
        destroy_qp,
        reg_mr_iova2: Some(reg_mr_iova2),
        reg_dmabuf_mr: Some(reg_dmabuf_mr),
        query_gid_ex: Some(query_gid_ex),
    }
}

fn note(name: &'static str) {
    world(|world| world.calls.push(Call::Named(name)));
}

fn fail(code: c_int) {
    // SAFETY: this thread's own errno.
    unsafe { *libc::__errno_location() = code };
}

/// An object of zeroes; the stand-in lives as long as the test.
fn made<T>() -> *mut T {
    // SAFETY: structures of C, for which zeroes are valid.
    Box::leak(Box::new(unsafe { std::mem::zeroed::<T>() }))
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut verbs::Device {
    let devices = world(|world| world.devices);
    // SAFETY: the caller's place.
    unsafe { *count = devices };
    let list = Box::leak(Box::new([made::<verbs::Device>(), ptr::null_mut()]));
    list.as_mut_ptr()
}

unsafe extern "C" fn free_device_list(_: *mut *mut verbs::Device) {}

unsafe extern "C" fn get_device_name(_: *mut verbs::Device) -> *const c_char {
    c"fake0".as_ptr()
}

unsafe extern "C" fn open_device(_: *mut verbs::Device) -> *mut verbs::Context {
    let code = world(|world| world.open);
    if code != 0 {
        fail(code);
        return ptr::null_mut();
    }
    note("open");
    let context = made::<verbs::Context>();
    // SAFETY: just made.
    unsafe {
        (*context).async_fd = -1;
        (*context).ops.post_send = Some(post_send);
        (*context).ops.post_recv = Some(post_recv);
        (*context).ops.poll_cq = Some(poll_cq);
        (*context).ops.req_notify_cq = Some(req_notify);
    }
    context
}

unsafe extern "C" fn close_device(_: *mut verbs::Context) -> c_int {
    note("close");
    0
}

unsafe extern "C" fn get_async_event(_: *mut verbs::Context, event: *mut verbs::AsyncEvent) -> c_int {
    let Some((kind, element)) = world(|world| world.events.pop_front()) else { return -1 };
    // SAFETY: the caller's place.
    unsafe { *event = verbs::AsyncEvent { element: ptr::without_provenance_mut(element), event_type: kind } };
    0
}

unsafe extern "C" fn ack_async_event(_: *mut verbs::AsyncEvent) {}

unsafe extern "C" fn query_device(_: *mut verbs::Context, attr: *mut verbs::DeviceAttr) -> c_int {
    // SAFETY: the caller's place.
    let attr = unsafe { &mut *attr };
    (attr.max_cqe, attr.max_qp_wr, attr.max_sge) = (4096, 1024, 16);
    (attr.max_qp_rd_atom, attr.max_qp_init_rd_atom, attr.phys_port_cnt) = (16, 8, 1);
    attr.atomic_cap = verbs::IBV_ATOMIC_HCA;
    0
}

unsafe extern "C" fn query_port(_: *mut verbs::Context, _: u8, attr: *mut verbs::PortAttr) -> c_int {
    // SAFETY: the caller's place.
    unsafe { *attr = world(|world| world.port) };
    0
}

unsafe extern "C" fn query_gid(_: *mut verbs::Context, _: u8, index: c_int, gid: *mut verbs::Gid) -> c_int {
    let at = usize::try_from(index).unwrap();
    let Some(raw) = world(|world| world.gids.get(at).copied()) else { return -1 };
    // SAFETY: the caller's place.
    unsafe { *gid = verbs::Gid { raw } };
    0
}

unsafe extern "C" fn query_gid_ex(
    _: *mut verbs::Context,
    _: u32,
    index: u32,
    entry: *mut verbs::GidEntry,
    _: u32,
    size: usize,
) -> c_int {
    assert_eq!(size, size_of::<verbs::GidEntry>());
    let found = world(|world| world.gids.get(index as usize).copied()).filter(|gid| *gid != [0; 16]);
    let Some(raw) = found else { return libc::ENODATA };
    // SAFETY: the caller's place.
    unsafe { ((*entry).gid, (*entry).gid_type) = (verbs::Gid { raw }, verbs::IBV_GID_TYPE_ROCE_V2) };
    0
}

unsafe extern "C" fn alloc_pd(_: *mut verbs::Context) -> *mut verbs::Pd {
    note("alloc_pd");
    made()
}

unsafe extern "C" fn dealloc_pd(_: *mut verbs::Pd) -> c_int {
    note("dealloc_pd");
    0
}

fn region(known: Registered) -> *mut verbs::Mr {
    let mr = made::<verbs::Mr>();
    world(|world| {
        world.next += 1;
        world.regions.insert(world.next, known);
        // SAFETY: just made.
        unsafe { ((*mr).lkey, (*mr).rkey) = (world.next, world.next) };
    });
    mr
}

fn register(addr: *mut c_void, len: usize, access: u32, relaxed: bool) -> *mut verbs::Mr {
    let addr = addr.addr() as u64;
    let code = world(|world| {
        world.calls.push(Call::RegMr { addr, len, access, relaxed });
        let refusal = if (world.is_gpu)(addr) { world.peermem } else { world.host };
        if relaxed && refusal == 0 { world.relaxed } else { refusal }
    });
    if code != 0 {
        fail(code);
        return ptr::null_mut();
    }
    region(Registered { is_dmabuf: false, offset: 0 })
}

unsafe extern "C" fn reg_mr(
    _: *mut verbs::Pd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut verbs::Mr {
    register(addr, len, access.cast_unsigned(), false)
}

unsafe extern "C" fn reg_mr_iova2(
    _: *mut verbs::Pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: u32,
) -> *mut verbs::Mr {
    assert_eq!(iova, addr.addr() as u64, "addresses of requests are those of the memory");
    register(addr, len, access, true)
}

unsafe extern "C" fn reg_dmabuf_mr(
    _: *mut verbs::Pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut verbs::Mr {
    let access = access.cast_unsigned();
    // SAFETY: plain numbers, for which zeroes are valid.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a number and a valid place.
    assert_eq!(unsafe { libc::fstat(fd, &raw mut status) }, 0, "the descriptor is open");
    let fd_len = u64::try_from(status.st_size).unwrap();
    let code = world(|world| {
        world.calls.push(Call::RegDmaBuf { offset, len, iova, fd_len, access });
        let asks = access & verbs::IBV_ACCESS_RELAXED_ORDERING != 0;
        if asks && world.dmabuf == 0 { world.relaxed } else { world.dmabuf }
    });
    if code != 0 {
        fail(code);
        return ptr::null_mut();
    }
    region(Registered { is_dmabuf: true, offset })
}

unsafe extern "C" fn dereg_mr(mr: *mut verbs::Mr) -> c_int {
    // SAFETY: one that was made here.
    let known = world(|world| world.regions.remove(&unsafe { (*mr).lkey }));
    assert!(known.is_some(), "a region is deregistered once");
    note("dereg_mr");
    0
}

unsafe extern "C" fn create_comp_channel(_: *mut verbs::Context) -> *mut verbs::CompChannel {
    note("create_channel");
    let channel = made::<verbs::CompChannel>();
    // SAFETY: just made.
    unsafe { (*channel).fd = -1 };
    channel
}

unsafe extern "C" fn destroy_comp_channel(_: *mut verbs::CompChannel) -> c_int {
    note("destroy_channel");
    0
}

unsafe extern "C" fn get_cq_event(
    _: *mut verbs::CompChannel,
    cq: *mut *mut verbs::Cq,
    _: *mut *mut c_void,
) -> c_int {
    let Some(at) = world(|world| world.announced.pop_front()) else { return -1 };
    // SAFETY: the caller's place.
    unsafe { *cq = ptr::with_exposed_provenance_mut(at) };
    0
}

unsafe extern "C" fn ack_cq_events(_: *mut verbs::Cq, _: u32) {}

unsafe extern "C" fn create_cq(
    context: *mut verbs::Context,
    depth: c_int,
    _: *mut c_void,
    _: *mut verbs::CompChannel,
    _: c_int,
) -> *mut verbs::Cq {
    note("create_cq");
    let cq = made::<verbs::Cq>();
    // SAFETY: just made.
    unsafe { ((*cq).context, (*cq).cqe) = (context, depth) };
    cq
}

unsafe extern "C" fn destroy_cq(cq: *mut verbs::Cq) -> c_int {
    // What was announced of it and not taken goes with it.
    world(|world| world.announced.retain(|at| *at != cq.addr()));
    note("destroy_cq");
    0
}

unsafe extern "C" fn create_qp(_: *mut verbs::Pd, init: *mut verbs::QpInitAttr) -> *mut verbs::Qp {
    // SAFETY: the caller's structure.
    let init = unsafe { &*init };
    if init.cap.max_inline_data > world(|world| world.most_inline) {
        fail(libc::EINVAL);
        return ptr::null_mut();
    }
    note("create_qp");
    let qp = made::<verbs::Qp>();
    // SAFETY: just made, on a queue that was made here.
    unsafe { ((*qp).context, (*qp).qp_num) = ((*init.send_cq).context, 77) };
    qp
}

unsafe extern "C" fn modify_qp(_: *mut verbs::Qp, attr: *mut verbs::QpAttr, mask: c_int) -> c_int {
    // SAFETY: the caller's structure.
    let attr = unsafe { &*attr };
    let route = PathAttr {
        dlid: attr.ah_attr.dlid,
        is_global: attr.ah_attr.is_global,
        // SAFETY: every bit pattern is a valid array of bytes.
        dgid: unsafe { attr.ah_attr.grh.dgid.raw },
        sgid_index: attr.ah_attr.grh.sgid_index,
        mtu: attr.path_mtu,
        port: attr.port_num,
        retries: attr.retry_cnt,
    };
    world(|world| {
        world.calls.push(Call::Modify { state: attr.qp_state, mask: mask.cast_unsigned(), attr: route });
        world.modify
    })
}

unsafe extern "C" fn destroy_qp(_: *mut verbs::Qp) -> c_int {
    note("destroy_qp");
    0
}

unsafe extern "C" fn req_notify(_: *mut verbs::Cq, _: c_int) -> c_int {
    0
}
