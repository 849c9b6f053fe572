//! Times as the standard encodes them. All times are nanoseconds.

/// A point in time or a duration, in nanoseconds. The caller owns the clock.
pub type Nanos = u64;

/// One microsecond.
pub const MICROSECOND: Nanos = 1_000;
/// One millisecond.
pub const MILLISECOND: Nanos = 1_000_000;
/// One second.
pub const SECOND: Nanos = 1_000_000_000;

/// The local ack timeout of a 5-bit code: 4.096 us times 2^code; code 0 means never.
pub const fn ack_timeout(code: u8) -> Option<Nanos> {
    match code & 31 {
        0 => None,
        code => Some(4096 << code),
    }
}

/// The receiver-not-ready timer of a 5-bit code.
pub const fn rnr_timer(code: u8) -> Nanos {
    const HUNDREDTHS_OF_MS: [u64; 32] = [
        65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024, 1_536,
        2_048, 3_072, 4_096, 6_144, 8_192, 12_288, 16_384, 24_576, 32_768, 49_152,
    ];
    HUNDREDTHS_OF_MS[(code & 31) as usize] * 10 * MICROSECOND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standards_encodings() {
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(1), Some(8_192));
        assert_eq!(ack_timeout(14), Some(67_108_864)); // 67 ms, the usual default
        assert_eq!(ack_timeout(20), Some(4_294_967_296)); // 4.3 s, NCCL's
        assert_eq!(ack_timeout(31), Some(8_796_093_022_208));
        assert_eq!(rnr_timer(0), 655_360 * MICROSECOND);
        assert_eq!(rnr_timer(1), 10 * MICROSECOND);
        assert_eq!(rnr_timer(12), 640 * MICROSECOND);
        assert_eq!(rnr_timer(31), 491_520 * MICROSECOND);
    }
}
