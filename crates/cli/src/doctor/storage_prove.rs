//! `doctor --storage --prove`: reads the file into host memory, through the page cache and past it,
//! and into the memory of each GPU, by this library and by cuFile.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nobounce::file::FileOptions;
use nobounce::memory::gpu::Gpu;
use nobounce::{Device, GpuOptions, Region, Require};
use nobounce_topology::facts::{DirectIo, Facts, Storage};

use super::cufile;
use super::storage::{file_of, open_direct};
use super::storage_proof::{LIMIT, MAX_BYTES, PIECE, StorageProof, StorageProofs, gbs_of};

/// Reads the file of the facts in every way that there is.
pub(super) fn prove(facts: &Facts, storage: &Storage) -> anyhow::Result<StorageProofs> {
    let path = file_of(Path::new(&storage.path))?;
    let len = std::fs::metadata(&path)?.len();
    ensure!(len > 0, "{} is empty: name a file with some bytes to read", path.display());
    let deadline = Instant::now() + LIMIT;
    let file = path.display().to_string();
    let mut proofs = StorageProofs { file, reads: Vec::new(), cufile: None, not_tried: Vec::new() };
    // First past the page cache: this read leaves the cache as it is.
    match storage.direct_io.known() {
        Some(Some(align)) => {
            let how = "O_DIRECT into host memory".to_owned();
            proofs.push(how, deadline, || direct(&path, len, *align, deadline));
        }
        Some(None) => proofs.not_tried.push("O_DIRECT: the file does not take it".to_owned()),
        None => {
            proofs.not_tried.push(format!("O_DIRECT: {}", storage.direct_io.why_not().unwrap_or_default()))
        }
    }
    let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut buffer = Buffer::new(1);
    let mut cached = |detail: &'static str| {
        let read = pump(&file, len, &mut buffer, deadline, |_, _| Ok(()))?;
        Ok((read, detail.to_owned()))
    };
    let how = "page cache into host memory".to_owned();
    proofs.push(how.clone(), deadline, || cached("first read: what was cached before is not known"));
    proofs.push(format!("{how}, again"), deadline, || cached("from memory, where the file fits into it"));
    gpus(facts, &path, len, &mut proofs, deadline);
    cufile::prove(facts, storage, &path, &mut proofs);
    proofs.not_tried.push("a cold page cache: emptying it would slow down other programs".to_owned());
    Ok(proofs)
}

impl StorageProofs {
    /// Runs a read, unless the time is over.
    fn push(
        &mut self,
        how: String,
        deadline: Instant,
        read: impl FnOnce() -> anyhow::Result<((u64, Duration), String)>,
    ) {
        if Instant::now() >= deadline {
            self.not_tried.push(format!("{how}: {} s are over", LIMIT.as_secs()));
            return;
        }
        self.reads.push(match read() {
            Ok(((bytes, time), detail)) => {
                StorageProof { how, bytes, gbs: Some(gbs_of(bytes, time)), detail, ok: bytes > 0 }
            }
            Err(error) => StorageProof { how, bytes: 0, gbs: None, detail: format!("{error:#}"), ok: false },
        });
    }
}

/// Bytes at an alignment.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn new(align: usize) -> Self {
        let align = align.max(4096);
        let bytes = vec![0_u8; PIECE + align];
        let start = bytes.as_ptr().align_offset(align).min(align);
        Self { bytes, start }
    }

    fn piece(&mut self) -> &mut [u8] {
        let start = self.start;
        &mut self.bytes[start..start + PIECE]
    }
}

/// Reads the file piece by piece, at most [`MAX_BYTES`] and until the deadline, and hands each
/// piece on. The number of bytes, and the time.
fn pump(
    file: &File,
    len: u64,
    buffer: &mut Buffer,
    deadline: Instant,
    mut with: impl FnMut(u64, &[u8]) -> anyhow::Result<()>,
) -> anyhow::Result<(u64, Duration)> {
    let (start, mut at) = (Instant::now(), 0_u64);
    while at < len.min(MAX_BYTES) && Instant::now() < deadline {
        let piece = buffer.piece();
        // At most one piece, which is small.
        let read = file.read_at(piece, at).with_context(|| format!("cannot read at offset {at}"))?;
        if read == 0 {
            break;
        }
        with(at, &piece[..read])?;
        at += read as u64;
        // O_DIRECT continues at aligned offsets only: a short read is the end of the file.
        if read < PIECE {
            break;
        }
    }
    Ok((at, start.elapsed()))
}

fn direct(
    path: &Path,
    len: u64,
    align: DirectIo,
    deadline: Instant,
) -> anyhow::Result<((u64, Duration), String)> {
    let file = open_direct(path).with_context(|| format!("cannot open {} with O_DIRECT", path.display()))?;
    let most = align.memory.max(align.offset);
    let wanted = usize::try_from(most)?;
    ensure!(
        wanted.is_power_of_two() && PIECE.is_multiple_of(wanted),
        "an alignment of {most} bytes is not supported here"
    );
    let read = pump(&file, len, &mut Buffer::new(wanted), deadline, |_, _| Ok(()))?;
    let how = if align.reported { "as statx asks for" } else { "a safe guess: the kernel tells none" };
    Ok((read, format!("past the page cache, aligned to {most} bytes, {how}")))
}

/// Reads into each GPU, through nobounce's own window or copy engine.
fn gpus(facts: &Facts, path: &Path, len: u64, proofs: &mut StorageProofs, deadline: Instant) {
    let gpus = match Gpu::list() {
        Ok(gpus) if !gpus.is_empty() => gpus,
        Ok(_) => return proofs.not_tried.push("into GPU memory: CUDA shows no GPU".to_owned()),
        Err(error) => return proofs.not_tried.push(format!("into GPU memory: {error}")),
    };
    let device = match Device::open_named("nb0") {
        Ok(device) => device,
        Err(error) => return proofs.not_tried.push(format!("into GPU memory: cannot open nb0: {error}")),
    };
    for gpu in gpus {
        let label = facts
            .gpus
            .iter()
            .find(|fact| fact.address == gpu.pci_address())
            .map_or_else(|| gpu.to_string(), nobounce_topology::facts::Gpu::label);
        // As the verdict has it, and as cuFile's compatibility mode reads: through pinned host
        // memory.
        let staged = GpuOptions { window: false, ..GpuOptions::default() };
        let mut ways = vec![(format!("into {label}"), GpuOptions::default())];
        if staged.with_environment().require == Require::Any {
            ways.push((format!("into {label}, staged"), staged));
        } else {
            proofs.not_tried.push(format!("into {label}, staged: NOBOUNCE_REQUIRE=direct forbids it"));
        }
        for (how, options) in ways {
            proofs.push(how, deadline, || {
                let region = device.register_gpu_on(gpu.ordinal(), PIECE, options)?;
                let (read, last, paths) = read_into(path, len, &region, deadline)?;
                let mut back = vec![0; last.len()];
                region.read_at(0, &mut back)?;
                ensure!(back == last, "the GPU's memory does not hold what was read from the file");
                Ok((read, format!("by {paths}; the last piece was compared")))
            });
        }
    }
}

/// Reads the file into a region of a GPU, piece by piece to its start. Returns the last piece, too,
/// and the paths that the bytes took.
fn read_into(
    path: &Path,
    len: u64,
    region: &Region,
    deadline: Instant,
) -> anyhow::Result<((u64, Duration), Vec<u8>, String)> {
    let file = nobounce::file::File::open(path)?;
    // The path of the verdict: long reads would take the copy engine where they may be staged.
    let is_direct = region.paths().inbound.is_direct();
    let require = if is_direct { Require::Direct } else { Require::Any };
    let options = FileOptions { require };
    let (start, mut at, mut last) = (Instant::now(), 0_u64, 0);
    let mut paths = Vec::new();
    while at < len.min(MAX_BYTES) && Instant::now() < deadline {
        // At most one piece.
        last = usize::try_from((len - at).min(PIECE as u64))?;
        let report = region.read_file_with(&file, at, 0..last, options)?;
        for (name, _) in report.paths.list().into_iter().filter(|(_, tally)| tally.bytes > 0) {
            if !paths.contains(&name) {
                paths.push(name);
            }
        }
        at += last as u64;
    }
    let time = start.elapsed();
    let mut bytes = vec![0; last];
    File::open(path)?.read_exact_at(&mut bytes, at - last as u64)?;
    Ok(((at, time), bytes, paths.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_to_its_end_and_no_further_than_the_limits() {
        let path = std::env::temp_dir().join(format!("nobounce-prove-{}", std::process::id()));
        std::fs::write(&path, vec![7_u8; PIECE + 1000]).unwrap();
        let file = File::open(&path).unwrap();
        let soon = Instant::now() + Duration::from_secs(5);
        let mut seen = 0;
        let (read, _) = pump(&file, (PIECE + 1000) as u64, &mut Buffer::new(512), soon, |at, bytes| {
            assert!(at == seen && bytes.iter().all(|byte| *byte == 7));
            seen += bytes.len() as u64;
            Ok(())
        })
        .unwrap();
        assert_eq!(read, (PIECE + 1000) as u64);
        let past = Instant::now();
        assert_eq!(pump(&file, 1 << 40, &mut Buffer::new(1), past, |_, _| Ok(())).unwrap().0, 0);
        std::fs::remove_file(&path).unwrap();
    }
}
