//! A file that is mapped for reading.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{Source, page_size};

/// `MADV_POPULATE_READ` of Linux 5.14: maps pages, reads absent ones from the file, and reports
/// errors.
const POPULATE_READ: i32 = 22;
/// Pages whose presence decides about a range of another user's file: all of a short one.
const SAMPLES: usize = 16;
/// Pages that one call of `mincore` answers for.
const MOST_ASKED: usize = 512;

/// The first bytes of a file, mapped read-only and shared: its page cache, without a copy.
///
/// Other processes may change or truncate the file at any time. Its bytes are copied by the guarded
/// routines of this crate only, which report a page that is gone.
#[derive(Debug)]
pub struct FileMapping {
    base: *mut u8,
    len: usize,
    /// To ask for its pages. `None` where nothing is mapped.
    file: Option<OwnedFd>,
    /// The file belongs to the user who mapped it: `mincore` reports absent pages.
    is_own: bool,
}

// SAFETY: the mapping is an address range that this object owns; all access goes through `Source`,
// for which concurrent changes are expected.
unsafe impl Send for FileMapping {}
// SAFETY: as above.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps the first `len` bytes.
    ///
    /// # Errors
    /// The kernel refused: the file cannot be mapped or read, or address space or descriptors are
    /// exhausted.
    pub fn of(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { base: ptr::null_mut(), len, file: None, is_own: true });
        }
        let own = file.try_clone_to_owned()?;
        let (how, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, how, flags, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let is_own = is_own(&own);
        Ok(Self { base: base.cast(), len, file: Some(own), is_own })
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte in this process.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.base.addr() as u64
    }

    /// A part of it, to copy from.
    ///
    /// # Panics
    /// It is not inside.
    #[must_use]
    pub fn source(&self, range: Range<usize>) -> Source<'_> {
        // SAFETY: the mapping lives as long. Pages that a truncation cuts off fault inside of the
        // guarded copy routines, which report it.
        unsafe { Source::new(self.base, self.len) }.slice(range)
    }

    /// Reads absent pages of the range from the file and maps them, so that copies do not wait for
    /// the disk. Kernels before 5.14 only start to read.
    ///
    /// # Errors
    /// The file was truncated, or its file system reports an error.
    pub fn populate(&self, range: Range<usize>) -> io::Result<()> {
        match self.advise(&range, POPULATE_READ) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                self.advise(&range, libc::MADV_WILLNEED)
            }
            other => other,
        }
    }

    /// Whether the range is in the page cache. Does not wait for the disk.
    ///
    /// A user's own files are asked by `mincore`, which changes nothing. It calls every page of
    /// another user's file present, so a sample of these is read without waiting (`RWF_NOWAIT`).
    /// Since Linux 5.9 such a read starts to fetch an absent page, and finds it if the disk is
    /// quick: places differ from call to call, or the next one would find the pages that this one
    /// has fetched. True for file systems without `RWF_NOWAIT`.
    #[must_use]
    pub fn is_resident(&self, range: Range<usize>) -> bool {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let Some(last) = range.end.min(self.len).checked_sub(1).filter(|last| *last >= range.start) else {
            return true;
        };
        let first = range.start / page_size();
        let pages = last / page_size() - first + 1;
        if self.is_own {
            let parts = (0..pages).step_by(MOST_ASKED);
            return parts.into_iter().all(|at| self.are_incore(first + at, MOST_ASKED.min(pages - at)));
        }
        (0..SAMPLES.min(pages)).all(|number| {
            // Consecutive multiples of the golden ratio are far from each other.
            let call = CALLS.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let page = if pages > SAMPLES { (call >> 32) % pages } else { number };
            self.is_readable_now((first + page) * page_size())
        })
    }

    /// At most [`MOST_ASKED`] pages.
    fn are_incore(&self, first: usize, pages: usize) -> bool {
        let mut answers = [0_u8; MOST_ASKED];
        let at = self.base.wrapping_add(first * page_size()).cast();
        // SAFETY: the pages are inside of the mapping, and the answer has a byte for each.
        let known = unsafe { libc::mincore(at, pages * page_size(), answers.as_mut_ptr().cast()) };
        known != 0 || answers[..pages].iter().all(|answer| answer & 1 == 1)
    }

    /// Whether a read of one byte needs no disk. True where the file system cannot tell.
    fn is_readable_now(&self, at: usize) -> bool {
        let (Some(file), Ok(at)) = (&self.file, libc::off_t::try_from(at)) else { return true };
        let mut byte = 0_u8;
        let part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        // SAFETY: the vector names one byte of ours.
        let read = unsafe { libc::preadv2(file.as_raw_fd(), &raw const part, 1, at, libc::RWF_NOWAIT) };
        read >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EAGAIN)
    }

    fn advise(&self, range: &Range<usize>, advice: i32) -> io::Result<()> {
        let start = range.start - range.start % page_size();
        let end = range.end.min(self.len);
        if end <= start {
            return Ok(());
        }
        let at = self.base.wrapping_add(start).cast();
        // SAFETY: the pages are inside of the mapping; the advice neither unmaps nor changes them.
        if unsafe { libc::madvise(at, end - start, advice) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

/// Whether the file belongs to the user of this thread.
fn is_own(file: &OwnedFd) -> bool {
    // SAFETY: stat is plain integers; zeros are a valid value.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: one live structure to fill.
    let is_known = unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) } == 0;
    // SAFETY: no pointers; an invalid user changes nothing, and the call returns the present one.
    let user = unsafe { libc::setfsuid(libc::uid_t::MAX) };
    is_known && libc::uid_t::try_from(user) == Ok(stat.st_uid)
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping is ours and ends with us; sources borrow it.
            unsafe { libc::munmap(self.base.cast(), self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::{HostBuffer, guard};

    fn file(bytes: &[u8]) -> std::fs::File {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("nobounce-mapping-{process}-{number}"));
        let options = std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(true).clone();
        let mut file = options.open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn waive(reason: &str) {
        let required = std::env::var("REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|name| name == "disk"), "a disk is required, but {reason}");
        if let Some(path) = std::env::var_os("NOBOUNCE_WAIVERS") {
            let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
            file.unwrap().write_all(format!("disk: {reason}\n").as_bytes()).unwrap();
        }
    }

    #[test]
    fn a_mapping_shows_the_file() {
        let bytes: Vec<u8> = (0..20_000_u32).map(|at| at.to_le_bytes()[0] ^ at.to_le_bytes()[1]).collect();
        let file = file(&bytes);
        let mapping = FileMapping::of(file.as_fd(), bytes.len()).unwrap();
        assert!(mapping.is_resident(0..bytes.len()), "it was just written");
        mapping.populate(5000..bytes.len()).unwrap();
        assert_eq!(mapping.source(4999..12_345).to_vec(), bytes[4999..12_345]);
        assert!(FileMapping::of(file.as_fd(), 0).unwrap().is_empty());
    }

    /// Also for a user who may only read the file, and for repeated calls, although each may fetch
    /// a page: one that loses its CPU meanwhile finds that page there.
    #[test]
    fn pages_are_resident_for_every_user_alike() {
        const LEN: usize = 4 << 20;
        const CALLS: usize = 20;
        let file = file(&vec![5; LEN]);
        file.set_permissions(std::fs::Permissions::from_mode(0o644)).unwrap();
        file.sync_all().unwrap();
        let readable = std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        let mapping = FileMapping::of(readable.as_fd(), LEN).unwrap();
        let ask = || {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| {
                    // SAFETY: changes the user for files of this thread only, which ends here.
                    unsafe { libc::setfsuid(65534) };
                    let mapping = FileMapping::of(readable.as_fd(), LEN).unwrap();
                    (0..CALLS).map(|_| mapping.is_resident(0..LEN)).collect::<Vec<_>>()
                });
                other.join().unwrap()
            })
        };
        assert_eq!(ask(), [true; CALLS], "it was just written");
        // SAFETY: advice about a descriptor.
        let cool = || unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        cool();
        if mapping.is_resident(LEN / 2..LEN / 2 + 1) {
            return waive("the temporary files stay in memory");
        }
        assert!(!mapping.is_resident(0..LEN));
        let holes = FileMapping::of(readable.as_fd(), LEN).unwrap();
        holes.advise(&(0..LEN), libc::MADV_RANDOM).unwrap(); // no readahead
        for at in [0, LEN / 2, LEN - 1] {
            holes.populate(at..at + 1).unwrap();
        }
        assert!(!mapping.is_resident(0..LEN), "most of it is on the disk");
        drop(holes); // mapped pages stay
        cool();
        let present = ask().into_iter().filter(|resident| *resident).count();
        let fetched = (0..LEN).step_by(page_size()).filter(|at| mapping.is_resident(*at..at + 1)).count();
        assert!(present <= fetched, "{present} calls found pages, {fetched} are there");
        mapping.populate(0..LEN).unwrap();
        assert!(mapping.is_resident(0..LEN));
        assert_eq!(ask(), [true; CALLS], "it was read");
    }

    #[test]
    fn a_truncated_file_is_an_error_and_no_signal() {
        guard::ensure_installed().unwrap();
        let file = file(&[7; 20_000]);
        let mapping = FileMapping::of(file.as_fd(), 20_000).unwrap();
        file.set_len(4096).unwrap();
        assert!(mapping.populate(0..20_000).is_err());
        let buffer = HostBuffer::new(20_000).unwrap();
        // SAFETY: the buffer outlives the window.
        let window = unsafe { buffer.window() };
        assert!(window.store(0, mapping.source(0..20_000)).is_err());
        let mut first = [0; 4096];
        buffer.read_at(0, &mut first).unwrap();
        assert_eq!(first, [7; 4096]);
    }
}
