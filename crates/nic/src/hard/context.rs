//! An open device: opening, attribute queries, and readable errors.

use std::ffi::CStr;
use std::fs::File;
use std::ops::Deref;
use std::ptr::NonNull;

use nobounce_verbs as verbs;

use super::error::{OpenError, last, returned};
use super::library::Library;
use crate::process::fork;

/// An open device, closed on drop in the process that opened it. `L` is how its library is held.
pub(crate) struct OpenContext<L: Deref<Target = Library>> {
    pub(crate) library: L,
    context: NonNull<verbs::Context>,
    name: String,
    /// Its file in /dev/infiniband.
    pub(crate) node: String,
    /// The process that opened it, counted in forks.
    generation: u64,
}

impl<L: Deref<Target = Library>> OpenContext<L> {
    /// Opens a device of a list.
    pub(crate) fn device(library: L, name: String, device: *mut verbs::Device) -> Result<Self, OpenError> {
        // SAFETY: a device of the list; the name in it ends in zero.
        let node = unsafe { CStr::from_ptr((*device).dev_name.as_ptr()) }.to_string_lossy().into_owned();
        // SAFETY: a device of the list, which lives until after the call.
        let context = NonNull::new(unsafe { (library.api.open_device)(device) });
        let Some(context) = context else {
            let (os, node) = (last(), format!("/dev/infiniband/{node}"));
            // libibverbs reports "no such file" for every failure: open the file ourselves for the
            // cause.
            let vague = os.raw_os_error() == Some(libc::ENOENT);
            let os = if vague { File::open(&node).err().unwrap_or(os) } else { os };
            return Err(OpenError::Open { device: name, node, os });
        };
        Ok(Self { library, context, name, node, generation: fork::generation() })
    }

    /// The device itself.
    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut verbs::Context {
        self.context.as_ptr()
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether this is a forked child of the process that opened it. Its descriptors refer to the
    /// parent's objects: do not use them here, least of all destroy them.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        fork::current() != self.generation
    }

    /// Its attributes.
    pub(crate) fn attr(&self) -> Result<verbs::DeviceAttr, OpenError> {
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut attr: verbs::DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: an open device, and a valid place for the result.
        let code = unsafe { (self.library.api.query_device)(self.context.as_ptr(), &raw mut attr) };
        if code == 0 {
            return Ok(attr);
        }
        Err(OpenError::Query { device: self.name.clone(), call: "ibv_query_device", os: returned(code) })
    }

    /// The attributes of a port, or the error number.
    pub(crate) fn port(&self, number: u8) -> Result<verbs::PortAttr, i32> {
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut attr: verbs::PortAttr = unsafe { std::mem::zeroed() };
        let context = self.context.as_ptr();
        // SAFETY: an open device; there is room for more than any version writes.
        let code = unsafe { (self.library.api.query_port)(context, number, &raw mut attr) };
        if code == 0 { Ok(attr) } else { Err(code) }
    }
}

impl<L: Deref<Target = Library>> Drop for OpenContext<L> {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        // SAFETY: opened by us; every object made from it held us and is gone.
        unsafe { (self.library.api.close_device)(self.context.as_ptr()) };
    }
}
