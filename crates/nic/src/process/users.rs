//! Whether a process runs as our user.
//!
//! In a user namespace the kernel shows every user without a mapping as one and the same, the
//! overflow user (65534). Its number says nothing then.

use std::sync::LazyLock;

/// The number that stands for unmapped users, if there can be any.
static OVERFLOW: LazyLock<Option<libc::uid_t>> = LazyLock::new(|| {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let overflow = read("/proc/sys/kernel/overflowuid").and_then(|text| text.trim().parse().ok());
    let is_identity = read("/proc/self/uid_map").is_none_or(|map| maps_everyone(&map));
    if is_identity { None } else { Some(overflow.unwrap_or(65534)) }
});

/// Whether a uid_map maps every user to itself.
fn maps_everyone(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Whether that is our own effective user, and no other one can look like it.
pub(crate) fn is_ours(uid: libc::uid_t) -> bool {
    // SAFETY: geteuid reads one number of this process and cannot fail.
    uid == unsafe { libc::geteuid() } && Some(uid) != *OVERFLOW
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_map_is_the_identity() {
        assert!(maps_everyone("         0          0 4294967295\n"));
        for map in ["0 1000 1\n", "0 0 65536\n", "65534 1000 1\n", "0 0 1\n1 100000 65535\n", ""] {
            assert!(!maps_everyone(map), "{map}");
        }
    }

    #[test]
    fn this_process_is_ours_and_others_are_not() {
        // SAFETY: geteuid reads one number of this process and cannot fail.
        let own = unsafe { libc::geteuid() };
        assert!(is_ours(own) || Some(own) == *OVERFLOW);
        assert!(!is_ours(own ^ 1));
    }
}
