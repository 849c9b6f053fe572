//! The machine as a picture: a panel for each memory node, boxes in boxes for what is below one switch, and the matrix of distances.

use std::fmt::Write as _;

use super::model::link_words;
use super::{Branch, Kind, Topology};
use crate::clean;
use crate::tree::Distance;

const LEAF: (f64, f64) = (184.0, 50.0);
const GAP: f64 = 10.0;
const PAD: f64 = 12.0;
const HEAD: f64 = 26.0;
/// Devices in one line of a switch.
const ACROSS: usize = 4;
/// Panels in one line of the picture.
const PANELS: usize = 2;

/// The picture.
#[must_use]
pub fn svg(topology: &Topology) -> String {
    let mut body = String::new();
    let (mut x, mut y, mut row, mut widest) = (24.0, 64.0, 0.0_f64, 0.0_f64);
    for (index, node) in topology.nodes.iter().enumerate() {
        let panel = panel(node);
        if index > 0 && index % PANELS == 0 {
            (x, y, row) = (24.0, y + row + 24.0, 0.0);
        }
        let _ = write!(body, "<g transform='translate({x:.0} {y:.0})'>{}</g>", panel.svg);
        x += panel.width + 24.0;
        row = row.max(panel.height);
        widest = widest.max(x);
    }
    y += row + 36.0;
    let matrix = matrix(topology);
    let _ = write!(body, "<g transform='translate(24 {y:.0})'>{}</g>", matrix.svg);
    let width = widest.max(matrix.width + 48.0).max(640.0);
    let height = y + matrix.height + 24.0;
    let title = topology.product.as_deref().unwrap_or("this machine");
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0}' height='{height:.0}' viewBox='0 0 {width:.0} {height:.0}' font-family='Helvetica, Arial, sans-serif' font-size='12'>\
         <rect width='100%' height='100%' fill='#ffffff'/>\
         <text x='24' y='34' font-size='20' font-weight='bold' fill='#222'>{}</text>{}{body}</svg>\n",
        escape(title),
        key(width)
    )
}

/// What the colours mean.
fn key(width: f64) -> String {
    let mut out = String::new();
    let mut x = width - 24.0;
    for (kind, word) in
        [(Kind::Nvme, "NVMe"), (Kind::Nic, "adapter"), (Kind::Gpu, "GPU"), (Kind::Switch, "PCIe switch")]
    {
        let length = 34.0 + 7.0 * count(word);
        x -= length;
        let (fill, stroke) = colours(kind);
        let _ = write!(
            out,
            "<rect x='{x:.0}' y='21' width='16' height='16' rx='3' fill='{fill}' stroke='{stroke}'/><text x='{:.0}' y='34' fill='#444'>{word}</text>",
            x + 22.0
        );
    }
    out
}

/// A piece of the picture with its size.
struct Block {
    svg: String,
    width: f64,
    height: f64,
}

fn panel(node: &Branch) -> Block {
    let inner = stack(node.children.iter().map(group).collect());
    let notes = node.notes.join(", ");
    let width = (inner.width + 2.0 * PAD).max(320.0);
    let height = inner.height + 2.0 * PAD + 34.0;
    let svg = format!(
        "<rect width='{width:.0}' height='{height:.0}' rx='10' fill='#f4f5f7' stroke='#b8bcc4'/>\
         <text x='{PAD}' y='24' font-size='15' font-weight='bold' fill='#333'>{}</text>\
         <text x='{:.0}' y='24' text-anchor='end' fill='#777'>{}</text>\
         <g transform='translate({PAD} {:.0})'>{}</g>",
        escape(&node.label),
        width - PAD,
        escape(&shortened(&notes, 26)),
        PAD + 32.0,
        inner.svg
    );
    Block { svg, width, height }
}

/// A root bus: what hangs on it, one below the other where there are switches, side by side where there are not.
fn group(root: &Branch) -> Block {
    let blocks: Vec<Block> = root.children.iter().map(|child| block(shown(child))).collect();
    flow(blocks)
}

/// Ports with one thing below say nothing by themselves.
fn shown(branch: &Branch) -> &Branch {
    let mut at = branch;
    while matches!(at.kind, Kind::Port | Kind::RootPort) && at.children.len() == 1 {
        at = &at.children[0];
    }
    at
}

fn block(branch: &Branch) -> Block {
    if branch.children.is_empty() {
        return leaf(branch);
    }
    let mut children: Vec<&Branch> = branch.children.iter().map(shown).collect();
    // Devices before further switches, so that lines fill up; GPUs first, for they are what one looks for.
    children.sort_by_key(|child| match child.kind {
        _ if !child.children.is_empty() => 3,
        Kind::Gpu => 0,
        Kind::Nic => 1,
        _ => 2,
    });
    let blocks: Vec<Block> = children.into_iter().map(block).collect();
    let inner = flow(blocks);
    let (fill, stroke) = colours(Kind::Switch);
    let width = inner.width + 2.0 * PAD;
    let height = inner.height + PAD + HEAD;
    let link = link_words(branch);
    let svg = format!(
        "<rect width='{width:.0}' height='{height:.0}' rx='8' fill='{fill}' stroke='{stroke}'/>\
         <text x='{PAD}' y='18' fill='#555'>{} <tspan fill='#888'>{}</tspan></text>{}\
         <g transform='translate({PAD} {HEAD})'>{}</g>",
        escape(&branch.label),
        escape(&branch.address),
        link_text(&link, branch.degraded, width - PAD, 18.0),
        inner.svg
    );
    Block { svg, width, height }
}

fn leaf(branch: &Branch) -> Block {
    let (fill, stroke) = colours(branch.kind);
    let (width, height) = LEAF;
    let stroke = if branch.degraded { "#d62728" } else { stroke };
    let link = link_words(branch);
    let notes = branch.notes.join(", ");
    // The vendor's name is no news in every box.
    let label = branch.label.replace("NVIDIA ", "").replace("AMD Instinct ", "");
    let svg = format!(
        "<rect width='{width}' height='{height}' rx='6' fill='{fill}' stroke='{stroke}' stroke-width='{}'/>\
         <text x='9' y='20' font-weight='bold' fill='#111'>{}</text>\
         <text x='9' y='39' font-size='11' fill='#444'>{}</text>{}",
        if branch.degraded { 2.5 } else { 1.2 },
        escape(&shortened(&label, 21)),
        escape(&shortened(&notes, 15)),
        link_text(&link, branch.degraded, width - 9.0, 39.0),
    );
    // The address shows when the pointer rests on the box.
    Block {
        svg: format!("<g><title>{} {}</title>{svg}</g>", escape(&branch.address), escape(&notes)),
        width,
        height,
    }
}

fn link_text(link: &str, degraded: bool, x: f64, y: f64) -> String {
    let colour = if degraded { "#d62728" } else { "#777" };
    let weight = if degraded { "bold" } else { "normal" };
    format!(
        "<text x='{x:.0}' y='{y:.0}' font-size='11' text-anchor='end' font-weight='{weight}' fill='{colour}'>{}</text>",
        escape(link)
    )
}

/// Blocks in lines.
fn flow(blocks: Vec<Block>) -> Block {
    let mut svg = String::new();
    let (mut x, mut y, mut row, mut widest, mut in_line) = (0.0, 0.0, 0.0_f64, 0.0_f64, 0);
    let limit = LEAF.0 * 4.0 + GAP * 3.0 + 1.0;
    for block in blocks {
        if in_line > 0 && (in_line == ACROSS || x + block.width > limit) {
            (x, y, row, in_line) = (0.0, y + row + GAP, 0.0, 0);
        }
        let _ = write!(svg, "<g transform='translate({x:.0} {y:.0})'>{}</g>", block.svg);
        x += block.width + GAP;
        row = row.max(block.height);
        widest = widest.max(x - GAP);
        in_line += 1;
    }
    Block { svg, width: widest, height: y + row }
}

/// Blocks one below the other; those without devices are left out. Narrow ones share a line.
fn stack(blocks: Vec<Block>) -> Block {
    flow(blocks.into_iter().filter(|block| block.height > 0.0).collect())
}

fn matrix(topology: &Topology) -> Block {
    let matrix = &topology.matrix;
    if matrix.gpus.is_empty() || matrix.nics.is_empty() {
        return Block { svg: String::new(), width: 0.0, height: 0.0 };
    }
    let cell = if matrix.nics.len() > 16 { 44.0 } else { 66.0 };
    let left = 150.0;
    let mut svg = String::from(
        "<text x='0' y='0' font-size='15' font-weight='bold' fill='#333'>How far each GPU is from each adapter (framed: the one to use)</text>",
    );
    // Names that do not fit side by side are written upwards.
    let upwards = matrix.nics.iter().any(|name| count(name) * 6.2 > cell - 4.0);
    let top = if upwards { 84.0 } else { 34.0 };
    for (at, nic) in matrix.nics.iter().enumerate() {
        let (x, name) = (left + cell * (step(at) + 0.5), escape(&shortened(nic, 12)));
        let _ = if upwards {
            write!(
                svg,
                "<text transform='translate({:.0} {:.0}) rotate(-60)' font-size='11' fill='#333'>{name}</text>",
                x - 2.0,
                top - 6.0
            )
        } else {
            write!(
                svg,
                "<text x='{x:.0}' y='26' text-anchor='middle' font-size='11' fill='#333'>{name}</text>"
            )
        };
    }
    for (at, row) in matrix.gpus.iter().enumerate() {
        let y = top + 26.0 * step(at);
        let _ = write!(
            svg,
            "<text x='{:.0}' y='{:.0}' text-anchor='end' fill='#333'>{}</text>",
            left - 10.0,
            y + 17.0,
            escape(&shortened(&row.label, 18))
        );
        for (column, distance) in row.distances.iter().enumerate() {
            let Some(name) = matrix.nics.get(column) else { continue };
            let x = left + cell * step(column);
            let (fill, word) =
                distance.map_or(("#eeeeee", "-"), |distance| (shade(distance), distance.name()));
            let best = row.best.as_ref() == Some(name);
            let frame = if best { "stroke='#111' stroke-width='2.5'" } else { "stroke='#fff'" };
            let weight = if best { "bold" } else { "normal" };
            let _ = write!(
                svg,
                "<rect x='{:.0}' y='{y:.0}' width='{:.0}' height='22' rx='3' fill='{fill}' {frame}/><text x='{:.0}' y='{:.0}' text-anchor='middle' font-size='11' font-weight='{weight}' fill='#222'>{word}</text>",
                x + 1.5,
                cell - 3.0,
                x + cell / 2.0,
                y + 15.0
            );
        }
    }
    let mut y = top + 26.0 * step(matrix.gpus.len()) + 16.0;
    for distance in Distance::ALL {
        if matrix.gpus.iter().any(|row| row.distances.contains(&Some(distance))) {
            let _ = write!(
                svg,
                "<rect x='{left}' y='{:.0}' width='40' height='16' rx='3' fill='{}'/><text x='{:.0}' y='{:.0}' text-anchor='middle' font-size='10'>{distance}</text><text x='{:.0}' y='{:.0}' fill='#555'>{}</text>",
                y - 12.0,
                shade(distance),
                left + 20.0,
                y,
                left + 50.0,
                y,
                distance.words()
            );
            y += 21.0;
        }
    }
    Block { svg, width: (left + cell * step(matrix.nics.len())).max(560.0), height: y }
}

const fn shade(distance: Distance) -> &'static str {
    match distance {
        Distance::Pix => "#8fd18f",
        Distance::Pxb => "#c3e6b0",
        Distance::Phb => "#fbe7a1",
        Distance::Node => "#f9cf9c",
        Distance::Sys => "#f2a9a4",
    }
}

const fn colours(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Gpu => ("#d4edc4", "#5d9c3a"),
        Kind::Nic => ("#cfe3f7", "#3b7dbb"),
        Kind::Nvme => ("#ece3f5", "#8e6bb0"),
        _ => ("#ffffff", "#9aa0aa"),
    }
}

/// A small number of things as a number to draw with.
fn step(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

fn count(text: &str) -> f64 {
    step(text.chars().count())
}

fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// Text that may come from anywhere becomes text of XML.
fn escape(text: &str) -> String {
    clean(text)
        .chars()
        .map(|c| match c {
            // Not even as a number may these be in XML.
            '\u{fffe}' | '\u{ffff}' => "\u{fffd}".to_owned(),
            '&' => "&amp;".to_owned(),
            '<' => "&lt;".to_owned(),
            '>' => "&gt;".to_owned(),
            '\'' => "&apos;".to_owned(),
            '"' => "&quot;".to_owned(),
            c => c.to_string(),
        })
        .collect()
}
