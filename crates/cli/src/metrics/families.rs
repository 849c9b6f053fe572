//! The metrics: names, labels and what they count.

use std::collections::{BTreeMap, BTreeSet};

use super::format::{Family, MetricKind, Sample};
use super::node_sums::Sum;
use crate::live::{FAILURES, LiveDevice, MovedByPath, PATHS, State};

/// The metrics of these devices; with those of node_exporter's InfiniBand collector too, where
/// there are sums for them.
#[allow(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
pub(super) fn of(devices: &[LiveDevice], sums: Option<&BTreeMap<String, Sum>>) -> Vec<Family> {
    let gauge =
        |name, help, value: fn(&LiveDevice) -> f64| each(devices, name, help, MetricKind::Gauge, value);
    let counter =
        |name, help, value: fn(&LiveDevice) -> f64| each(devices, name, help, MetricKind::Counter, value);
    let mut families = vec![
        gauge("nobounce_device_up", "Whether the device is open.", |device| {
            f64::from(u8::from(device.state == State::Live))
        }),
        gauge(
            "nobounce_device_opened_timestamp_seconds",
            "When the device was opened, in seconds since 1970.",
            |device| device.since as f64,
        ),
        paths(devices, "nobounce_bytes", "Payload bytes by direction and path.", |moved| moved.bytes),
        paths(devices, "nobounce_operations", "Operations by direction and path.", |moved| moved.operations),
        links(devices),
        counter("nobounce_packets_sent", "Packets sent.", |device| device.packets_sent as f64),
        counter("nobounce_packets_received", "Packets received.", |device| device.packets_received as f64),
        counter("nobounce_packets_dropped", "Received packets that were dropped.", |device| {
            device.packets_dropped as f64
        }),
        counter("nobounce_packets_lost", "Packets that the link could not send or receive.", |device| {
            device.lost() as f64
        }),
        counter("nobounce_retransmissions", "Retransmissions.", |device| device.retransmissions as f64),
        errors(devices),
        gauge("nobounce_queue_pairs", "Queue pairs.", |device| device.queue_pairs as f64),
        counter("nobounce_engine_cpu_seconds", "CPU time of the engine threads.", |device| {
            std::time::Duration::from_nanos(device.engine_cpu_ns).as_secs_f64()
        }),
    ];
    families.extend(refused(devices));
    if let Some(sums) = sums {
        families.extend(node_families(sums));
    }
    families
}

fn labels(device: &LiveDevice) -> Vec<(&'static str, String)> {
    vec![
        ("device", device.device.clone()),
        ("address", device.address.clone()),
        // A process may have several devices.
        ("id", device.id.clone()),
        ("program", device.program.clone()),
    ]
}

fn with(device: &LiveDevice, more: &[(&'static str, &str)], value: f64) -> Sample {
    let mut labels = labels(device);
    labels.extend(more.iter().map(|(name, value)| (*name, (*value).to_owned())));
    Sample { labels, value, created: device.since }
}

fn each(
    devices: &[LiveDevice],
    name: &'static str,
    help: &'static str,
    kind: MetricKind,
    value: fn(&LiveDevice) -> f64,
) -> Family {
    let samples = devices.iter().map(|device| with(device, &[], value(device))).collect();
    Family { name, help, kind, samples }
}

/// The known names and those that a device has besides. A series begins with zero when its device
/// opens: a rate does not see a series that begins with its first event.
fn names<'a, T>(known: &[&'a str], found: &'a BTreeMap<String, T>) -> BTreeSet<&'a str> {
    known.iter().copied().chain(found.keys().map(String::as_str)).collect()
}

#[allow(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
fn paths(
    devices: &[LiveDevice],
    name: &'static str,
    help: &'static str,
    value: fn(&MovedByPath) -> u64,
) -> Family {
    let samples = devices.iter().flat_map(|device| {
        [("in", &device.r#in), ("out", &device.out)].into_iter().flat_map(move |(direction, paths)| {
            names(&PATHS, paths).into_iter().map(move |path| {
                let moved = paths.get(path).copied().unwrap_or_default();
                with(device, &[("direction", direction), ("path", path)], value(&moved) as f64)
            })
        })
    });
    Family { name, help, kind: MetricKind::Counter, samples: samples.collect() }
}

#[allow(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
fn links(devices: &[LiveDevice]) -> Family {
    let samples = devices.iter().flat_map(|device| {
        [("shm", "out", "tx"), ("shm", "in", "rx"), ("udp", "out", "tx"), ("udp", "in", "rx")].map(
            |(link, direction, way)| {
                let bytes = device.link(&format!("{link}_{way}_bytes")) as f64;
                with(device, &[("direction", direction), ("link", link)], bytes)
            },
        )
    });
    let help = "Bytes of packets by direction and link, headers included.";
    Family { name: "nobounce_link_bytes", help, kind: MetricKind::Counter, samples: samples.collect() }
}

/// What devices with a key, or with a list of peers, dropped of the network.
#[allow(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
fn refused(devices: &[LiveDevice]) -> Option<Family> {
    let samples: Vec<_> = devices
        .iter()
        .flat_map(|device| {
            device.link.iter().filter_map(move |(name, count)| {
                let sealed = name.strip_prefix("sealed_drop_");
                let reason = sealed.or_else(|| (name == "unlisted_peer").then_some(name))?;
                Some(with(device, &[("reason", reason)], *count as f64))
            })
        })
        .collect();
    let help = "Packets dropped for lack of the key, or from a peer that is not listed, by reason.";
    (!samples.is_empty()).then_some(Family {
        name: "nobounce_packets_refused",
        help,
        kind: MetricKind::Counter,
        samples,
    })
}

#[allow(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
fn errors(devices: &[LiveDevice]) -> Family {
    let samples = devices.iter().flat_map(|device| {
        names(&FAILURES.map(|(status, _)| status), &device.errors).into_iter().map(|status| {
            let count = device.errors.get(status).copied().unwrap_or_default();
            with(device, &[("status", status)], count as f64)
        })
    });
    let help = "Failed work requests by completion status.";
    Family { name: "nobounce_errors", help, kind: MetricKind::Counter, samples: samples.collect() }
}

/// All devices of one name as an adapter with one port, as node_exporter has it. Counters of a
/// physical port that the software device does not count are absent.
#[allow(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
fn node_families(sums: &BTreeMap<String, Sum>) -> Vec<Family> {
    let family = |name, help, kind, value: fn(&Sum) -> f64| {
        let samples = sums.iter().map(|(device, sum)| Sample {
            labels: vec![("device", device.clone()), ("port", "1".to_owned())],
            value: value(sum),
            created: sum.created,
        });
        Family { name, help, kind, samples: samples.collect() }
    };
    let counter = |name, help, value| family(name, help, MetricKind::Counter, value);
    let gauge = |name, help, value| family(name, help, MetricKind::Gauge, value);
    let info = sums.keys().map(|device| Sample {
        labels: vec![
            ("device", device.clone()),
            ("board_id", "nobounce".to_owned()),
            ("firmware_version", env!("CARGO_PKG_VERSION").to_owned()),
            ("hca_type", "nobounce".to_owned()),
        ],
        value: 1.0,
        created: 0,
    });
    vec![
        Family {
            name: "node_infiniband_info",
            help: "Non-numeric data from /sys/class/infiniband/<device>, value is always 1.",
            kind: MetricKind::Gauge,
            samples: info.collect(),
        },
        counter(
            "node_infiniband_port_data_received_bytes",
            "Number of data octets received on all links",
            |sum| sum.counts.bytes_in as f64,
        ),
        counter(
            "node_infiniband_port_data_transmitted_bytes",
            "Number of data octets transmitted on all links",
            |sum| sum.counts.bytes_out as f64,
        ),
        counter(
            "node_infiniband_port_packets_received",
            "Number of packets received on all VLs by this port (including errors)",
            |sum| sum.counts.packets_in as f64,
        ),
        counter(
            "node_infiniband_port_packets_transmitted",
            "Number of packets transmitted on all VLs from this port (including errors)",
            |sum| sum.counts.packets_out as f64,
        ),
        counter(
            "node_infiniband_port_discards_received",
            "Number of inbound packets discarded by the port because the port is down or congested",
            |sum| sum.counts.discards_in as f64,
        ),
        counter(
            "node_infiniband_port_discards_transmitted",
            "Number of outbound packets discarded by the port because the port is down or congested",
            |sum| sum.counts.discards_out as f64,
        ),
        counter(
            "node_infiniband_port_errors_received",
            "Number of packets containing an error that were received on this port",
            |sum| sum.counts.errors_in as f64,
        ),
        gauge(
            "node_infiniband_state_id",
            "State of the InfiniBand port (0: no change, 1: down, 2: init, 3: armed, 4: active, 5: act defer)",
            |sum| if sum.is_live { 4.0 } else { 1.0 },
        ),
        gauge(
            "node_infiniband_physical_state_id",
            "Physical state of the InfiniBand port (0: no change, 1: sleep, 2: polling, 3: disable, 4: shift, \
             5: link up, 6: link error recover, 7: phytest)",
            |sum| if sum.is_live { 5.0 } else { 3.0 },
        ),
        gauge("node_infiniband_rate_bytes_per_second", "Maximum signal transfer rate", |sum| {
            f64::from(sum.rate_gbps) * 1e9 / 8.0
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::format::{Format, text};
    use crate::metrics::node_sums::NodeSums;

    fn device() -> LiveDevice {
        let moved = |bytes| [("cpu".to_owned(), MovedByPath { bytes, operations: 2 })].into();
        let link = [
            ("shm_tx_bytes", 7),
            ("udp_tx_lost_buffer_full", 3),
            ("handover_lost", 20),
            ("udp_rx_lost_queue_full", 100),
            ("fault_lost", 1000),
        ];
        LiveDevice {
            id: "5-0".to_owned(),
            pid: 5,
            program: "ib_write_bw".to_owned(),
            device: "nb0".to_owned(),
            address: "127.0.0.1".to_owned(),
            r#in: moved(10),
            out: moved(20),
            errors: [("RemoteAccess".to_owned(), 1)].into(),
            link: link.map(|(name, count)| (name.to_owned(), count)).into(),
            since: 1_700_000_000,
            rate_gbps: 100,
            ..LiveDevice::default()
        }
    }

    #[test]
    fn every_counter_has_a_name() {
        let sums = NodeSums::default().taken(&[device()], 1_700_000_005);
        insta::assert_snapshot!(text(&of(&[device()], Some(&sums)), Format::Prometheus));
    }

    /// A first event between two scrapes is a rise from zero, and a device that has not written its
    /// counters yet has all series.
    #[test]
    fn every_series_is_there_from_the_start() {
        let new =
            LiveDevice { r#in: BTreeMap::new(), out: BTreeMap::new(), errors: BTreeMap::new(), ..device() };
        let series = |device: &LiveDevice| {
            let samples = of(std::slice::from_ref(device), None).into_iter().flat_map(|family| {
                family.samples.into_iter().map(move |sample| (family.name, sample.labels, sample.created))
            });
            samples.collect::<Vec<_>>()
        };
        assert_eq!(series(&new), series(&device()));
        let text = text(&of(&[new], None), Format::OpenMetrics);
        assert_eq!(text.matches("\nnobounce_bytes_total{").count(), 12);
        assert_eq!(text.matches("\nnobounce_bytes_created{").count(), 12);
        assert_eq!(text.matches("} 1700000000\n").count(), text.matches("_created{").count() + 1, "{text}");
    }

    #[test]
    fn the_dashboard_asks_for_names_that_exist() {
        let dashboard = include_str!("../../../../docs/grafana/nobounce.json");
        let dashboard: serde_json::Value = serde_json::from_str(dashboard).unwrap();
        let names: Vec<String> = of(&[device()], None)
            .iter()
            .map(|family| {
                format!("{}{}", family.name, if family.kind == MetricKind::Counter { "_total" } else { "" })
            })
            .collect();
        let mut asked = 0;
        for panel in dashboard["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let query = target["expr"].as_str().unwrap();
                let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                for word in words.filter(|word| word.starts_with("nobounce_")) {
                    assert!(names.iter().any(|name| name == word), "{word} in {query}");
                    asked += 1;
                }
            }
        }
        assert!(asked >= 8, "{asked} names");
    }
}
