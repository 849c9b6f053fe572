//! Log lines on stderr, which `kubectl logs` shows.

use std::io::Write;

/// Prints one line. A closed stderr is no reason to end, so errors are ignored.
pub(crate) fn line(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "nobounce-device-plugin: {text}");
}

/// Prints a state when it changes, so that a retry every second does not repeat its reason.
#[derive(Debug)]
pub(crate) struct StateLog {
    subject: String,
    last: String,
}

impl StateLog {
    pub(crate) fn new(subject: &str) -> Self {
        Self { subject: subject.to_owned(), last: String::new() }
    }

    pub(crate) fn state(&mut self, text: String) {
        if self.last != text {
            line(&format!("{}: {text}", self.subject));
            self.last = text;
        }
    }
}
