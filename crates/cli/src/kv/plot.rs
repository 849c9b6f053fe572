//! Speed against page size and number of requests.

use plotters::chart::SeriesLabelPosition;

use super::figures::{KvReport, List};
use crate::bench::plot::{Panel, PlotError, picture};
use crate::bench::plot_line::Line;
use crate::bench::ranks::{link_color, link_name};

pub(super) fn svg(report: &KvReport) -> Result<String, PlotError> {
    let subtitle = format!("{} · {} · {}", report.machine, report.memory, report.started);
    picture("nobounce bench: KV-cache pages", &subtitle, &[lists(report)])
}

fn lists(report: &KvReport) -> Panel {
    let lines = report.links.iter().flat_map(|link| {
        let name = link_name(&link.link);
        let line = |what: &str, strong: bool, of: fn(&List) -> f64| {
            let points = link.lists.iter().map(|one| (one.page_bytes, of(one))).collect();
            Line::new(format!("{what}, {name}"), link_color(&link.link), strong, points)
        };
        [
            line("pages written", true, |one| one.write_gbytes_per_s),
            line("in one piece", false, |one| one.contiguous_write_gbytes_per_s),
        ]
    });
    Panel {
        title: "Pages of random block tables, by page size",
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
        for name in ["pages written, shm", "pages written, udp", "in one piece, shm"] {
            assert!(picture.contains(name), "{name}");
        }
    }
}
