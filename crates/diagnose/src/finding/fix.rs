//! A fix: what to do on which side of a container, in typed parts.

use std::fmt;

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

/// The side of a container that a fix changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Modules, drivers, the kernel and firmware, which all containers of a host share.
    Host,
    /// The image, the start of the container, and the environment of its processes.
    Container,
    /// Either side, both, or neither: a network namespace, a cable, another machine.
    Both,
}

/// A part of a fix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", bound = "S: AsRef<str> + Serialize")]
pub enum FixPart<S = String> {
    /// A line for a shell: nothing is left to fill in.
    Command(S),
    /// Variables of the environment: `NAME=value`, several between blanks.
    Assignment(S),
    /// Options of the command that starts a container.
    #[serde(rename = "option")]
    EngineOption(S),
    /// A line of a configuration file.
    Line {
        /// The file.
        file: S,
        /// The line.
        text: S,
    },
    /// What to do besides, or where.
    Remark(#[serde(serialize_with = "serialize_sentence")] S),
}

impl<S: AsRef<str>> FixPart<S> {
    /// The line to paste into a shell, where the part is one.
    #[must_use]
    pub fn paste(&self) -> Option<String> {
        match self {
            Self::Command(command) => Some(command.as_ref().to_owned()),
            // Without `export` the program would not get it.
            Self::Assignment(variables) => Some(format!("export {}", variables.as_ref())),
            Self::EngineOption(_) | Self::Line { .. } | Self::Remark(_) => None,
        }
    }

    /// The part among other words.
    fn words(&self) -> String {
        match self {
            Self::EngineOption(options) => format!("add to docker or podman run: {}", options.as_ref()),
            Self::Line { file, text } => format!("add to {}: {}", file.as_ref(), text.as_ref()),
            Self::Remark(text) => text.as_ref().to_owned(),
            Self::Command(_) | Self::Assignment(_) => self.paste().unwrap_or_default(),
        }
    }

    /// The part on a line of its own.
    #[must_use]
    pub fn line(&self) -> String {
        self.paste().unwrap_or_else(|| sentence(&self.words()))
    }

    fn is_remark(&self) -> bool {
        matches!(self, Self::Remark(_))
    }

    fn to_owned(&self) -> FixPart {
        let own = |text: &S| text.as_ref().to_owned();
        match self {
            Self::Command(text) => FixPart::Command(own(text)),
            Self::Assignment(text) => FixPart::Assignment(own(text)),
            Self::EngineOption(text) => FixPart::EngineOption(own(text)),
            Self::Line { file, text } => FixPart::Line { file: own(file), text: own(text) },
            Self::Remark(text) => FixPart::Remark(own(text)),
        }
    }
}

/// What to do about a finding, complete on its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fix {
    side: Side,
    parts: Vec<FixPart>,
}

impl Fix {
    const fn on(side: Side) -> Self {
        Self { side, parts: Vec::new() }
    }

    /// A fix on the host.
    #[must_use]
    pub const fn host() -> Self {
        Self::on(Side::Host)
    }

    /// A fix in the container: its image, its start, its environment.
    #[must_use]
    pub const fn container() -> Self {
        Self::on(Side::Container)
    }

    /// A fix on either side, or on neither.
    #[must_use]
    pub const fn both() -> Self {
        Self::on(Side::Both)
    }

    /// A fix of parts that a table has.
    #[must_use]
    pub fn of(side: Side, parts: &[FixPart<&str>]) -> Self {
        Self { side, parts: parts.iter().map(FixPart::to_owned).collect() }
    }

    fn with(mut self, part: FixPart) -> Self {
        self.parts.push(part);
        self
    }

    /// A command to paste.
    #[must_use]
    pub fn run(self, command: impl Into<String>) -> Self {
        self.with(FixPart::Command(command.into()))
    }

    /// A command for each name, as one line to paste: `{}` stands for the name. None for no name.
    #[must_use]
    pub fn each<S: AsRef<str>>(self, names: &[S], command: &str) -> Self {
        match names {
            [] => self,
            [one] => self.run(command.replace("{}", one.as_ref())),
            many => {
                let names: Vec<&str> = many.iter().map(AsRef::as_ref).collect();
                self.run(format!("for d in {}; do {}; done", names.join(" "), command.replace("{}", "$d")))
            }
        }
    }

    /// Variables of the environment: `NAME=value`.
    #[must_use]
    pub fn set(self, variables: impl Into<String>) -> Self {
        self.with(FixPart::Assignment(variables.into()))
    }

    /// Options of the command that starts a container.
    #[must_use]
    pub fn option(self, options: impl Into<String>) -> Self {
        self.with(FixPart::EngineOption(options.into()))
    }

    /// A line of a configuration file.
    #[must_use]
    pub fn line(self, file: impl Into<String>, text: impl Into<String>) -> Self {
        self.with(FixPart::Line { file: file.into(), text: text.into() })
    }

    /// What to do besides, or where: words without a mark or capital at their ends.
    #[must_use]
    pub fn remark(self, text: impl Into<String>) -> Self {
        self.with(FixPart::Remark(text.into()))
    }

    /// The same with a remark before it, which introduces a remark that is there.
    #[must_use]
    pub(crate) fn after(mut self, text: impl Into<String>) -> Self {
        let text = text.into();
        match self.parts.first_mut() {
            Some(FixPart::Remark(first)) => *first = format!("{text}: {first}"),
            _ => self.parts.insert(0, FixPart::Remark(text)),
        }
        self
    }

    /// The side that it changes.
    #[must_use]
    pub const fn side(&self) -> Side {
        self.side
    }

    /// Its parts, in their order.
    #[must_use]
    pub fn parts(&self) -> &[FixPart] {
        &self.parts
    }

    /// The same as it is told inside a container.
    pub(crate) fn in_container(self) -> Self {
        match self.side {
            Side::Host => self.after("on the host, not in the container"),
            Side::Container | Side::Both => self,
        }
    }
}

/// One line. A single command to paste comes first, and remarks are a comment behind it. Parts of
/// another form are words.
impl fmt::Display for Fix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut actions = self.parts.iter().filter(|part| !part.is_remark());
        if let (Some(only), None) = (actions.next().and_then(FixPart::paste), actions.next()) {
            f.write_str(&only)?;
            let remarks = self.parts.iter().filter(|part| part.is_remark());
            for (nth, remark) in remarks.enumerate() {
                f.write_str(if nth == 0 { "   # " } else { "; " })?;
                f.write_str(&remark.words())?;
            }
            return Ok(());
        }
        for (nth, part) in self.parts.iter().enumerate() {
            let before = nth.checked_sub(1).and_then(|at| self.parts.get(at));
            match before {
                None => {}
                Some(before) if before.is_remark() && !part.is_remark() => f.write_str(": ")?,
                Some(_) => f.write_str("; ")?,
            }
            f.write_str(&part.words())?;
        }
        Ok(())
    }
}

/// As a line, and in parts.
impl Serialize for Fix {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(2))?;
        map.serialize_entry("fix", &self.to_string())?;
        map.serialize_entry("fix_parts", self.parts())?;
        map.end()
    }
}

/// Fixes as lines, and the same in parts for readers that offer commands to copy.
pub(crate) fn serialize_both<S: Serializer>(fixes: &[Fix], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(2))?;
    map.serialize_entry("fix", &fixes.iter().map(Fix::to_string).collect::<Vec<_>>())?;
    map.serialize_entry("fix_parts", &fixes.iter().map(Fix::parts).collect::<Vec<_>>())?;
    map.end()
}

fn serialize_sentence<S: AsRef<str>, Z: Serializer>(text: &S, serializer: Z) -> Result<Z::Ok, Z::Error> {
    serializer.serialize_str(&sentence(text.as_ref()))
}

/// Words with a capital at their begin, where that is a word of the language.
fn sentence(text: &str) -> String {
    let first = text.split(' ').next().unwrap_or_default();
    if first.is_empty() || !first.chars().all(|c| c.is_ascii_lowercase() || "-,;:".contains(c)) {
        return text.to_owned();
    }
    text[..1].to_ascii_uppercase() + &text[1..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(fix: &Fix) -> String {
        serde_json::to_value(fix.parts()).unwrap().to_string()
    }

    #[test]
    fn a_single_command_comes_first_and_remarks_are_its_comment() {
        let fix = Fix::host()
            .remark("start a subnet manager")
            .run("sudo systemctl start opensm")
            .remark("on one node");
        assert_eq!(fix.to_string(), "sudo systemctl start opensm   # start a subnet manager; on one node");
        assert_eq!(
            parts(&fix),
            r#"[{"remark":"Start a subnet manager"},{"command":"sudo systemctl start opensm"},{"remark":"On one node"}]"#
        );
        let set = Fix::container().set("NCCL_IB_HCA==mlx5_0 UCX_TLS=^rc").remark("bnxt_re, irdma");
        assert_eq!(set.to_string(), "export NCCL_IB_HCA==mlx5_0 UCX_TLS=^rc   # bnxt_re, irdma");
        assert_eq!(
            parts(&set),
            r#"[{"assignment":"NCCL_IB_HCA==mlx5_0 UCX_TLS=^rc"},{"remark":"bnxt_re, irdma"}]"#
        );
    }

    #[test]
    fn options_and_lines_are_no_commands() {
        let fix = Fix::container().option("--network host").remark("to confirm");
        assert_eq!(fix.to_string(), "add to docker or podman run: --network host; to confirm");
        assert_eq!(parts(&fix), r#"[{"option":"--network host"},{"remark":"To confirm"}]"#);
        let line = Fix::host().line("/etc/modprobe.d/nvidia.conf", "options nvidia A=1");
        assert_eq!(line.parts()[0].line(), "Add to /etc/modprobe.d/nvidia.conf: options nvidia A=1");
        assert_eq!(
            parts(&line),
            r#"[{"line":{"file":"/etc/modprobe.d/nvidia.conf","text":"options nvidia A=1"}}]"#
        );
        assert!(line.parts()[0].paste().is_none() && fix.parts()[0].paste().is_none());
    }

    #[test]
    fn several_commands_are_words() {
        let fix = Fix::host().run("a").remark("on Debian; or").run("b").remark("then").run("c");
        assert_eq!(fix.to_string(), "a; on Debian; or: b; then: c");
    }

    #[test]
    fn a_command_for_each_of_no_devices_is_none() {
        let fix = |names: &[&str]| Fix::both().remark("check the cable").each(names, "mlxlink -d {}");
        assert_eq!(fix(&[]).to_string(), "check the cable");
        assert_eq!(fix(&["a"]).to_string(), "mlxlink -d a   # check the cable");
        assert_eq!(fix(&["a", "b"]).parts()[1].line(), "for d in a b; do mlxlink -d $d; done");
    }

    #[test]
    fn only_fixes_of_the_host_name_their_side_in_a_container() {
        let told = |fix: Fix| fix.run("x").in_container().to_string();
        assert_eq!(told(Fix::host()), "x   # on the host, not in the container");
        let words = Fix::host().remark("upgrade the driver").in_container();
        assert_eq!(words.to_string(), "on the host, not in the container: upgrade the driver");
        assert_eq!([told(Fix::container()), told(Fix::both())], ["x", "x"]);
    }
}
