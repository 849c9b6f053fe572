//! A device that was opened: the one way in, and what it says about itself, with the reasons where it does not.

use std::ffi::CStr;
use std::fs::File;
use std::ptr::NonNull;

use nobounce_verbs as verbs;

use super::error::{OpenError, last, returned};
use super::library::Library;

/// An open device. It closes when this goes, unless it was [kept](Self::keep).
pub(crate) struct Open<'a> {
    library: &'a Library,
    context: NonNull<verbs::Context>,
    name: String,
    /// Its file in /dev/infiniband.
    pub(crate) node: String,
}

impl<'a> Open<'a> {
    /// Opens a device of a list.
    pub(crate) fn device(
        library: &'a Library,
        name: String,
        device: *mut verbs::Device,
    ) -> Result<Self, OpenError> {
        // SAFETY: a device of the list; the name in it ends in zero.
        let node = unsafe { CStr::from_ptr((*device).dev_name.as_ptr()) }.to_string_lossy().into_owned();
        // SAFETY: a device of the list, which lives until after the call.
        let context = NonNull::new(unsafe { (library.api.open_device)(device) });
        let Some(context) = context else {
            let (os, node) = (last(), format!("/dev/infiniband/{node}"));
            // libibverbs says «no such file» whatever the file said: it is asked itself.
            let vague = os.raw_os_error() == Some(libc::ENOENT);
            let os = if vague { File::open(&node).err().unwrap_or(os) } else { os };
            return Err(OpenError::Open { device: name, node, os });
        };
        Ok(Self { library, context, name, node })
    }

    /// The device itself.
    pub(crate) fn context(&self) -> NonNull<verbs::Context> {
        self.context
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What it says about itself.
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

    /// What one of its ports says, or the error number.
    pub(crate) fn port(&self, number: u8) -> Result<verbs::PortAttr, i32> {
        // SAFETY: plain numbers, for which zeroes are valid.
        let mut attr: verbs::PortAttr = unsafe { std::mem::zeroed() };
        let context = self.context.as_ptr();
        // SAFETY: an open device; there is room for more than any version writes.
        let code = unsafe { (self.library.api.query_port)(context, number, &raw mut attr) };
        if code == 0 { Ok(attr) } else { Err(code) }
    }

    /// The device for somebody who closes it himself.
    pub(crate) fn keep(mut self) -> (NonNull<verbs::Context>, String) {
        let kept = (self.context, std::mem::take(&mut self.name));
        drop(std::mem::take(&mut self.node));
        std::mem::forget(self); // nothing is left in it but the device
        kept
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // SAFETY: opened by us, and nothing was made from it.
        unsafe { (self.library.api.close_device)(self.context.as_ptr()) };
    }
}
