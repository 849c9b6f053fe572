//! Local scatter/gather lists.

use nobounce_protocol::qp::LocalFault;

use super::build::crc_on;
use super::region::Regions;

/// One element of a scatter/gather list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Address of its first byte.
    pub addr: u64,
    /// Its bytes.
    pub len: u32,
    /// The key of the region it lies in.
    pub lkey: u32,
}

/// Where the bytes of a posted request are.
#[derive(Debug)]
pub(crate) enum Bytes {
    One(Sge),
    Many(Box<[Sge]>),
    Inline(Box<[u8]>),
}

impl Bytes {
    pub(crate) fn of(list: &[Sge]) -> Self {
        match list {
            [one] => Self::One(*one),
            many => Self::Many(many.into()),
        }
    }

    fn list(&self) -> &[Sge] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
            Self::Inline(_) => &[],
        }
    }

    /// Fills `out` with the bytes from `offset` on, and carries `crc` on over them.
    pub(crate) fn gather(
        &self,
        regions: &mut Regions,
        pd: u32,
        offset: u64,
        out: &mut [u8],
        mut crc: u32,
    ) -> Result<u32, LocalFault> {
        if let Self::Inline(bytes) = self {
            let from = usize::try_from(offset).map_err(|_| LocalFault)?;
            out.copy_from_slice(bytes.get(from..from + out.len()).ok_or(LocalFault)?);
            return Ok(crc_on(crc, out));
        }
        let mut done = 0;
        self.walk(offset, out.len(), |addr, lkey, len| {
            let piece = &mut out[done..done + len];
            done += len;
            crc = regions.load_local(pd, lkey, addr, piece, crc)?;
            Ok(())
        })?;
        Ok(crc)
    }

    /// Puts `bytes` from `offset` on; `last` ends the message.
    pub(crate) fn scatter(
        &self,
        regions: &mut Regions,
        pd: u32,
        offset: u64,
        bytes: &[u8],
        last: bool,
    ) -> Result<(), LocalFault> {
        let mut done = 0;
        self.walk(offset, bytes.len(), |addr, lkey, len| {
            let piece = &bytes[done..done + len];
            done += len;
            regions.store_local(pd, lkey, addr, piece, last && done == bytes.len())
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
