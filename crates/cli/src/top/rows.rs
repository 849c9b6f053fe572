//! The rows of the view: rates from two readings.

use std::time::Duration;

use serde::Serialize;

use crate::live::{LiveDevice, State};

/// A device with its rates.
#[derive(Clone, Debug, Serialize)]
pub(super) struct DeviceRow {
    #[serde(flatten)]
    pub(super) device: LiveDevice,
    pub(super) out_bytes_per_s: f64,
    pub(super) in_bytes_per_s: f64,
    pub(super) staged_bytes_per_s: f64,
    /// Share of one CPU that the engine threads take.
    pub(super) engine_cpu: f64,
}

/// What the rows are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    #[default]
    Rate,
    Total,
    Staged,
    Program,
}

impl Order {
    pub(super) const fn next(self) -> Self {
        match self {
            Self::Rate => Self::Total,
            Self::Total => Self::Staged,
            Self::Staged => Self::Program,
            Self::Program => Self::Rate,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::Total => "total",
            Self::Staged => "staged bytes",
            Self::Program => "program",
        }
    }
}

impl DeviceRow {
    pub(super) fn total(&self) -> u64 {
        LiveDevice::bytes(&self.device.out) + LiveDevice::bytes(&self.device.r#in)
    }

    /// Paths with bytes, the staged one last.
    pub(super) fn paths(&self) -> String {
        let used = crate::live::PATHS.iter().filter(|path| {
            [&self.device.out, &self.device.r#in]
                .iter()
                .any(|paths| paths.get(**path).is_some_and(|moved| moved.bytes > 0))
        });
        used.copied().collect::<Vec<_>>().join(" ")
    }
}

/// The devices now, with rates since the reading before. A device without one has no rate yet.
#[allow(clippy::cast_precision_loss, reason = "rates for people")]
pub(super) fn rows(before: &[LiveDevice], now: &[LiveDevice], passed: Duration) -> Vec<DeviceRow> {
    let row = |device: &LiveDevice| {
        let known = before.iter().find(|known| known.id == device.id);
        let rate = |of: &dyn Fn(&LiveDevice) -> u64| {
            let gained = known.map_or(0, |known| of(device).saturating_sub(of(known)));
            if passed.is_zero() { 0.0 } else { gained as f64 / passed.as_secs_f64() }
        };
        DeviceRow {
            out_bytes_per_s: rate(&|device| LiveDevice::bytes(&device.out)),
            in_bytes_per_s: rate(&|device| LiveDevice::bytes(&device.r#in)),
            staged_bytes_per_s: rate(&LiveDevice::staged),
            engine_cpu: rate(&|device| device.engine_cpu_ns) / 1e9,
            device: device.clone(),
        }
    };
    now.iter().map(row).collect()
}

/// Those whose program has the text, in order; live ones first.
pub(super) fn arranged(mut rows: Vec<DeviceRow>, order: Order, filter: &str, ended: bool) -> Vec<DeviceRow> {
    rows.retain(|row| {
        (ended || row.device.state == State::Live)
            && row.device.program.to_lowercase().contains(&filter.to_lowercase())
    });
    rows.sort_by(|a, b| {
        let by = match order {
            Order::Rate => {
                (b.out_bytes_per_s + b.in_bytes_per_s).total_cmp(&(a.out_bytes_per_s + a.in_bytes_per_s))
            }
            Order::Total => b.total().cmp(&a.total()),
            Order::Staged => b.device.staged().cmp(&a.device.staged()),
            Order::Program => a.device.program.cmp(&b.device.program),
        };
        let ended = |row: &DeviceRow| row.device.state != State::Live;
        ended(a).cmp(&ended(b)).then(by).then(a.device.id.cmp(&b.device.id))
    });
    rows
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::live::MovedByPath;

    pub(in crate::top) fn device(
        id: &str,
        program: &str,
        path: &str,
        bytes: u64,
        state: State,
    ) -> LiveDevice {
        LiveDevice {
            id: id.to_owned(),
            pid: 5,
            state,
            program: program.to_owned(),
            device: "nb0".to_owned(),
            address: "127.0.0.1".to_owned(),
            out: [(path.to_owned(), MovedByPath { bytes, operations: 1 })].into(),
            engine_cpu_ns: bytes,
            ..LiveDevice::default()
        }
    }

    #[test]
    fn rates_order_and_filter() {
        let before =
            [device("1-0", "b", "cpu", 1000, State::Live), device("2-0", "a", "staged", 500, State::Live)];
        let now = [
            device("1-0", "b", "cpu", 2000, State::Live),
            device("2-0", "a", "staged", 5500, State::Live),
            device("3-0", "new", "cpu", 9000, State::Live),
            device("4-0", "old", "cpu", 99_000, State::Killed),
        ];
        let all = rows(&before, &now, Duration::from_secs(2));
        let told: Vec<_> = all.iter().map(|row| (row.out_bytes_per_s, row.staged_bytes_per_s)).collect();
        assert_eq!(told, [(500.0, 0.0), (2500.0, 2500.0), (0.0, 0.0), (0.0, 0.0)]);
        let ids = |order, filter, ended| {
            arranged(all.clone(), order, filter, ended)
                .iter()
                .map(|row| row.device.id.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(ids(Order::Rate, "", false), ["2-0", "1-0", "3-0"]);
        assert_eq!(ids(Order::Total, "", true), ["3-0", "2-0", "1-0", "4-0"]);
        assert_eq!(ids(Order::Program, "", false), ["2-0", "1-0", "3-0"]);
        assert_eq!(ids(Order::Rate, "NE", true), ["3-0"]);
    }
}
