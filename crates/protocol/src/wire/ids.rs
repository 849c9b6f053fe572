//! 24-bit numbers: queue pairs and packet sequence.

use std::fmt;

/// A queue pair number: 24 bits, printed in hex.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Qpn(u32);

impl Qpn {
    /// The largest queue pair number.
    pub const MAX: u32 = 0xff_ffff;
    /// The destination of multicast packets.
    pub const MULTICAST: Self = Self(Self::MAX);

    /// Takes the low 24 bits of `n`.
    pub const fn new(n: u32) -> Self {
        Self(n & Self::MAX)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A packet sequence number as the wire carries it: 24 bits, wrapping, printed in hex.
///
/// Inside the state machines sequence numbers are 64 bits wide and never wrap; [`Psn::extend`] and
/// [`Psn::of`] are the only two places where the two meet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// How many sequence numbers there are.
    pub const SPACE: u64 = 1 << 24;

    /// Takes the low 24 bits of `n`.
    pub const fn new(n: u32) -> Self {
        Self(n & 0xff_ffff)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number so many packets after it.
    #[must_use]
    pub const fn plus(self, packets: u32) -> Self {
        Self::new(self.0.wrapping_add(packets))
    }

    /// The number after it.
    #[must_use]
    pub const fn next(self) -> Self {
        self.plus(1)
    }

    /// The wire form of a 64-bit sequence number.
    #[allow(clippy::cast_possible_truncation)] // the mask is the point
    pub const fn of(wide: u64) -> Self {
        Self((wide & (Self::SPACE - 1)) as u32)
    }

    /// The 64-bit sequence number nearest to `reference` whose wire form this is.
    ///
    /// `reference` must be at least 2^24, which the state machines see to by starting there.
    pub const fn extend(self, reference: u64) -> u64 {
        let ahead = (self.0 as u64).wrapping_sub(reference) & (Self::SPACE - 1);
        if ahead < Self::SPACE / 2 {
            reference.wrapping_add(ahead)
        } else {
            reference.wrapping_add(ahead).wrapping_sub(Self::SPACE)
        }
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extend_finds_the_nearest_number_across_the_wrap() {
        let base = 5 * Psn::SPACE;
        for (reference, wire, want) in [
            (base, 0, base),
            (base, 0xff_ffff, base - 1),
            (base - 1, 0, base),
            (base + 7, 3, base + 3),
            (base, 0x7f_ffff, base + 0x7f_ffff),
            (base, 0x80_0000, base - 0x80_0000),
        ] {
            assert_eq!(Psn::new(wire).extend(reference), want, "{wire:#x} near {reference:#x}");
            assert_eq!(Psn::of(want).get(), wire);
        }
    }
}
