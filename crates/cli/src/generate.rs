//! What is made from the command's own definition: man pages, shell completions, and the page
//! docs/reference/cli.md.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Arg, Command, CommandFactory};
use clap_complete::Shell;

/// What to generate, and where to.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct GenerateArgs {
    /// man: one page per subcommand; completions: for bash, zsh and fish; reference: cli.md
    #[arg(value_parser = ["man", "completions", "reference"])]
    what: String,
    /// Output directory; created if missing
    folder: PathBuf,
}

/// The command.
pub(crate) fn main<C: CommandFactory>(args: &GenerateArgs) -> anyhow::Result<()> {
    let folder = &args.folder;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    match args.what.as_str() {
        "man" => man(&C::command(), folder),
        "reference" => Ok(fs::write(folder.join("cli.md"), reference(&C::command()))?),
        _ => completions(&mut C::command(), folder),
    }
}

fn man(command: &Command, folder: &Path) -> anyhow::Result<()> {
    let write = |command: Command, name: &str| -> anyhow::Result<()> {
        let path = folder.join(format!("{name}.1"));
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))
    };
    write(command.clone(), "nobounce")?;
    for (name, sub) in shown(command, "nobounce") {
        let page = name.replace(' ', "-");
        write(sub.clone().display_name(page.clone()).bin_name(name), &page)?;
    }
    Ok(())
}

fn completions(command: &mut Command, folder: &Path) -> anyhow::Result<()> {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, command, "nobounce", folder)
            .with_context(|| format!("cannot write to {}", folder.display()))?;
    }
    Ok(())
}

/// The commands below this one with their names, each before its own.
fn shown<'a>(command: &'a Command, name: &str) -> Vec<(String, &'a Command)> {
    let subs = command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help");
    subs.flat_map(|sub| {
        let name = format!("{name} {}", sub.get_name());
        let below = shown(sub, &name);
        std::iter::once((name, sub)).chain(below)
    })
    .collect()
}

/// The page docs/reference/cli.md.
fn reference(command: &Command) -> String {
    let mut text = String::from(
        "# Command line\n\nGenerated from the built-in help; `nobounce COMMAND --help` prints the same text.\n",
    );
    for (name, sub) in shown(command, "nobounce") {
        let _ = write!(text, "\n## {name}\n\n");
        let about = sub.get_long_about().or_else(|| sub.get_about());
        if let Some(about) = about {
            let about = about.to_string();
            about.trim_end().lines().for_each(|line| wrap(&mut text, line));
            text.push('\n');
        }
        let _ = writeln!(text, "```text\n{}\n```", sub.clone().bin_name(name).render_usage());
        let arguments: Vec<_> =
            sub.get_arguments().filter(|arg| !arg.is_hide_set() && arg.get_id() != "help").collect();
        if !arguments.is_empty() {
            text.push_str("\n| argument | effect |\n|---|---|\n");
            for arg in arguments {
                let _ = writeln!(text, "| `{}` | {} |", name_of(arg), effect_of(arg));
            }
        }
        if let Some(examples) = sub.get_after_help() {
            let _ = writeln!(text, "\n```text\n{examples}\n```");
        }
    }
    text
}

/// Adds a paragraph in lines of at most 100 columns.
fn wrap(text: &mut String, paragraph: &str) {
    let mut column = 0;
    for word in paragraph.split(' ') {
        let len = word.chars().count();
        if column > 0 && column + 1 + len > 100 {
            text.push('\n');
            column = 0;
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += len;
    }
    text.push('\n');
}

fn name_of(arg: &Arg) -> String {
    let values = arg
        .get_value_names()
        .map(|names| names.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
    let takes = arg.get_action().takes_values();
    let value = values.filter(|_| takes).unwrap_or_default();
    match (arg.get_long(), arg.get_short()) {
        (Some(long), _) if value.is_empty() => format!("--{long}"),
        (Some(long), _) => format!("--{long} {value}"),
        (None, Some(short)) => format!("-{short} {value}").trim_end().to_owned(),
        (None, None) if value.is_empty() => arg.get_id().to_string(),
        (None, None) => value,
    }
}

fn effect_of(arg: &Arg) -> String {
    let help = arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut text = help.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    let values: Vec<_> = arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    if !values.is_empty() && arg.get_action().takes_values() && !arg.is_hide_possible_values_set() {
        let _ = write!(text, " ({})", values.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;

    /// docs/reference/cli.md is what the command says; `NOBOUNCE_WRITE_DOCS=1` writes it.
    #[test]
    fn the_reference_has_every_option() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/cli.md");
        let now = reference(&Cli::command());
        if std::env::var_os("NOBOUNCE_WRITE_DOCS").is_some() {
            fs::write(path, now).unwrap();
        } else {
            let before = fs::read_to_string(path).unwrap_or_default();
            assert!(
                before == now,
                "docs/reference/cli.md is stale: run this test with NOBOUNCE_WRITE_DOCS=1"
            );
        }
    }

    #[test]
    fn man_pages_and_completions_name_every_command() {
        let folder = std::env::temp_dir().join(format!("nobounce-generate-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        man(&Cli::command(), &folder).unwrap();
        completions(&mut Cli::command(), &folder).unwrap();
        for name in [
            "nobounce.1",
            "nobounce-run.1",
            "nobounce-doctor.1",
            "nobounce.bash",
            "_nobounce",
            "nobounce.fish",
        ] {
            let text = fs::read_to_string(folder.join(name)).unwrap();
            assert!(text.len() > 200, "{name}: {text}");
        }
        assert!(!folder.join("nobounce-raw.1").exists(), "hidden commands have no page");
        fs::remove_dir_all(&folder).unwrap();
    }
}
