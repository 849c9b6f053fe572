//! The two processes: a file server, and a client that measures.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use nobounce::Device;
use nobounce_storage::{FileClient, FileRange, FileServer, ServerOptions};
use nobounce_transfer::{Agent, AgentOptions, Notify, Piece, View};

use super::figures::{LinkFigures, Remote};
use super::local::{self, Local};
use super::{DONE, FILE_LEN, NAME};
use crate::bench::ranks::{memory, open, size};

const SOON: Duration = Duration::from_secs(60);
/// The second process ends after this long, whatever happens.
const MOST: Duration = Duration::from_secs(300);
/// Time for each size: both kinds of transfer in turns.
const AIM: Duration = Duration::from_millis(500);
/// Bytes of a range, and ranges of one request.
const REQUESTS: [(u64, u64); 6] =
    [(64 << 10, 1), (1 << 20, 1), (16 << 20, 1), (64 << 20, 1), (64 << 10, 256), (1 << 20, 64)];

/// What would be measured.
pub(super) fn cases() -> String {
    let name = |&(bytes, ranges): &(u64, u64)| format!("{ranges} x {}", size(bytes));
    let sizes: Vec<_> = REQUESTS.iter().map(name).collect();
    format!("from a file server in another process, over shared memory and UDP: {}\n", sizes.join(", "))
}

/// Rank 1: serves the directory until rank 0 is done.
pub(super) fn serve(meet: SocketAddr, gpu: Option<i32>, folder: &Path) -> anyhow::Result<()> {
    let device = open(gpu)?;
    let options = ServerOptions { listen: meet, ..ServerOptions::default() };
    let server = FileServer::start(&device, folder, options)?;
    server.agent().export("memory", &memory(&device, gpu)?)?;
    let start = Instant::now();
    while !folder.join(DONE).exists() && start.elapsed() < MOST {
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Rank 0.
pub(super) fn measure(
    meet: SocketAddr,
    gpu: Option<i32>,
    folder: &Path,
    link: &str,
) -> anyhow::Result<LinkFigures> {
    let done = Done(folder);
    let device = open(gpu)?;
    let path = folder.join(NAME);
    let reads = Local::open(&device, gpu, &path)?;
    let cold = reads.cold(&path)?;
    let cached = reads.cached()?;
    drop(reads);
    let remote = compare(&device, meet, gpu)?;
    drop(done);
    Ok(LinkFigures { link: link.to_owned(), cached, cold, remote })
}

/// Ends the other process, also after an error.
struct Done<'a>(&'a Path);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join(DONE), []);
    }
}

fn compare(device: &Device, meet: SocketAddr, gpu: Option<i32>) -> anyhow::Result<Vec<Remote>> {
    let client = FileClient::connect(device, meet, SOON)?;
    let target = client.export(&memory(device, gpu)?)?;
    let agent = Agent::new(device, "writer", AgentOptions::default())?;
    let peer = agent.connect(meet, SOON)?;
    // As large as the file: caches hold no more of it than of the page cache.
    let len = usize::try_from(FILE_LEN)?;
    let (source, remote) = (View::of(device.register(len)?), peer.region("memory", SOON)?);
    source.region().fill(0..len, 0x5a)?;
    ensure!(client.stat(NAME, SOON)? == FILE_LEN, "another file than expected");
    let mut found = Vec::new();
    for (bytes, ranges) in REQUESTS {
        // In memory in another order than in the file: nothing is merged.
        let place = |number: u64| (ranges - 1 - number) * bytes;
        let mut read = |at: u64| {
            let range = |number| FileRange { offset: at + number * bytes, len: bytes, memory: place(number) };
            let list: Vec<_> = (0..ranges).map(range).collect();
            let moved = client.read(&target, &[(NAME, &list)])?.wait(SOON)?;
            ensure!(moved == ranges * bytes, "{moved} bytes instead of {ranges} x {bytes}");
            Ok(())
        };
        let mut write = |at: u64| {
            let piece = |number| Piece { local: at + number * bytes, remote: place(number), len: bytes };
            let pieces: Vec<_> = (0..ranges).map(piece).collect();
            peer.write_list(&source, &remote, &pieces, Notify::Nothing)?.wait(SOON)?;
            Ok(())
        };
        let [read_us, write_us] = local::times(ranges * bytes, AIM, [&mut read, &mut write])?;
        found.push(Remote { bytes, ranges, read_us, write_us });
    }
    Ok(found)
}
