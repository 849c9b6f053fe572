//! Throw-away.
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;
use nobounce_memory::HostBuffer;
use nobounce_nic::soft::*;
fn main() {
    let (mut a, mut b) = UnixStream::pair().unwrap();
    let child = unsafe { libc::fork() };
    let server = child == 0;
    let s = if server { &mut b } else { &mut a };
    let device = Device::open(&Config::from_env().unwrap()).unwrap();
    let pd = device.alloc_pd();
    let len = 8 << 20;
    let buf = HostBuffer::new(len).unwrap();
    let mr = unsafe { pd.register(buf.as_mut_ptr(), len, Access::all()) }.unwrap();
    let cq = device.create_cq(4096, None);
    let qp = pd.create_qp(&cq, &cq, QpLimits::default()).unwrap();
    qp.modify(&QpAttr::to_init(Access::all())).unwrap();
    let mine = [qp.qpn().get() as u64, mr.addr(), mr.rkey() as u64];
    for v in mine { s.write_all(&v.to_ne_bytes()).unwrap(); }
    let mut t = [0u64; 3];
    for v in &mut t { let mut x = [0; 8]; s.read_exact(&mut x).unwrap(); *v = u64::from_ne_bytes(x); }
    qp.modify(&QpAttr::to_rtr(device.local(), Qpn::new(t[0] as u32), Psn::new(0), Mtu::Mtu4096)).unwrap();
    qp.modify(&QpAttr::to_rts(Psn::new(0))).unwrap();
    let remote = Remote { addr: t[1], rkey: t[2] as u32 };
    for _ in 0..100 { qp.post_recv(&RecvRequest { wr_id: 0, sges: &[] }).unwrap(); }
    let sync = |s: &mut UnixStream| { s.write_all(&[1]).unwrap(); s.read_exact(&mut [0]).unwrap(); };
    sync(s);
    let mut out = Vec::new();
    // latency write imm
    let n: u32 = std::env::var("N").map_or(100_000, |v| v.parse().unwrap());
    let sge = [Sge { addr: mr.addr(), len: 8, lkey: mr.lkey() }];
    let mut post = 0;
    let (hit, miss, misses) = (std::cell::Cell::new(0u64), std::cell::Cell::new(0u64), std::cell::Cell::new(0u64));
    let wait_recv = |out: &mut Vec<WorkCompletion>| loop {
        out.clear();
        let t = unsafe { std::arch::x86_64::_rdtsc() };
        cq.poll(out, 16).unwrap();
        let d = unsafe { std::arch::x86_64::_rdtsc() } - t;
        if !out.is_empty() { hit.set(hit.get() + d) } else { miss.set(miss.get() + d); misses.set(misses.get() + 1) }
        if out.iter().any(|c| c.kind == WorkKind::ReceiveWriteImmediate) { qp.post_recv(&RecvRequest { wr_id: 0, sges: &[] }).unwrap(); return; }
    };
    let start = Instant::now();
    for i in 0..n {
        if server { wait_recv(&mut out); }
        let mut r = SendRequest::new(1, Operation::WriteImmediate(remote, i), &sge);
        r.signaled = i % 64 == 63;
        let t = unsafe { std::arch::x86_64::_rdtsc() };
        qp.post_send(&r).unwrap();
        post += unsafe { std::arch::x86_64::_rdtsc() } - t;
        if !server { wait_recv(&mut out); }
    }
    println!("post {} hit {} miss {} misses {} ns", post / n as u64 * 10 / 21, hit.get() / n as u64 * 10 / 21, miss.get() / (misses.get()+1) * 10 / 21, misses.get() as f64 / n as f64);
    if !server { println!("write 8 B half round trip {:.2} us", start.elapsed().as_secs_f64() / n as f64 / 2.0 * 1e6); }
    sync(s);
    // drain
    while cq.poll(&mut out, 1000).unwrap() > 0 {}
    let gb: usize = std::env::var("GB").map_or(2, |v| v.parse().unwrap());
    for (name, size, read) in [("write", 1usize << 20, false)/*X*/, ("write", 65536, false), ("read", 1 << 20, true)] {
        if !server {
            let iters = (gb << 30) / size;
            let sge = [Sge { addr: mr.addr(), len: size as u32, lkey: mr.lkey() }];
            let start = Instant::now();
            let (mut posted, mut done) = (0, 0);
            let c0 = device.counters(); let l0 = device.link_counters();
            while done < iters {
                while posted < iters && posted - done < 16 {
                    let op = if read { Operation::Read(remote) } else { Operation::Write(remote) };
                    qp.post_send(&SendRequest::new(1, op, &sge)).unwrap();
                    posted += 1;
                }
                out.clear();
                done += cq.poll(&mut out, 16).unwrap();
            }
            let c = device.counters();
            println!("{name} {size} B: {:.2} GB/s, acks {} sent {} calls {} rxcalls {}, {:?}", (size * iters) as f64 / start.elapsed().as_secs_f64() / 1e9, c.rcvd_pkts - c0.rcvd_pkts, c.sent_pkts - c0.sent_pkts, device.link_counters()[2].1 - l0[2].1, device.link_counters()[12].1 - l0[12].1, c.qps);
        }
        if server { s.set_nonblocking(true).unwrap(); while s.read(&mut [0]).is_err() { for _ in 0..100 { cq.poll(&mut out, 16).unwrap(); } } } else { s.write_all(&[0]).unwrap(); }
    }
    if server { eprintln!("server {:?}", device.counters()); eprintln!("{:?}", device.link_counters());} else { println!("{:?}", device.link_counters()); unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }; }
}
