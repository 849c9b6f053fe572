//! Counters by device name (`nb0`), for dashboards that know adapters and no processes.
//!
//! Many devices have one name, one after the other and at the same time. Their sum must never fall:
//! Prometheus would take that for a restart from zero. So the counts of devices that are gone are
//! kept in a file of the live folder, which all readers of a user share.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nobounce::nic::soft::live_folder;
use serde::{Deserialize, Serialize};

use crate::live::{LiveDevice, State};

/// The file, the one that replaces it, and the lock of both.
const FILE: &str = "node-names";
const NEW: &str = "node-names.new";
const LOCK: &str = "node-names.lock";
/// Seconds after which a device that was not seen is no longer kept by itself: longer than the live
/// folder keeps devices that ended.
const FORGET: u64 = 1200;
/// How often the lock is tried, with pauses.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// What is summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Counts {
    pub(super) bytes_in: u64,
    pub(super) bytes_out: u64,
    pub(super) packets_in: u64,
    pub(super) packets_out: u64,
    pub(super) discards_in: u64,
    pub(super) discards_out: u64,
    pub(super) errors_in: u64,
}

impl Counts {
    fn of(device: &LiveDevice) -> Self {
        let lost_out = device.lost_of("_tx_");
        Self {
            bytes_in: LiveDevice::bytes(&device.r#in),
            bytes_out: LiveDevice::bytes(&device.out),
            packets_in: device.packets_received,
            packets_out: device.packets_sent,
            discards_in: device.lost().saturating_sub(lost_out),
            discards_out: lost_out,
            errors_in: device.packets_dropped,
        }
    }

    /// Each count by itself.
    fn with(self, other: Self, one: fn(u64, u64) -> u64) -> Self {
        Self {
            bytes_in: one(self.bytes_in, other.bytes_in),
            bytes_out: one(self.bytes_out, other.bytes_out),
            packets_in: one(self.packets_in, other.packets_in),
            packets_out: one(self.packets_out, other.packets_out),
            discards_in: one(self.discards_in, other.discards_in),
            discards_out: one(self.discards_out, other.discards_out),
            errors_in: one(self.errors_in, other.errors_in),
        }
    }
}

/// The devices of one name together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sum {
    pub(super) counts: Counts,
    pub(super) is_live: bool,
    pub(super) rate_gbps: u32,
    /// When counting began, in seconds since 1970.
    pub(super) created: u64,
}

/// A device that was seen.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Seen {
    device: String,
    counts: Counts,
    /// The last time, in seconds since 1970.
    at: u64,
}

/// The devices of one name that are gone.
#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
struct Gone {
    counts: Counts,
    created: u64,
    rate_gbps: u32,
}

/// What is kept from one reading to the next.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(super) struct NodeSums {
    gone: BTreeMap<String, Gone>,
    /// By the name of the file and the time of opening: process IDs are used again.
    seen: BTreeMap<String, Seen>,
}

impl NodeSums {
    /// The sums with these devices, by device name.
    pub(super) fn taken(&mut self, devices: &[LiveDevice], now: u64) -> BTreeMap<String, Sum> {
        for device in devices {
            let gone =
                self.gone.entry(device.device.clone()).or_insert(Gone { created: now, ..Gone::default() });
            gone.rate_gbps = gone.rate_gbps.max(device.rate_gbps);
            let seen = Seen { device: device.device.clone(), counts: Counts::default(), at: now };
            let seen = self.seen.entry(format!("{}@{}", device.id, device.since)).or_insert(seen);
            *seen = Seen { counts: seen.counts.with(Counts::of(device), u64::max), at: now, ..seen.clone() };
        }
        let Self { gone, seen } = self;
        seen.retain(|_, one| {
            let is_kept = now.saturating_sub(one.at) <= FORGET;
            if let (false, Some(gone)) = (is_kept, gone.get_mut(&one.device)) {
                gone.counts = gone.counts.with(one.counts, u64::saturating_add);
            }
            is_kept
        });
        let sum = |(name, gone): (&String, &Gone)| {
            let named = seen.values().filter(|one| one.device == *name);
            let counts = named.fold(gone.counts, |sum, one| sum.with(one.counts, u64::saturating_add));
            let is_live = devices.iter().any(|one| one.device == *name && one.state == State::Live);
            (name.clone(), Sum { counts, is_live, rate_gbps: gone.rate_gbps, created: gone.created })
        };
        gone.iter().map(sum).collect()
    }
}

/// The sums with these devices. Where nothing can be kept they are those of these devices alone.
pub(super) fn update(devices: &[LiveDevice]) -> BTreeMap<String, Sum> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    match live_folder::existing() {
        Some(folder) => update_in(&folder, devices, now),
        None => NodeSums::default().taken(devices, now),
    }
}

fn update_in(folder: &Path, devices: &[LiveDevice], now: u64) -> BTreeMap<String, Sum> {
    // Held until the end of the function.
    let lock = locked(&folder.join(LOCK));
    let text = live_folder::read(&folder.join(FILE)).unwrap_or_default();
    let mut sums: NodeSums = serde_json::from_slice(&text).unwrap_or_default();
    let taken = sums.taken(devices, now);
    if lock.is_some()
        && let Ok(text) = serde_json::to_vec(&sums)
    {
        let new = folder.join(NEW);
        let kept = fs::write(&new, text).and_then(|()| fs::rename(&new, folder.join(FILE)));
        if kept.is_err() {
            let _ = fs::remove_file(&new); // a full file system: the next reading tries again
        }
    }
    taken
}

/// The lock, unless another process keeps it for long.
fn locked(path: &Path) -> Option<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let mut options = File::options();
    options.write(true).create(true).truncate(false).mode(0o600).custom_flags(flags);
    let file = options.open(path).ok()?;
    for _ in 0..TRIES {
        match file.try_lock() {
            Ok(()) => return Some(file),
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(id: &str, packets_sent: u64, state: State) -> LiveDevice {
        LiveDevice {
            id: id.to_owned(),
            device: "nb0".to_owned(),
            since: 5,
            packets_sent,
            rate_gbps: 100,
            state,
            ..LiveDevice::default()
        }
    }

    #[test]
    fn sums_never_fall() {
        let folder = std::env::temp_dir().join(format!("nobounce-node-names-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let sum = |devices: &[LiveDevice], now: u64| {
            let sum = update_in(&folder, devices, now)["nb0"];
            (sum.counts.packets_out, sum.is_live, sum.created, sum.rate_gbps)
        };
        let (one, two) = (device("1-0", 10, State::Live), device("2-0", 100, State::Live));
        assert_eq!(sum(&[one.clone(), two.clone()], 1000), (110, true, 1000, 100));
        let ended = device("1-0", 12, State::Ended);
        assert_eq!(sum(&[ended, two.clone()], 1001), (112, true, 1000, 100));
        // Gone from the folder; a reading that misses a device; another one with its process ID.
        assert_eq!(sum(&[two], 1700), (112, true, 1000, 100));
        assert_eq!(sum(&[], 1701), (112, false, 1000, 100));
        assert_eq!(
            sum(&[LiveDevice { since: 9, ..device("2-0", 1, State::Live) }], 1702),
            (113, true, 1000, 100)
        );
        // Long after, only sums are kept.
        assert_eq!(sum(&[], 1702 + 3 * FORGET), (113, false, 1000, 100));
        let kept = fs::read_to_string(folder.join(FILE)).unwrap();
        assert!(kept.contains("\"seen\":{}"), "{kept}");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "the file and its lock");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_damaged_file_and_a_lock_of_others_do_not_stop_it() {
        let folder = std::env::temp_dir().join(format!("nobounce-node-damaged-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(FILE), "no JSON").unwrap();
        fs::create_dir(folder.join(LOCK)).unwrap();
        assert_eq!(update_in(&folder, &[device("1-0", 7, State::Live)], 9)["nb0"].counts.packets_out, 7);
        fs::remove_dir_all(&folder).unwrap();
    }
}
