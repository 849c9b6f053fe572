//! Text of others must not steer the terminal.

use nobounce_diagnose::draw::{self, Topology};
use nobounce_diagnose::{Style, diagnose, report};
use nobounce_topology::facts::Read;
use nobounce_topology::machines;

#[test]
fn names_of_facts_do_not_steer_the_terminal() {
    const EVIL: &str = "x\u{1b}]0;title\u{7}\u{9b}2J\r\u{202e}y";
    let mut facts = machines::machine("dgx-h100").unwrap();
    facts.host = Some(EVIL.to_owned());
    facts.machine.product = Read::Yes(EVIL.to_owned());
    facts.environment.insert("NCCL_IB_HCA".to_owned(), EVIL.to_owned());
    for nic in &mut facts.nics {
        nic.name.push_str(EVIL);
    }
    for gpu in &mut facts.gpus {
        gpu.name = Read::Yes(EVIL.to_owned());
    }
    let style = Style { color: false, width: 120, all: true };
    let texts = [report(&facts, &diagnose(&facts), style), draw::text(&Topology::of(&facts), style)];
    for text in texts {
        assert!(
            text.contains('y') && !text.chars().any(|c| c != '\n' && (c.is_control() || c == '\u{202e}')),
            "{text:?}"
        );
    }
}
