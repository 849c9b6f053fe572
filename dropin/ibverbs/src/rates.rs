//! Static rates: the standard's codes, multiples of 2.5 Gb/s, and Mb/s.

use std::ffi::c_int;

/// Code, multiple of 2.5 Gb/s (0 where it is none that the standard names), Mb/s.
const RATES: [(u32, c_int, c_int); 23] = [
    (2, 1, 2_500),
    (5, 2, 5_000),
    (3, 4, 10_000),
    (6, 8, 20_000),
    (4, 12, 30_000),
    (7, 16, 40_000),
    (8, 24, 60_000),
    (9, 32, 80_000),
    (10, 48, 120_000),
    (11, 0, 14_062),
    (12, 0, 56_250),
    (13, 0, 112_500),
    (14, 0, 168_750),
    (15, 0, 25_781),
    (16, 0, 103_125),
    (17, 0, 206_250),
    (18, 0, 309_375),
    (19, 11, 28_125),
    (20, 20, 53_125),
    (21, 160, 425_000),
    (22, 240, 637_500),
    (23, 320, 850_000),
    (24, 480, 1_275_000),
];

/// `ibv_rate_to_mult`.
pub(crate) unsafe extern "C" fn rate_to_mult(rate: u32) -> c_int {
    RATES.iter().find(|(code, mult, _)| *code == rate && *mult > 0).map_or(-1, |(_, mult, _)| *mult)
}

/// `mult_to_ibv_rate`: 0, the port's own rate, where there is no such multiple.
pub(crate) unsafe extern "C" fn mult_to_rate(mult: c_int) -> u32 {
    RATES.iter().find(|(_, known, _)| *known > 0 && *known == mult).map_or(0, |(code, ..)| *code)
}

/// `ibv_rate_to_mbps`.
pub(crate) unsafe extern "C" fn rate_to_mbps(rate: u32) -> c_int {
    RATES.iter().find(|(code, ..)| *code == rate).map_or(-1, |(_, _, mbps)| *mbps)
}

/// `mbps_to_ibv_rate`: 0, the port's own rate, where there is no such rate.
pub(crate) unsafe extern "C" fn mbps_to_rate(mbps: c_int) -> u32 {
    RATES.iter().find(|(_, _, known)| *known == mbps).map_or(0, |(code, ..)| *code)
}
