//! The two processes: one posts and measures, the other offers memory.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nobounce::ConnectOptions;
use nobounce_transfer::{Agent, AgentOptions, Notify, Pages, Peer, Piece, Remote, Transfer, View};

use super::figures::{KvLinkFigures, List, Requests};
use super::workload::{Pool, shuffled};
use crate::bench::numbers::float;
use crate::bench::ranks::{MEMORY, memory, open};
use crate::bench::stats::{Percentiles, median};

const SOON: Duration = Duration::from_secs(60);
/// Page lists: bytes of a page, and pages.
const LISTS: [(u64, u64); 4] = [(4 << 10, 4096), (16 << 10, 4096), (64 << 10, 1024), (256 << 10, 256)];
/// Tokens of a page, of servers that are in use.
const PAGE_TOKENS: [u64; 2] = [16, 64];
const AT_ONCE: [u64; 4] = [1, 4, 16, 64];
/// Time for each measurement.
const AIM: Duration = Duration::from_millis(400);

/// What would be measured.
pub(super) fn cases() -> String {
    let mut text =
        String::from("two processes on this machine, over shared memory and UDP; every byte verified\n");
    for (bytes, pages) in LISTS {
        text += &format!(
            "lists: {pages} pages of {} KiB, random block tables; the same bytes in one piece\n",
            bytes >> 10
        );
    }
    for tokens in PAGE_TOKENS {
        text += &format!("requests: {AT_ONCE:?} at once, layer by layer, pages of {tokens} tokens\n");
    }
    text
}

/// Rank 1: offers its memory until rank 0 has closed.
pub(super) fn serve(meet: SocketAddr, gpu: Option<i32>) -> anyhow::Result<()> {
    let device = open(gpu)?;
    let agent = Agent::listening(&device, "decode", meet, AgentOptions::default())?;
    agent.export("kv", &memory(&device, gpu)?)?;
    let mut peers = 0;
    // A probe of the first bytes, then the measurement.
    while peers < 2 {
        let peer = agent.accept(SOON)?;
        while peer.gone().is_none() {
            agent.notification(Duration::from_millis(20));
        }
        peers += 1;
    }
    Ok(())
}

/// Rank 0.
pub(super) fn measure(meet: SocketAddr, gpu: Option<i32>, link: &str) -> anyhow::Result<KvLinkFigures> {
    let device = open(gpu)?;
    let agent = Agent::new(&device, "prefill", AgentOptions::default())?;
    let (local, back) = (memory(&device, gpu)?, memory(&device, gpu)?);
    let connect_ms = time_to_first_byte(&agent, meet, &local)?;
    let peer = agent.connect(meet, SOON)?;
    let remote = peer.region("kv", SOON)?;
    let bench = KvBench { peer, remote, local, back };
    let lists =
        LISTS.iter().map(|(bytes, pages)| bench.list(*bytes, *pages)).collect::<anyhow::Result<_>>()?;
    let mut requests = Vec::new();
    for tokens in PAGE_TOKENS {
        let pool = Pool::new(tokens, MEMORY);
        for at_once in AT_ONCE {
            requests.push(bench.requests(&pool, at_once)?);
        }
    }
    let paths = bench.local.region().paths().to_string();
    Ok(KvLinkFigures { link: link.to_owned(), paths, connect_ms, lists, requests })
}

fn time_to_first_byte(agent: &Agent, meet: SocketAddr, local: &View) -> anyhow::Result<f64> {
    let deadline = Instant::now() + SOON;
    loop {
        let start = Instant::now();
        let peer = match agent.connect(meet, ConnectOptions::default().timeout) {
            Ok(peer) => peer,
            // The other process is not there yet.
            Err(_) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let remote = peer.region("kv", SOON)?;
        let first = [Piece { local: 0, remote: 0, len: 1 }];
        peer.write_list(local, &remote, &first, Notify::Nothing)?.wait(SOON)?;
        let took = start.elapsed();
        peer.close();
        return Ok(took.as_secs_f64() * 1e3);
    }
}

struct KvBench {
    peer: Peer,
    remote: Remote,
    local: View,
    /// Where everything is read back to.
    back: View,
}

impl KvBench {
    fn list(&self, bytes: u64, pages: u64) -> anyhow::Result<List> {
        let (from, to) = (shuffled(MEMORY / bytes, bytes), shuffled(MEMORY / bytes, !bytes));
        let count = usize::try_from(pages.min(MEMORY / bytes))?;
        let pages = Pages::whole(&from[..count], &to[..count], bytes);
        let total = bytes * count as u64;
        let whole = [Piece { local: 0, remote: 0, len: total }];
        let (write_gbytes_per_s, submit_us) =
            speed(total, || self.peer.write_pages(&self.local, &self.remote, &pages, Notify::Nothing))?;
        self.verify(&pages)?;
        let (read_gbytes_per_s, _) =
            speed(total, || self.peer.read_pages(&self.local, &self.remote, &pages, Notify::Nothing))?;
        let (contiguous_write_gbytes_per_s, _) =
            speed(total, || self.peer.write_list(&self.local, &self.remote, &whole, Notify::Nothing))?;
        let (contiguous_read_gbytes_per_s, _) =
            speed(total, || self.peer.read_list(&self.local, &self.remote, &whole, Notify::Nothing))?;
        Ok(List {
            page_bytes: bytes,
            pages: count as u64,
            write_gbytes_per_s,
            read_gbytes_per_s,
            contiguous_write_gbytes_per_s,
            contiguous_read_gbytes_per_s,
            submit_us,
        })
    }

    /// Writes new bytes, reads them back and compares each page.
    fn verify(&self, pages: &Pages<'_>) -> anyhow::Result<()> {
        let len = usize::try_from(MEMORY)?;
        let word = |at: u64| (at ^ pages.len).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        let sent: Vec<u8> = (0..MEMORY / 8).flat_map(|at| word(at).to_le_bytes()).collect();
        self.local.region().write_at(0, &sent)?;
        self.peer.write_pages(&self.local, &self.remote, pages, Notify::Nothing)?.wait(SOON)?;
        let whole = [Piece { local: 0, remote: 0, len: MEMORY }];
        self.peer.read_list(&self.back, &self.remote, &whole, Notify::Nothing)?.wait(SOON)?;
        let mut found = vec![0; len];
        self.back.region().read_at(0, &mut found)?;
        for (local, remote) in pages.local.iter().zip(pages.remote) {
            let page = |number: &u64| -> anyhow::Result<_> {
                let start = usize::try_from(number * pages.len)?;
                Ok(start..start + usize::try_from(pages.len)?)
            };
            ensure!(
                sent[page(local)?] == found[page(remote)?],
                "page {local} did not arrive at page {remote}"
            );
        }
        Ok(())
    }

    fn requests(&self, pool: &Pool, at_once: u64) -> anyhow::Result<Requests> {
        let submit = |request: u64| {
            let tag = request.to_le_bytes();
            pool.with_pages(request, |pages| {
                self.peer.write_pages(&self.local, &self.remote, pages, Notify::Tag(&tag))
            })
        };
        let (mut times, mut bytes, start) = (Vec::new(), 0, Instant::now());
        let mut round = 0;
        while round < 2 || start.elapsed() < AIM {
            let posted: Vec<_> = (0..at_once)
                .map(|request| Ok((Instant::now(), submit(round * at_once + request)?)))
                .collect::<anyhow::Result<_>>()?;
            for (began, transfer) in posted {
                bytes += transfer.wait(SOON)?.bytes;
                times.push(began.elapsed().as_secs_f64() * 1e3);
            }
            round += 1;
        }
        let gbytes_per_s = float(bytes) / start.elapsed().as_secs_f64() / 1e9;
        let times = Percentiles::of(&times).context("no request was measured")?;
        Ok(Requests {
            at_once,
            page_tokens: pool.page_tokens,
            page_bytes: pool.page_bytes(),
            request_bytes: pool.request_bytes(),
            gbytes_per_s,
            p50_ms: times.p50,
            p99_ms: times.p99,
        })
    }
}

/// GB/s of a transfer, and the microseconds of its posting call: medians of repetitions.
fn speed<E>(bytes: u64, submit: impl Fn() -> Result<Transfer, E>) -> anyhow::Result<(f64, f64)>
where
    anyhow::Error: From<E>,
{
    let (mut speeds, mut calls, start) = (Vec::new(), Vec::new(), Instant::now());
    while speeds.len() < 5 || start.elapsed() < AIM {
        let began = Instant::now();
        let transfer = submit()?;
        calls.push(began.elapsed().as_secs_f64() * 1e6);
        transfer.wait(SOON)?;
        speeds.push(float(bytes) / began.elapsed().as_secs_f64() / 1e9);
    }
    Ok((median(&speeds).unwrap_or(0.0), median(&calls).unwrap_or(0.0)))
}
