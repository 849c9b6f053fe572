//! Descriptors: 64 bytes that say what to do.
//!
//! The layout is that of NCCL's GPI backend. A descriptor has eight words. The lowest bit of each
//! is its owner bit, so that a reader sees when all have arrived, in whatever order
//! ([`ring`](crate::ring)). Data always moves between memory of this rank (*source* in the layout,
//! also for READ) and of another rank (*destination*).

/// Words of a descriptor.
pub const WORDS: usize = 8;

/// Bytes of a descriptor.
pub const BYTES: usize = 8 * WORDS;

/// The owner bit of each word.
pub const OWNER: u64 = 1;

const CONTROL: u8 = 1 << 7;

/// Flags of an operation: the counter is counted up, and its value is stored for the kernel.
const HAS_COUNTER: u8 = 1 << 0;
const COUNTED: u8 = 1 << 1;
const WRITE_BACK: u8 = 1 << 2;

/// What a descriptor asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The operation.
    pub action: Action,
    /// The counter that its completion counts up.
    pub counter: Option<Counted>,
}

/// A counter, and whether kernels see the new value at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Its index.
    pub index: u16,
    /// The value is stored in GPU memory.
    pub is_written_back: bool,
}

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Reads memory of another rank.
    Get(Transfer),
    /// Writes memory of another rank, then changes a signal there.
    Put(Transfer, Option<Signal>),
    /// Writes a value of 1 to 8 bytes that the descriptor holds, then changes a signal.
    PutValue {
        /// Where to.
        to: Place,
        /// The bytes, lowest first.
        value: u64,
        /// How many of them.
        len: u32,
        /// The signal.
        signal: Option<Signal>,
    },
    /// Adds to a word of another rank.
    Add {
        /// Which.
        to: Place,
        /// How much.
        value: u64,
    },
    /// Completes when all earlier operations to the rank have completed there.
    Flush {
        /// The rank.
        rank: u32,
    },
    /// Sets a counter to 0.
    ResetCounter(Counted),
    /// Stores the value of a counter in GPU memory.
    WriteBackCounter {
        /// Its index.
        index: u16,
    },
    /// Sets a signal of this rank to 0.
    ResetSignal {
        /// Its index.
        index: u16,
    },
}

/// A place in memory of another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The rank.
    pub rank: u32,
    /// Its memory.
    pub handle: u16,
    /// Bytes from the start of that memory.
    pub offset: u64,
}

/// Bytes that move between memory of this rank and of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Memory of this rank.
    pub local_handle: u16,
    /// Bytes from its start.
    pub local_offset: u64,
    /// Memory of the other rank.
    pub remote: Place,
    /// How many bytes.
    pub len: u32,
}

/// A change of a signal at the other rank, after the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Its index.
    pub index: u16,
    /// What is added to it.
    pub add: u64,
}

/// A descriptor that says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// No operation has that code.
    #[error("operation {0:#x} does not exist")]
    Operation(u8),
    /// No flag has that bit.
    #[error("flags {0:#x} do not exist")]
    Flags(u8),
}

mod code {
    pub(super) const GET: u8 = 0;
    pub(super) const PUT: u8 = 1;
    pub(super) const PUT_SIGNAL_ADD: u8 = 2;
    pub(super) const PUT_SIGNAL_COUNTED: u8 = 3;
    pub(super) const PUT_VALUE: u8 = 4;
    pub(super) const PUT_VALUE_SIGNAL_ADD: u8 = 5;
    pub(super) const PUT_VALUE_SIGNAL_COUNTED: u8 = 6;
    pub(super) const ADD: u8 = 7;
    pub(super) const FLUSH: u8 = 8;
    pub(super) const RESET_COUNTER: u8 = super::CONTROL;
    pub(super) const RESET_COUNTER_SILENTLY: u8 = super::CONTROL | 1;
    pub(super) const WRITE_BACK_COUNTER: u8 = super::CONTROL | 2;
    pub(super) const RESET_SIGNAL: u8 = super::CONTROL | 3;
}

/// `bits` bits of a word from `at` on.
const fn field(word: u64, at: u32, bits: u32) -> u64 {
    (word >> at) & ((1 << bits) - 1)
}

#[allow(clippy::cast_possible_truncation)] // fields of that width
impl Descriptor {
    /// Reads the words of a descriptor.
    ///
    /// # Errors
    /// They name no operation.
    pub fn parse(words: &[u64; WORDS]) -> Result<Self, Malformed> {
        let [header, target, remote, local, remote_offset, local_offset, low, high] = *words;
        let (op, flags) = (field(header, 16, 8) as u8, field(header, 24, 8) as u8);
        if flags & !(HAS_COUNTER | COUNTED | WRITE_BACK) != 0 {
            return Err(Malformed::Flags(flags));
        }
        let counter =
            Counted { index: field(header, 32, 16) as u16, is_written_back: flags & WRITE_BACK != 0 };
        let index = field(header, 48, 16) as u16;
        let len = field(target, 32, 32) as u32;
        let to = Place {
            rank: field(target, 1, 31) as u32,
            handle: field(remote, 16, 16) as u16,
            offset: remote_offset >> 1,
        };
        let transfer = Transfer {
            local_handle: field(local, 16, 16) as u16,
            local_offset: local_offset >> 1,
            remote: to,
            len,
        };
        let added = Some(Signal { index, add: (local >> 32) << 32 | remote >> 32 });
        let counted = Some(Signal { index, add: 1 });
        let value = (high >> 32) << 32 | low >> 32;
        let action = match op {
            code::GET => Action::Get(transfer),
            code::PUT => Action::Put(transfer, None),
            code::PUT_SIGNAL_ADD => Action::Put(transfer, added),
            code::PUT_SIGNAL_COUNTED => Action::Put(transfer, counted),
            code::PUT_VALUE => Action::PutValue { to, value, len, signal: None },
            code::PUT_VALUE_SIGNAL_ADD => Action::PutValue { to, value, len, signal: added },
            code::PUT_VALUE_SIGNAL_COUNTED => Action::PutValue { to, value, len, signal: counted },
            code::ADD => Action::Add { to, value },
            code::FLUSH => Action::Flush { rank: to.rank },
            code::RESET_COUNTER => Action::ResetCounter(Counted { is_written_back: true, ..counter }),
            code::RESET_COUNTER_SILENTLY => {
                Action::ResetCounter(Counted { is_written_back: false, ..counter })
            }
            code::WRITE_BACK_COUNTER => Action::WriteBackCounter { index: counter.index },
            code::RESET_SIGNAL => Action::ResetSignal { index },
            unknown => return Err(Malformed::Operation(unknown)),
        };
        let counts = flags & (HAS_COUNTER | COUNTED) != 0 && op & CONTROL == 0;
        Ok(Self { action, counter: counts.then_some(counter) })
    }

    /// The words of a descriptor, with this owner bit: for programs that fill a ring from the CPU.
    #[must_use]
    pub fn words(&self, owner: bool) -> [u64; WORDS] {
        let op;
        let (mut index, mut counter) = (0, self.counter);
        let (mut transfer, mut signal, mut value) = (None, None, 0);
        let with = |signal: Option<Signal>, plain, add| if signal.is_some() { add } else { plain };
        match self.action {
            Action::Get(moved) => (op, transfer) = (code::GET, Some(moved)),
            Action::Put(moved, then) => {
                (op, transfer, signal) = (with(then, code::PUT, code::PUT_SIGNAL_ADD), Some(moved), then);
            }
            Action::PutValue { to, value: bytes, len, signal: then } => {
                op = with(then, code::PUT_VALUE, code::PUT_VALUE_SIGNAL_ADD);
                transfer = Some(Transfer { local_handle: 0, local_offset: 0, remote: to, len });
                (signal, value) = (then, bytes);
            }
            Action::Add { to, value: added } => {
                transfer = Some(Transfer { local_handle: 0, local_offset: 0, remote: to, len: 8 });
                (op, value) = (code::ADD, added);
            }
            Action::Flush { rank } => {
                let remote = Place { rank, handle: 0, offset: 0 };
                (op, transfer) =
                    (code::FLUSH, Some(Transfer { local_handle: 0, local_offset: 0, remote, len: 0 }));
            }
            Action::ResetCounter(reset) => {
                op = if reset.is_written_back { code::RESET_COUNTER } else { code::RESET_COUNTER_SILENTLY };
                counter = Some(Counted { is_written_back: false, ..reset });
            }
            Action::WriteBackCounter { index: stored } => {
                op = code::WRITE_BACK_COUNTER;
                counter = Some(Counted { index: stored, is_written_back: false });
            }
            Action::ResetSignal { index: reset } => (op, index) = (code::RESET_SIGNAL, reset),
        }
        let flags = match self.counter {
            Some(counted) => COUNTED | if counted.is_written_back { WRITE_BACK } else { 0 },
            None => 0,
        };
        let Signal { index, add } = signal.unwrap_or(Signal { index, add: 0 });
        let none = Place { rank: 0, handle: 0, offset: 0 };
        let moved = transfer.unwrap_or(Transfer { local_handle: 0, local_offset: 0, remote: none, len: 0 });
        let counter = u64::from(counter.map_or(0, |counter| counter.index));
        let words = [
            u64::from(op) << 16 | u64::from(flags) << 24 | counter << 32 | u64::from(index) << 48,
            u64::from(moved.remote.rank) << 1 | u64::from(moved.len) << 32,
            u64::from(moved.remote.handle) << 16 | add << 32,
            u64::from(moved.local_handle) << 16 | (add >> 32) << 32,
            moved.remote.offset << 1,
            moved.local_offset << 1,
            value << 32,
            (value >> 32) << 32,
        ];
        words.map(|word| word & !OWNER | u64::from(owner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: Place = Place { rank: 0x7fff_fffe, handle: 0xabcd, offset: (1 << 62) + 5 };
    const MOVED: Transfer =
        Transfer { local_handle: 0x1234, local_offset: (1 << 61) + 3, remote: TO, len: u32::MAX };
    const SIGNAL: Option<Signal> = Some(Signal { index: 0xfedc, add: 0x8765_4321_1234_5678 });

    #[test]
    fn every_operation_is_read_as_it_was_written() {
        let counter = Counted { index: 0x4321, is_written_back: true };
        let value = 0x0102_0304_8506_0708;
        let actions = [
            Action::Get(MOVED),
            Action::Put(MOVED, None),
            Action::Put(MOVED, SIGNAL),
            Action::PutValue { to: TO, value, len: 8, signal: None },
            Action::PutValue { to: TO, value, len: 4, signal: SIGNAL },
            Action::Add { to: TO, value },
            Action::Flush { rank: 7 },
        ];
        for action in actions {
            for counter in [None, Some(counter), Some(Counted { is_written_back: false, ..counter })] {
                let descriptor = Descriptor { action, counter };
                for owner in [false, true] {
                    let words = descriptor.words(owner);
                    assert!(words.iter().all(|word| word & OWNER == u64::from(owner)));
                    assert_eq!(Descriptor::parse(&words), Ok(descriptor));
                }
            }
        }
        for action in [
            Action::ResetCounter(counter),
            Action::ResetCounter(Counted { is_written_back: false, ..counter }),
            Action::WriteBackCounter { index: 9 },
            Action::ResetSignal { index: 17 },
        ] {
            let descriptor = Descriptor { action, counter: None };
            assert_eq!(Descriptor::parse(&descriptor.words(true)), Ok(descriptor));
        }
    }

    /// The words that NCCL's device code writes for a put of 4096 bytes with a signal and a
    /// counter.
    #[test]
    fn the_layout_is_that_of_gpi() {
        let words = [
            2 << 16 | 6 << 24 | 3 << 32 | 5 << 48,
            1 << 1 | 4096 << 32,
            7 << 16 | 9 << 32,
            8 << 16,
            0x100 << 1,
            0x200 << 1,
            0,
            0,
        ];
        let transfer = Transfer {
            local_handle: 8,
            local_offset: 0x200,
            remote: Place { rank: 1, handle: 7, offset: 0x100 },
            len: 4096,
        };
        let action = Action::Put(transfer, Some(Signal { index: 5, add: 9 }));
        let counter = Some(Counted { index: 3, is_written_back: true });
        assert_eq!(Descriptor::parse(&words), Ok(Descriptor { action, counter }));
    }

    #[test]
    fn what_does_not_exist_is_refused() {
        let parse = |header: u64| Descriptor::parse(&[header, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(parse(9 << 16), Err(Malformed::Operation(9)));
        assert_eq!(parse(0x84 << 16), Err(Malformed::Operation(0x84)));
        assert_eq!(parse(8 << 24), Err(Malformed::Flags(8)));
        // Any other words mean something, or are refused, but never panic.
        let mut state = 1_u64;
        for _ in 0..100_000 {
            let words = std::array::from_fn(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                state.rotate_left(17)
            });
            if let Ok(descriptor) = Descriptor::parse(&words) {
                assert_eq!(Descriptor::parse(&descriptor.words(false)), Ok(descriptor));
            }
        }
    }
}
