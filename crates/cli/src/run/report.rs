//! One-line summary of the reports of all processes' devices.
//!
//! Each device has `PID-N.open` in the folder of the run while it is open, and writes `PID-N.json`
//! when it closes. If its process died, `PID-N.live` has its counters until shortly before.
//! `PID.refused` lists what our libraries refused, `PID.told` other errors, `PID.files` the bytes
//! that cuFile moved, and `PID.verbs` the files whose code looked for verbs devices.
//! docs/reference/json.md has the format.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::Path;

use nobounce::nic::soft::last_snapshot;

use super::copies;
use crate::live::LiveDevice;
use crate::size::decimal;

/// Most refusals and errors in the last line; programs may try many things that no device has.
const SAID_SHOWN: usize = 4;

/// The same for reasons why bytes were staged or packets took UDP.
const REASONS_SHOWN: usize = 2;

/// Longest reason in the last line.
const REASON_LEN: usize = 140;

/// All devices of a run together.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    devices: u64,
    /// Opened, and no word of what became of them.
    silent: u64,
    /// Devices whose processes died: their figures are from shortly before.
    cut_short: u64,
    /// What was refused or went wrong, and how often.
    said: BTreeMap<String, u64>,
    sum: LiveDevice,
}

/// Sums the reports in the folder. An invalid one is ignored.
pub(crate) fn read(folder: &Path) -> Totals {
    let (mut totals, mut looked) = (Totals::default(), BTreeSet::new());
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let parse = |text: &[u8]| serde_json::from_slice::<LiveDevice>(text).ok();
        let told = match path.extension().and_then(|ending| ending.to_str()) {
            Some("json") => fs::read(&path).ok().and_then(|text| parse(&text)),
            Some("open") => {
                let live = fs::read(path.with_extension("live")).ok();
                let last = live.as_deref().and_then(last_snapshot).and_then(parse);
                totals.cut_short += u64::from(last.is_some());
                last
            }
            Some(kind @ ("refused" | "told" | "files")) => {
                let prefix = if kind == "refused" { "refused: " } else { "" };
                for line in fs::read_to_string(&path).unwrap_or_default().lines() {
                    *totals.said.entry(format!("{prefix}{line}")).or_default() += 1;
                }
                continue;
            }
            Some("verbs") => {
                looked.extend(fs::read_to_string(&path).unwrap_or_default().lines().map(str::to_owned));
                continue;
            }
            _ => continue,
        };
        totals.devices += 1;
        match told {
            Some(device) => totals.sum.add(device),
            None => totals.silent += 1,
        }
    }
    for file in looked.iter().filter(|file| copies::has_rdma_core(Path::new(file))) {
        let line =
            format!("{file} has a copy of rdma-core linked in, which does not see nb0 (docs/guide/run.md)");
        totals.said.insert(line, 1);
    }
    totals
}

impl fmt::Display for Totals {
    #[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.devices == 0 && !self.said.is_empty() {
            f.write_str("no process opened a device")?;
            return self.write_said(f);
        }
        if self.devices == 0 {
            return f.write_str(
                "no process opened a device: the command uses no RDMA, opening failed (see above), or the command does not load \
                 this libibverbs (statically linked, setuid or its own copy; see docs/guide/run.md)",
            );
        }
        write!(f, "{} opened", counted(self.devices, "device"))?;
        let ended = self.silent + self.cut_short;
        if ended > 0 {
            write!(f, " ({ended} ended without a report")?;
            if self.cut_short > 0 {
                write!(f, ", {} of them with counters from shortly before", self.cut_short)?;
            }
            f.write_str(")")?;
        }
        if self.silent == self.devices {
            f.write_str("; no byte counts: their processes were killed or exited without a report")?;
            return self.write_said(f);
        }
        for (direction, paths) in [("out", &self.sum.out), ("in", &self.sum.r#in)] {
            let parts: Vec<String> = paths
                .iter()
                .filter(|(_, moved)| moved.bytes > 0)
                .map(|(path, moved)| {
                    format!(
                        "{} {path} in {}",
                        decimal(moved.bytes as f64),
                        counted(moved.operations, "operation")
                    )
                })
                .collect();
            let moved = if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") };
            write!(f, "; {direction}: {moved}")?;
        }
        if !self.sum.staged_reason.is_empty() {
            write!(f, " (staged: {})", brief(&self.sum.staged_reason))?;
        }
        match self.sum.sealed.as_str() {
            "encrypt" => f.write_str("; UDP encrypted")?,
            "authenticate" => f.write_str("; UDP authenticated")?,
            "mixed" => f.write_str("; UDP sealed in different ways")?,
            _ => {}
        }
        write!(f, "; {}", counted(self.sum.retransmissions, "retransmission"))?;
        let errors: Vec<String> = self
            .sum
            .errors
            .iter()
            .filter(|(_, count)| **count > 0)
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        if errors.is_empty() {
            f.write_str("; no errors")?;
        } else {
            write!(f, "; errors: {}", errors.join(", "))?;
        }
        if !self.sum.udp_reason.is_empty() {
            write!(f, "; {}", brief(&self.sum.udp_reason))?;
        }
        self.write_said(f)
    }
}

impl Totals {
    /// What the last line leaves out: every reason and refusal in full, one per line.
    pub(crate) fn details(&self) -> Vec<String> {
        let staged = self.sum.staged_reason.iter().map(|reason| format!("staged: {reason}"));
        let udp = self.sum.udp_reason.iter().map(|reason| format!("UDP on this machine: {reason}"));
        let said = self.said.iter().map(|(line, count)| match count {
            1 => line.clone(),
            _ => format!("{line} ({count} times)"),
        });
        staged.chain(udp).chain(said).collect()
    }

    fn write_said(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, (line, count)) in self.said.iter().enumerate() {
            if nth == SAID_SHOWN {
                let more = self.said.len() - SAID_SHOWN;
                return write!(f, "; and {more} more (--explain lists them)");
            }
            write!(f, "; {line}")?;
            if *count > 1 {
                write!(f, " ({count} times)")?;
            }
        }
        Ok(())
    }
}

/// Reasons for the last line: each once, the first ones, not too long.
fn brief(reasons: &[String]) -> String {
    let mut shown: Vec<(String, String)> = Vec::new();
    for reason in reasons {
        // Reasons that differ in addresses and sizes only are one.
        let kind = reason.split_whitespace().filter(|word| !word.contains(|c: char| c.is_ascii_digit()));
        let kind = kind.collect::<Vec<_>>().join(" ");
        if !shown.iter().any(|(known, _)| *known == kind) {
            shown.push((kind, shortened(reason)));
        }
    }
    let more = shown.len().saturating_sub(REASONS_SHOWN);
    let texts: Vec<_> = shown.into_iter().take(REASONS_SHOWN).map(|(_, text)| text).collect();
    let mut text = texts.join("; ");
    if more > 0 {
        text.push_str(&format!("; and {more} more (--explain lists them)"));
    }
    text
}

/// The text up to the last word that fits.
fn shortened(text: &str) -> String {
    if text.chars().count() <= REASON_LEN {
        return text.to_owned();
    }
    let cut: String = text.chars().take(REASON_LEN).collect();
    let end = cut.rfind(' ').unwrap_or(cut.len());
    format!("{} ...", cut[..end].trim_end_matches([',', ';', ':']))
}

fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_added_up_and_a_silent_device_is_named() {
        let folder = std::env::temp_dir().join(format!("report-test-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        assert!(read(&folder).to_string().starts_with("no process opened a device"));
        let sender = r#"{"version":1,"pid":7,"sealed":"encrypt","out":{"cpu":{"bytes":327680000,"operations":5000},"staged":{"bytes":0,"operations":0}},"retransmissions":1,"errors":{}}"#;
        let receiver = r#"{"sealed":"encrypt","in":{"cpu":{"bytes":327680000,"operations":5000},"staged":{"bytes":12,"operations":1}},"staged_reason":["no window"],"udp_reason":["no shared memory with any peer"],"errors":{"RetryExceeded":2},"unknown":[]}"#;
        fs::write(folder.join("7-0.json"), sender).unwrap();
        fs::write(folder.join("8-0.json"), receiver).unwrap();
        fs::write(folder.join("9-0.open"), "").unwrap();
        fs::write(folder.join("9-1.part"), "").unwrap();
        assert_eq!(
            read(&folder).to_string(),
            "3 devices opened (1 ended without a report); out: 328 MB cpu in 5000 operations; \
             in: 328 MB cpu in 5000 operations, 12 B staged in 1 operation (staged: no window); UDP encrypted; \
             1 retransmission; \
             errors: RetryExceeded 2; no shared memory with any peer"
        );
        // A process that died at work, and what was refused to the others.
        let mut live = [1_u64.to_ne_bytes(), (sender.len() as u64).to_ne_bytes()].concat();
        live.extend_from_slice(sender.as_bytes());
        fs::write(folder.join("10-0.open"), "").unwrap();
        fs::write(folder.join("10-0.live"), live).unwrap();
        fs::write(folder.join("8.refused"), "c\nb: no\na\nb: no\n").unwrap();
        fs::write(folder.join("9.told"), "the GPU is stuck\nz\n").unwrap();
        let line = read(&folder).to_string();
        let begin = "4 devices opened (2 ended without a report, 1 of them with counters from shortly before); out: 655 MB cpu in 10000 operations";
        assert!(line.starts_with(begin), "{line}");
        assert!(
            line.ends_with(
                "; refused: a; refused: b: no (2 times); refused: c; the GPU is stuck; and 1 more (--explain lists them)"
            ),
            "{line}"
        );
        for name in ["7-0.json", "8-0.json", "10-0.open", "8.refused", "9.told"] {
            fs::remove_file(folder.join(name)).unwrap();
        }
        assert!(
            read(&folder)
                .to_string()
                .starts_with("1 device opened (1 ended without a report); no byte counts")
        );
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_reason_is_said_once_and_briefly() {
        let reasons: Vec<String> = (0..8).map(|n| format!("no window onto 0x7f{n}000, {n} bytes")).collect();
        assert_eq!(brief(&reasons), "no window onto 0x7f0000, 0 bytes");
        let long = format!("{}end", "word ".repeat(100));
        let short = brief(&[long.clone(), "b".into(), "c".into()]);
        assert!(short.starts_with("word word") && short.len() < 220, "{short}");
        assert!(short.ends_with("word ...; b; and 1 more (--explain lists them)"), "{short}");
        let totals = Totals {
            sum: LiveDevice { staged_reason: vec![long.clone()], ..LiveDevice::default() },
            ..Totals::default()
        };
        assert_eq!(totals.details(), [format!("staged: {long}")]);
    }
}
