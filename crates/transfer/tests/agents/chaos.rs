//! Writers that are killed, stopped and started anew, over a bad network: every tag ends once,
//! never before its bytes, and nothing is left behind.
//!
//! `TRANSFER_CHAOS=1000` runs as many transfers.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nobounce::Device;
use nobounce_nic::links::LinkChoice;
use nobounce_transfer::{Agent, AgentOptions, Notify, Outcome, Pages, Peer, View};

use super::{SOON, device_with, shuffled};

const ROLE: &str = "TRANSFER_CHAOS_ADDR";
const SLOT: &str = "TRANSFER_CHAOS_SLOT";
const COUNT: &str = "TRANSFER_CHAOS";
const PAGES: u64 = 4096;
const PAGE: u64 = 64;
const AREA: u64 = PAGES * PAGE;
const WRITERS: usize = 3;
/// Loss, reordering and duplication in both directions.
const FAULTS: &str = "loss=0.005,reorder=0.01,dup=0.01,seed=3";

fn options() -> AgentOptions {
    AgentOptions { silence: Duration::from_millis(800), lanes: 2, ..AgentOptions::default() }
}

/// A device with a bad network.
fn faulty_device() -> Device {
    device_with(|config| {
        config.fault = Some(FAULTS.parse().unwrap());
        config.link = LinkChoice::Udp;
    })
}

/// The bytes of a tag.
fn pattern(tag: u64) -> Vec<u8> {
    let word = |at: u64| (at ^ tag.rotate_left(17)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    (0..AREA / 8).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// A writer: writes one tag after the other to its area, each when the last one was checked.
#[test]
fn writer_process() {
    let Ok(target) = std::env::var(ROLE) else { return };
    let slot: u64 = std::env::var(SLOT).unwrap().parse().unwrap();
    let agent = Agent::new(&faulty_device(), &format!("writer {slot}"), options()).unwrap();
    let local = agent.register(usize::try_from(AREA).unwrap()).unwrap();
    let Ok(peer) = agent.connect(target.as_str(), SOON) else { return };
    let Ok(remote) = peer.region("areas", SOON) else { return };
    let area = remote.part(slot * AREA, AREA).unwrap();
    let first = agent.generation() & !0xffff;
    for tag in first.. {
        local.region().write_at(0, &pattern(tag)).unwrap();
        let order = shuffled(PAGES, tag);
        let pages = Pages::whole(&order, &order, PAGE);
        println!("begin {tag}");
        let Ok(transfer) = peer.write_pages(&local, &area, &pages, Notify::Tag(&tag.to_le_bytes())) else {
            return;
        };
        match transfer.wait(SOON) {
            Ok(_) => println!("done {tag}"),
            Err(_) => return,
        }
        // The target answers with the same tag.
        if agent.notification(SOON).is_none_or(|answer| answer.tag != tag.to_le_bytes()) {
            return;
        }
    }
}

struct Writer {
    child: Child,
    slot: usize,
    said: std::thread::JoinHandle<Vec<String>>,
}

impl Writer {
    fn start(addr: &str, slot: usize) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "chaos::writer_process", "--nocapture"])
            .env(ROLE, addr)
            .env(SLOT, slot.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let said = std::thread::spawn(move || lines.map_while(Result::ok).collect());
        Self { child, slot, said }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a process of our own that was not waited for.
        unsafe { libc::kill(i32::try_from(self.child.id()).unwrap(), signal) };
    }

    fn end(mut self) -> Vec<String> {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.said.join().unwrap()
    }
}

/// What the target has heard of each tag.
#[derive(Default)]
struct Heard {
    complete: HashMap<u64, u32>,
    failed: HashMap<u64, u32>,
}

fn check(agent: &Agent, areas: &View, peers: &mut HashMap<(String, u64), Peer>, heard: &mut Heard) -> bool {
    while let Ok(peer) = agent.accept(Duration::ZERO) {
        peers.insert((peer.name().to_owned(), peer.generation()), peer);
    }
    let Some(note) = agent.notification(Duration::from_millis(20)) else { return false };
    let tag = u64::from_le_bytes(note.tag.clone().try_into().unwrap());
    if !matches!(note.outcome, Outcome::Complete { bytes: AREA }) {
        assert!(!matches!(note.outcome, Outcome::Complete { .. }), "{note:?}");
        *heard.failed.entry(tag).or_default() += 1;
        return false;
    }
    *heard.complete.entry(tag).or_default() += 1;
    let slot: usize = note.peer.strip_prefix("writer ").unwrap().parse().unwrap();
    let mut found = vec![0; usize::try_from(AREA).unwrap()];
    // A writer that died after its last tag leaves its area to the next one, which may write
    // already.
    let area = usize::try_from(AREA).unwrap();
    areas.region().read_at(slot * area, &mut found).unwrap();
    if let Some(peer) = peers.get(&(note.peer.clone(), note.generation))
        && peer.gone().is_none()
    {
        assert!(found == pattern(tag), "tag {tag:#x} of {} came before its bytes", note.peer);
        // The writer goes on.
        if let Ok(answer) = peer.announce(&tag.to_le_bytes()) {
            answer.complete();
        }
    }
    true
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn every_tag_ends_once_under_kills_stops_and_loss() {
    let count: usize = std::env::var(COUNT).map_or(60, |count| count.parse().unwrap());
    let agent = Agent::listening(&faulty_device(), "target", "127.0.0.1:0", options()).unwrap();
    let areas = agent.register(WRITERS * usize::try_from(AREA).unwrap()).unwrap();
    agent.export("areas", &areas).unwrap();
    let addr = agent.local_addr().unwrap().to_string();
    let mut writers: Vec<_> = (0..WRITERS).map(|slot| Writer::start(&addr, slot)).collect();
    let (mut heard, mut peers, mut said) = (Heard::default(), HashMap::new(), Vec::new());
    let (mut done, mut next, mut at_start) = (0, 8, None);
    let began = Instant::now();
    while done < count {
        assert!(
            began.elapsed()
                < Duration::from_secs(60) + Duration::from_millis(500) * u32::try_from(count).unwrap()
        );
        if check(&agent, &areas, &mut peers, &mut heard) {
            done += 1;
        }
        // A writer whose connection has ended ends by itself.
        let ended = writers.iter_mut().position(|writer| writer.child.try_wait().unwrap().is_some());
        if done >= next || ended.is_some() {
            let at = ended.unwrap_or(next / 8 % WRITERS);
            let writer = writers.swap_remove(at);
            match next / 8 % 3 {
                // Stopped for longer than the silence limit, then going on as a peer that is gone.
                0 if ended.is_none() => {
                    writer.signal(libc::SIGSTOP);
                    let stopped = Instant::now();
                    while stopped.elapsed() < Duration::from_millis(1000) {
                        done += usize::from(check(&agent, &areas, &mut peers, &mut heard));
                    }
                    writer.signal(libc::SIGCONT);
                }
                _ => writer.signal(libc::SIGKILL),
            }
            let slot = writer.slot;
            said.extend(writer.end());
            writers.push(Writer::start(&addr, slot));
            next = done + 8;
            peers.retain(|_, peer| peer.gone().is_none());
        }
        if done > count / 4 && at_start.is_none() {
            at_start = Some((descriptors(), resident_kib()));
        }
    }
    for writer in writers {
        said.extend(writer.end());
    }
    // What was announced and not ended is aborted now.
    let quiet = Instant::now();
    while quiet.elapsed() < Duration::from_millis(1200) {
        check(&agent, &areas, &mut peers, &mut heard);
    }
    for (tag, times) in heard.complete.iter().chain(&heard.failed) {
        assert_eq!(*times, 1, "tag {tag:#x}");
    }
    assert!(
        heard.complete.keys().all(|tag| !heard.failed.contains_key(tag)),
        "a tag that is complete and failed"
    );
    let said_done: Vec<u64> =
        said.iter().filter_map(|line| line.split("done ").nth(1)?.trim().parse().ok()).collect();
    let unheard = said_done.iter().filter(|tag| !heard.complete.contains_key(tag)).count();
    let begun = said.iter().filter(|line| line.contains("begin ")).count();
    println!(
        "{begun} begun, {} complete, {} failed or aborted, {unheard} unheard",
        heard.complete.len(),
        heard.failed.len()
    );
    // A writer that is killed between the end of its transfer and the frame leaves one that is
    // aborted.
    assert!(unheard <= heard.failed.len(), "{unheard} tags were lost");
    peers.clear();
    let (descriptors_then, resident_then) = at_start.unwrap();
    println!(
        "descriptors {descriptors_then} then, {} now; resident {resident_then} then, {} KiB now",
        descriptors(),
        resident_kib()
    );
    assert!(descriptors() <= descriptors_then, "descriptors are left");
    assert!(resident_kib() < resident_then + 20_000, "memory is left");
}
