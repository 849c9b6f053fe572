//! The metrics: names, labels and what they count.

use super::format::{Family, Kind, Sample};
use crate::live::{Device, State};

/// Counters of the link that mean a lost packet.
const LOST: &str = "_lost_";

/// The metrics of these devices; with those of node_exporter's InfiniBand collector too, if wanted.
#[allow(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
pub(super) fn of(devices: &[Device], node_names: bool) -> Vec<Family> {
    let gauge = |name, help, value: fn(&Device) -> f64| each(devices, name, help, Kind::Gauge, value);
    let counter = |name, help, value: fn(&Device) -> f64| each(devices, name, help, Kind::Counter, value);
    let mut families = vec![
        gauge("nobounce_device_up", "Whether the device is open.", |device| {
            f64::from(u8::from(device.state == State::Live))
        }),
        gauge(
            "nobounce_device_opened_seconds",
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
            device.link.iter().filter(|(name, _)| name.contains(LOST)).map(|(_, count)| *count as f64).sum()
        }),
        counter("nobounce_retransmissions", "Retransmissions.", |device| device.retransmissions as f64),
        errors(devices),
        gauge("nobounce_queue_pairs", "Queue pairs.", |device| device.queue_pairs as f64),
        counter("nobounce_engine_cpu_seconds", "CPU time of the engine threads.", |device| {
            std::time::Duration::from_nanos(device.engine_cpu_ns).as_secs_f64()
        }),
    ];
    if node_names {
        families.extend(node_families(devices));
    }
    families
}

fn labels(device: &Device) -> Vec<(&'static str, String)> {
    vec![
        ("device", device.device.clone()),
        ("address", device.address.clone()),
        // A process may have several devices.
        ("id", device.id.clone()),
        ("program", device.program.clone()),
    ]
}

fn with(device: &Device, more: &[(&'static str, &str)], value: f64) -> Sample {
    let mut labels = labels(device);
    labels.extend(more.iter().map(|(name, value)| (*name, (*value).to_owned())));
    Sample { labels, value }
}

fn each(
    devices: &[Device],
    name: &'static str,
    help: &'static str,
    kind: Kind,
    value: fn(&Device) -> f64,
) -> Family {
    let samples = devices.iter().map(|device| with(device, &[], value(device))).collect();
    Family { name, help, kind, samples }
}

#[allow(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
fn paths(
    devices: &[Device],
    name: &'static str,
    help: &'static str,
    value: fn(&crate::live::Moved) -> u64,
) -> Family {
    let samples = devices.iter().flat_map(|device| {
        [("in", &device.r#in), ("out", &device.out)].into_iter().flat_map(move |(direction, paths)| {
            paths.iter().map(move |(path, moved)| {
                with(device, &[("direction", direction), ("path", path)], value(moved) as f64)
            })
        })
    });
    Family { name, help, kind: Kind::Counter, samples: samples.collect() }
}

#[allow(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
fn links(devices: &[Device]) -> Family {
    let samples = devices.iter().flat_map(|device| {
        [("shm", "out", "tx"), ("shm", "in", "rx"), ("udp", "out", "tx"), ("udp", "in", "rx")].map(
            |(link, direction, way)| {
                let bytes = device.link(&format!("{link}_{way}_bytes")) as f64;
                with(device, &[("direction", direction), ("link", link)], bytes)
            },
        )
    });
    let help = "Bytes of packets by direction and link, headers included.";
    Family { name: "nobounce_link_bytes", help, kind: Kind::Counter, samples: samples.collect() }
}

#[allow(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
fn errors(devices: &[Device]) -> Family {
    let samples = devices.iter().flat_map(|device| {
        device.errors.iter().map(|(status, count)| with(device, &[("status", status)], *count as f64))
    });
    let help = "Failed work requests by completion status.";
    Family { name: "nobounce_errors", help, kind: Kind::Counter, samples: samples.collect() }
}

/// Each device as an adapter with one port. (A sum over devices would fall when one of them ends,
/// which Prometheus takes for a restart from zero.)
#[allow(clippy::cast_precision_loss, reason = "Prometheus' values are floats")]
fn node_families(devices: &[Device]) -> Vec<Family> {
    let port = |device: &Device, value| Sample {
        labels: vec![("device", format!("{}-{}", device.device, device.id)), ("port", "1".to_owned())],
        value,
    };
    let sum = |name, help, kind, value: fn(&Device) -> u64| {
        let samples = devices.iter().map(|device| port(device, value(device) as f64)).collect();
        Family { name, help, kind, samples }
    };
    vec![
        sum(
            "node_infiniband_port_data_received_bytes",
            "Number of data octets received on all links",
            Kind::Counter,
            |device| Device::bytes(&device.r#in),
        ),
        sum(
            "node_infiniband_port_data_transmitted_bytes",
            "Number of data octets transmitted on all links",
            Kind::Counter,
            |device| Device::bytes(&device.out),
        ),
        sum(
            "node_infiniband_port_packets_received",
            "Number of packets received on all VLs by this port (including errors)",
            Kind::Counter,
            |device| device.packets_received,
        ),
        sum(
            "node_infiniband_port_packets_transmitted",
            "Number of packets transmitted on all VLs from this port (including errors)",
            Kind::Counter,
            |device| device.packets_sent,
        ),
        Family {
            name: "node_infiniband_state_id",
            help: "State of the InfiniBand port (0: no change, 1: down, 2: init, 3: armed, 4: active, 5: act defer)",
            kind: Kind::Gauge,
            samples: devices
                .iter()
                .map(|device| port(device, if device.state == State::Live { 4.0 } else { 1.0 }))
                .collect(),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::Moved;
    use crate::metrics::format::{Format, text};

    fn device() -> Device {
        let moved = |bytes| [("cpu".to_owned(), Moved { bytes, operations: 2 })].into();
        let link = [("shm_tx_bytes".to_owned(), 7), ("udp_tx_lost_buffer_full".to_owned(), 3)].into();
        Device {
            id: "5-0".to_owned(),
            pid: 5,
            program: "ib_write_bw".to_owned(),
            device: "nb0".to_owned(),
            address: "127.0.0.1".to_owned(),
            r#in: moved(10),
            out: moved(20),
            errors: [("RemoteAccess".to_owned(), 1)].into(),
            link,
            ..Device::default()
        }
    }

    #[test]
    fn every_counter_has_a_name() {
        insta::assert_snapshot!(text(&of(&[device()], true), Format::Prometheus));
    }

    #[test]
    fn the_dashboard_asks_for_names_that_exist() {
        let dashboard = include_str!("../../../../docs/grafana/nobounce.json");
        let dashboard: serde_json::Value = serde_json::from_str(dashboard).unwrap();
        let names: Vec<String> = of(&[device()], false)
            .iter()
            .map(|family| {
                format!("{}{}", family.name, if family.kind == Kind::Counter { "_total" } else { "" })
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
