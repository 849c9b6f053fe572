//! Random numbers for keys, queue pair numbers and communication IDs.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// A random number. Where the system gives none (a sandbox may forbid getrandom and hide
/// /dev/urandom), one that differs from call to call: an allocation that retries must end.
pub(crate) fn random_u32() -> u32 {
    let mut bytes = [0_u8; 4];
    // SAFETY: four writable bytes. For so few the call neither blocks (after boot) nor returns
    // short.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == 4 || File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).is_ok() {
        return u32::from_ne_bytes(bytes);
    }
    unpredictable_enough()
}

/// Bytes that no one can guess.
///
/// # Errors
/// The system gives none.
pub(crate) fn seed() -> io::Result<[u8; 32]> {
    let mut bytes = [0_u8; 32];
    // SAFETY: as many writable bytes. For so few the call neither blocks (after boot) nor returns
    // short.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != 32 {
        File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes))?;
    }
    Ok(bytes)
}

/// 64 of them.
pub(crate) fn random_u64() -> u64 {
    u64::from(random_u32()) << 32 | u64::from(random_u32())
}

/// Mixes the clock, the process, an address and a counter (SplitMix64).
fn unpredictable_enough() -> u32 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let place = std::ptr::from_ref(&COUNT).addr() as u64;
    let count = COUNT.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    let mut mixed =
        u64::try_from(time & u128::from(u64::MAX)).unwrap_or(0) ^ place ^ u64::from(std::process::id()) << 40;
    mixed = mixed.wrapping_add(count);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    u32::try_from((mixed ^ mixed >> 31) >> 32).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn numbers_differ_with_and_without_the_system() {
        for one in [random_u32, unpredictable_enough] {
            let different: HashSet<u32> = (0..1000).map(|_| one()).collect();
            assert!(different.len() > 990, "{}", different.len());
        }
    }
}
