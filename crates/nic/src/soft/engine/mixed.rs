//! The rare packet whose payload has several pieces, some of them in GPU memory without a window.
//! It is gathered piece by piece, by the copy engine if necessary, and copied once more.

use nobounce_memory::Sink;
use nobounce_protocol::qp::{Access, Nak};

use crate::links::now_ns;
use crate::soft::engine::host::find_send;
use crate::soft::engine::queue_pair::QueuePair;
use crate::soft::engine::region::Regions;
use crate::soft::engine::scatter::Piece;
use crate::soft::gpu::copier::{CopyWork, Copying, Job};
use crate::soft::gpu::prefetch::{IN_A_ROW, Origin, STUCK_NS};
use crate::soft::gpu::target::GatheredMessage;

/// The gathered part of a packet.
#[derive(Debug)]
pub(crate) struct Mixed {
    origin: Origin,
    /// Offset of its payload in the message.
    at: u64,
    bytes: Vec<u8>,
    /// The fetch in flight, and its start time.
    fetching: Option<(Copying, u64)>,
}

/// The result of one attempt.
#[derive(Debug)]
pub(crate) enum Gathered {
    All(Vec<u8>),
    /// Retry.
    Pending,
    /// Retry; no chunk was free.
    Starved,
}

/// Gathers `len` bytes of a request from `at` on, without waiting.
pub(crate) fn gather(
    entry: &mut QueuePair,
    regions: &mut Regions,
    (serial, at): (u64, u64),
    len: usize,
) -> Result<Gathered, Nak> {
    let origin = Origin::Request(serial);
    if !regions.staging.is_settled(entry.owner()) {
        return Ok(Gathered::Pending);
    }
    let begun = entry.gpu.prefetches.as_mut().and_then(|prefetches| prefetches.mixed.take());
    let mut mixed = begun.filter(|mixed| (mixed.origin, mixed.at) == (origin, at)).unwrap_or_else(|| Mixed {
        origin,
        at,
        bytes: Vec::with_capacity(len),
        fetching: None,
    });
    let send = find_send(&entry.posted.sends, serial).ok_or(Nak::RemoteOperational)?;
    let mut end = 0;
    for piece in send.bytes.pieces(at, len).collect::<Vec<_>>() {
        end += piece.len;
        if mixed.bytes.len() >= end {
            continue;
        }
        match mixed.add(entry, regions, &piece)? {
            Gathered::All(_) => {}
            waits => {
                entry.gpu.prefetches.get_or_insert_default().mixed = Some(mixed);
                return Ok(waits);
            }
        }
    }
    Ok(Gathered::All(mixed.bytes))
}

impl Mixed {
    /// Adds the next piece.
    fn add(&mut self, entry: &QueuePair, regions: &mut Regions, piece: &Piece) -> Result<Gathered, Nak> {
        let name = (piece.key, piece.addr);
        if self.fetching.is_none() {
            let started = regions.with_gpu(
                entry.accessor(),
                name,
                piece.len,
                Access::empty(),
                |gpu, offset, staging| {
                    let copier = staging.copiers.get(gpu.copier).ok_or(Nak::RemoteOperational)?;
                    let Some(chunk) = copier.take_fetch_chunk() else { return Ok(None) };
                    let work = CopyWork::Fetch { rows: IN_A_ROW, offset, len: piece.len };
                    Ok(Some(copier.start(Job { work, memory: gpu.memory.clone(), chunk })))
                },
            )?;
            match started.transpose()? {
                Some(Some(copying)) => self.fetching = Some((copying, now_ns())),
                Some(None) => return Ok(Gathered::Starved),
                None => {
                    let (begin, message) =
                        (self.bytes.len(), GatheredMessage { len: u64::MAX, alone: false });
                    self.bytes.resize(begin + piece.len, 0);
                    let out = Sink::from(&mut self.bytes[begin..]);
                    let loaded = regions.load_local(entry.pd, name, out, message, None);
                    return loaded.map(|_| Gathered::All(Vec::new())).map_err(|_| Nak::RemoteOperational);
                }
            }
        }
        let Some((copying, since)) = &self.fetching else { return Ok(Gathered::Pending) };
        match copying.take() {
            None if now_ns().saturating_sub(*since) > STUCK_NS => {
                tracing::warn!("bytes to be sent were not fetched from the GPU in 10 s");
                Err(Nak::RemoteOperational)
            }
            None => Ok(Gathered::Pending),
            Some(Err(error)) => {
                tracing::warn!(%error, "GPU memory could not be read by the copy engine");
                Err(Nak::RemoteOperational)
            }
            Some(Ok(chunk)) => {
                let from = IN_A_ROW.place_of(0);
                self.bytes.extend_from_slice(&chunk[from..from + piece.len]);
                self.fetching = None;
                Ok(Gathered::All(Vec::new()))
            }
        }
    }
}
