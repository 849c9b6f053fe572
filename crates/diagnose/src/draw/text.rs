//! The tree and the matrix on a terminal.

use std::fmt::Write as _;

use super::model::link_words;
use super::{Branch, Kind, Topology};
use crate::report::Style;
use nobounce_topology::clean;

/// Tree and matrix.
#[must_use]
pub fn text(topology: &Topology, style: Style) -> String {
    let mut out = String::new();
    if let Some(product) = &topology.product {
        let _ = writeln!(out, "{}", clean(product));
    }
    for node in &topology.nodes {
        let _ = writeln!(out, "{}", style.bold(&words(node)));
        children(&mut out, node, "", style);
    }
    if !topology.matrix.gpus.is_empty() {
        out.push('\n');
        matrix(&mut out, topology, style);
    }
    if !topology.peers.is_empty() {
        out.push('\n');
        out.push_str(&topology.peers.text());
    }
    out
}

impl Style {
    fn code(self, code: &str, text: &str) -> String {
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn bold(self, text: &str) -> String {
        self.code("1", text)
    }
}

fn words(branch: &Branch) -> String {
    let notes = branch.notes.join(", ");
    clean(&if notes.is_empty() { branch.label.clone() } else { format!("{} ({notes})", branch.label) })
}

fn children(out: &mut String, branch: &Branch, indent: &str, style: Style) {
    for (index, child) in branch.children.iter().enumerate() {
        let last = index + 1 == branch.children.len();
        // A port with one device below says nothing by itself: it is drawn on the device's line.
        let mut shown = child;
        let mut above = String::new();
        while matches!(shown.kind, Kind::Port | Kind::RootPort) && shown.children.len() == 1 {
            if shown.kind == Kind::RootPort {
                above = clean(&format!("on root port {}", shown.address));
            }
            shown = &shown.children[0];
        }
        let code = match shown.kind {
            Kind::Gpu => "1;32",
            Kind::Nic => "1;36",
            Kind::Nvme => "34",
            _ => "0",
        };
        let address =
            if matches!(shown.kind, Kind::Root | Kind::Node) { String::new() } else { clean(&shown.address) };
        let link = link_words(shown);
        let words = style.code(code, &words(shown));
        let details = [address.as_str(), &link, &above].into_iter().filter(|part| !part.is_empty());
        let line = details.fold(words, |line, part| {
            let colour = if shown.degraded && *part == link { "1;31" } else { "2" };
            format!("{line}  {}", style.code(colour, part))
        });
        let _ = writeln!(out, "{indent}{} {line}", if last { "└─" } else { "├─" });
        let below = format!("{indent}{}  ", if last { " " } else { "│" });
        children(out, shown, &below, style);
    }
}

fn matrix(out: &mut String, topology: &Topology, style: Style) {
    let matrix = &topology.matrix;
    let first = matrix.gpus.iter().map(|row| row.label.len()).max().unwrap_or(3);
    let widths: Vec<usize> = matrix.nics.iter().map(|name| name.len().max(4)).collect();
    let _ = write!(out, "{:first$}", "");
    for (name, width) in matrix.nics.iter().zip(&widths) {
        let _ = write!(out, "  {:<width$}", clean(name));
    }
    let _ = writeln!(out, "  node  best");
    for row in &matrix.gpus {
        let _ = write!(out, "{:first$}", clean(&row.label));
        for ((distance, width), name) in row.distances.iter().zip(&widths).zip(&matrix.nics) {
            let word = distance.map_or("-", nobounce_topology::tree::Distance::name);
            let cell = format!("{word:<width$}");
            let cell = if row.best.as_ref() == Some(name) { style.bold(&cell) } else { cell };
            let _ = write!(out, "  {cell}");
        }
        let node =
            row.numa_node.filter(|node| *node >= 0).map_or_else(|| "-".to_owned(), |node| node.to_string());
        let _ = writeln!(out, "  {node:<4}  {}", clean(row.best.as_deref().unwrap_or("-")));
    }
    if !matrix.nics.is_empty() {
        let legend: Vec<String> = nobounce_topology::tree::Distance::ALL
            .into_iter()
            .filter(|distance| matrix.gpus.iter().any(|row| row.distances.contains(&Some(*distance))))
            .map(|distance| format!("{distance}: {}", distance.words()))
            .collect();
        let _ = writeln!(out, "{}", style.code("2", &legend.join("; ")));
    }
}
