//! Published figures against the model: the table of docs/predict.md.

use std::fmt::Write as _;

use nobounce_topology::predict::model::direct;
use nobounce_topology::predict::parts::Spec;
use nobounce_topology::predict::slot::Slot;
use nobounce_topology::predict::staging::staged;
use nobounce_topology::predict::{constants, window};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    id: String,
    source: String,
    what: String,
    figure: String,
    unit: String,
    way: String,
    /// `good`: the error is bounded. `other`: shown only, and the note says why.
    state: String,
    /// `least`: the source says "more than".
    #[serde(default)]
    bound: Option<String>,
    #[serde(default)]
    note: String,
    #[serde(default)]
    nvlinks: Option<u32>,
    #[serde(default)]
    per_link: Option<f64>,
    parts: Spec,
    points: Vec<(u64, f64)>,
}

/// In microseconds, or GB/s of 10^9 bytes.
fn measured(unit: &str, value: f64) -> f64 {
    match unit {
        "us" | "GB/s" => value,
        "Gb/s" => value / 8.0,
        "MB/s" => value / 1e3,
        "MiB/s" => value * 1_048_576.0 / 1e9,
        other => panic!("no unit: {other}"),
    }
}

#[allow(clippy::cast_precision_loss)]
fn predicted(row: &Row, size: u64) -> f64 {
    let bytes = size as f64;
    let slot = row.parts.gpu.unwrap_or(Slot { generation: 3, lanes: 16 });
    match row.figure.as_str() {
        "window_store_us" => bytes / window::store(slot) / 1000.0,
        "window_load_us" => window::load_microseconds(size),
        "window_store_gbytes" => window::store(slot),
        "window_load_gbytes" => bytes / window::load_microseconds(size) / 1000.0,
        "copy_engine" => slot.copy_engine(),
        "nvlink" => window::nvlink(row.nvlinks.unwrap(), row.per_link.unwrap()),
        figure => {
            let parts = row.parts.resolve().unwrap_or_else(|error| panic!("{}: {error}", row.id));
            let estimate = match row.way.as_str() {
                "staged" => staged(&parts, size, true),
                _ => direct(&parts, size).unwrap(),
            };
            match figure {
                "microseconds" => estimate.microseconds.expected,
                "lone_gbytes_per_s" => bytes / estimate.microseconds.expected / 1000.0,
                "gbytes_per_s" => estimate.gbytes_per_s.expected,
                other => panic!("no figure: {other}"),
            }
        }
    }
}

fn rows() -> Vec<Row> {
    serde_json::from_str(include_str!("predict/published.json")).unwrap()
}

#[test]
fn published_figures_are_predicted() {
    let (mut table, mut wrong) = (String::new(), Vec::new());
    for row in rows() {
        for (size, value) in &row.points {
            let (measured, predicted) = (measured(&row.unit, *value), predicted(&row, *size));
            let error = (predicted / measured - 1.0) * 100.0;
            let limit = if *size >= 1 << 20 { 5.0 } else { 20.0 };
            let least = row.bound.as_deref() == Some("least");
            let bad = if least { predicted < measured } else { error.abs() > limit };
            let mark = match (row.state.as_str(), bad) {
                ("good", true) => " FAILS",
                ("good", _) => "",
                _ => " (other)",
            };
            let _ = writeln!(
                table,
                "{:<22} {:>10} {:>10.3} {:>10.3} {:>+7.1}{mark}",
                row.id, size, measured, predicted, error
            );
            if row.state == "good" && bad {
                wrong.push(format!("{} {} {size} B: {predicted} instead of {measured}", row.id, row.what));
            }
        }
    }
    println!("{table}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let points: usize = rows().iter().map(|row| row.points.len()).sum();
    let fitted = constants::ALL.iter().filter(|constant| constant.fitted).count();
    assert!(fitted * 10 < points, "{fitted} constants fitted to {points} rows");
    for row in rows() {
        assert!(
            !row.source.is_empty() && (row.state == "good" || !row.note.is_empty()),
            "{} is not explained",
            row.id
        );
    }
}
