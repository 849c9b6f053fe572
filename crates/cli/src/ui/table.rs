//! Predictions that a report carries along: a choice of parts, in a compact form.

use serde_json::{Map, Value, json};

use super::data::Data;

const LINKS: [&str; 6] = ["ib:hdr", "ib:ndr", "ib:xdr", "rocev2:100", "rocev2:200", "rocev2:400"];
const SLOTS: [&str; 2] = ["gen4x16", "gen5x16"];
const DISTANCES: [&str; 5] = ["PIX", "PXB", "PHB", "NODE", "SYS"];
const RAILS: [&str; 3] = ["1", "2", "4"];
const SIZES: &str = "8..1G";

/// Every combination that can be predicted, by `LINK|SLOT|DISTANCE|RAILS`.
pub(super) fn predictions(data: &Data) -> Value {
    let mut table = Map::new();
    let pairs = |link, slot| {
        DISTANCES.iter().flat_map(move |distance| RAILS.map(|rails| (link, slot, *distance, rails)))
    };
    for (link, slot, distance, rails) in LINKS
        .iter()
        .flat_map(|link| SLOTS.map(|slot| (*link, slot)))
        .flat_map(|(link, slot)| pairs(link, slot))
    {
        let options = [
            ("link", link),
            ("nic-slot", slot),
            ("gpu-slot", "gen5x16"),
            ("distance", distance),
            ("rails", rails),
            ("size", SIZES),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
        if let Ok(found) = data.predict(&options) {
            table.insert(format!("{link}|{slot}|{distance}|{rails}"), compact(&found));
        }
    }
    Value::Object(table)
}

/// The curves, every fourth power of two, with three digits.
fn compact(found: &Value) -> Value {
    let rows = found["rows"].as_array().into_iter().flatten().step_by(2).map(|row| {
        json!([
            row["size"],
            estimate(&row["direct"]),
            row["not_direct"],
            estimate(&row["staged"]),
            row["not_predicted"]
        ])
    });
    json!({
        "title": found["title"], "rows": rows.collect::<Vec<_>>(),
        "staged_wins_from": found["staged_wins_from"], "twice_as_fast_below": found["twice_as_fast_below"],
    })
}

fn estimate(found: &Value) -> Value {
    if found.is_null() {
        return Value::Null;
    }
    let band = |name: &str| ["expected", "low", "high"].map(|part| digits(&found[name][part]));
    let mut all: Vec<Value> = band("microseconds").into_iter().chain(band("gbytes_per_s")).collect();
    all.extend([found["binds"].clone(), found["stream_binds"].clone()]);
    Value::Array(all)
}

/// Three digits are enough for a curve.
fn digits(number: &Value) -> Value {
    let Some(number) = number.as_f64().filter(|number| *number != 0.0) else { return number.clone() };
    let text = format!("{number:.2e}");
    text.parse::<f64>().map_or(Value::Null, |number| json!(number))
}
