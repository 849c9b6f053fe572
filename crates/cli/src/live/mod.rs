//! The devices of this user, from the counters that they publish (docs/reference/json.md).

mod device;
mod redact;
mod status;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use nobounce::nic::soft::{last_snapshot, live_folder};
use serde_json::{Value, json};

pub(crate) use self::device::{LiveDevice, MovedByPath, PATHS, State};
pub(crate) use self::redact::Redactor;
pub(crate) use self::status::FAILURES;
#[cfg(feature = "top")]
pub(crate) use self::status::meaning;

/// Devices that are open, and those that ended in the last minutes; none without a runtime
/// directory.
pub(crate) fn devices() -> Vec<LiveDevice> {
    let Some(folder) = live_folder::existing() else { return Vec::new() };
    live_folder::prune(&folder);
    devices_in(&folder)
}

/// Why devices are not seen, if that is so.
pub(crate) use nobounce::nic::soft::live_folder::trouble;

pub(crate) fn devices_in(folder: &Path) -> Vec<LiveDevice> {
    // A device that closes meanwhile has a marker and a report for a moment.
    let mut found: BTreeMap<String, LiveDevice> = BTreeMap::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let id = path.file_stem().and_then(OsStr::to_str).unwrap_or_default().to_owned();
        let read = match path.extension().and_then(OsStr::to_str) {
            Some("json") => report(&path, id),
            Some("open" | "dead") => marked(&path, id),
            _ => None,
        };
        let Some(device) = read else { continue };
        if device.state == State::Ended || !found.contains_key(&device.id) {
            found.insert(device.id.clone(), device);
        }
    }
    let mut devices: Vec<_> = found.into_values().collect();
    devices.sort_by_key(|device| (device.state != State::Live, device.since, device.pid));
    devices
}

/// A device that has closed.
fn report(path: &Path, id: String) -> Option<LiveDevice> {
    LiveDevice::parse(&live_folder::read(path)?, id, State::Ended)
}

/// The device of a marker. It may close, or be found dead by another reader, at any moment.
fn marked(marker: &Path, id: String) -> Option<LiveDevice> {
    let is_live = marker.extension().is_some_and(|kind| kind == "open") && live_folder::is_alive(marker);
    let state = if is_live { State::Live } else { State::Killed };
    let live = live_folder::read(&marker.with_extension("live"));
    if let Some(snapshot) = live.as_deref().and_then(last_snapshot) {
        return LiveDevice::parse(snapshot, id, state);
    }
    // Closing puts the report into place before the snapshots go: without them a report may have
    // come after the listing. The marker alone would set all counters to zero.
    if let Some(ended) = report(&marker.with_extension("json"), id.clone()) {
        return Some(ended);
    }
    let head = live_folder::read(marker).or_else(|| live_folder::read(&marker.with_extension("dead")))?;
    LiveDevice::parse(&head, id, state)
}

/// The devices, as the page takes them.
pub(crate) fn event(devices: &[LiveDevice], trouble: Option<String>) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let devices: Vec<_> = devices.iter().map(LiveDevice::event).collect();
    json!({ "time": now, "devices": devices, "trouble": trouble })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_with_their_state() {
        let folder = std::env::temp_dir().join(format!("nobounce-live-read-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let head = r#"{"version": 1, "pid": 7, "program": "a", "device": "nb0", "address": "127.0.0.1", "since": 5}"#;
        // No process holds a lock on it.
        fs::write(folder.join("7-0.open"), head).unwrap();
        let report = r#"{"version": 1, "pid": 8, "program": "b", "device": "nb1", "address": "::1", "since": 6,
            "out": {"cpu": {"bytes": 5, "operations": 1}}, "errors": {"RemoteAccess": 2}, "unknown": [1]}"#;
        fs::write(folder.join("8-0.json"), report).unwrap();
        fs::write(folder.join("8-0.open"), head).unwrap();
        fs::write(folder.join("9-0.json"), "not JSON").unwrap();
        fs::write(folder.join("6-0.dead"), head.replace('7', "6")).unwrap();
        fs::write(folder.join("x.live"), "").unwrap();
        let devices = devices_in(&folder);
        fs::remove_dir_all(&folder).unwrap();
        let told: Vec<_> =
            devices.iter().map(|one| (one.id.as_str(), one.state, one.program.as_str())).collect();
        assert_eq!(told[1..], [("7-0", State::Killed, "a"), ("8-0", State::Ended, "b")]);
        assert_eq!(told[0], ("6-0", State::Killed, "a"));
        let event = event(&devices, None);
        assert_eq!(event["devices"][2]["out"]["cpu"]["bytes"], 5);
        assert_eq!(
            event["devices"][2]["errors"][0],
            json!({"status": "RemoteAccess", "reason": meaning("RemoteAccess"), "count": 2})
        );
        assert_eq!(event["devices"][0]["state"], "killed");
    }

    fn folder(name: &str) -> std::path::PathBuf {
        let folder = std::env::temp_dir().join(format!("nobounce-live-{name}-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        folder
    }

    #[test]
    fn a_device_that_closes_after_the_listing_keeps_its_counters() {
        let folder = folder("closing");
        let marker = folder.join("7-0.open");
        fs::write(&marker, r#"{"version": 1, "pid": 7}"#).unwrap();
        fs::write(folder.join("7-0.json"), r#"{"version": 1, "pid": 7, "packets_sent": 9}"#).unwrap();
        let device = marked(&marker, "7-0".to_owned()).unwrap();
        assert_eq!((device.packets_sent, device.state), (9, State::Ended));
        fs::remove_file(&marker).unwrap();
        assert_eq!(marked(&marker, "7-0".to_owned()).unwrap().packets_sent, 9, "the marker is gone, too");
        fs::rename(folder.join("7-0.json"), folder.join("7-0.dead")).unwrap();
        assert_eq!(
            marked(&marker, "7-0".to_owned()).unwrap().state,
            State::Killed,
            "another reader was first"
        );
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn hostile_files_neither_block_nor_overflow() {
        let folder = folder("hostile");
        for kind in ["json", "open", "dead", "live"] {
            let fifo = std::ffi::CString::new(format!("{}/1-0.{kind}", folder.display())).unwrap();
            // SAFETY: the path is a C string.
            assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        }
        let long = fs::File::create(folder.join("2-0.json")).unwrap();
        long.set_len(1 << 40).unwrap();
        std::os::unix::fs::symlink("/proc/self/environ", folder.join("3-0.json")).unwrap();
        let most = r#"{"bytes": 18446744073709551615, "operations": 18446744073709551615}"#;
        let text = format!(
            r#"{{"pid": 4, "in": {{"cpu": {most}, "staged": {most}}}, "out": {{"x": {most}, "staged": {most}}},
            "errors": {{"a": 18446744073709551615, "b": 1}}, "retransmissions": 18446744073709551615,
            "link": {{"udp_tx_lost_other": 18446744073709551615, "handover_lost": 2}}}}"#
        );
        fs::write(folder.join("4-0.json"), &text).unwrap();
        live_folder::prune(&folder);
        let devices = devices_in(&folder);
        fs::remove_dir_all(&folder).unwrap();
        let [device] = &devices[..] else { panic!("{devices:?}") };
        let sums = [
            LiveDevice::bytes(&device.r#in),
            LiveDevice::bytes(&device.out),
            device.staged(),
            device.lost(),
            device.failed(),
        ];
        assert_eq!(sums, [u64::MAX; 5]);
        let mut twice = device.clone();
        twice.add(device.clone());
        assert_eq!((twice.retransmissions, twice.staged()), (u64::MAX, u64::MAX));
        assert!(event(&devices, None).to_string().contains("18446744073709551615"));
    }
}
