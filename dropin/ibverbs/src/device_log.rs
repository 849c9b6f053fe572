//! Forwards the device's `tracing` events to the library's own log, because most programs install
//! no subscriber.

use std::fmt::{Debug, Write};
use std::sync::Once;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::log;

/// Listens from now on.
pub(crate) fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if heard() != LevelFilter::OFF {
            // It fails where the program has installed a subscriber, which then gets the events.
            let _ = tracing::subscriber::set_global_default(DeviceLog);
        }
    });
}

/// The most verbose level that is logged. Under `nobounce run` that includes every warning, for its
/// last line.
fn heard() -> LevelFilter {
    match log::level() {
        log::Level::Debug => LevelFilter::DEBUG,
        log::Level::Info => LevelFilter::INFO,
        log::Level::Warn => LevelFilter::WARN,
        _ if std::env::var_os("NOBOUNCE_REPORT").is_some() => LevelFilter::WARN,
        log::Level::Error | log::Level::Silent => LevelFilter::OFF,
    }
}

struct DeviceLog;

impl Subscriber for DeviceLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= heard()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(heard())
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        match *event.metadata().level() {
            Level::ERROR | Level::WARN => log::warn_in("told", || line.whole()),
            Level::INFO => log::info(|| line.whole()),
            _ => log::debug(|| line.whole()),
        }
    }

    // The device has events only.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The words of an event, and its values behind them.
#[derive(Default)]
struct Line {
    words: String,
    values: String,
}

impl Line {
    fn whole(self) -> String {
        self.words + &self.values
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Strings take everything.
        let _ = match field.name() {
            "message" => write!(self.words, "{value:?}"),
            "error" => write!(self.values, ": {value:?}"),
            name => write!(self.values, " ({name} {value:?})"),
        };
    }
}
