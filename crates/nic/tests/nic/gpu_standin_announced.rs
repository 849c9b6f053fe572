//! Rules 2, 3, 9 and 10 of docs/reference/visibility.md: before a message is announced, the device
//! has called `GpuWindow::complete` for every window that the message was stored through.
//!
//! The stand-in's GPU says here that it gives no write ordering (attribute 118 is 0). `complete`
//! then ends in a load through that window, and a window onto which something was stored after its
//! last load says so: it `is_dirty`. Nothing else here loads through them.
#![allow(clippy::cast_possible_truncation)] // sizes of tests

use crate::common::on_gpu::{GpuMethod, OnGpu};
use crate::common::unreliable::{uc_pair, ud_end};
use crate::common::{End, child, config, pair, patterns, role};
use fake_cuda::client::StandIn;
use nobounce_nic::work::{Mtu, Operation, RecvRequest, SendRequest, Sge};

/// Of one packet, of many, and of a last packet with few bytes.
const SIZES: [usize; 6] = [1, 8, 64, 4096, 4097, 100_000];
const IMM: u32 = 0x1234;

/// Runs `body` in a process of its own: a GPU's attributes are read once.
fn unordered(test: &str, body: impl FnOnce(&'static StandIn)) {
    if role().is_some() {
        StandIn::load().set_attribute(118, 0);
        return body(StandIn::program());
    }
    let output = child(&format!("gpu_standin_announced::{test}"), "unordered").output().unwrap();
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (said(&output.stdout), said(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{err}");
}

/// The message was announced: none of its stores is in flight any more.
#[track_caller]
fn is_announced(memory: &OnGpu, what: &str) {
    let window = memory.mr.gpu_memory().unwrap().window().unwrap();
    assert!(!window.is_dirty(), "{what}: told of before `complete` was called for its window");
}

/// The test of the test: stores show until they are completed.
#[test]
fn stores_show_until_they_are_completed() {
    unordered("stores_show_until_they_are_completed", |gpu| {
        let end = End::open(&config("127.82.20.1"), 4096);
        let memory = OnGpu::new(&end, gpu, GpuMethod::Window);
        let window = memory.mr.gpu_memory().unwrap().window().unwrap();
        window.store_last(0, &[1; 100]).unwrap();
        assert!(window.is_dirty());
        window.complete().unwrap();
        assert!(!window.is_dirty());
    });
}

#[test]
fn every_message_is_completed_before_it_is_told_of() {
    unordered("every_message_is_completed_before_it_is_told_of", |gpu| {
        let (a, b) = pair("127.82.21.1", 1 << 20, Mtu::Mtu4096);
        let (here, there) = (OnGpu::new(&a, gpu, GpuMethod::Window), OnGpu::new(&b, gpu, GpuMethod::Window));
        for (round, size) in SIZES.into_iter().enumerate() {
            a.fill(round as u8);
            b.fill(round as u8 + 100);
            let (host, at) = (a.sge(0, size as u32), round * 8);
            let requests = [
                ("WRITE", Operation::Write(there.remote(at)), false),
                ("WRITE with an immediate", Operation::WriteImmediate(there.remote(at), IMM), true),
                ("SEND", Operation::Send, true),
                ("SEND with an immediate", Operation::SendImmediate(IMM), true),
            ];
            for (what, op, receives) in requests {
                let what = format!("{what} of {size} bytes");
                if receives {
                    b.qps[0].post_recv(&RecvRequest { wr_id: 1, sges: &[there.sge(at, size)] }).unwrap();
                }
                a.qps[0].post_send(&SendRequest::new(1, op, &host)).unwrap();
                // The polling end drives the device: each end polls first once.
                if receives && round % 2 == 0 {
                    b.succeed(1);
                    is_announced(&there, &format!("{what}, to the receiver"));
                }
                a.succeed(1);
                is_announced(&there, &what);
                if receives && round % 2 == 1 {
                    b.succeed(1);
                    is_announced(&there, &format!("{what}, to the receiver"));
                }
                there.holds(at, &patterns(round as u8, 0, size));
            }
            // What comes back to us is placed as what is sent to us.
            let read = Operation::Read(b.remote(0));
            a.qps[0].post_send(&SendRequest::new(1, read, &[here.sge(at, size)])).unwrap();
            a.succeed(1);
            is_announced(&here, &format!("READ of {size} bytes"));
            here.holds(at, &patterns(round as u8 + 100, 0, size));
        }
        for op in [
            Operation::FetchAdd { remote: there.remote(0), add: 1 },
            Operation::CompareSwap { remote: there.remote(8), compare: 0, swap: 1 },
        ] {
            a.qps[0].post_send(&SendRequest::new(1, op, &[here.sge(0, 8)])).unwrap();
            a.succeed(1);
            is_announced(&there, "the word that an atomic changed");
            is_announced(&here, "the answer of an atomic");
        }
    });
}

/// A message may end in other memory than it began in.
#[test]
fn every_window_of_a_list_is_completed() {
    unordered("every_window_of_a_list_is_completed", |gpu| {
        let (a, b) = pair("127.82.22.1", 1 << 20, Mtu::Mtu1024);
        let windows = [(); 3].map(|()| OnGpu::new(&b, gpu, GpuMethod::Window));
        let local = [(); 2].map(|()| OnGpu::new(&a, gpu, GpuMethod::Window));
        a.fill(3);
        b.fill(4);
        for each in [16, 700, 5000] {
            let list: Vec<Sge> = windows.iter().map(|memory| memory.sge(0, each)).collect();
            let [host] = b.sge(0, 64);
            for sges in [list.clone(), [list, vec![host]].concat()] {
                b.qps[0].post_recv(&RecvRequest { wr_id: 1, sges: &sges }).unwrap();
                let len = sges.iter().map(|sge| sge.len).sum();
                a.post(Operation::Send, 0, len);
                a.succeed(1);
                b.succeed(1);
                for (at, memory) in windows.iter().enumerate() {
                    is_announced(memory, &format!("part {at} of a SEND to {} pieces", sges.len()));
                }
            }
            let sges: Vec<Sge> = local.iter().map(|memory| memory.sge(0, each)).collect();
            a.qps[0].post_send(&SendRequest::new(1, Operation::Read(b.remote(0)), &sges)).unwrap();
            a.succeed(1);
            local.iter().for_each(|memory| is_announced(memory, "part of a READ"));
        }
    });
}

/// Messages behind a copy of the copy engine are stored after it, and announced after that.
#[test]
fn messages_that_had_to_wait_are_completed() {
    unordered("messages_that_had_to_wait_are_completed", |gpu| {
        let (a, b) = pair("127.82.23.1", 1 << 20, Mtu::Mtu1024);
        let (staged, window) =
            (OnGpu::new(&b, gpu, GpuMethod::Staged), OnGpu::new(&b, gpu, GpuMethod::Window));
        a.fill(5);
        gpu.set_copy_delay_us(20_000);
        for size in [64, 5000] {
            let (host, [end]) = (a.sge(0, size as u32), b.sge(0, 64));
            b.qps[0].post_recv(&RecvRequest { wr_id: 1, sges: &[window.sge(0, size)] }).unwrap();
            b.qps[0].post_recv(&RecvRequest { wr_id: 2, sges: &[window.sge(0, size - 64), end] }).unwrap();
            let last: [(&str, Operation); 4] = [
                ("WRITE", Operation::Write(window.remote(0))),
                ("SEND", Operation::Send),
                ("SEND that ends in host memory", Operation::Send),
                ("fetch-and-add", Operation::FetchAdd { remote: window.remote(0), add: 1 }),
            ];
            for (what, op) in last {
                let sges = if matches!(op, Operation::FetchAdd { .. }) { a.sge(0, 8) } else { host };
                let write = Operation::Write(staged.remote(0));
                a.qps[0]
                    .post_sends(&[SendRequest::new(1, write, &host), SendRequest::new(2, op, &sges)])
                    .unwrap();
                a.succeed(2);
                is_announced(&window, &format!("{what} of {size} bytes behind a copy"));
                if matches!(op, Operation::Send) {
                    b.succeed(1);
                }
            }
        }
        gpu.set_copy_delay_us(0);
    });
}

#[test]
fn messages_of_the_unreliable_services_are_completed() {
    unordered("messages_of_the_unreliable_services_are_completed", |gpu| {
        let (a, b) = uc_pair(&config("127.82.24.1"), &config("127.82.24.1"), 1 << 20, Mtu::Mtu4096);
        let there = OnGpu::new(&b, gpu, GpuMethod::Window);
        a.fill(6);
        for size in [8, 20_000] {
            for op in [
                Operation::Send,
                Operation::SendImmediate(IMM),
                Operation::WriteImmediate(there.remote(0), IMM),
            ] {
                b.last_qp().post_recv(&RecvRequest { wr_id: 1, sges: &[there.sge(0, size)] }).unwrap();
                a.last_qp().post_send(&SendRequest::new(1, op, &a.sge(0, size as u32))).unwrap();
                b.succeed(1);
                is_announced(&there, &format!("UC, {op:?}, {size} bytes"));
                a.succeed(1);
            }
        }
        let (a, b) = (ud_end("127.82.25.1", 4096), ud_end("127.82.25.1", 4096));
        let there = OnGpu::new(&b, gpu, GpuMethod::Window);
        for size in [0, 1, 1000] {
            b.last_qp().post_recv(&RecvRequest { wr_id: 1, sges: &[there.sge(0, 40 + size)] }).unwrap();
            a.send_to(&b, Operation::SendImmediate(IMM), 0, size as u32);
            b.succeed(1);
            is_announced(&there, &format!("a datagram of {size} bytes"));
            a.succeed(1);
        }
    });
}
