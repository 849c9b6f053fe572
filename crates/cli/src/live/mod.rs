//! The devices of this user, from the counters that they publish (docs/reference/json.md).

mod device;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use nobounce::nic::soft::{last_snapshot, live_folder};
use serde_json::{Value, json};

#[cfg(feature = "top")]
pub(crate) use self::device::PATHS;
pub(crate) use self::device::{Device, Moved, State};

/// Devices that are open, and those that ended in the last minutes; none without a runtime
/// directory.
pub(crate) fn devices() -> Vec<Device> {
    let Some(folder) = live_folder::existing() else { return Vec::new() };
    live_folder::prune(&folder);
    devices_in(&folder)
}

pub(crate) fn devices_in(folder: &Path) -> Vec<Device> {
    // A device that closes meanwhile has a marker and a report for a moment.
    let mut found: BTreeMap<String, Device> = BTreeMap::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let id = path.file_stem().and_then(OsStr::to_str).unwrap_or_default().to_owned();
        let read = match path.extension().and_then(OsStr::to_str) {
            Some("json") => fs::read(&path).ok().and_then(|text| Device::parse(&text, id, State::Ended)),
            Some(kind @ ("open" | "dead")) => {
                let is_live = kind == "open" && live_folder::is_alive(&path);
                let state = if is_live { State::Live } else { State::Killed };
                let live = fs::read(path.with_extension("live")).unwrap_or_default();
                let marker = fs::read(&path).unwrap_or_default();
                Device::parse(last_snapshot(&live).unwrap_or(&marker), id, state)
            }
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

/// The devices, as the page takes them.
pub(crate) fn event(devices: &[Device]) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    json!({ "time": now, "devices": devices.iter().map(Device::event).collect::<Vec<_>>() })
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
        let event = event(&devices);
        assert_eq!(event["devices"][2]["out"]["cpu"]["bytes"], 5);
        assert_eq!(event["devices"][2]["errors"][0], json!({"reason": "RemoteAccess", "count": 2}));
        assert_eq!(event["devices"][0]["state"], "killed");
    }
}
