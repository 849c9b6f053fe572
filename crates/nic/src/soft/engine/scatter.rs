//! Local scatter/gather lists.

use nobounce_memory::path::Mechanism;
use nobounce_memory::{Sink, Source};
use nobounce_protocol::qp::{LocalFault, Nak};

use crate::soft::crc::extend_crc;
use crate::soft::engine::region::{GatherError, Regions};
use crate::soft::gpu::staging::CopyOwner;
use crate::soft::gpu::target::{GatheredMessage, Placed};
use crate::tally::BytePath;
use crate::work::Sge;

/// The requested part of one element of a list.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) key: u32,
    pub(crate) addr: u64,
    /// Its offset in the message.
    pub(crate) at: u64,
    pub(crate) len: usize,
    pub(crate) behind: u64,
}

/// The bytes of a posted request.
#[derive(Debug)]
pub(crate) enum RequestBytes {
    One(Sge),
    Few([Sge; FEW], u8),
    Many(Box<[Sge]>),
    /// Inline data.
    Short([u8; SHORT], u8),
    Long(Box<[u8]>),
}

/// Scatter/gather elements and inline bytes that a request holds without an allocation: as many as
/// programs usually post.
const FEW: usize = 4;
const SHORT: usize = 64;

impl RequestBytes {
    #[inline]
    pub(crate) fn of(list: &[Sge]) -> Self {
        match *list {
            [one] => Self::One(one),
            [] | [_, _, ..] if list.len() <= FEW => {
                let mut few = [Sge { addr: 0, len: 0, lkey: 0 }; FEW];
                few[..list.len()].copy_from_slice(list);
                Self::Few(few, u8::try_from(list.len()).unwrap_or(0))
            }
            _ => Self::Many(list.into()),
        }
    }

    /// From a request: its inline data, or its list.
    #[inline]
    pub(crate) fn of_request(inline: Option<&[u8]>, list: &[Sge]) -> Self {
        let Some(bytes) = inline else { return Self::of(list) };
        if bytes.len() > SHORT {
            return Self::Long(bytes.into());
        }
        let mut short = [0; SHORT];
        short[..bytes.len()].copy_from_slice(bytes);
        Self::Short(short, u8::try_from(bytes.len()).unwrap_or(0))
    }

    fn list(&self) -> &[Sge] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Few(few, count) => &few[..usize::from(*count)],
            Self::Many(many) => many,
            Self::Short(..) | Self::Long(_) => &[],
        }
    }

    /// The inline data, if any.
    fn inline(&self) -> Option<&[u8]> {
        match self {
            Self::Short(bytes, len) => Some(&bytes[..usize::from(*len)]),
            Self::Long(bytes) => Some(bytes),
            Self::One(_) | Self::Few(..) | Self::Many(_) => None,
        }
    }

    /// Bytes of the whole message.
    pub(crate) fn len(&self) -> u64 {
        match self.inline() {
            Some(bytes) => bytes.len() as u64,
            None => self.list().iter().map(|sge| u64::from(sge.len)).sum(),
        }
    }

    /// Fills `out` with the bytes from `offset` on and extends `crc` over them. Returns the route
    /// they took (that of the last one, if there are several).
    pub(crate) fn gather(
        &self,
        regions: &mut Regions,
        pd: u32,
        (offset, message): (u64, GatheredMessage),
        mut out: Sink<'_>,
        mut crc: Option<u32>,
    ) -> Result<(Option<u32>, BytePath), GatherError> {
        let mut route = BytePath::Direct(Mechanism::Cpu);
        if let Some(bytes) = self.inline() {
            let fault = GatherError::Fault(Nak::RemoteOperational);
            let from = usize::try_from(offset).map_err(|_| fault.clone())?;
            let bytes = bytes.get(from..from + out.len()).ok_or(fault)?;
            out.put(0, bytes);
            return Ok((extend_crc(crc, bytes), route));
        }
        let mut done = 0;
        let mut failed = None;
        let walked = self.walk(offset, out.len(), |addr, lkey, len| {
            let piece = out.slice(done..done + len);
            done += len;
            match regions.load_local(pd, (lkey, addr), piece, message, crc) {
                Ok(loaded) => (crc, route) = loaded,
                Err(error) => failed = Some(error),
            }
            if failed.is_some() { Err(LocalFault) } else { Ok(()) }
        });
        match (walked, failed) {
            (Ok(()), _) => Ok((crc, route)),
            (Err(_), Some(error)) => Err(error),
            (Err(LocalFault), None) => Err(GatherError::Fault(Nak::RemoteOperational)),
        }
    }

    /// Places `bytes` from `offset` on; `last` ends the message. Returns where the last of them
    /// went.
    pub(crate) fn scatter(
        &self,
        regions: &mut Regions,
        (pd, mut owner): (u32, CopyOwner),
        offset: u64,
        bytes: Source<'_>,
        last: bool,
    ) -> Result<Placed, LocalFault> {
        let mut placed = Placed { route: BytePath::Direct(Mechanism::Cpu), ticket: None };
        let mut done = 0;
        self.walk(offset, bytes.len(), |addr, lkey, len| {
            let piece = bytes.slice(done..done + len);
            done += len;
            let ends = last && done == bytes.len();
            let next = regions.place_local((pd, owner), lkey, addr, piece, ends)?;
            owner.after = next.ticket.unwrap_or(owner.after);
            placed = Placed { ticket: next.ticket.or(placed.ticket), ..next };
            Ok(())
        })?;
        if last && matches!(self, Self::Few(..) | Self::Many(_)) {
            self.list().iter().try_for_each(|sge| regions.announce(pd, sge.lkey))?;
        }
        Ok(placed)
    }

    /// How many bytes are contiguous from `offset` on.
    pub(crate) fn contiguous_from(&self, offset: u64) -> u64 {
        if !matches!(self, Self::Few(..) | Self::Many(_)) {
            return u64::MAX;
        }
        let mut end = 0;
        self.list()
            .iter()
            .find_map(|sge| {
                end += u64::from(sge.len);
                (offset < end).then(|| end - offset)
            })
            .unwrap_or(0)
    }

    /// The pieces of the `len` bytes from `offset` on: key, address and length of each. Also how
    /// many more bytes of the list lie right behind it.
    pub(crate) fn pieces(&self, offset: u64, len: usize) -> impl Iterator<Item = Piece> + Clone {
        let end = offset + len as u64;
        let mut start = 0;
        self.list().iter().filter_map(move |sge| {
            let (begin, stop) = (start, start + u64::from(sge.len));
            start = stop;
            let (from, to) = (offset.max(begin), end.min(stop));
            (from < to).then(|| Piece {
                key: sge.lkey,
                addr: sge.addr.wrapping_add(from - begin),
                at: from,
                len: usize::try_from(to - from).unwrap_or(0),
                behind: stop - to,
            })
        })
    }

    /// Calls `each(address, key, length)` for the pieces that make up `len` bytes from `offset` on.
    fn walk(
        &self,
        offset: u64,
        len: usize,
        mut each: impl FnMut(u64, u32, usize) -> Result<(), LocalFault>,
    ) -> Result<(), LocalFault> {
        let (mut skip, mut left) = (offset, len);
        for sge in self.list() {
            let size = u64::from(sge.len);
            if skip >= size {
                skip -= size;
                continue;
            }
            let piece = usize::try_from(size - skip).unwrap_or(usize::MAX).min(left);
            if piece > 0 {
                each(sge.addr.wrapping_add(skip), sge.lkey, piece)?;
            }
            skip = 0;
            left -= piece;
            if left == 0 {
                return Ok(());
            }
        }
        if left == 0 { Ok(()) } else { Err(LocalFault) }
    }
}
