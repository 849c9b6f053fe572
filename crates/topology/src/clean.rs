//! Sanitises foreign text for a terminal: names, values and log lines must not control it.

/// Replaces control characters (escapes, line ends, C1) and bidirectional controls by `\u{fffd}`.
#[must_use]
pub fn clean(text: &str) -> String {
    text.chars().map(|c| if is_unfit(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// The same for multi-line text, whose line ends stay.
#[must_use]
pub fn clean_lines(text: &str) -> String {
    text.split('\n').map(clean).collect::<Vec<_>>().join("\n")
}

fn is_unfit(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_is_replaced() {
        let cleaned = clean_lines("x\u{1b}]0;title\u{7}\u{9b}2J\r\u{202e}y\nz");
        assert!(
            cleaned.ends_with("y\nz") && !cleaned.chars().any(|c| c != '\n' && is_unfit(c)),
            "{cleaned:?}"
        );
    }
}
