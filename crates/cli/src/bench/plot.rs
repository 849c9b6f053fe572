//! Latency and bandwidth against message size, as an SVG with logarithmic axes.
//!
//! Both axes are linear axes over logarithms, so that ticks fall on familiar values. Sizes have
//! powers of two, figures 1, 2 and 5 times powers of ten.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::prelude::*;

use super::axis::{Axis, size_label};
use super::case::{CaseKind, Op, Wait};
use super::gpu_plot;
use super::model::{BenchReport, CaseOutcome};
use super::numbers::{figure, float};
use super::plot_line::{Line, line};

const WIDTH: u32 = 1360;
const HEIGHT: u32 = 640;
const HEAD: u32 = 78;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const FAINT: RGBColor = RGBColor(0xe3, 0xe3, 0xe3);
const RAW: RGBColor = RGBColor(0x66, 0x66, 0x66);

/// There is no picture.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlotError {
    /// Neither latency nor bandwidth was measured.
    #[error(
        "nothing to plot: the run has neither latency nor bandwidth; add --kind latency or --kind bandwidth"
    )]
    Nothing,
    /// The drawing library refused.
    #[error("cannot draw the plot: {0}")]
    Draw(String),
}

/// Draws a run.
pub(crate) fn svg(report: &BenchReport) -> Result<String, PlotError> {
    let panels: Vec<Panel> = [latency(report), bandwidth(report)].into_iter().flatten().collect();
    picture(gpu_plot::title(report), &subtitle(report), &panels)
}

/// Draws panels beside each other.
pub(crate) fn picture(title: &str, subtitle: &str, panels: &[Panel]) -> Result<String, PlotError> {
    if panels.is_empty() {
        return Err(PlotError::Nothing);
    }
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&WHITE).map_err(drawn)?;
        let (head, body) = root.split_vertically(HEAD);
        let large = (FONT, 26).into_font().color(&INK);
        head.draw_text(title, &large, (28, 16)).map_err(drawn)?;
        let facts = (FONT, 15).into_font().color(&RAW);
        head.draw_text(subtitle, &facts, (28, 52)).map_err(drawn)?;
        for (area, panel) in body.split_evenly((1, panels.len())).iter().zip(panels) {
            draw(area, panel).map_err(drawn)?;
        }
        root.present().map_err(drawn)?;
    }
    Ok(text)
}

fn drawn(error: impl std::fmt::Display) -> PlotError {
    PlotError::Draw(error.to_string())
}

fn subtitle(report: &BenchReport) -> String {
    let loss = report.loss.map_or(String::new(), |loss| format!(", {} % loss", loss * 100.0));
    let link = report.main_link().map_or(String::new(), |link| format!(", over {link}"));
    format!("{} · {}{link}{loss}", report.machine, report.started)
}

#[derive(Debug)]
pub(crate) struct Panel {
    pub(crate) title: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) lines: Vec<Line>,
    /// The yardstick, plain UDP or TCP, and what to call it.
    pub(crate) raw: Option<(f64, &'static str)>,
    /// Where curves leave room: latencies rise to the right, bandwidths saturate there.
    pub(crate) legend: SeriesLabelPosition,
}

fn latency(report: &BenchReport) -> Option<Panel> {
    let mut lines = if report.machine.gpu.is_some() { gpu_plot::latency(report) } else { Vec::new() };
    let series = if lines.is_empty() { series(report, CaseKind::Latency) } else { Vec::new() };
    for (op, wait, qps) in series {
        let chosen =
            |one: &CaseOutcome| (one.op, one.wait, one.qps, one.kind) == (op, wait, qps, CaseKind::Latency);
        let name = format!("{op}{}", wait.words());
        let p50 = |one: &CaseOutcome| one.p50_us.filter(|_| chosen(one));
        let p99 = |one: &CaseOutcome| one.p99_us.filter(|_| chosen(one));
        lines.extend(line(report, format!("{name} p50"), color(op), true, p50));
        lines.extend(line(report, format!("{name} p99"), color(op), false, p99));
    }
    let raw = report.raw.as_ref().filter(|raw| raw.latency_doubt().is_none());
    let raw = raw.map(|raw| (raw.half_round_trip_us, "plain UDP, 32 B"));
    let raw =
        raw.or_else(|| report.tcp.as_ref().map(|tcp| (tcp.half_round_trip_us, "TCP, 8 B of host memory")));
    let legend = SeriesLabelPosition::UpperLeft;
    (!lines.is_empty()).then_some(Panel { title: "Latency", unit: "µs", lines, raw, legend })
}

fn bandwidth(report: &BenchReport) -> Option<Panel> {
    let mut lines = if report.machine.gpu.is_some() { gpu_plot::bandwidth(report) } else { Vec::new() };
    let plain = lines.is_empty();
    for (kind, strong, label) in
        [(CaseKind::Bandwidth, true, ""), (CaseKind::Bidirectional, false, " both ways")]
    {
        for (op, wait, qps) in series(report, kind).into_iter().filter(|_| plain) {
            let chosen = |one: &CaseOutcome| (one.op, one.wait, one.qps, one.kind) == (op, wait, qps, kind);
            let name = if qps > 1 { format!("{op}{label}, {qps} QPs") } else { format!("{op}{label}") };
            let strong = strong && qps == 1;
            lines.extend(line(report, name, color(op), strong, |one| {
                one.gbytes_per_s.filter(|_| chosen(one))
            }));
        }
    }
    let raw = report.raw.as_ref().filter(|raw| raw.bandwidth_doubt().is_none());
    let raw = raw.map(|raw| (raw.gbytes_per_s, "plain UDP, GSO"));
    let raw = raw.or_else(|| report.tcp.as_ref().map(|tcp| (tcp.gbytes_per_s, "TCP, host memory")));
    // Below curves that saturate there is room.
    let legend = SeriesLabelPosition::LowerRight;
    (!lines.is_empty()).then_some(Panel { title: "Bandwidth", unit: "GB/s", lines, raw, legend })
}

fn series(report: &BenchReport, kind: CaseKind) -> Vec<(Op, Wait, u32)> {
    let mut found = Vec::new();
    for one in report.results.iter().filter(|one| one.kind == kind) {
        let key = (one.op, one.wait, one.qps);
        if !found.contains(&key) {
            found.push(key);
        }
    }
    found
}

/// Colour-blind safe.
fn color(op: Op) -> RGBColor {
    match op {
        Op::Write => RGBColor(0x00, 0x72, 0xb2),
        Op::Read => RGBColor(0xd5, 0x5e, 0x00),
        Op::Send => RGBColor(0x00, 0x9e, 0x73),
        Op::Atomic => RGBColor(0xaa, 0x33, 0x77),
    }
}

fn draw(area: &DrawingArea<SVGBackend<'_>, Shift>, panel: &Panel) -> Result<(), Box<dyn std::error::Error>> {
    let sizes =
        || panel.lines.iter().flat_map(|line| line.points.iter().map(|(size, _)| float(*size).log2()));
    let figures = panel.lines.iter().flat_map(|line| line.points.iter().map(|(_, value)| value.log10()));
    let figures: Vec<f64> = figures.chain(panel.raw.map(|(value, _)| value.log10())).collect();
    let x = padded(sizes(), 0.5);
    let y = padded(figures.into_iter(), 0.12);
    let (x_axis, y_axis) = (Axis::of_sizes(x.clone()), Axis::of_figures(y));
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .margin_right(30)
        .caption(format!("{} ({})", panel.title, panel.unit), (FONT, 20).into_font().color(&INK))
        .x_label_area_size(54)
        .y_label_area_size(64)
        .build_cartesian_2d(x_axis, y_axis)?;
    let labels = (FONT, 15).into_font().color(&INK);
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .x_desc("message size")
        .axis_desc_style((FONT, 16).into_font().color(&INK))
        .label_style(labels.clone())
        .x_label_formatter(&|log| size_label(*log))
        .y_label_formatter(&|log| trimmed(10f64.powf(*log)))
        .x_labels(64)
        .y_labels(64)
        .draw()?;
    if let Some((value, name)) = panel.raw {
        let ends = [x.start, x.end].map(|at| (at, value.log10()));
        chart.draw_series(DashedLineSeries::new(ends, 7, 5, RAW.stroke_width(2)))?.label(name).legend(|at| {
            // plotters has dashed series, but no dashed element for a legend.
            let dash = |from| PathElement::new([(from, 0), (from + 6, 0)], RAW.stroke_width(2));
            EmptyElement::at(at) + dash(0) + dash(10) + dash(20)
        });
    }
    for line in &panel.lines {
        let (color, strong) = (line.color, line.strong);
        let style = if strong { color.stroke_width(3) } else { color.mix(0.5).stroke_width(2) };
        let points: Vec<_> =
            line.points.iter().map(|(size, value)| (float(*size).log2(), value.log10())).collect();
        // A single size makes no line: draw a ring, which stays visible around another operation's
        // point.
        let alone = points.len() == 1;
        let (radius, dot) = match (alone, strong) {
            (true, _) => (7, color.stroke_width(2)),
            (false, true) => (4, style.filled()),
            (false, false) => (0, style),
        };
        if radius > 0 {
            chart.draw_series(points.iter().map(|at| Circle::new(*at, radius, dot)))?;
        }
        let series = chart.draw_series(LineSeries::new(points, style))?.label(line.name.clone());
        if alone {
            series.legend(move |(x, y)| Circle::new((x + 13, y), 5, dot));
        } else {
            series.legend(move |(x, y)| PathElement::new([(x, y), (x + 26, y)], style));
        }
    }
    chart
        .configure_series_labels()
        .position(panel.legend.clone())
        .legend_area_size(34)
        .margin(12)
        .background_style(WHITE.mix(0.9))
        .border_style(FAINT)
        .label_font(labels)
        .draw()?;
    Ok(())
}

fn padded(values: impl Iterator<Item = f64>, margin: f64) -> Range<f64> {
    let (low, high) =
        values.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
    low - margin..high + margin
}

/// A tick says 0.5 or 20, not 0.50 or 20.0.
fn trimmed(value: f64) -> String {
    let text = figure(value);
    if text.contains('.') && !text.contains('e') {
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::flow_tests::sample_report;
    use super::*;

    #[test]
    fn a_run_becomes_two_panels_with_human_ticks() {
        let drawn = svg(&sample_report()).unwrap();
        let wanted = [
            "<svg",
            "Latency (µs)",
            "Bandwidth (GB/s)",
            "1 MiB",
            "write p99",
            "plain UDP, GSO",
            "Example CPU",
        ];
        for wanted in wanted {
            assert!(drawn.contains(wanted), "{wanted} is missing");
        }
        assert!(!drawn.contains("NaN"));
    }

    #[test]
    fn one_point_zero_sizes_and_no_raw_still_draw() {
        let mut report = sample_report();
        report.raw = None;
        report.results.truncate(1);
        assert!(svg(&report).unwrap().contains("write p50"));
        report.results[0].size = 0;
        assert!(matches!(svg(&report), Err(PlotError::Nothing)));
    }

    #[test]
    fn a_machine_name_cannot_break_out_of_the_svg() {
        let mut report = sample_report();
        report.machine.cpu = "<script>&\"".to_owned();
        assert!(!svg(&report).unwrap().contains("<script>"));
    }

    #[test]
    fn ticks_are_short() {
        assert_eq!([0.5, 20.0, 1.0, 100.0, 0.02].map(trimmed), ["0.5", "20", "1", "100", "0.02"]);
        assert_eq!([0.0, 10.0, 16.0, 23.0].map(size_label), ["1 B", "1 KiB", "64 KiB", "8 MiB"]);
    }
}
