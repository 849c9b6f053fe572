//! Published figures against the model: docs/measurements/predict-published.txt.

use std::fmt::Write as _;

use nobounce_predict::cluster::{Cluster, impact};
use nobounce_predict::model::direct;
use nobounce_predict::parts::Spec;
use nobounce_predict::report::{bytes, figure};
use nobounce_predict::slot::Slot;
use nobounce_predict::staging::staged;
use nobounce_predict::{constants, window};
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
    /// Why a row in good state is not met.
    #[serde(default)]
    fails: Option<String>,
    /// Nodes, GPUs and adapters of each.
    #[serde(default)]
    cluster: Option<(u32, u32, u32)>,
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
    let length = size as f64;
    let slot = row.parts.gpu.unwrap_or(Slot { generation: 3, lanes: 16 });
    match row.figure.as_str() {
        "window_store_us" => length / window::store(slot) / 1000.0,
        "window_load_us" => window::load_microseconds(size),
        "window_store_gbytes" => window::store(slot),
        "window_load_gbytes" => length / window::load_microseconds(size) / 1000.0,
        "copy_engine" => slot.copy_engine(),
        "nvlink" => window::nvlink(row.nvlinks.unwrap(), row.per_link.unwrap()),
        "ring_busbw" => {
            let (nodes, gpus_per_node, nics_per_node) = row.cluster.unwrap();
            let cluster = Cluster {
                nodes,
                gpus_per_node,
                nics_per_node,
                bytes: size,
                compute_ms: 0.0,
                overlap: 0.0,
                price: 0.0,
                nvlink: Some(window::nvlink(12, 25.0)),
            };
            let ring = impact(&row.parts.resolve().unwrap(), &cluster).unwrap()[0];
            let all = f64::from(nodes * gpus_per_node);
            2.0 * (all - 1.0) / all * length / ring.direct.exchange_ms / 1e6
        }
        figure => {
            let parts = row.parts.resolve().unwrap_or_else(|error| panic!("{}: {error}", row.id));
            let estimate = match row.way.as_str() {
                "staged" => staged(&parts, size, true),
                _ => direct(&parts, size).unwrap(),
            };
            match figure {
                "microseconds" => estimate.microseconds.expected,
                "lone_gbytes_per_s" => length / estimate.microseconds.expected / 1000.0,
                "gbytes_per_s" => estimate.gbytes_per_s.expected,
                other => panic!("no figure: {other}"),
            }
        }
    }
}

fn rows() -> Vec<Row> {
    serde_json::from_str(include_str!("predict/published.json")).unwrap()
}

/// Allowed: 5 % from 1 MiB on, 20 % below.
fn limit(size: u64) -> f64 {
    if size >= 1 << 20 { 5.0 } else { 20.0 }
}

/// One point of a row, rated.
struct Judged {
    measured: f64,
    predicted: f64,
    error: f64,
    within: bool,
}

fn judge(row: &Row, size: u64, value: f64) -> Judged {
    let (measured, predicted) = (measured(&row.unit, value), predicted(row, size));
    let error = (predicted / measured - 1.0) * 100.0;
    let least = row.bound.as_deref() == Some("least");
    let within = if least { predicted >= measured } else { error.abs() <= limit(size) };
    Judged { measured, predicted, error, within }
}

#[test]
fn published_figures_are_predicted() {
    let mut wrong = Vec::new();
    for row in rows() {
        assert!(!row.source.is_empty(), "{} has no source", row.id);
        assert!(row.state == "good" || !row.note.is_empty(), "{} is not explained", row.id);
        for (size, value) in &row.points {
            let judged = judge(&row, *size, *value);
            let (predicted, measured) = (judged.predicted, judged.measured);
            match (row.state.as_str(), &row.fails, judged.within) {
                ("good", None, false) => {
                    wrong.push(format!(
                        "{} {}, {size} B: {predicted} instead of {measured}",
                        row.id, row.what
                    ));
                }
                ("good", Some(_), true) => wrong.push(format!("{}: no longer fails; say so", row.id)),
                _ => {}
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let points: usize = rows().iter().map(|row| row.points.len()).sum();
    let fitted = constants::ALL.iter().filter(|constant| constant.fitted).count();
    assert!(fitted * 10 < points, "{fitted} constants fitted to {points} rows");
}

/// The constants of docs/reference/predict-model.md and the rows of
/// docs/measurements/predict-published.txt are these; `NOBOUNCE_WRITE_DOCS=1` writes them.
#[test]
fn the_documentation_has_these_tables() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/");
    let model = format!("{docs}reference/predict-model.md");
    let page = std::fs::read_to_string(&model).unwrap();
    let (start, end) = ("<!-- constants -->\n", "<!-- end of constants -->");
    let from = page.find(start).expect("the page has a place for the table") + start.len();
    let to = page.find(end).expect("the place has an end");
    let mut after = page.clone();
    after.replace_range(from..to, &constants_table());
    let rows = format!("{docs}measurements/predict-published.txt");
    for (path, now) in [(model, after), (rows, rows_table())] {
        if std::env::var_os("NOBOUNCE_WRITE_DOCS").is_some() {
            std::fs::write(path, now).unwrap();
        } else {
            let before = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(
                before == now,
                "{path} is not what the model says: run this test with NOBOUNCE_WRITE_DOCS=1"
            );
        }
    }
}

fn rows_table() -> String {
    let mut text = String::from(
        "| row | what | source | size | predicted | measured | error |\n|---|---|---|---:|---:|---:|---:|\n",
    );
    let mut notes = String::new();
    for row in rows() {
        let unit = if row.unit == "us" { "us" } else { "GB/s" };
        let good = if row.state == "good" { "" } else { " *" };
        for (size, value) in &row.points {
            let judged = judge(&row, *size, *value);
            let least = if row.bound.is_some() { "> " } else { "" };
            let mark = if row.state == "good" && !judged.within { " **fails**" } else { "" };
            let _ = writeln!(
                text,
                "| {}{good} | {} | {} | {} | {} {unit} | {least}{} {unit} | {:+.1} %{mark} |",
                row.id,
                row.what,
                row.source,
                bytes(*size),
                figure(judged.predicted),
                figure(judged.measured),
                judged.error
            );
        }
        let why = row.fails.as_deref().unwrap_or(&row.note);
        if !why.is_empty() {
            let _ = writeln!(notes, "- {}{good}, {}: {why}.", row.id, row.what);
        }
    }
    format!("{text}\nWhat is to be said of rows:\n\n{notes}")
}

fn constants_table() -> String {
    let mut text = String::from("| constant | value | from |\n|---|---:|---|\n");
    for one in constants::ALL {
        let kind = if one.fitted { "**fitted** to " } else { "" };
        let _ = writeln!(
            text,
            "| {} | {} {} | {kind}{} |",
            one.name.to_lowercase(),
            one.value,
            one.unit,
            one.source
        );
    }
    text
}
