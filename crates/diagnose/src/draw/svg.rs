//! The machine as a picture: a panel for each memory node, boxes in boxes for what is below one
//! switch, and the matrix of distances.

use std::fmt::Write as _;

use super::model::link_words;
use super::{Branch, Kind, Topology};
use nobounce_topology::clean;
use nobounce_topology::tree::Distance;

const LEAF: (f64, f64) = (188.0, 64.0);
const GAP: f64 = 10.0;
const PAD: f64 = 12.0;
const HEAD: f64 = 26.0;
/// Devices in one line of a switch.
const ACROSS: usize = 4;
/// Panels in one line of the picture.
const PANELS: usize = 2;
/// Letters of the title that fit into the narrowest picture.
const TITLE: usize = 48;
/// Colours of what is wrong.
const RED: &str = "#d62728";
const DOWN: (&str, &str) = ("#fde2c8", "#d9730d");

/// The picture.
#[must_use]
pub fn svg(topology: &Topology) -> String {
    let mut body = String::new();
    let (mut x, mut y, mut row, mut widest) = (24.0, 88.0, 0.0_f64, 0.0_f64);
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
        escape(&shortened(title, TITLE)),
        key(topology)
    )
}

/// What the colours mean, as far as they are in the picture.
fn key(topology: &Topology) -> String {
    let any = |test: &dyn Fn(&Branch) -> bool| topology.nodes.iter().any(|node| holds(node, test));
    let kinds = [
        (Kind::Switch, "PCIe switch"),
        (Kind::Gpu, "GPU"),
        (Kind::Nic, "adapter"),
        (Kind::Nvme, "NVMe drive"),
    ];
    let mut entries: Vec<(&str, &str, &str)> = kinds
        .into_iter()
        .filter(|(kind, _)| any(&|branch| branch.kind == *kind && !branch.down))
        .map(|(kind, word)| (colours(kind).0, colours(kind).1, word))
        .collect();
    if any(&|branch| branch.down) {
        entries.push((DOWN.0, DOWN.1, "adapter without a network link"));
    }
    if any(&|branch| branch.degraded) {
        entries.push(("#ffffff", RED, "PCIe link slower than both ends support"));
    }
    let mut out = String::new();
    let mut x = 24.0;
    for (fill, stroke, word) in entries {
        let _ = write!(
            out,
            "<rect x='{x:.0}' y='51' width='16' height='16' rx='3' fill='{fill}' stroke='{stroke}' stroke-width='1.5'/><text x='{:.0}' y='64' fill='#444'>{word}</text>",
            x + 22.0
        );
        x += 46.0 + 6.6 * count(word);
    }
    out
}

/// Whether anything of a branch passes a test.
fn holds(branch: &Branch, test: &dyn Fn(&Branch) -> bool) -> bool {
    test(branch) || branch.children.iter().any(|child| holds(child, test))
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

/// A root bus with the devices attached to it: stacked where there are switches, else side by side.
fn group(root: &Branch) -> Block {
    let blocks: Vec<Block> = root.children.iter().map(block).collect();
    flow(blocks)
}

/// A port with a single child adds nothing by itself; the root port is named together with the
/// device attached to it.
fn shown(branch: &Branch) -> (&Branch, Option<&str>) {
    let (mut at, mut root) = (branch, None);
    while matches!(at.kind, Kind::Port | Kind::RootPort) && at.children.len() == 1 {
        if at.kind == Kind::RootPort {
            root = Some(at.address.as_str());
        }
        at = &at.children[0];
    }
    (at, root)
}

fn block(branch: &Branch) -> Block {
    let (branch, root) = shown(branch);
    if branch.children.is_empty() {
        return leaf(branch, root);
    }
    let mut children: Vec<&Branch> = branch.children.iter().collect();
    // Devices before further switches, so that lines fill up; GPUs first, for they are what one
    // looks for.
    children.sort_by_key(|child| match shown(child).0 {
        below if !below.children.is_empty() => 3,
        below if below.kind == Kind::Gpu => 0,
        below if below.kind == Kind::Nic => 1,
        _ => 2,
    });
    let blocks: Vec<Block> = children.into_iter().map(block).collect();
    let inner = flow(blocks);
    let (fill, stroke) = colours(Kind::Switch);
    let width = (inner.width + 2.0 * PAD).max(2.0 * LEAF.0);
    let height = inner.height + PAD + HEAD;
    let above = root.map_or_else(String::new, |root| format!("root port {}, ", short(root)));
    // Two texts share the line: the left one gives way.
    let room = usize_of((width - 2.0 * PAD) / 6.4).saturating_sub(above.len() + link_words(branch).len() + 1);
    let svg = format!(
        "<rect width='{width:.0}' height='{height:.0}' rx='8' fill='{fill}' stroke='{stroke}'/>\
         <text x='{PAD}' y='18' fill='#555'>{}</text>{}\
         <g transform='translate({PAD} {HEAD})'>{}</g>",
        escape(&shortened(&format!("{} {}", branch.label, branch.address), room.max(12))),
        link_text(&above, &link_words(branch), branch.degraded, width - PAD, 18.0),
        inner.svg
    );
    Block { svg, width, height }
}

fn leaf(branch: &Branch, root: Option<&str>) -> Block {
    let (fill, stroke) = if branch.down { DOWN } else { colours(branch.kind) };
    let (width, height) = LEAF;
    let (stroke, thick) = if branch.degraded { (RED, 2.5) } else { (stroke, 1.2) };
    let link = link_words(branch);
    let mut notes = branch.notes.clone();
    notes.extend(root.map(|root| format!("port {}", short(root))));
    // The vendor's name is no news in every box.
    let label = branch.label.replace("NVIDIA ", "").replace("AMD Instinct ", "");
    let colour = if branch.degraded { RED } else { "#666" };
    let weight = if branch.degraded { "bold" } else { "normal" };
    let svg = format!(
        "<rect width='{width}' height='{height}' rx='6' fill='{fill}' stroke='{stroke}' stroke-width='{thick}'/>\
         <text x='9' y='19' font-weight='bold' fill='#111'>{}</text>\
         <text x='9' y='37' font-size='11' fill='#444'>{}</text>\
         <text x='9' y='54' font-size='11' font-weight='{weight}' fill='{colour}'>{}</text>",
        escape(&shortened(&label, 22)),
        escape(&shortened(&notes.join(" · "), 28)),
        escape(&shortened(&link, 28)),
    );
    // Everything shows when the pointer rests on the box.
    let whole = format!("{} {} {}", branch.label, branch.address, notes.join(", "));
    Block { svg: format!("<g><title>{}</title>{svg}</g>", escape(&whole)), width, height }
}

/// An address without the domain that nearly all have.
fn short(address: &str) -> &str {
    address.strip_prefix("0000:").unwrap_or(address)
}

fn link_text(above: &str, link: &str, degraded: bool, x: f64, y: f64) -> String {
    let colour = if degraded { RED } else { "#777" };
    let weight = if degraded { "bold" } else { "normal" };
    format!(
        "<text x='{x:.0}' y='{y:.0}' font-size='11' text-anchor='end' fill='#777'>{}<tspan font-weight='{weight}' fill='{colour}'>{}</tspan></text>",
        escape(above),
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
        "<text x='0' y='0' font-size='15' font-weight='bold' fill='#333'>Distance of each GPU from each adapter (framed: the best)</text>",
    );
    // Names that do not fit side by side are written upwards.
    let upwards = matrix.nics.iter().any(|name| count(name) * 6.2 > cell - 4.0);
    let top = if upwards { 84.0 } else { 34.0 };
    for (at, nic) in matrix.nics.iter().enumerate() {
        let idle =
            topology.nodes.iter().any(|node| holds(node, &|branch| branch.down && branch.label == *nic));
        let ink = if idle { DOWN.1 } else { "#333" };
        let (x, name) = (left + cell * (step(at) + 0.5), escape(&shortened(nic, 12)));
        let _ = if upwards {
            write!(
                svg,
                "<text transform='translate({:.0} {:.0}) rotate(-60)' font-size='11' fill='{ink}'>{name}</text>",
                x - 2.0,
                top - 6.0
            )
        } else {
            write!(
                svg,
                "<text x='{x:.0}' y='26' text-anchor='middle' font-size='11' fill='{ink}'>{name}</text>"
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

/// How many whole ones fit; 0 to 1000, for drawing.
fn usize_of(room: f64) -> usize {
    (0..1000).take_while(|n| step(*n) + 1.0 <= room).count()
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

#[cfg(test)]
mod tests {
    use super::*;
    use nobounce_topology::facts::Read;
    use nobounce_topology::machines;

    #[test]
    fn colours_that_are_in_the_picture_are_explained() {
        let mut facts = machines::machine("dgx-h100").unwrap();
        let healthy = svg(&Topology::of(&facts));
        assert!(healthy.contains("NVMe drive") && healthy.contains("root port 10:01.0"));
        assert!(!healthy.contains("without a network link") && !healthy.contains(RED));
        facts.nics[1].ports[0].state = "DOWN".to_owned();
        facts
            .pci
            .iter_mut()
            .find(|device| device.address == "0000:14:00.0")
            .unwrap()
            .link
            .as_mut()
            .unwrap()
            .width = 4;
        let sick = svg(&Topology::of(&facts));
        assert!(sick.contains("without a network link") && sick.contains("slower than both ends support"));
        assert!(sick.contains("Gen5 x4 of Gen5 x16!") && sick.contains("IB DOWN"));
    }

    #[test]
    fn texts_of_others_fit_and_are_no_markup() {
        let mut facts = machines::machine("dual-socket").unwrap();
        facts.machine.product = Read::Yes("<b>\u{1b}[2J&\u{202e}'\u{ffff}".repeat(40));
        facts.gpus[0].name =
            Read::Yes("NVIDIA <script> Blackwell Server Edition, the longest of names".to_owned());
        facts.nics[0].name = "rocep\u{0}49s0f0np0-of-the-longest-kind".to_owned();
        let drawn = svg(&Topology::of(&facts));
        assert!(!drawn.contains("<script>") && !drawn.contains("<b>"));
        assert!(!drawn.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{ffff}' || c == '\u{202e}'));
        // What is written beside another text is cut: no text of a box is longer than the box.
        for text in drawn.split("<text x='9'").skip(1) {
            let words = text.split('>').nth(1).unwrap().split('<').next().unwrap();
            assert!(words.replace("&lt;", "<").replace("&gt;", ">").chars().count() <= 28, "{words}");
        }
    }
}
