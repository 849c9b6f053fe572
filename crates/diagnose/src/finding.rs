//! A finding: the problem, its effect, the evidence, and the fix.

use std::fmt;

use serde::Serialize;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know; nothing needs to be done.
    Info,
    /// A relevant fact could not be read: it may be fine or not.
    Unknown,
    /// It works, but slower than possible, or not for every user; or it cannot work here at all.
    Warning,
    /// Something stops what could work.
    Error,
}

impl Severity {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Unknown => "unknown",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a finding does to the pairs of its devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// Nothing that the verdict would show.
    #[default]
    Nothing,
    /// The path is direct, but slower than it could be.
    Slows,
    /// The path is direct, and a library stages all the same.
    Stages,
    /// Bytes cannot go the direct way, or are not safe on it.
    Blocks,
}

/// A fact that a finding rests on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// A file, a variable, a probe.
    pub source: String,
    /// What it said.
    pub value: String,
}

/// A part of a fix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FixPart {
    /// To be pasted as it is: nothing is left to fill in.
    Command(String),
    /// What to do besides, or where.
    Remark(String),
}

/// Splits a fix at its backticks.
fn fix_parts(text: &str) -> Vec<FixPart> {
    let mut parts: Vec<FixPart> = Vec::new();
    for (nth, part) in text.split('`').enumerate() {
        let next = match nth % 2 {
            1 if part.starts_with('-') => option(part, &mut parts),
            1 if is_assignment(part) => FixPart::Command(format!("export {part}")),
            1 => FixPart::Command(part.to_owned()),
            _ => FixPart::Remark(remark(part)),
        };
        parts.push(next);
    }
    parts.retain(|part| !matches!(part, FixPart::Remark(text) if text.is_empty()));
    parts
}

/// Options of a container's start are no command of their own. The words before them go.
fn option(text: &str, parts: &mut Vec<FixPart>) -> FixPart {
    let before = match parts.pop() {
        Some(FixPart::Remark(before)) => before,
        Some(command) => {
            parts.push(command);
            String::new()
        }
        None => String::new(),
    };
    FixPart::Remark(match before.strip_suffix("tart the container with") {
        Some("S") => format!("Add to docker run: {text}"),
        Some(before) => format!("{}add to docker run: {text}", before.strip_suffix('s').unwrap_or(before)),
        None if before.is_empty() => format!("Option: {text}"),
        None => format!("{before} {text}"),
    })
}

/// Whether all words are assignments, which as a command would set nothing for the program.
fn is_assignment(text: &str) -> bool {
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_uppercase())
            && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
    };
    !text.is_empty()
        && text.split(' ').all(|word| word.split_once('=').is_some_and(|(name, _)| is_name(name)))
}

/// The words between two commands as a sentence: without the marks and brackets around commands.
fn remark(text: &str) -> String {
    let text = text.trim_matches(|c: char| c.is_whitespace() || ",;:(".contains(c));
    let mut depth = 0;
    let mut closed = |c: char| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        let is_open = depth >= 0;
        depth = depth.max(0);
        is_open
    };
    let text: String = text.chars().filter(|c| closed(*c)).collect();
    let first = text.split(' ').next().unwrap_or_default();
    if first.is_empty() || !first.chars().all(|c| c.is_ascii_lowercase() || "-,;:".contains(c)) {
        return text;
    }
    text[..1].to_ascii_uppercase() + &text[1..]
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its stable name: `peermem-not-loaded`.
    pub id: &'static str,
    /// How much it matters here; the diagnosis sets it by the effect.
    pub severity: Severity,
    /// What is wrong, in one line.
    pub title: String,
    /// Why it matters, with the loss to expect.
    pub why: String,
    /// How it is known.
    pub evidence: Vec<Evidence>,
    /// What to do: commands, or a sentence where no command does it.
    pub fix: Vec<String>,
    /// The same in parts, for readers that offer commands to copy.
    pub fix_parts: Vec<Vec<FixPart>>,
    /// Whether the fix needs root.
    pub needs_root: bool,
    /// Whether the fix needs a reboot.
    pub needs_reboot: bool,
    /// Devices that it is about: GPU addresses, adapter names, bridges.
    pub devices: Vec<String>,
    /// What it does to pairs of these devices.
    pub effect: Effect,
    /// The finding that this one goes below: it is a link of the same chain, or moot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub under: Option<&'static str>,
    /// What it costs, by the predictor, where it slows or blocks a path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<String>,
    /// The one library that it concerns, if the hardware path is unaffected: `NCCL`, `UCX`, ...
    #[serde(skip_serializing_if = "Option::is_none")]
    pub library: Option<&'static str>,
}

impl Finding {
    /// A finding with its title.
    pub fn new(id: &'static str, severity: Severity, title: impl Into<String>) -> Self {
        debug_assert!(crate::explain::text(id).is_some(), "{id} is not explained");
        Self {
            id,
            severity,
            title: title.into(),
            why: String::new(),
            evidence: Vec::new(),
            fix: Vec::new(),
            fix_parts: Vec::new(),
            needs_root: false,
            needs_reboot: false,
            devices: Vec::new(),
            effect: Effect::Nothing,
            under: None,
            cost: None,
            library: match id {
                _ if id.starts_with("nccl-") => Some("NCCL"),
                _ if id.starts_with("ucx-") => Some("UCX"),
                _ => None,
            },
        }
    }

    /// It is about one library only.
    #[must_use]
    pub fn of_library(mut self, library: &'static str) -> Self {
        self.library = Some(library);
        self
    }

    /// Why it matters.
    #[must_use]
    pub fn why(mut self, why: impl Into<String>) -> Self {
        self.why = why.into();
        self
    }

    /// How it is known.
    #[must_use]
    pub fn seen(mut self, source: impl Into<String>, value: impl Into<String>) -> Self {
        self.evidence.push(Evidence { source: source.into(), value: value.into() });
        self
    }

    /// Adds a fix that is one command, with a remark behind `   # ` if it needs one.
    #[must_use]
    pub fn command(mut self, line: impl Into<String>) -> Self {
        let line = line.into();
        let (command, about) = line.split_once("   # ").unwrap_or((&line, ""));
        let mut parts = vec![FixPart::Command(command.to_owned())];
        parts.extend((!about.is_empty()).then(|| FixPart::Remark(remark(about))));
        self.fix_parts.push(parts);
        self.fix.push(line);
        self
    }

    /// What to do. Commands and settings to copy stand between backticks, which are not shown.
    #[must_use]
    pub fn fix(mut self, text: impl Into<String>) -> Self {
        let text = text.into();
        // A command for each of no devices is none.
        let text = text.replace("``", "");
        let text = text.trim_matches(|c: char| c.is_whitespace() || c == ';');
        let parts = fix_parts(text);
        if !parts.is_empty() {
            self.fix_parts.push(parts);
            self.fix.push(text.replace('`', ""));
        }
        self
    }

    /// The fix needs root.
    #[must_use]
    pub fn root(mut self) -> Self {
        self.needs_root = true;
        self
    }

    /// The fix needs root and a reboot.
    #[must_use]
    pub fn reboot(mut self) -> Self {
        self.needs_root = true;
        self.needs_reboot = true;
        self
    }

    /// The fixes belong to the host of this container.
    pub(crate) fn put_on_host(&mut self) {
        const SIDE: &str = "on the host, not in the container";
        let is_command = self.id.starts_with("storage-");
        for (fix, parts) in self.fix.iter_mut().zip(&mut self.fix_parts) {
            if is_command {
                // Remarks on a command are a comment behind it.
                let joined = if fix.contains("   # ") { "; " } else { "   # " };
                *fix = format!("{fix}{joined}{SIDE}");
                parts.push(FixPart::Remark(remark(SIDE)));
                continue;
            }
            // Arguments of the container's start are no change inside of it.
            if !fix.contains("start the container") {
                *fix = format!("{SIDE}: {fix}");
                parts.insert(0, FixPart::Remark(remark(SIDE)));
            }
        }
    }

    /// It slows the pairs of its devices down.
    #[must_use]
    pub fn slows(mut self) -> Self {
        self.effect = Effect::Slows;
        self
    }

    /// It makes a library stage although the path is direct.
    #[must_use]
    pub fn stages(mut self) -> Self {
        self.effect = Effect::Stages;
        self
    }

    /// It keeps the pairs of its devices from being direct.
    #[must_use]
    pub fn blocks(mut self) -> Self {
        self.effect = Effect::Blocks;
        self
    }

    /// What it is about.
    #[must_use]
    pub fn on<S: Into<String>>(mut self, devices: impl IntoIterator<Item = S>) -> Self {
        self.devices.extend(devices.into_iter().map(Into::into));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixes_are_split_into_commands_and_remarks() {
        let parts = |text| serde_json::to_value(fix_parts(text)).unwrap().to_string();
        assert_eq!(
            parts("`sudo modprobe gdrdrv`   (from GDRCopy)"),
            r#"[{"command":"sudo modprobe gdrdrv"},{"remark":"From GDRCopy"}]"#
        );
        assert_eq!(
            parts("reinstall it (`dkms autoinstall`; or restart (all) of it), then `modprobe x`, `y`"),
            r#"[{"remark":"Reinstall it"},{"command":"dkms autoinstall"},{"remark":"Or restart (all) of it, then"},{"command":"modprobe x"},{"command":"y"}]"#
        );
        assert_eq!(parts("`a`   (bnxt_re, irdma)"), r#"[{"command":"a"},{"remark":"bnxt_re, irdma"}]"#);
        let of_none = Finding::new("port-down", Severity::Error, "").fix("check the cable; ``").fix("``");
        assert_eq!(of_none.fix, ["check the cable"]);
        assert_eq!(
            parts("start the container with `--network host`   (to confirm)"),
            r#"[{"remark":"Add to docker run: --network host"},{"remark":"To confirm"}]"#
        );
        assert_eq!(
            parts("`A`, then in a pod: start the container with `--ipc=host`"),
            r#"[{"command":"A"},{"remark":"Then in a pod: add to docker run: --ipc=host"}]"#
        );
        assert_eq!(
            parts("`NCCL_IB_HCA==mlx5_0 UCX_TLS=^rc`; `FOO=1 program`"),
            r#"[{"command":"export NCCL_IB_HCA==mlx5_0 UCX_TLS=^rc"},{"command":"FOO=1 program"}]"#
        );
        assert_eq!(parts("use a current NCCL"), r#"[{"remark":"Use a current NCCL"}]"#);
    }
}
