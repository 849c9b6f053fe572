//! Latency and bandwidth against message size.

use plotters::chart::SeriesLabelPosition;

use super::figures::{InitiatedLinkFigures, InitiatedReport};
use crate::bench::plot::{Panel, PlotError, picture};
use crate::bench::plot_line::Line;
use crate::bench::ranks::{link_color, link_name};

pub(super) fn svg(report: &InitiatedReport) -> Result<String, PlotError> {
    let panels = [latency(report), bandwidth(report)];
    let subtitle = format!("{} · {}", report.machine, report.started);
    picture("nobounce bench: GPU-initiated operations", &subtitle, &panels)
}

fn latency(report: &InitiatedReport) -> Panel {
    let line = |link: &InitiatedLinkFigures| {
        let points = link.latency.iter().map(|one| (one.bytes, one.p50_us)).collect();
        Line::new(format!("put with signal, {}", link_name(&link.link)), link_color(&link.link), true, points)
    };
    Panel {
        title: "Latency, kernel to kernel",
        unit: "µs",
        lines: report.links.iter().map(line).collect(),
        raw: None,
        legend: SeriesLabelPosition::UpperLeft,
    }
}

fn bandwidth(report: &InitiatedReport) -> Panel {
    let lines = report.links.iter().flat_map(|link| {
        let name = link_name(&link.link);
        let points = |of: fn(&super::figures::Bandwidth) -> f64| {
            link.bandwidth.iter().map(|one| (one.bytes, of(one))).collect()
        };
        [
            Line::new(
                format!("put, {name}"),
                link_color(&link.link),
                true,
                points(|one| one.put_gbytes_per_s),
            ),
            Line::new(
                format!("host-posted WRITE, {name}"),
                link_color(&link.link),
                false,
                points(|one| one.host_write_gbytes_per_s),
            ),
        ]
    });
    Panel {
        title: "Bandwidth",
        unit: "GB/s",
        lines: lines.collect(),
        raw: None,
        legend: SeriesLabelPosition::LowerRight,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_link_has_its_lines() {
        let picture = svg(&super::super::table::tests::report()).unwrap();
        for name in ["put with signal, shm", "put with signal, udp", "put, udp", "host-posted WRITE, shm"] {
            assert!(picture.contains(name), "{name}");
        }
    }
}
