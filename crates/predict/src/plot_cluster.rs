//! A picture of a cluster: the time of every exchange, direct and staged.

use std::fmt::Write as _;

use super::cluster::{Impact, Step};
use super::plot::wrapped;
use super::report::figure;

const WIDTH: f64 = 1100.0;
const LEFT: f64 = 190.0;
const BAR: f64 = 400.0;
const ROW: f64 = 64.0;
const LINE: f64 = 20.0;

/// The picture as SVG; with a reason in the place of bars where nothing is predicted.
#[must_use]
pub fn svg(title: &str, found: &[Impact], not_predicted: Option<&str>) -> String {
    let longest = found
        .iter()
        .map(|one| one.staged.exchange_high_ms.max(one.direct.exchange_high_ms))
        .fold(0.0, f64::max);
    let rows = found.iter().fold(0.0, |count, _| count + 1.0);
    let why = not_predicted.map(|why| wrapped(&[why.to_owned()], WIDTH - 56.0)).unwrap_or_default();
    let lines = why.iter().fold(0.0, |count, _| count + 1.0);
    let height = 90.0 + rows * ROW + lines * LINE;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    label(&mut text, (28.0, 36.0), 20, title);
    label(
        &mut text,
        (28.0, 60.0),
        13,
        "time of one exchange and its interval; blue: direct, orange: staged; bus bandwidth, and the limit",
    );
    let mut top = 84.0;
    for line in &why {
        label(&mut text, (28.0, top - 2.0), 13, line);
        top += LINE;
    }
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
    let scaled = |time: f64| if longest > 0.0 { time / longest * BAR } else { 0.0 };
    let (low, width, high) =
        (scaled(step.exchange_low_ms), scaled(step.exchange_ms), scaled(step.exchange_high_ms));
    let _ = writeln!(
        text,
        "<rect x=\"{LEFT}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"18\" fill=\"{color}\"/>"
    );
    // The whisker of the interval: a line from end to end, and a stroke at each end.
    let (left, right, middle) = (LEFT + low, LEFT + high, top + 9.0);
    let _ = writeln!(
        text,
        "<path d=\"M{left:.1} {:.1}v8M{left:.1} {middle:.1}H{right:.1}M{right:.1} {:.1}v8\" fill=\"none\" stroke=\"#222\"/>",
        middle - 4.0,
        middle - 4.0
    );
    let words = format!(
        "{} ms ({} - {}), {} GB/s, {}",
        figure(step.exchange_ms),
        figure(step.exchange_low_ms),
        figure(step.exchange_high_ms),
        figure(step.bus_gbytes_per_s),
        step.binds.words()
    );
    label(text, (LEFT + high + 8.0, top + 14.0), 13, &words);
}

fn label(text: &mut String, (x, y): (f64, f64), size: u32, words: &str) {
    let clean =
        nobounce_topology::clean(words).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ =
        writeln!(text, "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" fill=\"#222\">{clean}</text>");
}

#[cfg(test)]
mod tests {
    use super::super::cluster::Pattern;
    use super::super::factor::Factor;
    use super::*;

    #[test]
    fn bars_have_whiskers_and_refusals_a_reason() {
        let step = Step {
            exchange_ms: 20.0,
            exchange_low_ms: 10.0,
            exchange_high_ms: 40.0,
            exposed_ms: 20.0,
            step_ms: 20.0,
            step_low_ms: 10.0,
            step_high_ms: 40.0,
            algorithm_gbytes_per_s: 5.0,
            bus_gbytes_per_s: 9.0,
            bus_low_gbytes_per_s: 4.5,
            bus_high_gbytes_per_s: 18.0,
            bus_most_gbytes_per_s: 20.0,
            binds: Factor::Wire,
        };
        let pattern = Pattern::RingAllReduce;
        let one = Impact { pattern, direct: step, staged: step, gpu_hours: 0.0, money: 0.0 };
        let drawn = svg("two nodes", &[one], None);
        assert!(drawn.contains("H590.0") && drawn.contains("(10.0 - 40.0)"), "{drawn}");
        let refused = svg("two nodes", &[], Some("not predicted: below 1 MiB"));
        let long = format!("not predicted: {}the end", "a long reason ".repeat(30));
        let drawn = svg("two nodes", &[], Some(&long));
        let letters = drawn.lines().filter(|line| line.starts_with("<text")).map(str::len);
        assert!(letters.max().unwrap() < 250 && drawn.contains("the end"), "{drawn}");
        assert!(refused.contains("not predicted: below 1 MiB") && !refused.contains("NaN"), "{refused}");
    }
}
