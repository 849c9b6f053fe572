//! A picture of a cluster: the time of every exchange, direct and staged.

use std::fmt::Write as _;

use super::cluster::{Impact, Step};
use super::report::figure;

const WIDTH: f64 = 1000.0;
const LEFT: f64 = 190.0;
const BAR: f64 = 420.0;
const ROW: f64 = 64.0;

/// The picture as SVG.
#[must_use]
pub fn svg(title: &str, found: &[Impact]) -> String {
    let longest =
        found.iter().map(|one| one.staged.exchange_ms.max(one.direct.exchange_ms)).fold(0.0, f64::max);
    let rows = found.iter().fold(0.0, |count, _| count + 1.0);
    let height = 90.0 + rows * ROW;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    label(&mut text, (28.0, 36.0), 20, title);
    label(
        &mut text,
        (28.0, 60.0),
        13,
        "time of one exchange; blue: direct, orange: staged; bus bandwidth, and the limit",
    );
    let mut top = 84.0;
    for one in found {
        label(&mut text, (28.0, top + 24.0), 15, one.pattern.words());
        bar(&mut text, top, longest, "#0072b2", &one.direct);
        bar(&mut text, top + 24.0, longest, "#d55e00", &one.staged);
        top += ROW;
    }
    text.push_str("</svg>\n");
    text
}

fn bar(text: &mut String, top: f64, longest: f64, color: &str, step: &Step) {
    let width = if longest > 0.0 { step.exchange_ms / longest * BAR } else { 0.0 };
    let _ = writeln!(
        text,
        "<rect x=\"{LEFT}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"18\" fill=\"{color}\"/>"
    );
    let words = format!(
        "{} ms, {} GB/s, {}",
        figure(step.exchange_ms),
        figure(step.bus_gbytes_per_s),
        step.binds.words()
    );
    label(text, (LEFT + width + 8.0, top + 14.0), 13, &words);
}

fn label(text: &mut String, (x, y): (f64, f64), size: u32, words: &str) {
    let clean =
        nobounce_topology::clean(words).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ =
        writeln!(text, "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" fill=\"#222\">{clean}</text>");
}
