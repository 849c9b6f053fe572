//! The two processes: a file server, and a client that measures.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use nobounce::{Device, GpuOptions};
use nobounce_storage::{FileClient, FileRange, FileServer, ServerOptions};
use nobounce_transfer::{Agent, AgentOptions, Notify, Piece, View};

use super::figures::{LinkFigures, Remote};
use super::local::{self, Local};
use super::{DONE, FILE_LEN, NAME};

const SOON: Duration = Duration::from_secs(60);
/// The second process ends after this long, whatever happens.
const MOST: Duration = Duration::from_secs(300);
const SIZES: [u64; 4] = [64 << 10, 1 << 20, 16 << 20, 64 << 20];
/// Bytes of the memory that is written to.
const MEMORY: u64 = 64 << 20;

/// What would be measured.
pub(super) fn cases() -> String {
    let sizes: Vec<_> = SIZES.iter().map(|bytes| crate::bench::ranks::size(*bytes)).collect();
    format!("from a file server in another process, over shared memory and UDP: {}\n", sizes.join(", "))
}

fn open(gpu: Option<i32>) -> anyhow::Result<Device> {
    Ok(match gpu {
        Some(gpu) => Device::open_near_gpu(gpu)?,
        None => Device::open()?,
    })
}

fn memory(device: &Device, gpu: Option<i32>) -> anyhow::Result<View> {
    let len = usize::try_from(MEMORY)?;
    Ok(View::of(match gpu {
        Some(gpu) => device.register_gpu_on(gpu, len, GpuOptions::default())?,
        None => device.register(len)?,
    }))
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
    let (source, remote) = (memory(device, None)?, peer.region("memory", SOON)?);
    ensure!(client.stat(NAME, SOON)? == FILE_LEN, "another file than expected");
    let mut found = Vec::new();
    for bytes in SIZES {
        let read_us = local::time(bytes, |at| {
            let range = FileRange { offset: at, len: bytes, memory: 0 };
            let moved = client.read(&target, &[(NAME, &[range])])?.wait(SOON)?;
            ensure!(moved == bytes, "{moved} bytes instead of {bytes}");
            Ok(())
        })?;
        let write_us = local::time(bytes, |_| {
            let piece = Piece { local: 0, remote: 0, len: bytes };
            peer.write_list(&source, &remote, &[piece], Notify::Nothing)?.wait(SOON)?;
            Ok(())
        })?;
        found.push(Remote { bytes, read_us, write_us });
    }
    Ok(found)
}
