//! The filesystem of a path.

use crate::facts::{Mount, Read};
use crate::sysfs::Root;

/// A mount, and the number of its device.
pub(super) struct Found {
    pub(super) mount: Mount,
    /// `259:1`; `0:35` where the filesystem has no block device.
    pub(super) device: String,
}

/// The mount that holds a path: the longest mount point that the path begins with; of several at
/// one point the last, which covers the others.
pub(super) fn of(root: &Root, path: &str) -> Read<Found> {
    let text = match root.text("/proc/self/mountinfo").or_else(|_| root.text("/proc/1/mountinfo")) {
        Ok(text) => text,
        Err(error) => return Read::no(format!("/proc/self/mountinfo: {error}")),
    };
    let mut best: Option<Found> = None;
    for found in text.lines().filter_map(parse) {
        let longest = best.as_ref().map_or(0, |best| best.mount.point.len());
        if holds(&found.mount.point, path) && found.mount.point.len() >= longest {
            best = Some(found);
        }
    }
    best.map_or_else(|| Read::no(format!("/proc/self/mountinfo names no mount that holds {path}")), Read::Yes)
}

fn holds(point: &str, path: &str) -> bool {
    point == "/" || path.strip_prefix(point).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`.
fn parse(line: &str) -> Option<Found> {
    let (front, back) = line.split_once(" - ")?;
    let mut front = front.split(' ');
    let device = front.nth(2)?.to_owned();
    let point = unescape(front.nth(1)?);
    let of_mount = front.next()?;
    let mut back = back.split(' ');
    let kind = back.next()?.to_owned();
    let source = unescape(back.next()?);
    let mut options: Vec<String> = Vec::new();
    for option in of_mount.split(',').chain(back.next().unwrap_or_default().split(',')) {
        if !option.is_empty() && options.len() < 128 && !options.iter().any(|known| known == option) {
            options.push(unescape(option));
        }
    }
    Some(Found { mount: Mount { point, kind, source, options, journal: Read::default() }, device })
}

/// The kernel writes blanks and backslashes in octal: `\040`.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        let (before, after) = rest.split_at(at);
        out.push_str(before);
        let digits = after.get(1..4).filter(|digits| digits.bytes().all(|b| (b'0'..=b'7').contains(&b)));
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if byte.is_ascii() => {
                out.push(char::from(byte));
                rest = after.get(4..).unwrap_or_default();
            }
            _ => {
                out.push('\\');
                rest = after.get(1..).unwrap_or_default();
            }
        }
    }
    out + rest
}

/// The journaling mode of ext4. Mount options name it only where it is not the default.
pub(super) fn journal(root: &Root, device: &str) -> Read<String> {
    let path = format!("/proc/fs/ext4/{device}/options");
    match root.text(&path) {
        Ok(text) => text
            .lines()
            .find_map(|line| line.trim().strip_prefix("data="))
            .map_or_else(|| Read::no(format!("{path} names no mode")), |mode| Read::Yes(mode.to_owned())),
        Err(error) => Read::no(format!("{path}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_mountinfo_are_read_with_their_octal_characters() {
        let found = parse(
            r"36 35 259:1 / /mnt/my\040data rw,noatime shared:1 master:2 - ext4 /dev/nvme0n1p1 rw,data=ordered",
        )
        .unwrap();
        assert_eq!((found.mount.point.as_str(), found.device.as_str()), ("/mnt/my data", "259:1"));
        assert_eq!(found.mount.options, ["rw", "noatime", "data=ordered"]);
        assert_eq!(unescape(r"a\\b\04\9"), r"a\\b\04\9");
        for line in ["", " - ", "1 2 3", "1 2 3 4 5 6 - ", "1 2 3 4 5 6 - ext4"] {
            assert!(parse(line).is_none(), "{line}");
        }
    }

    #[test]
    fn a_mount_point_holds_what_is_below_it_and_no_namesakes() {
        assert!(holds("/", "/a") && holds("/a", "/a") && holds("/a", "/a/b") && !holds("/a", "/ab"));
    }
}
