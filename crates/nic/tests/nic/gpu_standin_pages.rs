//! Short messages of GPU memory that wait behind each other: the copy engine fetches several at a
//! time.
#![allow(clippy::cast_possible_truncation)] // sizes of tests

use crate::common::on_gpu::{GpuMethod, LEN, OnGpu};
use crate::common::{End, connect, patterns, unguarded};
use fake_cuda::client::StandIn;
use nobounce_nic::soft::{Config, LinkChoice};
use nobounce_nic::work::{Mtu, Operation, QpLimits, Remote, SendRequest};

const COUNT: usize = 96;

fn ends(addr: &str, link: LinkChoice, mtu: Mtu) -> (End, End) {
    let mut ends = [1, 2]
        .map(|n| {
            let mut end = End::open(&Config { link, ..unguarded(&format!("{addr}.{n}")) }, 4096);
            end.add_qp(QpLimits { send_depth: COUNT, ..QpLimits::default() });
            end
        })
        .into_iter();
    let (a, b) = (ends.next().unwrap(), ends.next().unwrap());
    connect(&a, 0, &b, 0, mtu);
    (a, b)
}

/// The place of a page at the peer: scattered, none twice.
fn place(page: usize, stride: usize) -> usize {
    page * 37 % COUNT * stride
}

#[test]
fn pages_that_wait_are_fetched_together() {
    let gpu = StandIn::program();
    // One packet and several; whole packets, and less.
    for (n, (len, mtu)) in
        [(4096, Mtu::Mtu4096), (5000, Mtu::Mtu4096), (4096, Mtu::Mtu1024), (20_000, Mtu::Mtu4096)]
            .into_iter()
            .enumerate()
    {
        let (udp, auto) = (LinkChoice::Udp, LinkChoice::Auto);
        let kinds = [
            (udp, GpuMethod::Window),
            (auto, GpuMethod::Window),
            (udp, GpuMethod::NoWindow),
            (auto, GpuMethod::NoWindow),
        ];
        for (m, (link, way)) in kinds.into_iter().enumerate() {
            let (a, b) = ends(&format!("127.82.{}", 4 * n + m), link, mtu);
            let (at_a, at_b) = (OnGpu::new(&a, gpu, way), OnGpu::new(&b, gpu, way));
            let stride = LEN / COUNT / 64 * 64;
            at_a.fill(3);
            at_b.fill(0xee);
            let calls = gpu.calls(c"cuMemcpyBatchAsync");
            let post = |operation: fn(Remote) -> Operation| {
                gpu.hold_copies(1);
                for page in 0..COUNT {
                    let there = at_b.remote(place(page, stride));
                    let here = [at_a.sge(page * stride, len)];
                    let request = SendRequest::new(page as u64, operation(there), &here);
                    a.qps[0].post_send(&request).unwrap();
                }
                gpu.hold_copies(0);
                a.succeed(COUNT);
            };
            post(Operation::Write);
            for page in 0..COUNT {
                at_b.holds(place(page, stride), &patterns(3, page * stride, len));
                at_b.holds(place(page, stride) + len, &patterns(0xee, place(page, stride) + len, 64));
            }
            let written = gpu.calls(c"cuMemcpyBatchAsync") - calls;
            // What has a window may be loaded, while copies are late or no other page waits.
            let loads = way == GpuMethod::Window;
            assert!(
                loads || (1..=COUNT as u64 / 4).contains(&written),
                "{written} calls for {COUNT} pages of {len}"
            );
            at_a.fill(0xdd);
            post(Operation::Read);
            for page in 0..COUNT {
                at_a.holds(page * stride, &patterns(3, page * stride, len));
                at_a.holds(page * stride + len, &patterns(0xdd, page * stride + len, 64));
            }
            let read = gpu.calls(c"cuMemcpyBatchAsync") - calls - written;
            assert!(loads || read >= 1, "READs of {len} were fetched one by one");
            assert_eq!((a.counter("icrc_errors"), b.counter("icrc_errors")), (0, 0));
        }
    }
}
