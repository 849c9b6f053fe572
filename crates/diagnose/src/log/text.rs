//! The report of a log in words.

use std::fmt::Write as _;

use super::LogReport;
use super::report::times;
use crate::finding::Fix;
use nobounce_topology::clean_lines;

/// Rows of each kind that are written out.
const ROWS: usize = 24;

/// How many rows of a kind are left out.
fn more(out: &mut String, rows: usize) {
    if rows > ROWS {
        let _ = writeln!(out, "  ... and {} more", rows - ROWS);
    }
}

/// Each part on a line of its own, as it is to be copied.
fn write_fix(out: &mut String, fix: &Fix) {
    for (nth, part) in fix.parts().iter().enumerate() {
        let head = if nth == 0 { "fix: " } else { "     " };
        let _ = writeln!(out, "      {head}{}", part.line());
    }
}

impl LogReport {
    /// The report for people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = String::new();
        let count = |kind: &str| self.totals.get(kind).copied().unwrap_or(0);
        let _ = writeln!(
            out,
            "{} log, {} lines: {} direct (GPUDirect), {} staged through host memory, {} over sockets, {} inside a machine",
            self.program,
            self.lines,
            count("direct"),
            count("staged"),
            count("sockets"),
            count("local")
        );
        for row in self.not_direct.iter().take(ROWS) {
            let mut parts = Vec::new();
            if !row.host.is_empty() {
                parts.push(row.host.clone());
            }
            if let Some(rank) = row.rank {
                parts.push(format!("rank {rank}"));
            }
            if let Some(gpu) = &row.gpu {
                parts.push(row.label.clone().unwrap_or_else(|| format!("GPU {gpu}")));
            }
            if let Some(adapter) = &row.adapter {
                parts.push(adapter.clone());
            }
            let why = if row.why.is_empty() { String::new() } else { format!(": {}", row.why.join("; ")) };
            let who = if parts.is_empty() { String::new() } else { format!("{} via ", parts.join(", ")) };
            let _ = writeln!(out, "  not direct: {who}{} ({}){why}", row.way, times(row.count));
        }
        more(&mut out, self.not_direct.len());
        for setting in &self.settings {
            let _ = writeln!(out, "  set: {setting}");
        }
        for (meaning, seen) in self.problems.iter().take(ROWS) {
            let _ = writeln!(out, "  {}: {meaning}", times(seen.count));
            if !seen.example.is_empty() && seen.example != *meaning {
                let _ = writeln!(out, "      {}", seen.example);
            }
        }
        more(&mut out, self.problems.len());
        for fatal in &self.fatal {
            let _ = writeln!(
                out,
                "  {}: fatal completion {} ({}): {}",
                times(fatal.seen.count),
                fatal.status,
                fatal.name,
                fatal.meaning
            );
            let _ = writeln!(out, "      {}", fatal.seen.example);
            if !fatal.findings.is_empty() {
                let _ =
                    writeln!(out, "      findings here that can be the cause: {}", fatal.findings.join(", "));
            }
        }
        for row in self.adapters.iter().take(ROWS) {
            let host = if row.host.is_empty() { String::new() } else { format!(" on {}", row.host) };
            let counts = [
                ("time-outs (status 12)", row.timeouts),
                ("other fatal completions", row.others),
                ("port errors", row.port_errors),
            ];
            let counts = counts.iter().filter(|(_, count)| *count > 0);
            let counts: Vec<String> = counts.map(|(what, count)| format!("{what}: {count}")).collect();
            let why = if row.why.is_empty() { String::new() } else { format!("; {}", row.why.join("; ")) };
            let _ = writeln!(out, "  errors of {}{host}: {}{why}", row.adapter, counts.join(", "));
            write_fix(&mut out, &row.fix);
        }
        more(&mut out, self.adapters.len());
        self.write_causes(&mut out);
        if !self.findings.is_empty() {
            let _ = writeln!(out, "  findings here that explain it: {}", self.findings.join(", "));
        }
        for note in &self.notes {
            let _ = writeln!(out, "  note: {note}");
        }
        clean_lines(&out)
    }

    /// What each problem comes from, the likeliest first.
    fn write_causes(&self, out: &mut String) {
        let mut before = "";
        for cause in &self.causes {
            if cause.problem != before {
                let _ = writeln!(out, "  likely causes of: {}", cause.problem);
                before = &cause.problem;
            }
            let _ = writeln!(out, "    - {}", cause.cause);
            write_fix(out, &cause.fix);
        }
    }
}
