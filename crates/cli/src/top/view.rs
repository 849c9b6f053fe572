//! The screen.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table};

use super::rows::{DeviceRow, Order};
use crate::live::{LiveDevice, State};
use crate::size::decimal;

/// What the keys have set.
#[derive(Clone, Debug, Default)]
pub(super) struct Choices {
    pub(super) order: Order,
    pub(super) filter: String,
    /// The filter is being typed.
    pub(super) typing: bool,
    pub(super) frozen: bool,
    pub(super) ended: bool,
}

const HEAD: [&str; 13] =
    ["PID", "PROGRAM", "DEV", "STATE", "OUT/s", "IN/s", "OUT", "IN", "PATHS", "RETR", "LOST", "ERR", "CPU"];

/// The cells of a row.
#[allow(clippy::cast_precision_loss, reason = "figures for people")]
pub(super) fn cells(row: &DeviceRow) -> [String; 13] {
    let device = &row.device;
    [
        device.pid.to_string(),
        nobounce_topology::clean(&device.program),
        device.device.clone(),
        device.state.name().to_owned(),
        decimal(row.out_bytes_per_s),
        decimal(row.in_bytes_per_s),
        decimal(LiveDevice::bytes(&device.out) as f64),
        decimal(LiveDevice::bytes(&device.r#in) as f64),
        row.paths(),
        device.retransmissions.to_string(),
        device.lost().to_string(),
        device.failed().to_string(),
        // In caller mode the threads of the program do most of the work, uncounted.
        format!("{:.0} %{}", row.engine_cpu * 100.0, if device.progress == "caller" { "+" } else { "" }),
    ]
}

/// Why bytes were staged, and failed requests, for the rows that are shown.
pub(super) fn reasons(rows: &[DeviceRow]) -> Vec<String> {
    let mut lines = Vec::new();
    for DeviceRow { device, .. } in rows {
        let name = nobounce_topology::clean(&device.program);
        let staged = device.staged_reason.iter().filter(|_| device.staged() > 0);
        lines.extend(
            staged.map(|reason| {
                format!("staged: {name} ({}): {}", device.pid, nobounce_topology::clean(reason))
            }),
        );
        lines.extend(device.errors.iter().filter(|(_, count)| **count > 0).map(|(status, count)| {
            let meaning = crate::live::meaning(status);
            let meaning = if meaning.is_empty() { String::new() } else { format!(": {meaning}") };
            let status = nobounce_topology::clean(status);
            format!("errors: {name} ({}): {count} x {status}{meaning}", device.pid)
        }));
        let udp = device.udp_reason.iter().map(|reason| nobounce_topology::clean(reason));
        lines.extend(udp.map(|reason| format!("UDP: {name} ({}): {reason}", device.pid)));
    }
    lines.dedup();
    lines
}

pub(super) fn draw(frame: &mut Frame<'_>, rows: &[DeviceRow], choices: &Choices) {
    let reasons = reasons(rows);
    let shown = u16::try_from(reasons.len().min(6)).unwrap_or(6);
    let [head, table, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(2), Constraint::Length(shown)])
            .areas(frame.area());
    frame.render_widget(Paragraph::new(title(rows, choices)), head);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let lines = rows.iter().map(|row| {
        let style = match (row.device.staged() > 0, row.device.state) {
            // Staged bytes stand out without colours, too.
            (true, _) => Style::new().add_modifier(Modifier::REVERSED),
            (false, State::Live) => Style::new(),
            (false, _) => Style::new().add_modifier(Modifier::DIM),
        };
        TableRow::new(cells(row).map(Cell::from)).style(style)
    });
    let widths = [7, 16, 4, 6, 9, 9, 9, 9, 19, 5, 5, 5, 5].map(Constraint::Length);
    let header = TableRow::new(HEAD.map(Cell::from)).style(bold);
    frame.render_widget(Table::new(lines, widths).header(header).column_spacing(1), table);
    let text: Vec<Line<'_>> = reasons.into_iter().take(6).map(Line::from).collect();
    frame.render_widget(Paragraph::new(text), foot);
}

fn title(rows: &[DeviceRow], choices: &Choices) -> Line<'static> {
    let live = rows.iter().filter(|row| row.device.state == State::Live).count();
    let (out, inward) =
        rows.iter().fold((0.0, 0.0), |sum, row| (sum.0 + row.out_bytes_per_s, sum.1 + row.in_bytes_per_s));
    let mut text = format!(
        "nobounce: {live} live, out {}/s, in {}/s; sorted by {}",
        decimal(out),
        decimal(inward),
        choices.order.name()
    );
    if choices.typing || !choices.filter.is_empty() {
        text += &format!("; filter: {}{}", choices.filter, if choices.typing { "_" } else { "" });
    }
    if choices.frozen {
        text += "; frozen";
    }
    Line::from(vec![
        Span::raw(text),
        Span::styled("   q s / space e", Style::new().add_modifier(Modifier::DIM)),
    ])
}

/// The same as plain text.
pub(super) fn plain(rows: &[DeviceRow], trouble: Option<String>) -> String {
    if rows.is_empty() {
        let why = trouble.map_or_else(String::new, |why| format!("{why}\n"));
        return format!("no device is open, and none ended in the last minutes\n{why}");
    }
    let lines: Vec<[String; 13]> =
        std::iter::once(HEAD.map(str::to_owned)).chain(rows.iter().map(cells)).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text += "\n";
    }
    for line in reasons(rows) {
        text += &line;
        text += "\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::rows::rows;
    use super::super::rows::tests::device;
    use super::*;

    fn some_rows() -> Vec<DeviceRow> {
        let mut staged = device("2-0", "python3", "staged", 5_000_000, State::Live);
        staged.staged_reason = vec!["managed memory moves between host and GPU".to_owned()];
        staged.progress = "caller".to_owned();
        staged.errors = [("RetryExceeded".to_owned(), 2), ("RemoteAccess".to_owned(), 0)].into();
        staged.link = [("handover_lost".to_owned(), 3), ("fault_lost".to_owned(), 9)].into();
        staged.udp_reason = vec!["the peer allows no shared memory".to_owned()];
        let now = [device("1-0", "ib_write_bw\x1b[2J", "cpu", 123_456_789, State::Live), staged];
        rows(&[], &now, std::time::Duration::from_secs(1))
    }

    #[test]
    fn a_screen() {
        let mut terminal = Terminal::new(TestBackend::new(120, 8)).unwrap();
        let choices = Choices { filter: "i".to_owned(), frozen: true, ..Choices::default() };
        terminal.draw(|frame| draw(frame, &some_rows(), &choices)).unwrap();
        insta::assert_snapshot!(terminal.backend());
    }

    #[test]
    fn a_table() {
        insta::assert_snapshot!(plain(&some_rows(), None));
        let none = "no device is open, and none ended in the last minutes\n";
        assert_eq!(plain(&[], None), none);
        assert_eq!(plain(&[], Some("the folder is open".to_owned())), format!("{none}the folder is open\n"));
    }
}
