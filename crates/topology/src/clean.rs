//! Text of others on a terminal: names, values and log lines must not steer it.

/// Control characters (escapes, line ends, C1) and those that turn the direction of writing are shown as `\u{fffd}`.
#[must_use]
pub fn clean(text: &str) -> String {
    text.chars().map(|c| if is_unfit(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// The same for text of several lines, whose ends stay.
pub(crate) fn clean_lines(text: &str) -> String {
    text.split('\n').map(clean).collect::<Vec<_>>().join("\n")
}

fn is_unfit(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::{self, Topology};
    use crate::{Style, diagnose, machines, report};

    #[test]
    fn names_of_facts_do_not_steer_the_terminal() {
        const EVIL: &str = "x\u{1b}]0;title\u{7}\u{9b}2J\r\u{202e}y";
        let mut facts = machines::machine("dgx-h100").unwrap();
        facts.host = Some(EVIL.to_owned());
        facts.machine.product = crate::facts::Read::Yes(EVIL.to_owned());
        facts.environment.insert("NCCL_IB_HCA".to_owned(), EVIL.to_owned());
        for nic in &mut facts.nics {
            nic.name.push_str(EVIL);
        }
        for gpu in &mut facts.gpus {
            gpu.name = crate::facts::Read::Yes(EVIL.to_owned());
        }
        let style = Style { color: false, width: 120, all: true };
        let texts = [report(&facts, &diagnose(&facts), style), draw::text(&Topology::of(&facts), style)];
        for text in texts {
            assert!(text.contains('y') && !text.chars().any(|c| c != '\n' && is_unfit(c)), "{text:?}");
        }
    }
}
