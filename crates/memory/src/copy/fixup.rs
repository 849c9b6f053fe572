//! Fix-up tables of instructions that may fault: each file of guarded routines has its own, and the
//! fault guard searches all.

/// One entry of a table: a range of instructions and the resume address after a fault in it, all
/// relative to the table.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Fixup {
    start: i32,
    end: i32,
    resume: i32,
}

/// The resume address after a fault at `instruction`, by the first entry that covers it.
/// Async-signal-safe.
pub(crate) fn find(table: &'static [Fixup], instruction: u64) -> Option<u64> {
    let base = table.as_ptr().addr() as u64;
    let at = |offset: i32| base.wrapping_add_signed(i64::from(offset));
    table
        .iter()
        .find(|fixup| (at(fixup.start)..at(fixup.end)).contains(&instruction))
        .map(|fixup| at(fixup.resume))
}
