//! The results for people: tables by kind, then one summary line each.

use std::fmt::Write as _;

use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};

use super::case::{CaseKind, Op, Wait};
use super::gpu_summary;
use super::model::{BenchReport, CaseOutcome};
use super::numbers::figure;
use super::stats::{mad, median};
use crate::size::Bytes;

/// One rule, under the header: rules between the rows would double the length and add nothing.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::new('─', '─', '─', '─'));

/// Median deviation, as a share of the median, beyond which a figure is called unsteady.
const UNSTEADY: f64 = 0.15;

/// Everything that is printed about a run.
pub(crate) fn render(report: &BenchReport) -> String {
    let mut text = format!("{}\n", report.machine);
    if let Some(gpu) = &report.machine.gpu {
        let _ = writeln!(text, "path of GPU memory: {}", gpu.paths);
        for refusal in &gpu.refusals {
            let _ = writeln!(text, "not used: {refusal}");
        }
        let _ = writeln!(text, "calibration: {}", gpu.calibration);
    }
    for note in &report.notes {
        let _ = writeln!(text, "{note}");
    }
    if let Some(raw) = &report.raw {
        let _ = writeln!(text, "raw (plain UDP between two processes of this machine): {raw}");
        for (what, doubt) in [("bandwidth", raw.bandwidth_doubt()), ("latency", raw.latency_doubt())] {
            if let Some(doubt) = doubt {
                let _ = writeln!(
                    text,
                    "no shares of raw {what} and no prediction from it: {doubt}; run again on an idle machine"
                );
            }
        }
    }
    if let (Some(busy), Some(tcp)) = (report.busy, &report.tcp) {
        let beside = match busy {
            0 => "no busy processes".to_owned(),
            1 => "1 busy process".to_owned(),
            more => format!("{more} busy processes"),
        };
        let _ = writeln!(text, "{beside}; TCP between the same two processes: {tcp}");
    }
    if let Some(link) = links(report) {
        let _ = writeln!(text, "{link}");
    }
    if let Some(loss) = report.loss {
        let _ = writeln!(text, "dropping {} % of the packets (--loss)", loss * 100.0);
    }
    for section in [latency(report), bandwidth(report), rate(report)].into_iter().flatten() {
        let _ = write!(text, "\n{section}\n");
    }
    text.push('\n');
    for line in verdicts(report) {
        let _ = writeln!(text, "{line}");
    }
    text
}

fn latency(report: &BenchReport) -> Option<String> {
    let rows = rows(report, &[CaseKind::Latency, CaseKind::GpuVisible]);
    let share = yardstick(report, "x");
    let mut table = table(&[
        "latency",
        "size",
        "min us",
        "p50 us",
        "mean us",
        "p99 us",
        "p99.9 us",
        &share,
        "CPU s/Mop",
        "bytes",
    ]);
    for one in &rows {
        let mut name = name(report, one);
        if one.wait != Wait::Cq {
            name.push_str(&format!(", {}", one.wait));
        }
        let mut cells = vec![name, Bytes(one.size).to_string()];
        cells.extend([one.min_us, one.p50_us, one.mean_us, one.p99_us, one.p999_us].map(optional));
        cells.extend([share_of(report, one), one.cpu_s_per_mop].map(optional));
        cells.push(bytes(one).to_owned());
        add(&mut table, cells);
    }
    (!rows.is_empty()).then(|| table.trim_fmt())
}

/// One-way and two-way figures of the same case share a row.
fn bandwidth(report: &BenchReport) -> Option<String> {
    let rows = rows(report, &[CaseKind::Bandwidth, CaseKind::Bidirectional]);
    let share = yardstick(report, "of");
    let mut table = table(&[
        "bandwidth",
        "size",
        "QPs",
        "one way GB/s",
        &share,
        "both ways GB/s",
        &share,
        "CPU s/GB",
        "bytes",
    ]);
    let mut shown = Vec::new();
    let key = |one: &CaseOutcome| {
        (one.op, one.size, one.qps, one.memory.clone(), one.path.clone(), one.link.clone())
    };
    for one in &rows {
        let this = key(one);
        if shown.contains(&this) {
            continue;
        }
        let of = |kind| rows.iter().find(|other| other.kind == kind && key(other) == this);
        let pair = [of(CaseKind::Bandwidth), of(CaseKind::Bidirectional)];
        shown.push(this);
        let mut cells = vec![name(report, one), Bytes(one.size).to_string(), one.qps.to_string()];
        for outcome in pair {
            cells.push(optional(outcome.and_then(|outcome| outcome.gbytes_per_s)));
            cells.push(optional(outcome.and_then(|outcome| share_of(report, outcome))));
        }
        cells.push(optional(one.cpu_s_per_gb));
        let worst = pair.into_iter().flatten().find(|outcome| !outcome.verified).unwrap_or(one);
        cells.push(bytes(worst).to_owned());
        add(&mut table, cells);
    }
    (!rows.is_empty()).then(|| table.trim_fmt())
}

fn rate(report: &BenchReport) -> Option<String> {
    let rows = rows(report, &[CaseKind::Rate]);
    let mut table = table(&["message rate", "size", "QPs", "Mmsg/s", "CPU s/Mop", "bytes"]);
    for one in &rows {
        let mut cells = vec![name(report, one), Bytes(one.size).to_string(), one.qps.to_string()];
        cells.extend([one.mops, one.cpu_s_per_mop].map(optional));
        cells.push(bytes(one).to_owned());
        add(&mut table, cells);
    }
    (!rows.is_empty()).then(|| table.trim_fmt())
}

/// What figures are set against.
fn yardstick(report: &BenchReport, word: &str) -> String {
    format!("{word} {}", if report.tcp.is_some() { "tcp" } else { "raw" })
}

fn share_of(report: &BenchReport, one: &CaseOutcome) -> Option<f64> {
    if report.tcp.is_some() { one.of_tcp } else { one.of_raw }
}

/// Which link the figures are of.
fn links(report: &BenchReport) -> Option<String> {
    let main = report.main_link()?;
    let words = match main {
        "shm" => "shm, shared memory between processes of one machine",
        "udp" => "udp, as between machines",
        other => other,
    };
    let others = report.results.iter().find(|one| one.link != main);
    let but = others.map_or(String::new(), |one| format!("; rows marked {0} over {0}", one.link));
    Some(format!("link: {words}{but}"))
}

/// The name of a row: with its link, if it differs from the first one's. In a run about GPU memory,
/// also with memory and path.
fn name(report: &BenchReport, one: &CaseOutcome) -> String {
    let name = kind_of_row(report, one);
    if report.main_link() == Some(one.link.as_str()) { name } else { format!("{name}, {}", one.link) }
}

fn kind_of_row(report: &BenchReport, one: &CaseOutcome) -> String {
    let what = if one.kind == CaseKind::GpuVisible { "gpu-visible".to_owned() } else { one.op.to_string() };
    match &report.machine.gpu {
        None => what,
        Some(_) if one.memory == "stand-in" => format!("{what}, stand-in {}", one.memory_path()),
        Some(_) => format!("{what}, {}", one.memory_path()),
    }
}

fn rows<'a>(report: &'a BenchReport, kinds: &[CaseKind]) -> Vec<&'a CaseOutcome> {
    report.results.iter().filter(|one| kinds.contains(&one.kind)).collect()
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    // Widths follow the content, never the terminal: a wrapped figure is a wrong figure.
    table.load_style(STYLE).set_content_arrangement(ContentArrangement::Disabled);
    let cells = header.iter().enumerate().map(|(at, name)| Cell::new(name).set_alignment(alignment(at)));
    table.set_header(cells.collect::<Vec<_>>());
    table
}

fn add(table: &mut Table, cells: Vec<String>) {
    let cells = cells.into_iter().enumerate().map(|(at, text)| Cell::new(text).set_alignment(alignment(at)));
    table.add_row(cells.collect::<Vec<_>>());
}

fn alignment(column: usize) -> CellAlignment {
    if column == 0 { CellAlignment::Left } else { CellAlignment::Right }
}

fn bytes(outcome: &CaseOutcome) -> &'static str {
    if outcome.verified { "verified" } else { "WRONG" }
}

fn optional(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), figure)
}

/// One line for each thing worth remembering.
pub(crate) fn verdicts(report: &BenchReport) -> Vec<String> {
    let mut lines = if report.machine.gpu.is_some() { gpu_summary::lines(report) } else { headlines(report) };
    if let Some(counted) = &report.kernel_udp {
        let (sent, received) = counted.moved();
        lines.push(format!("UDP datagrams counted by the kernel: {sent} out, {received} in"));
    }
    lines.extend(unsteady(report));
    let wrong: Vec<&CaseOutcome> = report.results.iter().filter(|one| !one.verified).collect();
    if wrong.is_empty() && !report.results.is_empty() {
        let cases = report.results.len();
        let compared: u64 = report.results.iter().map(|one| one.compared).sum();
        let cases = format!("{cases} {}", if cases == 1 { "case" } else { "cases" });
        lines.push(format!(
            "bytes verified, {cases}: the final content of every buffer, and every byte of {compared} messages with separate buffers"
        ));
    }
    for one in wrong {
        let (name, size, kind) = (name(report, one), Bytes(one.size), one.kind);
        lines.push(format!(
            "WRONG BYTES: {name} {size} {kind}: {}",
            one.fault.as_deref().unwrap_or("no detail")
        ));
    }
    lines
}

/// The headline figures of a run on host memory.
fn headlines(report: &BenchReport) -> Vec<String> {
    let mut lines = Vec::new();
    let judged = |kind, size| {
        let wanted =
            move |one: &&CaseOutcome| (one.op, one.kind, one.size, one.qps) == (Op::Write, kind, size, 1);
        report.results.iter().filter(wanted)
    };
    let over = |one: &CaseOutcome| format!("over {}", one.link);
    for (one, speed) in judged(CaseKind::Bandwidth, 1 << 20).filter_map(|one| Some((one, one.gbytes_per_s?)))
    {
        let share = share(one, "of");
        lines.push(format!("write 1 MiB {}: {} GB/s{share}", over(one), figure(speed)));
    }
    for (one, p50) in judged(CaseKind::Latency, 8).filter_map(|one| Some((one, one.p50_us?))) {
        let share = share(one, "x");
        lines.push(format!(
            "write 8 B latency {}, waiting on {}: {} us{share}",
            over(one),
            one.wait,
            figure(p50)
        ));
    }
    let many = report.on_main_link().filter(|one| one.kind == CaseKind::Bandwidth && one.qps > 1);
    for many in many {
        let single = report
            .on_main_link()
            .find(|one| (one.op, one.kind, one.size, one.qps) == (many.op, many.kind, many.size, 1));
        if let Some((many_speed, one_speed)) = many.gbytes_per_s.zip(single.and_then(|one| one.gbytes_per_s))
        {
            let (op, size, qps) = (many.op, Bytes(many.size), many.qps);
            lines.push(format!(
                "{op} {size}, {qps} queue pairs: {} x one queue pair",
                figure(many_speed / one_speed)
            ));
        }
    }
    lines
}

fn share(one: &CaseOutcome, word: &str) -> String {
    match (one.of_raw, &one.raw_doubt) {
        (Some(share), _) => format!(", {} {word} raw", figure(share)),
        (None, Some(doubt)) => format!(", no share of raw ({doubt})"),
        (None, None) => String::new(),
    }
}

/// Warns if the figures drifted during the run: a comparison then means little.
fn unsteady(report: &BenchReport) -> Option<String> {
    let spread =
        |samples: &[f64]| mad(samples).zip(median(samples)).map_or(0.0, |(mad, middle)| mad / middle);
    let raw = report.raw.as_ref().is_some_and(|raw| {
        spread(&raw.gbytes_per_s_samples).max(spread(&raw.half_round_trip_us_samples)) > UNSTEADY
    });
    let throughput = report.results.iter().filter(|one| !one.kind.is_latency());
    let cases = throughput.filter(|one| spread(&one.samples) > UNSTEADY).count();
    let cases_text = if cases == 1 { "1 case".to_owned() } else { format!("{cases} cases") };
    let what = match (raw, cases) {
        (false, 0) => return None,
        (true, 0) => "plain UDP".to_owned(),
        (false, _) => cases_text,
        (true, _) => format!("plain UDP and {cases_text}"),
    };
    Some(format!(
        "unsteady: {what} varied by more than {:.0} % within the run; check for other load on the machine",
        UNSTEADY * 100.0
    ))
}

#[cfg(test)]
mod tests {
    use super::super::flow_tests::sample_report;
    use super::*;

    #[test]
    fn a_run_as_it_is_printed() {
        insta::assert_snapshot!(render(&sample_report()));
    }

    /// Two links in one run: each figure says which it is of.
    #[test]
    fn a_run_over_two_links_says_which_each_figure_is_of() {
        let mut report = sample_report();
        let judged = |one: &CaseOutcome| {
            one.op == Op::Write
                && one.qps == 1
                && matches!((one.kind, one.size), (CaseKind::Latency, 8) | (CaseKind::Bandwidth, 0x10_0000))
        };
        let udp: Vec<CaseOutcome> = report.results.iter().filter(|one| judged(one)).cloned().collect();
        assert_eq!(udp.len(), 2);
        report.results.iter_mut().for_each(|one| one.link = "shm".to_owned());
        report.results.extend(udp);
        insta::assert_snapshot!(render(&report));
    }

    #[test]
    fn wrong_bytes_are_shouted() {
        let mut report = sample_report();
        report.results[0].verified = false;
        report.results[0].fault = Some("byte 17 holds 3, not 4".to_owned());
        let text = render(&report);
        assert!(text.contains("WRONG BYTES: write 8 B latency: byte 17 holds 3, not 4"), "{text}");
        assert!(!text.contains("bytes verified"), "{text}");
    }

    #[test]
    fn a_busy_machine_is_pointed_out() {
        let mut report = sample_report();
        assert_eq!(unsteady(&report), None);
        report.raw.as_mut().unwrap().gbytes_per_s_samples = vec![2.0, 4.0, 6.0];
        report.results.iter_mut().find(|one| one.kind == CaseKind::Rate).unwrap().samples =
            vec![1.0, 2.0, 3.0];
        assert!(unsteady(&report).unwrap().starts_with("unsteady: plain UDP and 1 case varied"));
    }

    /// The reason stands in place of the share, and nothing is drawn or predicted by it.
    #[test]
    fn plain_udp_without_a_cpu_is_no_yardstick() {
        let mut report = sample_report();
        let raw = report.raw.as_mut().unwrap();
        raw.ping_cpu_samples = vec![0.4];
        let doubt = raw.latency_doubt();
        for one in report.results.iter_mut().filter(|one| one.kind == CaseKind::Latency) {
            (one.of_raw, one.raw_doubt) = (None, doubt.clone());
        }
        let text = render(&report);
        assert!(
            text.contains("no shares of raw latency and no prediction from it: plain UDP got 40 %"),
            "{text}"
        );
        assert!(
            text.contains(" us, no share of raw (plain UDP got 40 % of the CPU time it needed)"),
            "{text}"
        );
        assert!(!text.contains(" x raw\n") && text.contains(" of raw\n"), "{text}");
    }
}
