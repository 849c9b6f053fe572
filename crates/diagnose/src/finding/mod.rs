//! A finding: the problem, its effect, the evidence, and the fix.

mod fix;

use std::fmt;

use serde::Serialize;

pub use fix::{Fix, FixPart, Side};

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
    /// What to do, each complete on its own. JSON has it as lines and as parts.
    #[serde(flatten, serialize_with = "fix::serialize_both")]
    pub fix: Vec<Fix>,
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

    /// What to do. A fix for each of no devices is none.
    #[must_use]
    pub fn fix(mut self, fix: Fix) -> Self {
        self.fix.extend((!fix.parts().is_empty()).then_some(fix));
        self
    }

    /// Several ways out, each complete on its own.
    #[must_use]
    pub fn fixes(self, fixes: impl IntoIterator<Item = Fix>) -> Self {
        fixes.into_iter().fold(self, Self::fix)
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
