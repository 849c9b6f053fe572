//! The diagnosis for people: findings ranked, then one line for each GPU.

use std::fmt::Write as _;

use crate::diagnosis::Diagnosis;
use crate::finding::{Finding, Fix, FixPart, Severity};
use crate::verdict::{PathKind, Use, UseKind, Verdict};
use nobounce_topology::facts::{Facts, Gpu};
use nobounce_topology::{clean, clean_lines};

/// How a report is written.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Colours, for terminals.
    pub color: bool,
    /// Columns that lines may take.
    pub width: usize,
    /// Every pair, and the evidence of information, too.
    pub all: bool,
}

impl Style {
    pub(crate) fn paint(self, code: &str, text: &str) -> String {
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// The report.
#[must_use]
pub fn report(facts: &Facts, diagnosis: &Diagnosis, style: Style) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{}", headline(facts));
    let heads = || diagnosis.findings.iter().filter(|finding| finding.under.is_none() || style.all);
    for finding in heads().filter(|finding| finding.severity > Severity::Info) {
        full(&mut out, finding, style);
        if !style.all {
            below(&mut out, finding, &diagnosis.findings, style);
        }
    }
    let notes: Vec<_> = heads().filter(|finding| finding.severity == Severity::Info).collect();
    if !notes.is_empty() {
        out.push('\n');
        for finding in notes {
            if style.all {
                full(&mut out, finding, style);
            } else {
                wrapped(
                    &mut out,
                    &format!("{}  {}: ", style.paint("2", "info"), finding.id),
                    &finding.title,
                    4 + finding.id.len() + 4,
                    6,
                    style,
                );
            }
        }
    }
    pairs(&mut out, facts, diagnosis, style);
    let _ = writeln!(out, "\n{}", verdict_line(facts, diagnosis, style));
    out
}

pub(crate) fn headline(facts: &Facts) -> String {
    let mut parts = Vec::new();
    if let Some(host) = &facts.host {
        parts.push(host.clone());
    }
    if let Some(product) = facts.machine.product.known().filter(|product| !product.is_empty()) {
        parts.push(product.clone());
    }
    let count =
        |number: usize, one: &str, many: &str| format!("{number} {}", if number == 1 { one } else { many });
    parts.push(count(facts.gpus.len(), "GPU", "GPUs"));
    parts.push(count(facts.nics.len(), "RDMA adapter", "RDMA adapters"));
    parts.push(format!("Linux {}", facts.kernel.release));
    if let Some(Some(module)) = facts.kernel.nvidia.known() {
        let kind = match module.open {
            Some(true) => ", open module",
            Some(false) => ", closed module",
            None => "",
        };
        parts.push(format!("NVIDIA driver {}{kind}", module.version));
    }
    if let Some(Some(hypervisor)) = facts.machine.hypervisor.known() {
        parts.push(format!("virtual machine ({hypervisor})"));
    }
    if let Some(Some(container)) = facts.process.container.known() {
        parts.push(format!("container ({container})"));
    }
    clean(&parts.join(" · "))
}

pub(crate) fn full(out: &mut String, finding: &Finding, style: Style) {
    let code = match finding.severity {
        Severity::Error => "1;31",
        Severity::Warning => "1;33",
        Severity::Unknown => "1;35",
        Severity::Info => "2",
    };
    out.push('\n');
    let head = format!(
        "{} {}: ",
        style.paint(code, &format!("{:<7}", finding.severity.name())),
        style.paint("1", finding.id)
    );
    wrapped(out, &head, &finding.title, 8 + finding.id.len() + 2, 8, style);
    wrapped(out, "        ", &finding.why, 8, 8, style);
    for evidence in &finding.evidence {
        wrapped(
            out,
            &style.paint("2", "  seen  "),
            &format!("{}: {}", evidence.source, evidence.value),
            8,
            8,
            style,
        );
    }
    if let Some(cost) = &finding.cost {
        wrapped(out, &style.paint("2", "  cost  "), cost, 8, 8, style);
    }
    for (index, each) in finding.fix.iter().enumerate() {
        let needs = match (index, finding.needs_root, finding.needs_reboot) {
            (0, _, true) => "   [root, reboot]",
            (0, true, false) => "   [root]",
            _ => "",
        };
        fix(out, each, needs, style);
    }
}

/// A fix: remarks are wrapped, other parts stand on lines of their own as they are to be copied.
fn fix(out: &mut String, fix: &Fix, needs: &str, style: Style) {
    for (nth, part) in fix.parts().iter().enumerate() {
        let needs = if nth == 0 { style.paint("2", needs) } else { String::new() };
        let head = if nth == 0 { style.paint("32", "  fix   ") } else { "        ".to_owned() };
        match part {
            FixPart::Remark(_) => {
                wrapped(out, &head, &part.line(), 8, 8, style);
                if !needs.is_empty() {
                    let end = out.trim_end().len();
                    out.insert_str(end, &needs);
                }
            }
            _ => {
                let _ = writeln!(out, "{head}{}{needs}", clean_lines(&part.line()));
            }
        }
    }
}

/// What went below a finding: a line each.
fn below(out: &mut String, head: &Finding, findings: &[Finding], style: Style) {
    let own = findings.iter().filter(|finding| finding.under == Some(head.id));
    for finding in own.filter(|finding| finding.severity > Severity::Info) {
        let text = format!("{}: {}", finding.id, finding.title);
        wrapped(out, &style.paint("2", "  also  "), &text, 8, 8, style);
    }
}

/// `text` after `head`, broken at blanks; `at` is how wide the head looks, `indent` where further
/// lines begin.
pub(crate) fn wrapped(out: &mut String, head: &str, text: &str, at: usize, indent: usize, style: Style) {
    out.push_str(head);
    let mut column = at;
    let mut first = true;
    for word in text.split_whitespace() {
        let word = clean(word);
        let length = word.chars().count();
        if !first && column + 1 + length > style.width {
            let _ = write!(out, "\n{:indent$}", "");
            column = indent;
        } else if !first {
            out.push(' ');
            column += 1;
        }
        out.push_str(&word);
        column += length;
        first = false;
    }
    out.push('\n');
}

fn pairs(out: &mut String, facts: &Facts, diagnosis: &Diagnosis, style: Style) {
    let shown: Vec<&Verdict> =
        diagnosis.verdicts.iter().filter(|verdict| style.all || verdict.best).collect();
    if shown.is_empty() {
        return;
    }
    let gpu_name = |verdict: &Verdict| {
        facts
            .gpus
            .iter()
            .find(|gpu| gpu.address == verdict.gpu)
            .map_or_else(|| clean(&verdict.gpu), |gpu| clean(&gpu.label()))
    };
    let widest = |cells: Vec<usize>, least: usize| cells.into_iter().max().unwrap_or(0).max(least);
    let gpu = widest(shown.iter().map(|verdict| gpu_name(verdict).chars().count()).collect(), 3);
    let nic = widest(shown.iter().map(|verdict| verdict.nic.chars().count()).collect(), 7);
    let path = widest(shown.iter().map(|verdict| way(verdict).chars().count()).collect(), 4);
    let nccl = widest(shown.iter().map(|verdict| short(verdict.nccl.kind).chars().count()).collect(), 4);
    out.push('\n');
    let title = format!(
        "{:<gpu$}  {:<nic$}  dist  {:<path$}  {:>16}  {:<nccl$}  UCX",
        "GPU", "adapter", "path", "expected", "NCCL"
    );
    let _ = writeln!(out, "{}", style.paint("2", &title));
    for verdict in &shown {
        let expected = match (verdict.expected_gbs, verdict.loss()) {
            (Some(gbs), Some(loss)) => format!("{gbs:.1} GB/s, -{:.0} %", loss * 100.0),
            (Some(gbs), None) => format!("{gbs:.1} GB/s"),
            (None, _) => "-".to_owned(),
        };
        let code = match verdict.path {
            PathKind::Direct => "32",
            PathKind::Slow => "33",
            PathKind::Unknown => "35",
            PathKind::Staged => "31",
        };
        let _ = writeln!(
            out,
            "{:<gpu$}  {:<nic$}  {:<4}  {}  {expected:>16}  {:<nccl$}  {}",
            gpu_name(verdict),
            clean(&verdict.nic),
            verdict.distance.map_or("-", nobounce_topology::tree::Distance::name),
            style.paint(code, &format!("{:<path$}", way(verdict))),
            short(verdict.nccl.kind),
            short(verdict.ucx.kind),
        );
    }
    // Why, once for all pairs that share it.
    let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
    let mut note = |text: String, who: String| match reasons.iter_mut().find(|(known, _)| *known == text) {
        Some((_, whom)) => whom.push(who),
        None => reasons.push((text, vec![who])),
    };
    for verdict in &shown {
        let who = format!("{}/{}", gpu_name(verdict), verdict.nic);
        if !verdict.reasons.is_empty() {
            note(
                general(&format!("{}: {}", verdict.path.words(), verdict.reasons.join("; ")), verdict),
                who.clone(),
            );
        }
        match (&verdict.nccl, &verdict.ucx) {
            (nccl, ucx) if nccl == ucx && nccl.kind != UseKind::Direct => {
                note(general(&format!("NCCL and UCX: {}", nccl.text), verdict), who);
            }
            (nccl, ucx) => {
                for (name, plan) in [("NCCL", nccl), ("UCX", ucx)] {
                    if plan.kind != UseKind::Direct {
                        note(general(&format!("{name}: {}", plan.text), verdict), who.clone());
                    }
                }
            }
        }
    }
    for (text, whom) in reasons {
        let who = if whom.len() == shown.len() { "all".to_owned() } else { crate::checks::list(&whom) };
        wrapped(out, "  ", &format!("{who}: {text}"), 2, 4, style);
    }
}

/// A reason without the names of its pair, so that one line can stand for many pairs.
fn general(text: &str, verdict: &Verdict) -> String {
    let text = without_name(text, &verdict.nic);
    match text.split_once("/dev/infiniband/uverbs") {
        Some((before, after)) => {
            format!(
                "{before}/dev/infiniband/uverbs*{}",
                after.trim_start_matches(|c: char| c.is_ascii_digit())
            )
        }
        None => text,
    }
}

/// Names are replaced where they stand as words of their own: not within longer names, the value of
/// a variable, or a list of names.
fn without_name(text: &str, name: &str) -> String {
    let within = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(name).filter(|_| !name.is_empty()) {
        let (before, from) = rest.split_at(at);
        let (this, after) = from.split_at(name.len());
        let joined = before
            .chars()
            .next_back()
            .or(out.chars().next_back())
            .is_some_and(|c| within(c) || "=,^:".contains(c))
            || after.starts_with(within);
        let listed = after.starts_with(',')
            || after.starts_with(" and ")
            || before.ends_with(", ")
            || before.ends_with(" and ");
        let joined = joined || listed;
        out.push_str(before);
        out.push_str(if joined { this } else { "the adapter" });
        rest = after;
    }
    out + rest
}

fn way(verdict: &Verdict) -> String {
    match (&verdict.by, verdict.proven) {
        (Some(by), true) => format!("{} ({by}, registered)", verdict.path.words()),
        (Some(by), false) => format!("{} ({by})", verdict.path.words()),
        (None, _) => verdict.path.words().to_owned(),
    }
}

const fn short(kind: UseKind) -> &'static str {
    match kind {
        UseKind::Direct => "direct",
        UseKind::Half => "half direct",
        UseKind::Staged => "staged",
        UseKind::None => "not used",
        UseKind::Unknown => "see below",
    }
}

fn verdict_line(facts: &Facts, diagnosis: &Diagnosis, style: Style) -> String {
    let count = |kind: PathKind| {
        diagnosis.verdicts.iter().filter(|verdict| verdict.best && verdict.path == kind).count()
    };
    if facts.gpus.is_empty() {
        return "no GPU found: nothing to diagnose for GPUDirect".to_owned();
    }
    let of = |severity: Severity| {
        let heads = diagnosis.findings.iter().filter(|finding| finding.under.is_none());
        heads.filter(|finding| finding.severity == severity).count()
    };
    let (errors, warnings, unknown) = (of(Severity::Error), of(Severity::Warning), of(Severity::Unknown));
    if diagnosis.verdicts.is_empty() {
        let moves = |gpu: &Gpu| {
            let mut own = facts.transfers.iter().filter(|transfer| transfer.gpu == gpu.address);
            own.all(|transfer| transfer.probe.ok)
        };
        let window =
            facts.gpus.iter().any(|gpu| gpu.window_probe.known().is_some_and(|probe| probe.ok) && moves(gpu));
        return match errors {
            0 if window => "no RDMA adapter for the GPUs; on the software NIC (nobounce run) their memory is direct, through the window".to_owned(),
            0 => "no RDMA adapter for the GPUs".to_owned(),
            _ => style.paint("1;31", "no usable RDMA adapter; see above"),
        };
    }
    let counts: Vec<String> = [PathKind::Direct, PathKind::Slow, PathKind::Unknown, PathKind::Staged]
        .into_iter()
        .filter(|kind| count(*kind) > 0)
        .map(|kind| format!("{} {}", count(kind), kind.words()))
        .collect();
    let many = |number: usize, word: &str| format!("{number} {word}{}", if number == 1 { "" } else { "s" });
    let text = format!(
        "GPUs with their best adapter: {}{}; {}, {}, {unknown} unknown",
        counts.join(", "),
        not_used(diagnosis),
        many(errors, "error"),
        many(warnings, "warning")
    );
    let code = if errors > 0 {
        "1;31"
    } else if warnings + unknown > 0 {
        "1;33"
    } else {
        "1;32"
    };
    style.paint(code, &text)
}

/// Direct paths that a library does not use directly, by its plan or its log.
fn not_used(diagnosis: &Diagnosis) -> String {
    let direct =
        |verdict: &&Verdict| verdict.best && matches!(verdict.path, PathKind::Direct | PathKind::Slow);
    let left_out = |plan: &Use| match plan.kind {
        UseKind::Staged | UseKind::None => true,
        UseKind::Unknown => plan.may_fail(),
        UseKind::Direct | UseKind::Half => false,
    };
    let count = |plan: fn(&Verdict) -> &Use| {
        diagnosis.verdicts.iter().filter(direct).filter(|verdict| left_out(plan(verdict))).count()
    };
    match (count(|verdict| &verdict.nccl), count(|verdict| &verdict.ucx)) {
        (0, 0) => String::new(),
        (nccl, 0) => format!(", {nccl} of them not used directly by NCCL"),
        (0, ucx) => format!(", {ucx} of them not used directly by UCX"),
        (nccl, ucx) => format!(", of them not used directly by NCCL {nccl}, by UCX {ucx}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_left_out_as_words_only() {
        assert_eq!(
            without_name("does not use mlx5_1: NCCL_IB_HCA=mlx5_1,mlx5_10", "mlx5_1"),
            "does not use the adapter: NCCL_IB_HCA=mlx5_1,mlx5_10"
        );
        assert_eq!(
            without_name("mlx5_1 takes none; mlx5_1", "mlx5_1"),
            "the adapter takes none; the adapter"
        );
        assert_eq!(
            without_name("mlx5_1, mlx5_2 and 3 more: slow", "mlx5_1"),
            "mlx5_1, mlx5_2 and 3 more: slow"
        );
        assert_eq!(without_name("mlx5_10 and xmlx5_1", "mlx5_1"), "mlx5_10 and xmlx5_1");
    }
}
