//! Sets `LONG_VERSION`, the text of `nobounce --version`: `0.1.0 (3a90ef8b1c2d 2026-11-18)`. The
//! device plugin uses it as well.
//!
//! | build | commit | date |
//! |---|---|---|
//! | with `NOBOUNCE_COMMIT` | its value; none if it is empty | `SOURCE_DATE_EPOCH`, or none |
//! | release, in a checkout | `HEAD` | `SOURCE_DATE_EPOCH`, or that of the commit |
//! | without git, from a source archive | none | none |
//! | debug | none | none |
//!
//! A debug build says `(debug)`: with the commit in it, every commit would compile the command and
//! its tests again. There is no mark for changed files: cargo does not run this script when a file
//! of another crate changes, and the mark would be wrong.

use std::env;
use std::path::Path;
use std::process::Command;

/// Digits of a commit that are shown: as many as the kernel's convention has.
const DIGITS: usize = 12;

fn main() {
    // Without such lines cargo runs the script after every change in the package.
    for name in ["NOBOUNCE_COMMIT", "SOURCE_DATE_EPOCH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    match origin() {
        Some(origin) => println!("cargo::rustc-env=LONG_VERSION={version} ({origin})"),
        None => println!("cargo::rustc-env=LONG_VERSION={version}"),
    }
}

/// What stands in parentheses after the version.
fn origin() -> Option<String> {
    let epoch = env::var("SOURCE_DATE_EPOCH").ok().map(|text| {
        let seconds = text.trim().parse::<i64>();
        seconds.unwrap_or_else(|_| panic!("SOURCE_DATE_EPOCH={text}: expected seconds since 1970"))
    });
    let (commit, seconds) = if let Ok(commit) = env::var("NOBOUNCE_COMMIT") {
        (commit.trim().to_owned(), epoch)
    } else if env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
        return Some("debug".to_owned());
    } else {
        let (commit, seconds) = head()?;
        (commit, epoch.or(Some(seconds)))
    };
    let commit: String = commit.chars().filter(char::is_ascii_graphic).take(DIGITS).collect();
    let date = seconds.map(|seconds| format!(" {}", date(seconds))).unwrap_or_default();
    (!commit.is_empty()).then(|| commit + &date)
}

/// The commit that is checked out, and its date in seconds. Cargo runs the script again when it
/// changes.
fn head() -> Option<(String, i64)> {
    let root = Path::new(&env::var_os("CARGO_MANIFEST_DIR")?).join("../..");
    // Not found by walking upward: the sources may lie in the repository of another project.
    // In a worktree .git is a file.
    if !root.join(".git").exists() {
        return None;
    }
    let told = git(&root, &["log", "-1", "--format=%H %ct"])?;
    let (commit, seconds) = told.split_once(' ')?;
    // A path that does not exist would run the script in every build.
    let place = |name: &str| {
        let path = root.join(git(&root, &["rev-parse", "--git-path", name])?);
        path.exists().then_some(path)
    };
    let mut watched = vec![place("HEAD")];
    if let Some(branch) = git(&root, &["symbolic-ref", "--quiet", "HEAD"]) {
        match place(&branch) {
            loose @ Some(_) => watched.push(loose),
            // It is packed; its next commit makes a file in refs/heads.
            None => watched.extend([place("packed-refs"), place("refs/heads")]),
        }
    }
    for path in watched.iter().flatten() {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    Some((commit.to_owned(), seconds.parse().ok()?))
}

/// The output of git in a folder; `None` without git, or where it fails.
fn git(root: &Path, args: &[&str]) -> Option<String> {
    let mut command = Command::new("git");
    // Set in hooks, perhaps those of another repository.
    command.arg("-C").arg(root).args(args).env_remove("GIT_DIR").env_remove("GIT_WORK_TREE");
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// Year, month and day in UTC, by the calendar of days since 0000-03-01: leap days end its years.
fn date(seconds: i64) -> String {
    let days = seconds.div_euclid(86_400) + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) =
        if month < 10 { (year + 400 * era, month + 3) } else { (year + 400 * era + 1, month - 9) };
    format!("{year:04}-{month:02}-{day:02}")
}
