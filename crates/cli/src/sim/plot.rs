//! Goodput and the deepest queue over time, and latencies by quantile, as an SVG.

use nobounce_fabric::Report;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::text;

const WIDTH: u32 = 1500;
const HEIGHT: u32 = 560;
const HEAD: u32 = 50;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const FAINT: RGBColor = RGBColor(0xe3, 0xe3, 0xe3);
/// Colour-blind safe.
const COLORS: [RGBColor; 4] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xaa, 0x33, 0x77),
];
/// Places of the quantiles on their axis.
const QUANTILES: [&str; 4] = ["p50", "p99", "p99.9", "max"];

/// One chart: lines over a common horizontal axis.
struct SimPanel {
    title: &'static str,
    x_title: &'static str,
    /// Names of the places on the horizontal axis, where they are not numbers.
    places: Option<[&'static str; 4]>,
    lines: Vec<(String, Vec<(f64, f64)>)>,
}

/// Draws a report.
pub(super) fn svg(report: &Report) -> anyhow::Result<String> {
    let series = |value: fn(&nobounce_fabric::Sample) -> f64| {
        report.samples.iter().map(|sample| (sample.us, value(sample))).collect::<Vec<_>>()
    };
    let latencies = report.latency_us.iter().map(|class| {
        let us = &class.us;
        let points = [us.p50, us.p99, us.p999, us.max].into_iter().zip([0.0, 1.0, 2.0, 3.0]);
        (class.class.to_owned(), points.map(|(value, place)| (place, value)).collect())
    });
    let panels = [
        SimPanel {
            title: "Goodput (Gb/s)",
            x_title: "time (µs)",
            places: None,
            lines: vec![("all receivers".to_owned(), series(|sample| sample.goodput_gbits))],
        },
        SimPanel {
            title: "Deepest queue (KB)",
            x_title: "time (µs)",
            places: None,
            lines: vec![("of all switches".to_owned(), series(|one| text::float(one.deepest_queue) / 1e3))],
        },
        SimPanel {
            title: "Latency (µs)",
            x_title: "share of messages",
            places: Some(QUANTILES),
            lines: latencies.collect(),
        },
    ];
    let mut drawn = String::new();
    {
        let root = SVGBackend::with_string(&mut drawn, (WIDTH, HEIGHT)).into_drawing_area();
        let failed = |error: Box<dyn std::error::Error>| anyhow::anyhow!("cannot draw the plot: {error}");
        head_and_panels(&root, report, &panels).map_err(failed)?;
    }
    Ok(drawn)
}

fn head_and_panels(
    root: &DrawingArea<SVGBackend<'_>, Shift>,
    report: &Report,
    panels: &[SimPanel],
) -> Result<(), Box<dyn std::error::Error>> {
    root.fill(&WHITE)?;
    let (head, body) = root.split_vertically(HEAD);
    head.draw_text(&text::title(report), &(FONT, 20).into_font().color(&INK), (28, 16))?;
    for (area, panel) in body.split_evenly((1, panels.len())).iter().zip(panels) {
        draw(area, panel)?;
    }
    root.present()?;
    Ok(())
}

fn draw(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    panel: &SimPanel,
) -> Result<(), Box<dyn std::error::Error>> {
    let points = || panel.lines.iter().flat_map(|(_, points)| points);
    let right = points().map(|(x, _)| *x).fold(1.0, f64::max);
    let top = points().map(|(_, y)| *y).fold(1.0, f64::max);
    let left = if panel.places.is_some() { -0.3 } else { 0.0 };
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .caption(panel.title, (FONT, 20).into_font().color(&INK))
        .x_label_area_size(50)
        .y_label_area_size(64)
        .build_cartesian_2d(left..right * 1.02, 0.0..top * 1.08)?;
    let labels = (FONT, 15).into_font().color(&INK);
    let name = |x: &f64| match panel.places {
        None => text::rounded(*x).trim_end_matches(".00").to_owned(),
        Some(places) => {
            let at = [0.0, 1.0, 2.0, 3.0].iter().position(|place: &f64| (place - x).abs() < 0.01);
            at.map_or(String::new(), |at| places[at].to_owned())
        }
    };
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(FAINT)
        .axis_style(INK)
        .x_desc(panel.x_title)
        .x_labels(6)
        .x_label_formatter(&name)
        .axis_desc_style((FONT, 16).into_font().color(&INK))
        .label_style(labels.clone())
        .draw()?;
    for ((name, points), color) in panel.lines.iter().zip(COLORS.iter().cycle()) {
        let style = color.stroke_width(2);
        if panel.places.is_some() {
            chart.draw_series(points.iter().map(|at| Circle::new(*at, 4, color.filled())))?;
        }
        chart
            .draw_series(LineSeries::new(points.iter().copied(), style))?
            .label(name.clone())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 26, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .legend_area_size(34)
        .margin(12)
        .background_style(WHITE.mix(0.9))
        .border_style(FAINT)
        .label_font(labels)
        .draw()?;
    Ok(())
}
