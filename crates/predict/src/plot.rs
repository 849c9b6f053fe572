//! A prediction as a picture: latency and bandwidth against size, with bands, and what binds where.

use std::fmt::Write as _;

use super::model::Estimate;
use super::report::{Report, SizeRow, bytes, figure, reasons};
use super::route::float;

const WIDTH: f64 = 1360.0;
const HEIGHT: f64 = 640.0;
const TOP: f64 = 110.0;
const BOTTOM: f64 = 500.0;
const PANEL: f64 = 540.0;
const LINE: f64 = 20.0;
const INK: &str = "#222222";
const FAINT: &str = "#e3e3e3";
const GREY: &str = "#666666";
/// Colour-blind safe.
const DIRECT: &str = "#0072b2";
const STAGED: &str = "#d55e00";
const WHOLE: &str = "#999999";

/// A way of a row.
type Of = fn(&SizeRow) -> Option<&Estimate>;

/// One panel: which figure it shows.
struct Panel<'a> {
    title: &'static str,
    left: f64,
    value: fn(&Estimate) -> (f64, f64, f64),
    binds: fn(&Estimate) -> &'static str,
    extreme: Extreme,
    legend_right: bool,
    rows: Vec<&'a SizeRow>,
}

/// Draws a prediction.
#[must_use]
pub fn svg(report: &Report) -> String {
    let drawn: Vec<&SizeRow> = report.rows.iter().filter(|row| row.size > 0).collect();
    // A curve that ends, or does not start, says why below the panels.
    let is_partial = drawn.iter().any(|row| row.direct.is_some() || row.staged.is_some());
    let missing = if is_partial { wrapped(&missing(&drawn), WIDTH - 56.0) } else { Vec::new() };
    let height = missing.iter().fold(HEIGHT, |height, _| height + LINE);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    label(&mut text, (28.0, 40.0), 24, INK, "start", &report.title);
    label(&mut text, (28.0, 66.0), 14, GREY, "start", &report.parts.line());
    let rows = || drawn.clone();
    let latency = Panel {
        title: "Latency, one message at a time (us)",
        left: 90.0,
        value: |one| (one.microseconds.expected, one.microseconds.low, one.microseconds.high),
        binds: |one| one.binds.words(),
        extreme: Extreme { name: "shortest", unit: "us", is_highest: false },
        legend_right: false,
        rows: rows(),
    };
    let bandwidth = Panel {
        title: "Bandwidth, many outstanding (GB/s)",
        left: 770.0,
        value: |one| (one.gbytes_per_s.expected, one.gbytes_per_s.low, one.gbytes_per_s.high),
        binds: |one| one.stream_binds.words(),
        extreme: Extreme { name: "plateau", unit: "GB/s", is_highest: true },
        legend_right: true,
        rows: rows(),
    };
    for panel in [latency, bandwidth] {
        panel.draw(&mut text);
    }
    let note = "shaded: uncertainty of the direct path; below: what takes most of its time";
    label(&mut text, (28.0, HEIGHT - 14.0), 13, GREY, "start", note);
    let mut y = HEIGHT - 14.0;
    for why in &missing {
        y += LINE;
        label(&mut text, (28.0, y), 13, INK, "start", why);
    }
    text.push_str("</svg>\n");
    text
}

/// Why figures are missing, with the sizes.
fn missing(rows: &[&SizeRow]) -> Vec<String> {
    let rows = || rows.iter().copied();
    let is_gpu = rows().any(|row| row.staged.is_some() || row.staged_not_predicted.is_some());
    let mut found = reasons(rows(), if is_gpu { "direct" } else { "host memory" }, SizeRow::why_not);
    found.extend(reasons(rows(), "staged", SizeRow::why_not_staged));
    found
}

/// Lines of 13 pixels' letters that are no wider than this, broken at spaces; what continues a line
/// is indented.
pub(super) fn wrapped(lines: &[String], width: f64) -> Vec<String> {
    // Sans-serif letters are half as wide as high, the widest text a fifth more.
    let fits = |line: &str| line.chars().fold(0.0, |sum, _| sum + 13.0 * 0.6) <= width;
    let mut found = Vec::new();
    for line in lines {
        let mut now = String::new();
        for word in line.split(' ') {
            let longer = if now.is_empty() { word.to_owned() } else { format!("{now} {word}") };
            if fits(&longer) || now.is_empty() {
                now = longer;
            } else {
                found.push(std::mem::replace(&mut now, format!("  {word}")));
            }
        }
        found.push(now);
    }
    found
}

/// The point of a curve that is worth a figure.
struct Extreme {
    name: &'static str,
    unit: &'static str,
    is_highest: bool,
}

impl Panel<'_> {
    fn draw(&self, text: &mut String) {
        let Some((x, y)) = self.axes() else {
            let mut missing = missing(&self.rows);
            if missing.is_empty() {
                missing.push("nothing to draw: every size is 0".to_owned());
            }
            self.lines(text, 300.0, &missing);
            return;
        };
        label(text, (self.left, TOP - 14.0), 17, INK, "start", self.title);
        self.grid(text, x, y);
        self.band(text, x, y);
        // Of host memory there is nothing to be direct against.
        let only = self.rows.iter().all(|row| row.staged.is_none());
        let series: [(&str, &str, Of); 3] = [
            (WHOLE, "staged, one step at a time", |row| row.unpipelined.as_ref()),
            (STAGED, "staged in chunks", |row| row.staged.as_ref()),
            (DIRECT, if only { "host memory" } else { "direct" }, |row| row.direct.as_ref()),
        ];
        let shown: Vec<_> =
            series.iter().filter(|(.., of)| self.rows.iter().any(|row| of(row).is_some())).collect();
        for (color, _, of) in &shown {
            let points: Vec<String> = self
                .rows
                .iter()
                .filter_map(|row| Some((row.size, (self.value)(of(row)?).0)))
                .map(|(size, value)| format!("{:.1},{:.1}", self.at(x, size), across(y, value)))
                .collect();
            let width = if *color == DIRECT { 3 } else { 2 };
            let _ = writeln!(
                text,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"{width}\"/>",
                points.join(" ")
            );
        }
        for (line, (color, name, _)) in shown.iter().rev().enumerate() {
            let row = u32::try_from(line).map_or(0.0, f64::from);
            let (at, top) =
                if self.legend_right { (PANEL - 280.0, BOTTOM - 70.0) } else { (16.0, TOP + 20.0) };
            let (left, middle) = (self.left + at, top + row * 22.0);
            let _ = writeln!(
                text,
                "<line x1=\"{left:.1}\" y1=\"{middle:.1}\" x2=\"{:.1}\" y2=\"{middle:.1}\" stroke=\"{color}\" stroke-width=\"3\"/>",
                left + 26.0
            );
            label(text, (left + 34.0, middle + 5.0), 14, INK, "start", name);
        }
        self.strip(text, x);
        self.mark_extreme(text, x, y);
    }

    /// Sentences, in lines that fit the panel.
    fn lines(&self, text: &mut String, top: f64, sentences: &[String]) {
        let mut lines = Vec::new();
        for sentence in sentences {
            lines.push(String::new());
            for word in sentence.split(' ') {
                let last = lines.len() - 1;
                if lines[last].len() + word.len() > 68 {
                    lines.push(word.to_owned());
                } else {
                    lines[last] = format!("{} {word}", lines[last]).trim().to_owned();
                }
            }
        }
        let mut y = top;
        for line in lines {
            label(text, (self.left + PANEL / 2.0, y), 14, INK, "middle", &line);
            y += 20.0;
        }
    }

    /// The shortest latency, or the plateau of the bandwidth.
    fn mark_extreme(&self, text: &mut String, x: (f64, f64), y: (f64, f64)) {
        let points =
            self.rows.iter().filter_map(|row| Some((row.size, (self.value)(row.direct.as_ref()?).0)));
        let sign = if self.extreme.is_highest { 1.0 } else { -1.0 };
        let Some((size, value)) = points.max_by(|a, b| (sign * a.1).total_cmp(&(sign * b.1))) else { return };
        let words = format!("{}: {} {}", self.extreme.name, figure(value), self.extreme.unit);
        let (at, to) = (self.at(x, size), across(y, value));
        let anchor = if self.extreme.is_highest { "end" } else { "start" };
        let _ = writeln!(text, "<circle cx=\"{at:.1}\" cy=\"{to:.1}\" r=\"4\" fill=\"{DIRECT}\"/>");
        label(text, (at, to - 10.0), 14, DIRECT, anchor, &words);
    }

    /// Logarithms of the least and the most, of sizes and of figures.
    fn axes(&self) -> Option<((f64, f64), (f64, f64))> {
        let sizes = self.rows.iter().map(|row| float(row.size).log2());
        let estimates =
            self.rows.iter().flat_map(|row| [&row.direct, &row.staged, &row.unpipelined]).flatten();
        let figures = estimates.map(|one| (self.value)(one).0).filter(|value| *value > 0.0).map(f64::log10);
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values.fold(None, |range: Option<(f64, f64)>, value| {
                Some(range.map_or((value, value), |(low, high)| (low.min(value), high.max(value))))
            })
        };
        let (x, y) = (range(&mut { sizes })?, range(&mut { figures })?);
        Some(((x.0 - 0.5, x.1 + 0.5), (y.0 - 0.12, y.1 + 0.12)))
    }

    fn at(&self, x: (f64, f64), size: u64) -> f64 {
        self.left + (float(size).log2() - x.0) / (x.1 - x.0) * PANEL
    }

    fn grid(&self, text: &mut String, x: (f64, f64), y: (f64, f64)) {
        let right = self.left + PANEL;
        let steps: &[f64] = if y.1 - y.0 > 3.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        for decade in -9..12 {
            for step in steps {
                let value = 10_f64.powi(decade) * step;
                if (y.0..y.1).contains(&value.log10()) {
                    let at = across(y, value);
                    let _ = writeln!(
                        text,
                        "<line x1=\"{}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" stroke=\"{FAINT}\"/>",
                        self.left
                    );
                    label(text, (self.left - 8.0, at + 5.0), 13, INK, "end", &short(value));
                }
            }
        }
        let apart = if x.1 - x.0 > 18.0 { 4 } else { 2 };
        for power in (0..=40_u32).step_by(apart) {
            if (x.0..x.1).contains(&f64::from(power)) {
                let at = self.at(x, 1 << power);
                let _ = writeln!(
                    text,
                    "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{BOTTOM}\" stroke=\"{FAINT}\"/>"
                );
                label(text, (at, BOTTOM + 20.0), 13, INK, "middle", &bytes(1 << power));
            }
        }
        let _ = writeln!(
            text,
            "<path d=\"M{0} {TOP}V{BOTTOM}H{right}\" fill=\"none\" stroke=\"{INK}\"/>",
            self.left
        );
    }

    fn band(&self, text: &mut String, x: (f64, f64), y: (f64, f64)) {
        let direct: Vec<(u64, (f64, f64, f64))> =
            self.rows.iter().filter_map(|row| Some((row.size, (self.value)(row.direct.as_ref()?)))).collect();
        let point = |size: u64, value: f64| format!("{:.1},{:.1}", self.at(x, size), across(y, value));
        let up = direct.iter().map(|(size, (_, _, high))| point(*size, *high));
        let down = direct.iter().rev().map(|(size, (_, low, _))| point(*size, *low));
        let points: Vec<String> = up.chain(down).collect();
        let _ = writeln!(
            text,
            "<polygon points=\"{}\" fill=\"{DIRECT}\" fill-opacity=\"0.15\"/>",
            points.join(" ")
        );
    }

    /// What binds, from where to where.
    fn strip(&self, text: &mut String, x: (f64, f64)) {
        let mut runs: Vec<(&str, u64, u64)> = Vec::new();
        for row in &self.rows {
            let Some(one) = row.direct.as_ref().or(row.staged.as_ref()) else { continue };
            let words = (self.binds)(one);
            match runs.last_mut() {
                Some((last, _, to)) if *last == words => *to = row.size,
                _ => runs.push((words, row.size, row.size)),
            }
        }
        for (line, (words, from, to)) in runs.iter().enumerate() {
            let row = u32::try_from(line % 3).map_or(0.0, f64::from);
            let (left, right) = (self.at(x, *from) - 6.0, self.at(x, *to) + 6.0);
            let y = BOTTOM + 42.0 + row * 24.0;
            let _ = writeln!(
                text,
                "<line x1=\"{left:.1}\" y1=\"{y:.1}\" x2=\"{right:.1}\" y2=\"{y:.1}\" stroke=\"{GREY}\" stroke-width=\"4\"/>"
            );
            let (at, anchor) = if left > self.left + PANEL * 0.6 { (right, "end") } else { (left, "start") };
            label(text, (at, y + 16.0), 13, INK, anchor, words);
        }
    }
}

/// Where a figure is on the vertical axis.
fn across(y: (f64, f64), value: f64) -> f64 {
    let share = (value.max(f64::MIN_POSITIVE).log10() - y.0) / (y.1 - y.0);
    BOTTOM - share.clamp(0.0, 1.0) * (BOTTOM - TOP)
}

fn short(value: f64) -> String {
    if (1e-5..0.01).contains(&value) {
        return format!("{value}");
    }
    let text = figure(value);
    if text.contains('.') && !text.contains('e') {
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    text
}

fn label(text: &mut String, (x, y): (f64, f64), size: u32, color: &str, anchor: &str, words: &str) {
    let clean =
        nobounce_topology::clean(words).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(
        text,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" fill=\"{color}\" text-anchor=\"{anchor}\">{clean}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::super::fabric::Fabric;
    use super::super::parts::Spec;
    use super::super::report::report;
    use super::*;

    #[test]
    fn a_picture_has_both_panels_and_no_broken_number() {
        let parts = Spec { link: Fabric::infiniband("ndr"), ..Spec::default() }.resolve().unwrap();
        let sizes: Vec<u64> = (0..=40).map(|power| 1 << power).collect();
        let drawn = svg(&report("<b>&", &parts, &sizes));
        for wanted in
            ["Latency", "Bandwidth", "staged in chunks", "1 MiB", "the network link", "&lt;b&gt;&amp;"]
        {
            assert!(drawn.contains(wanted), "{wanted} is missing");
        }
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"));
        let empty = svg(&report("empty", &parts, &[0]));
        assert!(empty.contains("nothing to draw"));
        assert!(drawn.contains("shortest: ") && drawn.contains("plateau: "));
        let window = Spec { bar1: Some(1 << 20), link: Fabric::infiniband("ndr"), ..Spec::default() };
        assert!(svg(&report("ends", &window.resolve().unwrap(), &sizes)).contains("BAR1"));
        // Of two reasons, none is dropped: UCX's for the direct way, the core's for the staged one.
        let mpi = Spec {
            software: Some(super::super::parts::Software::Mpi),
            bar1: Some(1 << 30),
            link: Fabric::infiniband("ndr"),
            ..Spec::default()
        };
        let drawn = svg(&report("mpi", &mpi.resolve().unwrap(), &sizes));
        for wanted in
            ["direct, 1 B to 512 KiB: not predicted", "direct, 2 GiB to 1 TiB", "staged, 1 B to 32 KiB"]
        {
            assert!(drawn.contains(wanted), "{wanted} is missing in\n{drawn}");
        }
        // A reason of many words, as the doctor's, stays within the picture.
        let unavailable = Some("no word of it is short ".repeat(20));
        let long = Spec { unavailable, link: Fabric::infiniband("edr"), ..Spec::default() };
        let drawn = svg(&report("long", &long.resolve().unwrap(), &sizes));
        let letters = drawn.lines().filter(|line| line.starts_with("<text")).map(str::len);
        assert!(letters.max().unwrap() < 300 && drawn.contains("no word of it"), "{drawn}");
        let tcp = Spec { link: "tcp:100".parse().ok(), ..Spec::default() };
        assert!(svg(&report("tcp", &tcp.resolve().unwrap(), &sizes)).contains("not predicted: TCP"));
    }
}
