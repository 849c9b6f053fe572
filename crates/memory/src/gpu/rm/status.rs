//! The resource manager's answers in words.

/// Meaning of a status, for those that a mapping can return.
pub(super) fn words(status: u32) -> &'static str {
    match status {
        0x03 => "the system is busy",
        0x0F => "the GPU has fallen off the bus",
        0x10 => "the GPU is being reset",
        0x16 => "the action is not allowed now",
        0x17 | 0x63 => "the object is in use",
        0x1A => "a resource ran out, such as BAR1 space",
        0x1B => "not permitted to this user or container",
        0x1D => "this kind of access is not allowed",
        0x1E => "the address is not valid",
        0x1F | 0x3A | 0x3B => "an argument is not valid: the driver interface differs from the known one",
        0x22 => "the class is not known to this driver",
        0x23 => "the client is not valid",
        0x26 => "the device is not valid",
        0x29 => "the flags are not valid",
        0x2E => "the range lies outside the object",
        0x31 | 0x33 => "the object is not valid, or was freed",
        0x34 => "the new object's name is taken",
        0x36 => "the parent object is not valid",
        0x37 => "the offset is not valid",
        0x38 => "the operation is not valid",
        0x3D => "a pointer is not valid",
        0x40 => "the state is not valid",
        0x51 => "out of memory or BAR1 space",
        0x55 => "not ready",
        0x56 => "not supported by this driver or GPU",
        0x57 => "the object was not found",
        0x59 => "the operating system refused",
        0x5B => "a value is out of range",
        0x5F => "protected memory, as in confidential computing",
        0x62 => "the GPU needs a reset",
        0x65 | 0x66 => "the call timed out",
        0x6E => "the resource was destroyed",
        _ => "see nvstatuscodes.h of NVIDIA's open kernel modules",
    }
}

/// True where space ran out, which a smaller range or a later attempt may find again.
pub(super) fn is_lack_of_space(status: u32) -> bool {
    matches!(status, 0x03 | 0x1A | 0x51 | 0x65 | 0x66)
}
