//! Log lines for Python's `logging`. Threads of the NIC must not wait for the interpreter: they
//! leave lines here, and the package takes them.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

/// Lines that may wait. Older ones are dropped.
const MAX_LINES: usize = 1000;

/// Level, logger, text.
type Line = (u32, String, String);

static LINES: Mutex<Waiting> = Mutex::new(Waiting { lines: VecDeque::new(), dropped: 0 });

struct Waiting {
    lines: VecDeque<Line>,
    dropped: u64,
}

struct Lines;

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::DEBUG && metadata.is_event()
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            Level::INFO => 20,
            _ => 10,
        };
        let mut text = Text(String::new());
        event.record(&mut text);
        let mut waiting = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.lines.len() >= MAX_LINES {
            waiting.lines.pop_front();
            waiting.dropped += 1;
        }
        waiting.lines.push_back((level, event.metadata().target().replace("::", "."), text.0));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string does not fail.
        let _ = if field.name() == "message" {
            write!(self.0, "{value:?}")
        } else {
            write!(self.0, " {}={value:?}", field.name())
        };
    }
}

pub(crate) fn start() {
    // Another subscriber of the process may be there already.
    let _ = tracing::subscriber::set_global_default(Lines);
}

/// The lines since the last call.
#[pyfunction]
pub(crate) fn take_log() -> Vec<Line> {
    let mut waiting = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let dropped = std::mem::take(&mut waiting.dropped);
    let lost =
        (30, "nobounce.log".to_owned(), format!("{dropped} older lines were dropped before they were read"));
    (dropped > 0).then_some(lost).into_iter().chain(waiting.lines.drain(..)).collect()
}
