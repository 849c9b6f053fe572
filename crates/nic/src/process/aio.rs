//! Linux AIO: a readable descriptor raises an eventfd, with no thread in between.

use std::io;
use std::os::fd::RawFd;

/// `IOCB_CMD_POLL` and `IOCB_FLAG_RESFD` of linux/aio_abi.h.
const POLL: u16 = 5;
const RESULT_FD: u32 = 1;

/// `struct iocb`.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    /// Events, for [`POLL`].
    buf: u64,
    len: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Default)]
struct Completed {
    data: u64,
    request: u64,
    results: [i64; 2],
}

/// Raises an eventfd once when a descriptor becomes readable.
#[derive(Debug)]
pub(crate) struct ReadAlarm {
    context: libc::c_ulong,
    is_set: bool,
}

impl ReadAlarm {
    /// # Errors
    /// The kernel has no AIO, or a filter of system calls forbids it.
    pub(crate) fn new() -> io::Result<Self> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: a place for the context, which is 0 as the call demands.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) };
        if made < 0 { Err(io::Error::last_os_error()) } else { Ok(Self { context, is_set: false }) }
    }

    /// Raises `event` when `fd` is readable, or is now. An alarm that is still set stays as it is.
    pub(crate) fn set(&mut self, fd: RawFd, event: RawFd) -> io::Result<()> {
        if self.is_set && !self.has_gone_off() {
            return Ok(());
        }
        let mut request = Request {
            opcode: POLL,
            fd: fd.cast_unsigned(),
            buf: u64::from(libc::POLLIN.cast_unsigned()),
            flags: RESULT_FD,
            result_fd: event.cast_unsigned(),
            ..Request::default()
        };
        let mut list = [&raw mut request];
        // SAFETY: a list of one request, which the kernel copies.
        if unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, list.as_mut_ptr()) } != 1 {
            return Err(io::Error::last_os_error());
        }
        self.is_set = true;
        Ok(())
    }

    /// Whether it has gone off, once.
    fn has_gone_off(&mut self) -> bool {
        let (mut completed, now) = (Completed::default(), libc::timespec { tv_sec: 0, tv_nsec: 0 });
        // SAFETY: room for one completion, and a timeout of 0.
        let gone_off = self.is_set
            && unsafe {
                libc::syscall(libc::SYS_io_getevents, self.context, 0, 1, &raw mut completed, &raw const now)
            } == 1;
        self.is_set &= !gone_off;
        gone_off
    }
}

impl Drop for ReadAlarm {
    fn drop(&mut self) {
        // SAFETY: a context of this process. In a forked child it does not exist, which the call
        // reports.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::eventfd::EventFd;
    use std::os::fd::AsRawFd;

    #[test]
    fn an_alarm_raises_its_event_once() {
        let (watched, event) = (EventFd::new().unwrap(), EventFd::counting().unwrap());
        let mut alarm = ReadAlarm::new().unwrap();
        alarm.set(watched.as_raw_fd(), event.as_raw_fd()).unwrap();
        assert!(!alarm.has_gone_off() && !event.is_raised());
        watched.raise();
        assert!(event.wait(1000) && event.take() && !event.take());
        assert!(alarm.has_gone_off() && !alarm.has_gone_off());
        alarm.set(watched.as_raw_fd(), event.as_raw_fd()).unwrap();
        assert!(event.wait(1000), "readable already");
    }
}
