//! `nobounce top`: the traffic of this user's devices in a terminal.

pub(crate) mod args;
mod rows;
mod view;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGTERM};
use signal_hook::flag;

use self::args::TopArgs;
use self::view::Choices;
use crate::live;

/// Between two readings.
const INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn main(args: &TopArgs) -> anyhow::Result<ExitCode> {
    if args.once {
        let (before, start) = (live::devices(), Instant::now());
        std::thread::sleep(INTERVAL);
        let rows = rows::rows(&before, &live::devices(), start.elapsed());
        let rows = rows::arranged(rows, rows::Order::Rate, "", true);
        let mut out = std::io::stdout().lock();
        if args.json {
            serde_json::to_writer_pretty(
                &mut out,
                &serde_json::json!({ "schema": "nobounce-top/1", "devices": rows }),
            )?;
            writeln!(out)?;
        } else {
            write!(out, "{}", view::plain(&rows, live::trouble()))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !std::io::stdout().is_terminal() {
        bail!("standard output is no terminal; use nobounce top --once");
    }
    let ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP] {
        flag::register(signal, ended.clone()).context("cannot handle signals")?;
    }
    let mut terminal = ratatui::try_init().context("cannot use the terminal")?;
    let watched = watch(&mut terminal, &ended);
    ratatui::restore();
    watched.map(|()| ExitCode::SUCCESS)
}

/// Draws until the user quits, or a signal says so.
fn watch(terminal: &mut ratatui::DefaultTerminal, ended: &AtomicBool) -> anyhow::Result<()> {
    let mut choices = Choices::default();
    let (mut before, mut read_at) = (live::devices(), Instant::now());
    let mut shown = rows::rows(&before, &before, Duration::ZERO);
    while !ended.load(Ordering::Relaxed) {
        let arranged = rows::arranged(shown.clone(), choices.order, &choices.filter, choices.ended);
        terminal.draw(|frame| view::draw(frame, &arranged, &choices))?;
        let left = INTERVAL.saturating_sub(read_at.elapsed());
        if event::poll(left)? {
            if let Event::Key(key) = event::read()?
                && key.kind == KeyEventKind::Press
                && !press(&mut choices, key)
            {
                return Ok(());
            }
        } else {
            let now = live::devices();
            if !choices.frozen {
                shown = rows::rows(&before, &now, read_at.elapsed());
            }
            (before, read_at) = (now, Instant::now());
        }
    }
    Ok(())
}

/// Handles a key; false ends the view.
fn press(choices: &mut Choices, key: KeyEvent) -> bool {
    if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
        return false;
    }
    match (choices.typing, key.code) {
        (true, KeyCode::Enter) => choices.typing = false,
        (true, KeyCode::Esc) => (choices.typing, choices.filter) = (false, String::new()),
        (true, KeyCode::Backspace) => drop(choices.filter.pop()),
        (true, KeyCode::Char(letter)) => choices.filter.push(letter),
        (false, KeyCode::Char('q') | KeyCode::Esc) => return false,
        (false, KeyCode::Char('s')) => choices.order = choices.order.next(),
        (false, KeyCode::Char('/')) => (choices.typing, choices.filter) = (true, String::new()),
        (false, KeyCode::Char(' ')) => choices.frozen = !choices.frozen,
        (false, KeyCode::Char('e')) => choices.ended = !choices.ended,
        _ => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        let mut choices = Choices::default();
        for code in ['s', ' ', 'e', '/', 'q', 'x'].map(KeyCode::Char) {
            assert!(press(&mut choices, code.into()), "typed into the filter");
        }
        assert!(press(&mut choices, KeyCode::Backspace.into()) && press(&mut choices, KeyCode::Enter.into()));
        assert_eq!((choices.order, choices.frozen, choices.ended), (rows::Order::Total, true, true));
        assert_eq!((choices.filter.as_str(), choices.typing), ("q", false));
        assert!(!press(&mut choices, KeyCode::Char('q').into()));
        assert!(!press(&mut choices, KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }
}
